"""Verification on a CPU: a call of the compiled kernel in verification.cpp."""

from ctypes import addressof, byref, c_int64

import torch
from torch import Tensor

from heavypath.kernels.native.library import compiled
from heavypath.kernels.native.recording import Arguments, do, fields
from heavypath.kernels.native.sampling import FiltersStruct, seed_tensor
from heavypath.kernels.nodes import VERIFICATION_RULES, Verified, VerifyInputs, no_maximum, sibling_order


class _Verification(Arguments):
    _fields_ = (
        *fields(
            "batch nodes vocab max_depth method independent *tokens *parents *ranks *noise_rows tree_step "
            "*target *draft target_step draft_step"
        ),
        ("target_filters", FiltersStruct),
        ("draft_filters", FiltersStruct),
        *fields("*seed *path *length *next_token *bad"),
    )


def verify(inputs: VerifyInputs) -> Verified:
    """Return the accepted paths of drafted trees.

    Raises ValueError if a row of logits that is used has no finite maximum.
    """
    tokens, parents, ranks = inputs.nodes
    noise = inputs.noise
    batch, count = tokens.shape
    if ranks is None:
        ranks = sibling_order(parents.expand_as(tokens))
    one_shape = parents.dim() == ranks.dim() == 1 or parents.stride(0) == ranks.stride(0) == 0
    if one_shape:
        parents = _of_first(parents)
        ranks = _of_first(ranks)
    else:
        parents = parents.expand(batch, -1)
        ranks = ranks.expand(batch, -1)
    rows = torch.arange(batch * count, device="cpu") if noise.rows is None else noise.rows.contiguous()
    target = _readable(inputs.target_logits)
    draft = None
    rule = VERIFICATION_RULES[inputs.method]
    if rule.draft_aware and inputs.draft_logits is not None:
        draft = _readable(inputs.draft_logits)
    path = tokens.new_empty(batch, inputs.max_depth + 1)
    length = tokens.new_empty(batch)
    next_token = torch.empty_like(length)
    bad = (c_int64 * 3)()
    call = _Verification(
        batch,
        count,
        target.shape[-1],
        inputs.max_depth,
        rule.number,
        inputs.independent,
        tokens.contiguous(),
        parents.contiguous(),
        ranks.contiguous(),
        rows,
        0 if one_shape else count,
        target,
        draft,
        target.stride(0),
        0 if draft is None else draft.stride(0),
        FiltersStruct.of(inputs.target_filters),
        FiltersStruct.of(inputs.draft_filters),
        seed_tensor(noise.seed),
        path,
        length,
        next_token,
        addressof(bad),
    )
    kernel = compiled().verify

    def run() -> None:
        if not kernel(byref(call)):
            of_draft, sequence, node = bad
            side = "draft" if of_draft else "target"
            logits = draft if of_draft else target
            assert logits is not None
            largest = float(logits[sequence, node].max())
            raise no_maximum(side, sequence, node, largest)

    do(run)
    return Verified(path, length, next_token)


def _of_first(each: Tensor) -> Tensor:
    """The row [N] of the first sequence, from a tensor [N] or [B, N]."""
    return each[:1].flatten() if each.dim() > 1 else each


def _readable(logits: Tensor) -> Tensor:
    """Return logits [B, N, V] in fp32, with the rows of a sequence contiguous."""
    logits = logits.detach().float()
    if logits.stride(2) == 1 and logits.stride(1) == logits.shape[2]:
        return logits
    return logits.contiguous()
