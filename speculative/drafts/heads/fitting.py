"""Load the tensors of a checkpoint into the module of a head, or refuse by name what does not fit."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.drafts.heads.config import TappedConfig
from heavypath.speculative.files.checkpoint import check_config, check_tensors, shapes_of

_ANOTHER_TARGET = "give the target that the head was trained for"


def filled(
    kind: Callable[[Any], Any],
    config: TappedConfig,
    settings: Mapping[str, Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Any:
    """A head's module with these tensors, in eval mode and without gradients.

    kind: makes the module from the config; settings: of config.json, whose sizes the tensors must have, too
    tensors: by the module's names, and d2t and t2d as they are published; changed in place

    Raises ValueError unless they are exactly its tensors.
    """
    _take_the_tokens(config, tensors)
    try:
        with torch.device("meta"):
            head = kind(config)
    except Exception as error:  # transformers and PyTorch raise errors of many types
        raise ValueError(f"config.json gives what no head can be made of: {error}") from error
    expected = head.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in expected and name not in tensors:
            raise ValueError(
                f"1 tensors are missing: {name}; the target's cannot stand in, of width {config.target_hidden_size} "
                f"and {config.vocab_size} tokens, for a head of width {config.hidden_size} and "
                f"{config.draft_vocab_size} tokens"
            )
    what = f"a draft of kind {head.config.model_type} with {config.layers} layers"
    check_tensors(shapes_of(tensors), shapes_of(expected), what, partial(_why, config=config))
    sizes = ["hidden_size", "intermediate_size", "target_hidden_size", "draft_vocab_size"]
    sizes += ["vocab_size"] if config.owns_embedding else []
    check_config(settings, {size: getattr(config, size) for size in sizes})
    on_device = {name: tensor.to(device, None if name == "d2t" else dtype) for name, tensor in tensors.items()}
    head.load_state_dict(on_device, assign=True)
    head.rotary_emb = type(head.rotary_emb)(head.rotary_emb.config).to(device)  # not in the checkpoint; stays float32
    if not head.rotary_emb.inv_freq.isfinite().all():
        raise ValueError(f"config.json gives rotary settings {config.rope_parameters}, whose angles are no numbers")
    return head.requires_grad_(False).eval()


def _take_the_tokens(config: TappedConfig, tensors: dict[str, Tensor]) -> None:
    """Check the tensor d2t among `tensors`, in place: make it int64 offsets, or remove it if the head has all tokens.

    t2d, bool [V], is removed: it shows whether d2t holds offsets or ids.

    Raises ValueError for ids instead of offsets, and for sizes or tokens that do not fit the target's vocabulary.
    """
    kept = tensors.pop("t2d", None)
    size = config.draft_vocab_size
    vocab = config.vocab_size
    d2t = tensors.pop("d2t", None)
    if kept is not None and "embed_tokens.weight" not in tensors and len(kept) != vocab:
        raise ValueError(f"t2d has shape {[*kept.shape]}, expected [{vocab}], the target's tokens; {_ANOTHER_TARGET}")
    if d2t is None:
        if size != vocab:
            raise ValueError(
                f"lm_head.weight has shape [{size}, {config.hidden_size}], expected [{vocab}, {config.hidden_size}] "
                f"for the target's tokens, or beside it d2t of shape [{size}], which is missing; {_ANOTHER_TARGET}"
            )
        return
    if d2t.is_floating_point() or [*d2t.shape] != [size]:
        raise ValueError(f"d2t is {d2t.dtype} of shape {[*d2t.shape]}, expected integers of shape [{size}]")
    offsets = d2t.long()
    tokens = offsets + torch.arange(size, device="cpu")
    confirmed = kept is not None and torch.equal(tokens.sort().values, kept.nonzero().flatten())
    # Neighbouring tokens have equal offsets, so if all entries differ they are ids.
    if size > 1 and not confirmed and offsets.min() >= 0 and len(offsets.unique()) == size:
        raise ValueError(
            "d2t holds absolute ids of tokens, expected offsets: token i of the head is token i + d2t[i] of the "
            "target; subtract torch.arange(len(d2t)) from it"
        )
    if tokens.min() < 0 or tokens.max() >= vocab or len(tokens.unique()) < size:
        raise ValueError(
            f"d2t of shape [{size}] leads to tokens {int(tokens.min())} to {int(tokens.max())}, {len(tokens.unique())} "
            f"different ones; expected {size} different ones of the target's {vocab}; {_ANOTHER_TARGET}"
        )
    if size < vocab:
        tensors["d2t"] = offsets
    elif offsets.any():
        raise ValueError(f"d2t permutes all {vocab} tokens; expected zeros where the head has all tokens of the target")


def _why(name: str, config: TappedConfig) -> str:
    """The end of an error message on a tensor's shape: what the shape follows from, and what to do."""
    if name in ("fc.weight", "input_norm.weight", "mask_hidden") or name.startswith("fc_norm."):
        return (
            f" to read hidden states {', '.join(map(str, config.taps))} of width {config.target_hidden_size} of the "
            f"target; {_ANOTHER_TARGET}"
        )
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return f" for the target's vocabulary of {config.vocab_size} tokens; {_ANOTHER_TARGET}"
    return ", by config.json and the tensors beside it; fetch the checkpoint again"
