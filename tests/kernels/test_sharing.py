"""Rows that programs share: leaders that are called, and more rows than a program looks at once.

What is shared in a pass: the tests of filter cuts, scores and verification, whose programs come in any schedule too.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from heavypath.kernels.sharing import (
    LOOKS,
    NOTHING,
    OVER,
    call_leader,
    counters,
    find_open,
    finish_chunks,
    helpers,
    leave,
    open_pass,
    take_chunk,
    wait_for_all,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _step_kernel(counters_ptr, found_ptr, rows, row, STEP: tl.constexpr):
    """One step of a pass over a single chunk, as a program takes it."""
    if STEP == "open":
        open_pass(counters_ptr, row, 1)
    elif STEP == "find":
        tl.store(found_ptr, find_open(counters_ptr, rows, row))
    elif STEP == "work":
        chunk = take_chunk(counters_ptr, row)
        finish_chunks(counters_ptr, rows, row, chunk + 1)
        wait_for_all(counters_ptr, rows, row, 1)
    else:
        leave(counters_ptr, rows, 0)


@triton.jit
def _depths_kernel(depths_ptr, counters_ptr, rows, HELPERS):
    """The depth of each row in a binary tree of them: that of the row above, whose leader calls this one's, plus 1."""
    row = find_open(counters_ptr, rows, tl.program_id(0) % rows)
    while row != OVER:
        chunk = tl.full([], -1, tl.int32)
        if row >= 0:
            chunk = take_chunk(counters_ptr, row)
        if chunk >= 0:
            above = tl.load(depths_ptr + (row - 1) // 2, mask=row > 0, other=-1, cache_modifier=".cg")
            tl.store(depths_ptr + row, above + 1)
            for child in range(2 * row + 1, tl.minimum(2 * row + 3, rows)):
                call_leader(counters_ptr, child)
            leave(counters_ptr, rows, HELPERS)
        row = find_open(counters_ptr, rows, tl.program_id(0) % rows)
    leave(counters_ptr, rows, HELPERS)


def depths(rows: int, helping: int) -> tuple[Tensor, Tensor]:
    """What `_depths_kernel` finds, and the counters behind it."""
    found = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    given = torch.zeros(counters(rows), dtype=torch.int32, device=DEVICE)
    given[0], given[1] = rows - 1, 1  # the first row's leader is called
    _depths_kernel[(helping,)](found, given, rows, helping)
    return found.cpu(), given


def test_a_helper_finds_the_next_open_row_of_more_than_it_loads_at_once():
    rows = 2500
    found, given = torch.zeros(1 + counters(rows), dtype=torch.int32, device=DEVICE).split([1, counters(rows)])

    def step(name: str, row: int) -> int:
        _step_kernel[(1,)](given, found, rows, row, STEP=name)
        return int(found)

    for row in (0, 1022, 1023, 1024, 2047, 2499):
        assert step("find", 7) == NOTHING.value
        step("open", row)
        assert [step("find", start) for start in (0, row, 2499)] == [row] * 3
        step("work", row)
    step("open", 5)
    step("open", 2000)
    assert [step("find", start) for start in (5, 6, 2001)] == [5, 2000, 5]
    step("work", 5)
    step("work", 2000)
    given[0] = rows - 1  # all leaders but one have left
    assert step("find", 7) == NOTHING.value
    given[0] = rows
    assert step("find", 7) == OVER.value
    given[0] = rows - 1
    step("leave", 0)
    assert not given.any()


@pytest.mark.parametrize("seed", range(4))
def test_leaders_are_called_in_any_schedule(seed):
    adversary = pytest.importorskip("adversary", reason="needs greenlet")
    if DEVICE.type == "cuda":
        pytest.skip("the adversary needs Triton's interpreter")
    with adversary.Adversary(seed):
        found, left = depths(6, 3)
    assert found.tolist() == [0, 1, 1, 2, 2, 2]
    assert not left.any()


def test_rows_whose_leaders_are_called_are_led_once_the_row_above_is():
    for rows, helping in ((1, 1), (1, 3), (6, 1), (30, 4)):
        found, left = depths(rows, helping)
        assert found.tolist() == [(row + 1).bit_length() - 1 for row in range(rows)]
        assert not left.any()


def test_helpers_are_few_in_the_interpreter_and_look_a_bounded_time():
    assert helpers(DEVICE) >= 1
    assert 1 <= LOOKS.value <= 2**16
