"""Tiny targets whose checkpoints have a layer for multi-token prediction, as DeepSeek and Z.ai publish them."""

import copy

import torch
from families import EXPERTS, tiny
from safetensors.torch import load_file, save_file

from heavypath.speculative.drafts.mtp.draft import MtpConfig, MtpHead

GLM = EXPERTS | {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}  # fmt: skip
KINDS = {"glm4_moe": GLM, "deepseek_v3": {}}
LAYERS = 2  # of the targets, so that the layer has this number


def random_mtp(target, seed=5, scale=0.3):
    """transformers' model of one layer for a target of any type, with random weights and norms."""
    from transformers.modeling_layers import MtpModel  # which early versions lack

    model = copy.copy(target)
    model.config = copy.deepcopy(target.config)
    model.config.num_mtp_layers = 1
    mtp = MtpModel(model, 1).to(target.dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in mtp.layers.named_parameters():
            drawn = scale * torch.randn(weight.shape, generator=noise)
            weight.copy_(drawn + 1 if "norm" in name else drawn)
        for buffer in mtp.layers.buffers():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=noise))
    return mtp


def mtp_of(target):
    """A random layer as a draft for a target of any type whose layers are all alike."""
    config = target.config
    head = MtpHead(
        MtpConfig(config.model_type, config.hidden_size, (config.num_hidden_layers,)), random_mtp(target).layers[0]
    )
    return head.requires_grad_(False).eval()


def published(mtp, target):
    """The tensors of the layer by the names that they are published by."""
    found = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"mlp.experts.{index}.gate_proj.weight"] = gate
                found[f"mlp.experts.{index}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{index}.down_proj.weight": each for index, each in enumerate(tensor)}
        else:
            found[name] = tensor
    found["embed_tokens.weight"] = target.get_input_embeddings().weight
    found["shared_head.head.weight"] = target.get_output_embeddings().weight
    return {f"model.layers.{LAYERS}.{name}": tensor.detach().clone().contiguous() for name, tensor in found.items()}


def save_target_with_mtp(kind, folder, change=lambda tensors: None):
    """A target of this type and transformers' MTP model of it; both are in one checkpoint in the folder."""
    target = tiny(kind, **KINDS[kind])
    mtp = random_mtp(target)
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | published(mtp, target)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return target, mtp
