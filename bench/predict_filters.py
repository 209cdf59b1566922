"""What the cuts of filters should take on a GPU, from bytes, instructions, passes and waiting (predict.py filters).

The launch (kernels/filter_cuts.py) reads every row once for its largest logit and its sum, and then takes some passes
over it, which all multiprocessors share (kernels/sharing.py). How many is found by running the search, in NumPy, on
made-up rows: logits as of a language model, normal numbers with a few tokens far above them.

With few rows a pass is a chain of waiting, and its chunk:

    publish   the leader's thresholds are written and fenced, and the word is given      fence + half a round trip
    notice    a helper's look is on its way                                              1.5 round trips
    take      it takes a chunk, loads the thresholds and the logits                      2 round trips
    chunk     it computes, and sees that no chunk is left                                instructions + round trip
    give      its sums are written and fenced, and counted                               fence + half a round trip
    combine   the leader sees it, loads all sums, and takes the next thresholds          2 round trips + instructions

With many rows other rows' chunks fill that time, and instructions bind, of which programs that wait keep the schedulers
from issuing some. Instructions are counted in the machine code for sm_90 (triton 3.9).
"""

from math import ceil
from typing import NamedTuple

import numpy as np
from assumed_gpu import H200, SCHEDULERS, Gpu

from heavypath.kernels.filter_cuts import CHUNK, LANES, THRESHOLDS

WARPS = LANES.value // 32
FIRST = 390  # instructions of a warp for a chunk of the first pass,
PASS = 970  # of a later one,
NEXT = 230  # and between passes, of the leader
ROWS, VOCABULARIES, DTYPES, FILTERS = (1, 8, 64), (32_000, 128_256), ("bf16", "fp32"), ("top-k 50", "top-p 0.9")
BITS = {"bf16": 16, "fp32": 0}  # of a logit's key that are not there


class Prediction(NamedTuple):
    """One launch. Times in microseconds; passes are those behind the first."""

    filters: str
    dtype: str
    vocabulary: int
    rows: int
    passes: float
    mbytes: float
    minstructions: float  # of threads, in millions
    microseconds: float


def model_rows(count: int, vocabulary: int, dtype: str) -> np.ndarray:
    """Logits fp32 [count, vocabulary] that a model might give."""
    random = np.random.default_rng(vocabulary)
    rows = random.normal(0, 2.5, (count, vocabulary)).astype(np.float32)
    rows[:, :20] += random.uniform(4, 14, (count, 20)).astype(np.float32)
    return ((rows.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32) if dtype == "bf16" else rows


def _keys(x: np.ndarray, hidden: int) -> np.ndarray:
    bits = (np.asarray(x, np.float32) + np.float32(0)).view(np.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> hidden).astype(np.int64)


def passes_of(row: np.ndarray, filters: str, hidden: int) -> int:
    """How many passes the search takes for a row: as `_search` in kernels/filter_cuts.py, and one for ties."""
    kind, number = filters.split()
    largest, every = row.max(), len(row)
    weights = np.exp(row.astype(np.float64) - largest) if kind == "top-p" else np.ones(every)
    enough = float(number) * (weights.sum() if kind == "top-p" else 1)
    if kind == "top-p":
        guess = largest + np.log((1 - float(number)) * weights.sum() / every)
    else:
        chunks = [row[start : start + CHUNK.value].max() for start in range(0, every, CHUNK.value)]
        guess = largest - 2 * (largest - min(chunks))
    keys, place = _keys(row, hidden), np.arange(THRESHOLDS.value)
    low, high, passes = _keys(np.finfo(np.float32).min, hidden), _keys(largest, hidden) + 1, 0
    even = np.maximum(place - 1, 0) / (THRESHOLDS.value - 2)
    thresholds = np.where(place == 0, low, _keys(guess * (1 - even) + largest * even, hidden))
    while high - low > 1:
        thresholds = thresholds.clip(low, high - 1)
        reach = np.array([weights[keys >= threshold].sum() for threshold in thresholds]) >= enough
        low, high = thresholds[reach].max(initial=low), thresholds[~reach].min(initial=high)
        thresholds = low + place * -(-(high - low) // THRESHOLDS.value)
        passes += 1
    return passes + int(kind == "top-p" and (keys == low).sum() > 1)


def predict(filters: str, dtype: str, vocabulary: int, rows: int, gpu: Gpu = H200) -> Prediction:
    """A launch on `rows` rows of one kind."""
    size, chunks = (2 if dtype == "bf16" else 4), ceil(vocabulary / CHUNK.value)
    found = [passes_of(row, filters, BITS[dtype]) for row in model_rows(32, vocabulary, dtype)]
    passes = float(np.mean(found))
    read = rows * vocabulary * size
    per_chunk = WARPS / (gpu.processors * SCHEDULERS * gpu.clock)  # microseconds for an instruction of all its warps
    alone = gpu.alone / gpu.clock
    first = gpu.memory + FIRST * alone + 2 * gpu.fence + 2 * gpu.trip
    chain = 2 * gpu.fence + 7.5 * gpu.trip + (PASS + NEXT) * alone
    waiting = gpu.launch + first + passes * chain
    issue = rows * chunks * (FIRST + passes * PASS) * per_chunk / gpu.issued
    memory = read / gpu.bandwidth
    # What binds is there for as long as it takes, and the first and the last pass of some row are waited for beside it.
    busy = gpu.launch + first + max(issue, memory) + chain
    return Prediction(
        filters, dtype, vocabulary, rows, passes, read / 1e6,
        rows * chunks * LANES.value * (FIRST + passes * PASS) / 1e6, max(waiting, busy),
    )  # fmt: skip


def rows() -> list[dict]:
    """All predictions."""
    return [
        predict(filters, dtype, vocabulary, rows)._asdict()
        for filters in FILTERS
        for dtype in DTYPES
        for vocabulary in VOCABULARIES
        for rows in ROWS
    ]
