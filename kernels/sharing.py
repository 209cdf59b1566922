"""A pass over a row that is shared by whatever programs of a launch are free.

Some results take several passes over a row, each of which depends on the one before. One program, the row's leader,
knows what is next. It publishes a pass, takes part in it as others do, and goes on when all chunks of the row are done:

    leader  store what the pass needs; open_pass; work; wait_for_all; combine the chunks' results; ...; leave
    helper  while there is a row: row = find_open; work;                                          ...; leave
    work    chunk = take_chunk; while chunk >= 0: store the chunk's result, take_chunk; finish_chunks

Helpers are the last programs of the grid: they start when no other program is left to start, and fill the processors
that others have left. Each kernel writes `work` itself, one function for leaders and helpers.

Rows whose leaders are not known beforehand, because they depend on other rows' results, count as rows that have left.
When one is needed, call_leader opens a pass of one chunk. The program that takes this chunk leads the row. So every
program of such a launch is a helper, and looks for rows until all have left.

Nobody waits for a program that has not started. Chunks are taken one by one, and a leader takes chunks itself until
none is left. So it only waits for chunks that others have taken. Those programs run already, and wait for nobody while
they hold a chunk. A helper leaves when all leaders have left, or after LOOKS looks for work. So the order in which
programs start does not matter, nor how many run at once, nor whether there are any helpers. In Triton's interpreter,
which runs one program after the other, leaders do everything themselves.

Nor do the results depend on who computed them: each chunk's is stored at a place of its own, and the leader combines
them in a fixed order.

Who sees what, and when:

    open_pass      release  what the leader stored before is there for everyone who takes a chunk of this pass
    take_chunk     acquire  so parameters are loaded after a chunk was taken. They change only when all chunks are done,
                            so one call of `work` serves one pass, even if its row was found open in an earlier pass
    finish_chunks  release  results are there ...
    wait_for_all   acquire  ... for the leader, which loads them past the first cache, with cache_modifier=".cg"

A scalar atomic is executed by one thread and its result is handed to the others at a barrier, so that all threads of a
program go the same way. A scalar load is executed by every thread, and those could see different values. Therefore a
leader polls by an atomic addition of zero. A helper looks at all rows at once by a volatile load of LOOK counters. No
program has more threads than LOOK, so one thread loads each counter, and all threads get the same minimum.

The counters, int32, are zero before and after a launch (see `tickets`):

    0                       the leaders and helpers that have left; the last one sets what is not zero to zero
    1 .. rows               each row's chunks that nobody has taken; below 0 where several came for the last one
    rows + 1 .. 2 rows      each row's chunks that are done in this pass
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false

import torch

from heavypath.kernels.language import knobs, tl, triton

LOOKS = tl.constexpr(24 if knobs.runtime.interpret else 4096)  # of one helper; 4096 take a few milliseconds
LOOK = tl.constexpr(1024)  # counters that a helper loads at once: at least the threads of a program
NOTHING = tl.constexpr(-1)  # no row has an open pass at present
OVER = tl.constexpr(-2)  # all leaders have left


def counters(rows: int) -> int:
    """The number of `tickets` that a launch with this many leaders takes."""
    return 2 * rows + 1


def helpers(device: torch.device) -> int:
    """The number of programs to add to a grid so that each multiprocessor has one; a few in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def open_pass(counters_ptr, row, CHUNKS):
    """Let everyone take the chunks of this row, whose last pass is done. Its leader calls this."""
    tl.debug_barrier()
    tl.atomic_xchg(counters_ptr + 1 + row, CHUNKS, sem="release")


@triton.jit
def call_leader(counters_ptr, row):
    """Let whoever takes the only chunk of this pass lead the row, which counted as one that has left."""
    tl.atomic_add(counters_ptr, -1, sem="relaxed")
    open_pass(counters_ptr, row, 1)


@triton.jit
def take_chunk(counters_ptr, row):
    """The number of a chunk that nobody else has or will get in this pass; less than 0 if none is left."""
    return tl.atomic_add(counters_ptr + 1 + row, -1, sem="acquire") - 1


@triton.jit
def finish_chunks(counters_ptr, rows, row, count):
    """Say that the results of this many chunks, all that this program has taken, are stored."""
    tl.debug_barrier()
    tl.atomic_add(counters_ptr + 1 + rows + row, count, sem="release")


@triton.jit
def wait_for_all(counters_ptr, rows, row, CHUNKS):
    """Return when the results of all chunks of this pass are stored. The row's leader calls this after its work."""
    done_ptr = counters_ptr + 1 + rows + row
    done = tl.atomic_add(done_ptr, 0, sem="acquire")
    while done < CHUNKS:
        done = tl.atomic_add(done_ptr, 0, sem="acquire")
    tl.debug_barrier()
    tl.store(done_ptr, 0)


@triton.jit
def find_open(counters_ptr, rows, start):
    """A row with chunks to take: the first one from row `start` on, in a circle. NOTHING if there is none; or OVER."""
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
    """The last thing that each of the leaders, one for each row, and of the helpers does with the counters."""
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr, 1, sem="acq_rel") == rows + HELPERS - 1:
        tl.debug_barrier()
        for base in range(0, rows + 1, LOOK):
            place = base + tl.arange(0, LOOK)
            tl.store(counters_ptr + place, tl.zeros_like(place), mask=place <= rows)
