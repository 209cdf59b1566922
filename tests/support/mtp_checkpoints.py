"""Tiny targets whose checkpoints have a layer for multi-token prediction, as its authors publish them."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from families import EXPERTS, LATENT, tiny
from mtp_oracle import MtpOracle
from recurrent_families import COMMON, GDN, recurrent
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForImageTextToText

from heavypath.speculative.drafts.mtp.draft import MtpConfig, MtpHead

AFTER = ("enorm", "hnorm", "shared_head.norm", "eh_proj", "")
IN_MTP = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", "layers.0.")
GLM = EXPERTS | {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}  # fmt: skip
EXAONE = EXPERTS | {
    "n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "sliding_window": 6, "first_k_dense_replace": 1
}  # fmt: skip
MELLUM = EXPERTS | {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def that_sees(kind, text):
    """A random model that reads images, too."""
    torch.manual_seed(3)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


class Kind(NamedTuple):
    """How a type of target is made, and where its checkpoints have the layer.

    names: of three norms and a product, and the beginning of the block's names, see `MtpOracle`
    alike: index of the target's layer, counted from the last, that has the block's shapes
    window, turns: as in `MtpOracle`
    """

    settings: dict[str, Any]
    names: tuple[str, ...] = AFTER
    make: Callable[..., Any] = tiny
    alike: int = -1
    window: int | None = None
    turns: bool = True


KINDS = {
    "glm4_moe": Kind(GLM),
    "deepseek_v3": Kind({}),
    "glm4_moe_lite": Kind(EXPERTS | LATENT),
    "hy_v3": Kind(EXPERTS, ("enorm", "hnorm", "final_layernorm", "eh_proj", "")),
    "exaone_moe": Kind(EXAONE, IN_MTP, alike=0, turns=False),
    "mellum": Kind(MELLUM, IN_MTP, window=6),
    "qwen3_next": Kind(TWO, IN_MTP, recurrent.__wrapped__),
    "qwen3_5_text": Kind(TWO, IN_MTP, recurrent.__wrapped__),
    "qwen3_5_moe_text": Kind(TWO, IN_MTP, recurrent.__wrapped__),
    "qwen3_5": Kind({"text": COMMON | GDN | TWO | {"head_dim": 16}}, IN_MTP, that_sees),
}


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


def prefix_of(kind, target):
    """The beginning of the names of all of the layer's tensors."""
    return "mtp." if KINDS[kind].names == IN_MTP else f"model.layers.{target.config.num_hidden_layers}."


def published(kind, target, tensors, seed=5, scale=0.3):
    """Random tensors of the layer by their published names, without the prefix: of the shapes that a layer has here.

    tensors: the target's, as they are published
    """
    first, second, last, joining, block = KINDS[kind].names
    text = target.config.get_text_config()
    layers, width = text.num_hidden_layers, text.hidden_size
    alike = f"layers.{range(layers)[KINDS[kind].alike]}."
    shapes = {f"{block}{name.split(alike)[1]}": each.shape for name, each in tensors.items() if alike in name}
    shapes |= {f"{name}.weight": (width,) for name in (first, second, last)} | {f"{joining}.weight": (width, 2 * width)}
    noise = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=noise) + float("norm" in name)
        for name, shape in sorted(shapes.items())
    }


def save_target_with_mtp(kind, folder, change=lambda tensors: None, **settings):
    """A target of this type, whose checkpoint in the folder has a layer; returns both, see `published`."""
    target = KINDS[kind].make(kind, **KINDS[kind].settings | settings)
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    own = published(kind, target, tensors)
    prefix = prefix_of(kind, target)
    tensors |= {prefix + name: each for name, each in own.items()}
    if prefix != "mtp.":  # copies of the target's, which need not be read
        tensors[f"{prefix}embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return target, own


def oracle_of(kind, target, own):
    """What the published tensors say by the formulas."""
    rope = target.config.get_text_config().rope_parameters
    own_rope = rope.get("sliding_attention", rope)
    return MtpOracle(target, own, KINDS[kind].names, own_rope, KINDS[kind].window, KINDS[kind].turns)


def stack_experts(tensors, prefix):
    """Store the experts of the layers whose names begin so as stacks, in place, as some checkpoints have them."""
    parts = {}
    for name in [name for name in tensors if name.startswith(prefix) and ".experts." in name]:
        before, _, last = name.partition(".experts.")
        index, part, _ = last.split(".")
        parts.setdefault(before, {})[int(index), part] = tensors.pop(name)
    for before, own in parts.items():
        each = [[own[index, f"{part}_proj"] for index in range(4)] for part in ("gate", "up", "down")]
        tensors[f"{before}.experts.gate_up_proj"] = torch.cat([torch.stack(each[0]), torch.stack(each[1])], 1)
        tensors[f"{before}.experts.down_proj"] = torch.stack(each[2])


def padded(prompt):
    """A prompt without its first token, padded, and the whole one, with their mask."""
    return torch.cat([pad(prompt[:, 1:], (1, 0)), prompt]), torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
