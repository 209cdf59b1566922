"""Verification by the compiled kernel, see verification.cpp: where the token is drawn first, and by traversal."""

from ctypes import Structure, addressof, byref, c_int64, c_void_p

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.native.library import compiled
from heavypath.kernels.native.recording import dense, do
from heavypath.kernels.native.sampling import FiltersStruct, seed_tensor
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.ordering import sibling_order
from heavypath.kernels.verifying.distributions import no_maximum
from heavypath.kernels.verifying.rule import Rule

NATIVE_METHODS = {
    "greedy": 0,
    "target_sample": 1,
    "race": 2,
    "traversal": 3,
    "held_traversal": 4,
}  # by their C++ numbers


class _Verification(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "nodes", "vocab", "max_depth", "method", "independent")),
        *((name, c_void_p) for name in ("tokens", "parents", "ranks", "noise_rows")),
        ("tree_step", c_int64),
        *((name, c_void_p) for name in ("target", "draft")),
        *((name, c_int64) for name in ("target_step", "draft_step")),
        *((name, FiltersStruct) for name in ("target_filters", "draft_filters")),
        *((name, c_void_p) for name in ("seed", "path", "length", "next_token", "bad")),
    ]


def verify(
    nodes: Nodes,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """What is accepted of trees, with the arguments of `verification.verify_unchecked` on a CPU.

    Raises ValueError for a row of logits that is used and has no finite maximum.
    """
    tokens, parents, ranks = nodes
    batch, count = tokens.shape
    if ranks is None:
        ranks = sibling_order(parents)
    one_shape = parents.dim() == ranks.dim() == 1 or parents.stride(0) == ranks.stride(0) == 0
    shaped = [each[:1].flatten() if one_shape and each.dim() > 1 else each for each in (parents, ranks)]
    parents, ranks = (dense(each if one_shape else each.expand(batch, -1)) for each in shaped)
    rows = torch.arange(batch * count) if noise.rows is None else dense(noise.rows)
    target, draft = _readable(target_logits), None if draft_logits is None else _readable(draft_logits)
    path, length = torch.empty(batch, max_depth + 1, dtype=torch.long), torch.empty(batch, dtype=torch.long)
    next_token, tokens = torch.empty_like(length), dense(tokens)
    bad, seed = (c_int64 * 3)(), seed_tensor(noise.seed)
    call = _Verification(
        batch=batch,
        nodes=count,
        vocab=target.shape[-1],
        max_depth=max_depth,
        method=NATIVE_METHODS[rule.method],
        independent=rule.independent,
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
        ranks=ranks.data_ptr(),
        noise_rows=rows.data_ptr(),
        tree_step=0 if one_shape else count,
        target=target.data_ptr(),
        draft=None if draft is None else draft.data_ptr(),
        target_step=target.stride(0),
        draft_step=0 if draft is None else draft.stride(0),
        target_filters=FiltersStruct.of(target_filters),
        draft_filters=FiltersStruct.of(draft_filters),
        seed=seed.data_ptr(),
        path=path.data_ptr(),
        length=length.data_ptr(),
        next_token=next_token.data_ptr(),
        bad=addressof(bad),
    )

    kernel = compiled().verify

    def run() -> None:
        if not kernel(byref(call)):
            of_draft, sequence, node = bad
            side, logits = ("draft", draft) if of_draft else ("target", target)
            assert logits is not None
            raise no_maximum(side, sequence, node, float(logits[sequence, node].max()))

    do(run, (tokens, parents, ranks, rows, seed))
    return Verified(path, length, next_token)


def _readable(logits: Tensor) -> Tensor:
    """Logits [B, N, V] in fp32, with the rows of a sequence side by side."""
    logits = logits.detach().float()
    return logits if logits.stride(2) == 1 and logits.stride(1) == logits.shape[2] else dense(logits)
