"""What filters should take on a GPU, from bytes, instructions, passes and waiting (predict.py filters).

The launch (kernels/filter_cuts.py) reads every row once for its largest logit and its sum, and then takes some passes
over it, which all multiprocessors share (kernels/sharing.py). How many is found by running the search, in NumPy, on
made-up rows: logits as of a language model, normal numbers with a few tokens far above them.

With few rows a pass takes what assumed_gpu.py says, with the thresholds as its parameters. With many rows other rows'
chunks fill that time, and instructions bind, of which programs that wait keep the schedulers from issuing some.
Instructions are counted in the machine code for sm_90 (triton 3.9). A chunk without a token that reaches the pass's
least threshold takes fewer: past the first pass these are most chunks.

A draw under top-p is a draw without filters, whose leader then takes passes of that kind (kernels/nucleus.py): one
where the candidates decide. So does `step`, which sums what a step takes of five draws of eight tokens from eight rows
and of the cuts of both models' rows, by which a tree of 64 nodes is verified.
"""

from math import ceil, log
from typing import NamedTuple

import numpy as np
from assumed_gpu import H200, SCHEDULERS, Gpu, shared_pass

from heavypath.kernels.filter_cuts import CHUNK, LANES, THRESHOLDS
from heavypath.kernels.noise import Stream, gumbels

WARPS = LANES.value // 32
FIRST = 390  # instructions of a warp for a chunk of the first pass,
PASS, UNREACHED = 1002, 170  # of a later one, and of one that no token's threshold is in,
NEXT = 230  # and between passes, of the leader
PLAIN_DRAW = 24, 5.0  # instructions of a token, and microseconds for the launch and the last program
ROWS, VOCABULARIES, DTYPES, FILTERS = (1, 8, 64), (32_000, 128_256), ("bf16", "fp32"), ("top-k 50", "top-p 0.9")
BITS = {"bf16": 16, "fp32": 0}  # of a logit's key that are not there


class Prediction(NamedTuple):
    """One launch. Times in microseconds; passes are those behind the first, reached the share of chunks they reach."""

    filters: str
    dtype: str
    vocabulary: int
    rows: int
    passes: float
    reached: float
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


def _reached(keys: np.ndarray, least: int) -> float:
    """The share of chunks with a token whose key is at least this."""
    return float(
        np.mean([keys[start : start + CHUNK.value].max() >= least for start in range(0, len(keys), CHUNK.value)])
    )


def passes_of(row: np.ndarray, filters: str, hidden: int) -> list[float]:
    """The share of chunks that each pass of the search reaches, as in kernels/filter_cuts.py, and that for ties."""
    kind, number = filters.split()
    largest, every = row.max(), len(row)
    weights = np.exp(row.astype(np.float64) - largest) if kind == "top-p" else np.ones(every)
    enough = float(number) * (weights.sum() if kind == "top-p" else 1)
    if kind == "top-p":
        guess = largest + np.log((1 - float(number)) * weights.sum() / every)
    else:
        chunks = [row[start : start + CHUNK.value].max() for start in range(0, every, CHUNK.value)]
        guess = largest - 2 * max(largest - min(chunks), 8 * log(2))
    keys, place = _keys(row, hidden), np.arange(THRESHOLDS.value)
    low, high, passes = _keys(np.finfo(np.float32).min, hidden), _keys(largest, hidden) + 1, []
    even = np.maximum(place - 1, 0) / (THRESHOLDS.value - 2)
    thresholds = np.where(place == 0, low, _keys(guess * (1 - even) + largest * even, hidden))
    while high - low > 1:
        thresholds = thresholds.clip(low, high - 1)
        passes.append(_reached(keys, thresholds.min()))
        reach = np.array([weights[keys >= threshold].sum() for threshold in thresholds]) >= enough
        low, high = thresholds[reach].max(initial=low), thresholds[~reach].min(initial=high)
        thresholds = low + place * -(-(high - low) // THRESHOLDS.value)
    return passes + [_reached(keys, low)] * int(kind == "top-p" and (keys == low).sum() > 1)


def passes_of_draw(row: np.ndarray, top_p: float, k: int, hidden: int, noise_row: int = 0) -> list[float]:
    """The same of a draw of k tokens at temperature 1: as `_search` in kernels/nucleus.py, and one for ties."""
    weights, keys = np.exp(row.astype(np.float64) - row.max()), _keys(row, hidden)
    noise = gumbels(0, Stream.DRAFT, np.array([noise_row]), len(row))[0]
    places = max(8, 1 << (2 * k - 1).bit_length())
    best = (-(row + noise)).argsort(kind="stable")[:places]  # the candidates
    low, high, place, passes = _keys(np.finfo(np.float32).min, hidden), keys.max() + 1, np.arange(THRESHOLDS.value), []
    while high - low > 1:
        inside = np.sort(keys[best][(keys[best] > low) & (keys[best] < high)])[::-1]
        last = max(len(inside), THRESHOLDS.value - 1) - 1
        chosen = ((THRESHOLDS.value - 1 - place) * last // (THRESHOLDS.value - 2)).clip(max=len(inside) - 1)
        even = (low + place * -(-(high - low) // THRESHOLDS.value)).clip(max=high - 1)
        thresholds = np.where(place == 0, low, inside[chosen]) if len(inside) else even
        passes.append(_reached(keys, thresholds.min()))
        reach = np.array([weights[keys >= threshold].sum() for threshold in thresholds]) >= top_p * weights.sum()
        low, high = thresholds[reach].max(initial=low), thresholds[~reach].min(initial=high)
        is_cut = ((keys >= low) & (keys < high)).sum() == 1
        kept = keys[best] >= (low if is_cut else high)
        before = kept.cumsum()
        if not (~kept & (keys[best] >= low) & (before < k)).any() and (
            before[-1] >= k or (is_cut and (keys >= low).sum() == before[-1])
        ):
            return passes
    return passes + [_reached(keys, low)] * int((keys == low).sum() > 1)


def predict(filters: str, dtype: str, vocabulary: int, rows: int, gpu: Gpu = H200) -> Prediction:
    """A launch on `rows` rows of one kind."""
    found = [passes_of(row, filters, BITS[dtype]) for row in model_rows(32, vocabulary, dtype)]
    return predicted(filters, dtype, vocabulary, rows, found, gpu)


def predicted(
    filters: str, dtype: str, vocabulary: int, rows: int, found: list[list[float]], gpu: Gpu = H200,
    first: float = FIRST,
) -> Prediction:  # fmt: skip
    """A launch on rows that take passes such as these; first: instructions of the first pass."""
    size, chunks = (2 if dtype == "bf16" else 4), ceil(vocabulary / CHUNK.value)
    passes, reached = float(np.mean([len(each) for each in found])), float(np.mean(np.concatenate(found)))
    read = rows * vocabulary * size
    one = reached * PASS + (1 - reached) * UNREACHED  # instructions of a pass's chunk
    per_chunk = WARPS / (gpu.processors * SCHEDULERS * gpu.clock)  # microseconds for an instruction of all its warps
    alone = gpu.alone / gpu.clock
    begin = gpu.memory + first * alone + 2 * gpu.fence + 2 * gpu.trip
    chain = sum(shared_pass(gpu, gpu.trip + PASS * alone, NEXT * alone).values())  # some chunk is reached
    waiting = gpu.launch + begin + passes * chain
    issue = rows * chunks * (first + passes * one) * per_chunk / gpu.issued
    memory = read / gpu.bandwidth
    # What binds is there for as long as it takes, and the first and the last pass of some row are waited for beside it.
    busy = gpu.launch + begin + max(issue, memory) + chain
    return Prediction(
        filters, dtype, vocabulary, rows, passes, reached, read / 1e6,
        rows * chunks * LANES.value * (first + passes * one) / 1e6, max(waiting, busy),
    )  # fmt: skip


def draw(dtype: str, vocabulary: int, rows: int, k: int, gpu: Gpu = H200) -> Prediction:
    """A draw of k tokens from each row under top-p 0.9, where the candidates may decide."""
    made = enumerate(model_rows(32, vocabulary, dtype))
    found = [passes_of_draw(row, 0.9, k, BITS[dtype], number) for number, row in made]
    instructions, last = PLAIN_DRAW
    plain = predicted(f"top-p 0.9 k={k}", dtype, vocabulary, rows, found, gpu, instructions * CHUNK.value / LANES.value)
    return plain._replace(microseconds=plain.microseconds + last - gpu.launch)


def step(gpu: Gpu = H200, vocabulary: int = 128_256) -> dict[str, float]:
    """Microseconds of a step under top-p: by its cuts and draws as they are, and with a cut before each draw."""
    cuts = predict("top-p 0.9", "bf16", vocabulary, 64, gpu).microseconds
    alone, drawn = predict("top-p 0.9", "bf16", vocabulary, 8, gpu).microseconds, draw("bf16", vocabulary, 8, 8, gpu)
    instructions, last = PLAIN_DRAW
    lanes = gpu.processors * SCHEDULERS * 32 * gpu.clock * gpu.issued
    plain = instructions * 8 * vocabulary / lanes + last
    return {"cuts": 2 * cuts, "draws": 5 * drawn.microseconds, "draws with cuts": 5 * (alone + plain)}


def rows() -> list[dict]:
    """All predictions."""
    shapes = [(dtype, vocabulary, rows) for dtype in DTYPES for vocabulary in VOCABULARIES for rows in ROWS]
    cuts = [predict(filters, *shape) for filters in FILTERS for shape in shapes]
    return [each._asdict() for each in (*cuts, *(draw(*shape, k) for k in (1, 8) for shape in shapes))]
