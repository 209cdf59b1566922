"""Shared passes over rows: a small kernel whose rows need several passes, alone, with helpers, and in any order."""

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
LANES, PASSES = 128, 3


@triton.jit
def _work(x_ptr, levels_ptr, parts_ptr, counters_ptr, rows, row, V, CHUNKS, LANES: tl.constexpr):
    """Sum min(x, level) over the chunks that this program gets."""
    count = 0
    chunk = take_chunk(counters_ptr, row)
    if chunk >= 0:
        level = tl.load(levels_ptr + row, cache_modifier=".cg")
        while chunk >= 0:
            place = chunk * LANES + tl.arange(0, LANES)
            x = tl.load(x_ptr + row * V + place, mask=place < V, other=0.0)
            tl.store(parts_ptr + row * CHUNKS + chunk, tl.sum(tl.minimum(x, level)))
            count += 1
            chunk = take_chunk(counters_ptr, row)
        finish_chunks(counters_ptr, rows, row, count)


@triton.jit
def _sum(parts_ptr, row, CHUNKS, BLOCK: tl.constexpr):
    chunk = tl.arange(0, BLOCK)
    return tl.sum(tl.load(parts_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg"))


@triton.jit
def _levels_kernel(
    x_ptr, levels_ptr, parts_ptr, counters_ptr, order_ptr, rows, V, CHUNKS, HELPERS,
    LOOKS: tl.constexpr, PASSES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """level <- the mean of min(x, level), PASSES times for each row."""
    program = tl.load(order_ptr + tl.program_id(0))
    if program < rows:
        row = program
        for _ in range(PASSES):
            open_pass(counters_ptr, row, CHUNKS)
            _work(x_ptr, levels_ptr, parts_ptr, counters_ptr, rows, row, V, CHUNKS, LANES)
            wait_for_all(counters_ptr, rows, row, CHUNKS)
            tl.store(levels_ptr + row, _sum(parts_ptr, row, CHUNKS, BLOCK) / V)
    else:
        look = 0
        while look < LOOKS:
            row = find_open(counters_ptr, rows, (program - rows) % rows)
            look = tl.where(row == OVER, LOOKS, look + 1)
            if row >= 0:
                _work(x_ptr, levels_ptr, parts_ptr, counters_ptr, rows, row, V, CHUNKS, LANES)
    leave(counters_ptr, rows, HELPERS)


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


class Rows:
    """Rows of numbers, and the memory that programs share."""

    def __init__(self, rows: int, size: int):
        self.x = torch.rand(rows, size, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
        self.levels = torch.ones(rows, device=DEVICE)
        self.chunks = triton.cdiv(size, LANES)
        self.parts = torch.full((rows, self.chunks), torch.nan, device=DEVICE)
        self.counters = torch.zeros(counters(rows), dtype=torch.int32, device=DEVICE)

    def expected(self) -> Tensor:
        levels = torch.ones(len(self.x), 1, dtype=torch.float64)
        for _ in range(PASSES):
            levels = self.x.cpu().double().minimum(levels).mean(1, keepdim=True)
        return levels[:, 0].float()

    def run(self, helping: int, order: list[int] | None = None, looks: int = LOOKS.value) -> Tensor:
        rows, size = self.x.shape
        grid = rows + helping
        programs = torch.tensor(order or range(grid), dtype=torch.int32, device=DEVICE)
        _levels_kernel[(grid,)](
            self.x, self.levels, self.parts, self.counters, programs, rows, size, self.chunks, helping,
            LOOKS=looks, PASSES=PASSES, LANES=LANES, BLOCK=triton.next_power_of_2(self.chunks),
        )  # fmt: skip
        return self.levels.cpu()


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 128), (3, 1000), (5, 129)])
def test_leaders_alone_sum_what_they_should_and_leave_all_counters_at_zero(rows, size):
    given = Rows(rows, size)
    torch.testing.assert_close(given.run(0), given.expected())
    assert not given.counters.any()


def test_helpers_change_no_bit_whether_they_come_before_or_after_the_leaders():
    alone = Rows(3, 1000).run(0)
    for order in ([0, 1, 2, 3, 4], [3, 4, 0, 1, 2], [4, 2, 0, 3, 1]):
        given = Rows(3, 1000)
        assert torch.equal(given.run(2, order), alone), order
        assert not given.counters.any()


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
def test_no_schedule_changes_a_bit(seed):
    adversary = pytest.importorskip("adversary", reason="needs greenlet")
    if DEVICE.type == "cuda":
        pytest.skip("the adversary needs Triton's interpreter")
    given, called = Rows(2, 300), (0, 1, 1, 2, 2, 2)
    with adversary.Adversary(seed) as schedule:
        torch.testing.assert_close(given.run(3), given.expected())
        found, left = depths(6, 3)
    assert schedule.launched == {"_levels_kernel": 1, "_depths_kernel": 1}
    assert not given.counters.any()
    assert found.tolist() == [*called]
    assert not left.any()


def test_rows_whose_leaders_are_called_are_led_once_the_row_above_is():
    for rows, helping in ((1, 1), (1, 3), (6, 1), (30, 4)):
        found, left = depths(rows, helping)
        assert found.tolist() == [(row + 1).bit_length() - 1 for row in range(rows)]
        assert not left.any()


def test_helpers_are_few_in_the_interpreter_and_look_a_bounded_time():
    assert helpers(DEVICE) >= 1
    assert 1 <= LOOKS.value <= 2**16
