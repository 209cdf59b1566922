"""Rows of several tensors, one after another: the input of a product that reads them all.

    y[b, i] = [f_1[b, r_1[b, i]]; f_2[b, r_2[b, i]]; ...]      f_p: [B, S_p, C_p], r_p: [B, n]

PyTorch looks each one up and joins the results. The kernel is one launch.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton

PARTS = 3  # that a launch takes at most


class FieldRows(NamedTuple):
    """Rows of a tensor, which need not have been looked up.

    field: [B, S, C], or [1, S, C] for a table that all sequences share
    at:    LongTensor[B, n], the rows' numbers; None for row 0 of each sequence
    """

    field: Tensor
    at: Tensor | None

    @classmethod
    def of_table(cls, table: Tensor, at: Tensor) -> Self:
        """Rows of a table [V, C]."""
        return cls(table[None], at)

    @classmethod
    def for_each(cls, row: Tensor) -> Self:
        """Each sequence's row [B, C], for all of its nodes."""
        return cls(row[:, None], None)

    def looked_up(self, batch: int, count: int) -> Tensor:
        """The rows themselves, [B, n, C]."""
        if self.at is None:
            return self.field[:, :1].expand(batch, count, -1)
        if len(self.field) == 1:
            return self.field[0][self.at]
        return self.field.gather(1, self.at[..., None].expand(-1, -1, self.field.shape[-1]))


def side_by_side(parts: Sequence[FieldRows], *, impl: str = "auto") -> Tensor:
    """The rows of two or three tensors of one dtype next to each other, [B, n, sum of C_p].

    parts: at least one has the numbers of its rows
    impl:  see `implementation`; "triton" does not check these numbers
    """
    shape = next(part.at.shape for part in parts if part.at is not None)
    if choose_impl("side_by_side", impl, parts[0].field) == "triton":
        return _launch(parts, shape)
    return torch.cat([part.looked_up(*shape) for part in parts], -1)


@triton.jit
def _copy(field, at, out, entry, sequence, field_b, field_s, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one row of a part."""
    row = tl.zeros([], tl.int64)
    if at is not None:
        row = tl.load(at + entry)
    column = tl.arange(0, BLOCK)
    x = tl.load(field + sequence * field_b + row * field_s + column, mask=column < WIDTH, other=0.0)
    tl.store(out + column, x, mask=column < WIDTH)


@triton.jit(do_not_specialize=["nodes"])
def _side_by_side_kernel(
    first,  # [B or 1, any, FIRST]
    second,
    third,  # None if there are two parts
    first_at,  # [B, nodes], or None
    second_at,
    third_at,
    out,  # [B * nodes, FIRST + SECOND + THIRD]
    nodes,
    first_b,  # 0 for a table
    first_s,
    second_b,
    second_s,
    third_b,
    third_s,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program does one row."""
    entry = tl.program_id(0).to(tl.int64)
    sequence = entry // nodes
    out += entry * (FIRST + SECOND + THIRD)
    _copy(first, first_at, out, entry, sequence, first_b, first_s, FIRST, BLOCK)
    _copy(second, second_at, out + FIRST, entry, sequence, second_b, second_s, SECOND, BLOCK)
    if third is not None:
        _copy(third, third_at, out + FIRST + SECOND, entry, sequence, third_b, third_s, THIRD, BLOCK)


def _launch(parts: Sequence[FieldRows], shape: torch.Size) -> Tensor:
    """Launch the kernel of `side_by_side`."""
    batch, count = shape
    fields = [in_rows(part.field) for part in parts]
    given = [(each.dtype, [*each.shape]) for each in fields]
    fits = all(dtype == fields[0].dtype and size[0] in (1, batch) for dtype, size in given)
    if not 2 <= len(parts) <= PARTS or not fits:
        raise ValueError(f"impl 'triton' takes 2 or {PARTS} tensors [B, S, C] of one dtype; got {given}")
    first, second, third = [*fields, None][:PARTS]
    numbers = [None if part.at is None else part.at.contiguous() for part in parts]
    first_at, second_at, third_at = [*numbers, None][:PARTS]
    first_b, first_s, first_width = _layout(first)
    second_b, second_s, second_width = _layout(second)
    third_b, third_s, third_width = _layout(third)
    out = fields[0].new_empty(batch, count, first_width + second_width + third_width)
    block = triton.next_power_of_2(max(first_width, second_width, third_width))
    if batch * count:
        with torch.cuda.device_of(out):
            _side_by_side_kernel[(batch * count,)](
                first,
                second,
                third,
                first_at,
                second_at,
                third_at,
                out,
                count,
                first_b,
                first_s,
                second_b,
                second_s,
                third_b,
                third_s,
                FIRST=first_width,
                SECOND=second_width,
                THIRD=third_width,
                BLOCK=block,
                num_warps=min(8, max(1, block // 256)),
                enable_fp_fusion=False,
            )
    return out


def _layout(field: Tensor | None) -> tuple[int, int, int]:
    """The strides of a field's sequences, 0 for a table, and of its rows, and its columns; zeros for no field."""
    if field is None:
        return 0, 0, 0
    return 0 if len(field) == 1 else field.stride(0), field.stride(1), field.shape[-1]
