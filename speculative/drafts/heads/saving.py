"""Write the checkpoint of a trained head: model.safetensors and config.json. EAGLE heads have the official layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heavypath.speculative.drafts.heads.config import TappedConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.settings import OWN_KEY


def own_settings(acceptance: tuple[float, float] | None) -> dict[str, Any]:
    """The key of config.json for what was measured, which `measured_acceptance` reads; nothing for None."""
    return {} if acceptance is None else {OWN_KEY: {"acceptance": [*acceptance]}}


def common_settings(config: TappedConfig) -> dict[str, Any]:
    """The keys of config.json that describe the layers, for heads of all kinds."""
    rope = config.rope_parameters
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_bias": "q_proj" in config.biases,
        "tie_word_embeddings": False,
        **own_settings(config.acceptance),
    }


def save_checkpoint(
    folder: str | Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: TappedConfig
) -> None:
    """Write a head's config.json with these settings, and model.safetensors with these tensors, to a folder.

    With the offsets `d2t`, also write the mask `t2d`, which shows that `d2t` does not hold ids.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    if "d2t" in written:
        kept = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
        kept[torch.arange(config.draft_vocab_size, device="cpu") + written["d2t"]] = True
        written["t2d"] = kept
    unfinished = folder / "model.safetensors.new"
    save_file(written, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")  # not overwritten: the head's tensors may be mapped from this file
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    whole = {**settings, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def save_head(head: EagleHead, folder: str | Path, *, with_lm_head: bool = True) -> None:
    """Write a head to a folder in the official layout, in its own dtype; `load_head` returns an equal head.

    with_lm_head: False for a head whose lm_head is the target's rows of its tokens, which `load_head` then takes from
        the target: the file is smaller, and others cannot load it
    """
    config = head.config
    tensors = head.state_dict()
    if not with_lm_head:
        del tensors["lm_head.weight"]
    if config.generation == 3:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    common = common_settings(config)
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.generation == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        **common,
        "target_hidden_size": config.target_hidden_size,
        "bias": "fc" in config.biases,
        "mlp_bias": "gate_proj" in config.biases,
        OWN_KEY: {"taps": config.taps, "feeds_back_normed": config.feeds_back_normed, **common.get(OWN_KEY, {})},
    }
    if config.generation == 3:
        settings |= {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": config.taps, "use_aux_hidden_state": True},
            "fc_norm": config.tap_norms,
            "norm_before_fc": config.norm_before_fc,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.feeds_back_normed,
        }
    if not with_lm_head:
        settings[OWN_KEY]["lm_head_of_target"] = True
    if config.mask_token_id is not None:
        settings["mask_token_id"] = config.mask_token_id
    save_checkpoint(folder, settings, tensors, config)
