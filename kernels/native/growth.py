"""Growing trees by the compiled kernels, see growth.cpp."""

from ctypes import Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from heavypath.kernels.native.library import thread_count
from heavypath.kernels.native.recording import dense, launch, refuse
from heavypath.kernels.sampling import TopK
from heavypath.kernels.trees.levels import Fed
from heavypath.kernels.trees.slots import Grown, Level, Policy, Roots, Slots

_BY = {"slot": 0, "node": 1, "beam": 2}
_ASSEMBLED = 12  # tensors of an `Assembled`


class _Grow(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "first", "parents", "most", "count", "slots", "depth")),
        *((name, c_int64) for name in ("by", "noisy", "threads")),
        *((name, c_double) for name in ("temperature", "threshold")),
        *((name, c_void_p) for name in ("drawn", "drawn_keys", "drawn_logprobs", "logits")),
        *((name, c_int64) for name in ("batch_stride", "row_stride", "vocab")),
        ("lines", c_void_p),
        ("line_step", c_int64),
        *((name, c_void_p) for name in ("roots", "lengths", "noise_rows", "left")),
        *((name, c_void_p) for name in ("slot_parents", "ranks", "depths", "tokens", "values", "worths", "keys")),
        ("above", c_void_p),
        *((name, c_int64) for name in ("above_batch", "above_row")),
        *((name, c_void_p) for name in ("mask", "fed")),
    ]


class _Assembly(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "slots", "drafted", "inner", "trims", "nodes")),
        *((name, c_void_p) for name in ("parents", "ranks", "depths", "tokens", "values")),
        *((name, c_void_p) for name in ("lengths", "noise_rows", "out")),
    ]


def grow(slots: Slots, above: Level, draws: TopK, logits: Tensor, roots: Roots, policy: Policy, count: int) -> Grown:
    """`trees.growing.grow` of a level of `count` slots."""
    batch, parents, most = draws.tokens.shape
    end = above.first + parents
    assert end + count <= slots.tokens.shape[1]
    lines = None if policy.by == "beam" or policy.lines is None else dense(policy.lines)
    mask = torch.empty(batch, count, end + count, dtype=torch.bool)
    fed = torch.empty(5, batch, count, dtype=torch.long)
    drawn, given, mask_above = TopK(*map(dense, draws)), Roots(*map(dense, roots)), above.mask
    if mask_above.stride(2) != 1:
        mask_above = dense(mask_above)
    call = _Grow(
        batch, above.first, parents, most, count, slots.tokens.shape[1], above.depth + 1,
        _BY[policy.by], policy.noisy, thread_count(), policy.temperature, policy.threshold,
        *(each.data_ptr() for each in drawn),
        roots=given.tokens.data_ptr(), lengths=given.lengths.data_ptr(), noise_rows=given.noise_rows.data_ptr(),
        left=given.left.data_ptr(), slot_parents=slots.parents.data_ptr(), ranks=slots.ranks.data_ptr(),
        depths=slots.depths.data_ptr(), tokens=slots.tokens.data_ptr(), values=slots.values.data_ptr(),
        worths=slots.worths.data_ptr(), keys=slots.keys.data_ptr(), above=mask_above.data_ptr(),
        above_batch=mask_above.stride(0), above_row=mask_above.stride(1), mask=mask.data_ptr(), fed=fed.data_ptr(),
    )  # fmt: skip
    if lines is not None:
        call.lines, call.line_step = lines.data_ptr(), lines.shape[1]
    if lines is not None or (policy.by != "beam" and not policy.noisy):
        logits = logits.detach().float()
        if logits.stride(2) != 1:
            logits = dense(logits)
        call.logits, call.vocab = logits.data_ptr(), logits.shape[2]
        call.batch_stride, call.row_stride = logits.stride(0), logits.stride(1)
    launch("grow", call, (slots, mask_above, drawn, logits, given, lines, mask, fed))
    return Grown(Level(end, count, above.depth + 1, mask), Fed(*fed.unbind()))


def assemble(slots: Slots, roots: Roots, last: Level, nodes: int, *, trims: bool) -> tuple[Tensor, ...]:
    """The tensors of an `Assembled`, and behind them those of its `Fed`."""
    batch, stride = slots.tokens.shape
    out = torch.empty(_ASSEMBLED * batch * nodes, dtype=torch.long)
    lengths, noise_rows = dense(roots.lengths), dense(roots.noise_rows)
    call = _Assembly(
        batch, stride, last.end, last.first, trims, nodes,
        slots.parents.data_ptr(), slots.ranks.data_ptr(), slots.depths.data_ptr(), slots.tokens.data_ptr(),
        slots.values.data_ptr(), lengths.data_ptr(), noise_rows.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    launch("assemble", call, (slots, lengths, noise_rows, out))
    if trims:
        refuse("assemble")  # how many nodes there are another time is not known
        out = out[: _ASSEMBLED * batch * call.nodes]
    return out.view(_ASSEMBLED, batch, -1).unbind()
