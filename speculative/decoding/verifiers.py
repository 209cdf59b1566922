"""Check a user's verifier and its results."""

import inspect
from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.nodes import Nodes, Verified
from heavypath.speculative.decoding.rules import Verifier
from heavypath.speculative.models.forward import host_can_read


def checked_verifier(verifier: Verifier) -> Verifier:
    """Wrap a user's verifier so that its results are checked: always their shapes, and on a CPU also their values.

    The verifier gets logits in fp32, whatever the models' dtype.

    Raises TypeError if it cannot be called as a `Verifier`. The returned function raises TypeError or ValueError for
    an invalid result.
    """
    name = getattr(verifier, "__name__", type(verifier).__name__)
    if not callable(verifier) or isinstance(verifier, type):
        given = f"the class {name}" if isinstance(verifier, type) else type(verifier).__name__
        raise TypeError(
            "verifier must be None, for the method's default, a name, or a callable as described by Verifier; "
            f"got {given}"
        )
    names = [*inspect.signature(Verifier.__call__).parameters][1:]
    try:
        inspect.signature(verifier).bind(*names[:3], **dict.fromkeys(names[3:]))
    except TypeError as error:
        call = f"({', '.join(names[:3])}, *, {', '.join(names[3:])})"
        raise TypeError(f"verifier {name!r} must be callable as {name}{call}: {error}") from None

    def verify(
        nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, *, max_depth: int, **options: Any
    ) -> Verified:
        nodes = nodes.per_sequence()
        draft_logits = None if draft_logits is None else draft_logits.float()
        answer = verifier(nodes, target_logits.float(), draft_logits, max_depth=max_depth, **options)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise TypeError(
                f"verifier {name!r} must return Verified(path, length, next_token), got {type(answer).__name__}"
            )
        path, length, next_token = answer
        verified = Verified(path, length, next_token)
        batch = len(nodes.tokens)
        device = nodes.tokens.device
        for field, value, shape in zip(
            Verified._fields, answer, ((batch, max_depth + 1), (batch,), (batch,)), strict=True
        ):
            if not isinstance(value, Tensor):
                raise TypeError(f"verifier {name!r} must return tensors, got {field} {type(value).__name__}")
            if value.shape != shape or value.dtype != torch.long or value.device != device:
                raise ValueError(
                    f"verifier {name!r} must return {field} as a LongTensor {[*shape]} on {device}, "
                    f"got {value.dtype} {[*value.shape]} on {value.device}"
                )
        if host_can_read(device):
            _check_values(name, nodes, verified, target_logits.shape[-1])
        return verified

    return verify


def _check_values(name: str, nodes: Nodes, verified: Verified, vocab_size: int) -> None:
    path, length, next_token = verified
    place = torch.arange(path.shape[1], device="cpu")
    above = path[:, :-1]
    node = path[:, 1:].clamp(min=0)
    there = (node < nodes.tokens.shape[1]) & (length[:, None] >= place[1:])
    node = node.where(there, 0)
    drafted = (nodes.parents.gather(1, node) == above) & (nodes.tokens.gather(1, node) >= 0)
    right = (path[:, 0] == 0) & ((path[:, 1:] >= 0) == there).all(1) & (drafted | ~there).all(1)
    right &= (length >= 0) & (length < path.shape[1])
    if not right.all():
        slot = int(right.int().argmin())
        raise ValueError(
            f"verifier {name!r} must return paths of 0, then `length` drafted nodes from parent to child, "
            f"then -1; got path {path[slot].tolist()} of length {int(length[slot])} in a tree with parents "
            f"{nodes.parents[slot].tolist()} and tokens {nodes.tokens[slot].tolist()}"
        )
    if ((next_token < 0) | (next_token >= vocab_size)).any():
        raise ValueError(
            f"verifier {name!r} must return next_token in 0 .. {vocab_size - 1}, got {next_token.tolist()}"
        )
