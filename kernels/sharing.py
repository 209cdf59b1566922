"""Work sharing inside one launch: free programs take part in passes over a row that another program leads.

Some results need several passes over a row, each depending on the one before. One program, the row's leader, starts a
pass, takes part in it like the others, and continues when all chunks of the row are done:

    leader  store what the pass needs; open_pass; work; wait_for_all; combine the chunks' results; ...; leave
    helper  while there is a row: row = find_open; work;                                          ...; leave
    work    chunk = take_chunk; while chunk >= 0: store the chunk's result, take_chunk; finish_chunks

Helpers are the last programs of the grid: they start when no other program is left to start, and use the processors
that others have freed. Each kernel defines `work`, one function for leaders and helpers.

Rows whose leaders are not known in advance, because they depend on other rows' results, count as rows that have left.
When such a row is needed, call_leader opens a pass of one chunk, and the program that takes this chunk leads the row.
So every program of such a launch is a helper, and looks for rows until all have left.

No program waits for one that has not started. Chunks are taken one by one, and a leader takes chunks until none is
left. So it waits only for chunks that others have taken. Those programs are running, and wait for no program while they
hold a chunk. A helper leaves when all leaders have left, or after LOOKS looks for work. So correctness does not depend
on the order in which programs start, on how many run at the same time, or on helpers. In Triton's interpreter, which
runs one program after the other, leaders do everything.

Results do not depend on which program computed them: each chunk's result has a fixed place in memory, and the leader
combines them in a fixed order.

Memory order:

    open_pass      release  the leader's earlier stores are visible to each program that takes a chunk of this pass
    take_chunk     acquire  so parameters are loaded after a chunk was taken. They change only when all chunks are done,
                            so one call of `work` serves one pass, even if its row was found open in an earlier pass
    finish_chunks  release  results are visible ...
    wait_for_all   acquire  ... to the leader, which loads them past the L1 cache, with cache_modifier=".cg"

A scalar atomic is executed by one thread, and a barrier passes its result to the others, so that all threads of a
program take the same branch. A scalar load is executed by every thread, and threads could see different values.
Therefore a leader polls by an atomic addition of zero. A helper reads all rows' counters by a volatile load of LOOK
counters. No program has more threads than LOOK, so one thread loads each counter, and all threads get the same minimum.
Helpers do not pause between looks. Each has one load in flight, which takes 0.7 us or more, so that 132 of them use a
third of the L2 bandwidth of a counter's cache line, and an atomic waits for less than 10 ns (arithmetic, for 64 rows).
The passes of `filter_cuts` and `nucleus` have four times as many helpers. What their looks cost is not measured yet.

The counters, int32, are zero before and after a launch (see `tickets`):

    0                       leaders and helpers that have left; the last one resets all counters to zero
    1 .. rows               each row's chunks that are not taken; below 0 if several programs came for the last one
    rows + 1 .. 2 rows      each row's chunks that are done in this pass
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

import torch

from heavypath.kernels.language import knobs, tl, triton

LOOKS = tl.constexpr(24 if knobs.runtime.interpret else 4096)  # of one helper; 4096 looks take a few milliseconds
LOOK = tl.constexpr(1024)  # counters that a helper loads in one instruction: at least the threads of a program
NOTHING = tl.constexpr(-1)  # no row has an open pass now
OVER = tl.constexpr(-2)  # all leaders have left


def counters(rows: int) -> int:
    """Return how many `tickets` a launch with this many leaders needs."""
    return 2 * rows + 1


def helpers(device: torch.device) -> int:
    """Return the number of helpers to add to a grid: one for each multiprocessor; 3 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def open_pass(counters_ptr, row, CHUNKS):
    """Open a pass: let programs take the row's chunks. Called by the row's leader, when its last pass is done."""
    tl.debug_barrier()
    tl.atomic_xchg(counters_ptr + 1 + row, CHUNKS, sem="release")


@triton.jit
def call_leader(counters_ptr, row):
    """Let another program lead a row: open a pass of one chunk; the program that takes the chunk is the leader.

    Until now the row counted as one whose leader has left; it no longer does.
    """
    tl.atomic_add(counters_ptr, -1, sem="relaxed")
    open_pass(counters_ptr, row, 1)


@triton.jit
def take_chunk(counters_ptr, row):
    """Take a chunk: return its number, which no other program gets in this pass; less than 0 if none is left."""
    return tl.atomic_add(counters_ptr + 1 + row, -1, sem="acquire") - 1


@triton.jit
def finish_chunks(counters_ptr, rows, row, count):
    """Report that the results of `count` chunks, all that this program has taken, are stored."""
    tl.debug_barrier()
    tl.atomic_add(counters_ptr + 1 + rows + row, count, sem="release")


@triton.jit
def wait_for_all(counters_ptr, rows, row, CHUNKS):
    """Wait until the results of all chunks of this pass are stored. Called by the row's leader after its work."""
    done_ptr = counters_ptr + 1 + rows + row
    done = tl.atomic_add(done_ptr, 0, sem="acquire")
    while done < CHUNKS:
        done = tl.atomic_add(done_ptr, 0, sem="acquire")
    tl.debug_barrier()
    tl.store(done_ptr, 0)


@triton.jit
def find_open(counters_ptr, rows, start):
    """Return the first row with chunks to take, cyclically from `start`; NOTHING if there is none; OVER at the end."""
    tl.debug_barrier()
    nearest = tl.full([], 2**31 - 1, tl.int32)
    for base in range(0, rows + 1, LOOK):
        place = base + tl.arange(0, LOOK)
        count = tl.load(counters_ptr + place, mask=place <= rows, other=0, volatile=True)
        distance = tl.where(place > start, place - 1 - start, place - 1 - start + rows)
        distance = tl.where(count > 0, distance, 2**31 - 1)
        distance = tl.where(place == 0, tl.where(count >= rows, -1, 2**31 - 1), distance)
        nearest = tl.minimum(nearest, tl.min(distance))
    tl.debug_barrier()
    row = (start + nearest) % rows
    return tl.where(nearest < 0, OVER, tl.where(nearest < 2**31 - 1, row, NOTHING))


@triton.jit
def leave(counters_ptr, rows, HELPERS):
    """Count this program as one that has left. Leaders, one for each row, and helpers call it last."""
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr, 1, sem="acq_rel") == rows + HELPERS - 1:
        tl.debug_barrier()
        for base in range(0, rows + 1, LOOK):
            place = base + tl.arange(0, LOOK)
            tl.store(counters_ptr + place, tl.zeros_like(place), mask=place <= rows)
