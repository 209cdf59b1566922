"""Load the tensors of a checkpoint into a head's module, or refuse by name what does not fit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.drafts.heads.config import TappedConfig

_ANOTHER_TARGET = "give the target that the head was trained for"


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for tensors with unexpected dtypes."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and (name != "d2t" or tensor.is_complex()):
            raise ValueError(f"{name} is {tensor.dtype}; expected floating point: quantised heads are not supported")


def take_the_tokens(config: TappedConfig, tensors: dict[str, Tensor], kept: Tensor | None) -> None:
    """Check d2t, and remove it if the head has all tokens. kept: t2d, which shows whether d2t holds offsets or ids"""
    size, vocab, d2t = config.draft_vocab_size, config.vocab_size, tensors.pop("d2t", None)
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


def fill(head: Any, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Load the tensors into a module on the "meta" device. Raises ValueError unless they are exactly its tensors."""
    expected = head.state_dict()
    unknown, missing = sorted(tensors.keys() - expected.keys()), sorted(expected.keys() - tensors.keys())
    if unknown:
        raise ValueError(f"{len(unknown)} tensors are not known: {_list(unknown)}; it is another kind of head")
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing: {_list(missing)}{_in_its_place(head.config, missing)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} has shape {[*tensor.shape]}, expected {[*expected[name].shape]}{_why(name, head.config)}"
            )
    on_device = {name: tensor.to(device, None if name == "d2t" else dtype) for name, tensor in tensors.items()}
    head.load_state_dict(on_device, assign=True)
    head.rotary_emb = type(head.rotary_emb)(head.rotary_emb.config).to(device)  # not in the checkpoint; stays float32
    if not head.rotary_emb.inv_freq.isfinite().all():
        raise ValueError(
            f"config.json gives rotary settings {head.config.rope_parameters}, whose angles are no numbers"
        )


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _in_its_place(config: TappedConfig, missing: list[str]) -> str:
    """Why the target's tensor cannot be used for a missing one."""
    if not {"lm_head.weight", "embed_tokens.weight"} & {*missing}:
        return "; fetch the checkpoint again"
    return (
        f"; the target's cannot stand in, of width {config.target_hidden_size} and {config.vocab_size} tokens, for a "
        f"head of width {config.hidden_size} and {config.draft_vocab_size} tokens"
    )


def _why(name: str, config: TappedConfig) -> str:
    if name in ("fc.weight", "input_norm.weight", "mask_hidden") or name.startswith("fc_norm."):
        return (
            f" to read hidden states {', '.join(map(str, config.taps))} of width {config.target_hidden_size} of the "
            f"target; {_ANOTHER_TARGET}"
        )
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return f" for the target's vocabulary of {config.vocab_size} tokens; {_ANOTHER_TARGET}"
    return ", by config.json and the tensors beside it; fetch the checkpoint again"
