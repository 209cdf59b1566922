"""Requests of a weight: which lines, that they lie within it, and that nothing changes."""

import pytest
import torch
import triton
import triton.language as tl
from devices import DEVICE

from heavypath.kernels.layers.prefetch import LINE, offsets_of_lines, prefetch_weight

SHAPES = [(1, 64), (3, 100), (17, 640), (48, 1030)]


@triton.jit
def _write_offsets(out, lines, lines_of_row, row_bytes, LINE: tl.constexpr, LINES: tl.constexpr):
    at = offsets_of_lines(tl.program_id(0), lines, lines_of_row, row_bytes, LINE, LINES)
    tl.store(out + tl.program_id(0) * LINES + tl.arange(0, LINES), at)


@pytest.mark.parametrize(("rows", "lines_of_row"), [(1, 1), (5, 3), (70, 11)])
def test_the_first_lines_of_each_row_are_requested_once(rows, lines_of_row):
    lines, row_bytes = rows * lines_of_row, 2000
    programs = triton.cdiv(lines, 64)
    out = torch.full((programs * 64,), -1, device=DEVICE)
    _write_offsets[(programs,)](out, lines, lines_of_row, row_bytes, LINE=LINE, LINES=64)
    expected = [row * row_bytes + line * LINE for row in range(rows) for line in range(lines_of_row)]
    assert out[:lines].tolist() == expected
    assert set(out[lines:].tolist()) <= {expected[-1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nbytes", [1, 5_000, 1 << 30])
def test_a_weight_is_requested_within_its_memory_in_any_schedule(nbytes, dtype, adversary):
    for rows, columns in SHAPES:
        whole = torch.randn(rows, columns + 40).to(DEVICE, dtype)
        for weight in (whole, whole[:, :columns], torch.nn.Parameter(whole[:1])):
            before = weight.clone()
            for impl in ("triton", "torch"):
                prefetch_weight(weight, nbytes, impl=impl)
            assert torch.equal(weight, before)
    adversary.met("_prefetch_kernel")


def test_other_shapes_and_sizes_are_refused():
    weight = torch.zeros(4, 6, device=DEVICE)
    for given, nbytes in ((weight[0], 8), (weight.T, 8), (weight, 0)):
        with pytest.raises(ValueError, match=r"takes a weight \[N, K\] with contiguous columns, and"):
            prefetch_weight(given, nbytes)
    prefetch_weight(weight[:0], 8, impl="triton")
