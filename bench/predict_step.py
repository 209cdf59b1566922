"""What a step of a static tree at batch 1 should take on a GPU: how likely each part is, and how well that is known.

A step is a chain of kernels, each of which waits for the one before:

    product of few rows    weight bytes / (bandwidth x share) + GAP     every weight is read once
    the same by `ramps`    weight bytes / bandwidth + RAMP              fits tokens a second that others publish
    attention              ATTENTION                                    with its parts and their merge
    any other kernel       SMALL                                        a launch in a graph, and what it does
    draw of a level        + DRAW, verification + DECIDE                what these take beyond a small kernel

How many kernels there are is counted: launches.json has them by draft, and tests/core/test_step_launches.py counts them
again. `now` is with products by PyTorch; `ramps` is that by the other model of a product. `few rows` is with the
products of kernels/layers/few_rows.py, silu in one of them: the decoder takes these where kernels/layers/measured.py
has them as faster on the GPU that it runs on. `ahead` is `ramps` with a target's weights requested while its attention
and small kernels run (speculative/models/ahead.py): a share of that time, AHEAD, is saved. `fp8 draft` is `few rows`
with a draft whose weights torchao left in fp8, and `ahead, fp8 draft` is `ahead` with such a draft. The limit is the
time to read the target's weights once, at a copy's bandwidth. `top_p` is the share of a step that cuts and draws take
under top-p, of rows of 128,256 tokens, by predict_filters.py.

Each constant is what we expect, the best and the worst that published measurements allow, and where these are from. The
least and the most of a step have all constants at their best, or all at their worst, so they are wide.

`block_rows` is of a round of Llama-3.1-8B with a DFlash draft of five layers: one pass of a block for all levels, whose
context is projected from five taps, and a larger tree. Its products may take longer than reading: of the two the longer
counts, product by product, at a share of the tensor cores' peak. What a term launches at each level counts as small
kernels, its products too. `ahead` requests the target's weights alone.
"""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import predict_filters
from assumed_gpu import H200
from common import Row


class Known(NamedTuple):
    """A constant as it likely is, at its best and at its worst."""

    likely: float
    best: float
    worst: float
    source: str


class Launches(NamedTuple):
    """How many kernels are launched: products of a linear layer, attention, and others."""

    products: int
    attention: int
    others: int


class Model(NamedTuple):
    """The shape of a Llama, or of an EAGLE-3 head, whose queries, keys and values are made of two states.

    keys:   width of all key heads; None: as many as query heads
    states: that queries, keys and values are made of
    taps:   hidden states of the target that its features are made of, by one product a step
    """

    layers: int
    hidden: int
    inner: int
    vocabulary: int = 32000
    keys: int | None = None
    states: int = 1
    taps: int = 0

    def layer(self, *, joined: bool) -> list[int]:
        """Bytes of the weights of each product of a layer, in bf16."""
        square, wide = BYTES * self.hidden**2, BYTES * self.hidden * self.inner
        key = square if self.keys is None else BYTES * self.hidden * self.keys
        made = [self.states * each for each in (square, key, key)]
        return [sum(made), square, 2 * wide, wide] if joined else [*made, square, *[wide] * 3]

    def products(self, *, joined: bool = True) -> list[int]:
        """Bytes of the weights of each product of a pass, in bf16: all but the token embedding."""
        return [*self.layers * self.layer(joined=joined), BYTES * self.hidden * self.vocabulary]

    @property
    def features(self) -> list[int]:
        """Bytes of the weights that are read once a step, of the target's hidden states."""
        return [BYTES * self.taps * self.hidden**2] if self.taps else []


class Pair(NamedTuple):
    """A target and a draft. kind: the draft's name in launches.json"""

    target: Model
    draft: Model
    kind: str


class Way(NamedTuple):
    """How products are made.

    own: by few_rows.py; ramps: by the other model; ahead: weights are requested ahead; draft_bytes: of a draft's weight
    """

    own: bool = False
    ramps: bool = False
    ahead: bool = False
    draft_bytes: int = 2


BYTES = 2  # of a weight
EAGLE = "eagle-3, a vocabulary of its own"
PAIRS = {  # Llama-2-7B and llama-68m; Llama-3.1-8B
    "7B + 68M": Pair(Model(32, 4096, 11008), Model(2, 768, 3072), "a model of two layers"),
    "8B + EAGLE-3": Pair(Model(32, 4096, 14336, 128_256, 1024), Model(1, 4096, 14336, 32_000, 1024, 2, taps=3), EAGLE),
}
LEVELS = 5
LLAMA_8B, DFLASH = PAIRS["8B + EAGLE-3"].target, Model(5, 4096, 14336, 128_256, 1024, taps=5)
BLOCK, BLOCK_LEVELS = 16, 12  # rows of a block, and levels of a tree of 64 to 128 nodes
BLOCK_KINDS = ("dflash", "dspark, gated", "dspark, rnn")
WAYS = {
    "now": Way(),
    "ramps": Way(ramps=True),
    "ahead": Way(ramps=True, ahead=True),
    "few rows": Way(own=True),
    "fp8 draft": Way(own=True, draft_bytes=1),
    "ahead, fp8 draft": Way(ramps=True, ahead=True, draft_bytes=1),
}
BLOCK_WAYS = ("now", "ramps", "ahead")
COUNTED = {
    name: {part: Launches(*counts) for part, counts in parts.items()}
    for name, parts in json.loads((Path(__file__).parent / "launches.json").read_text()).items()
}
OF_TARGET = COUNTED["a target"]

# Bytes in a second of a large copy.
BANDWIDTH = {
    "H200": Known(4.26e12, 4.3e12, 4.2e12, "measured, bench/results/head-h200.json"),
    "H100": Known(3.0e12, 3.1e12, 2.9e12, "nine tenths of the data sheet's 3.35 TB/s"),
}
# The share of a copy's bandwidth that a product of 33 to 128 rows reaches, by bytes of its weights, at most. The kernel
# that adds the parts of split-K counts to its product.
HEAD_STEP = "measured on an H200, bench/results/head-h200.json"  # a step of the 8B target with its head, 60 nodes
SHARES = (
    (10e6, Known(0.50, 0.70, 0.35, "judged: too few blocks for all multiprocessors")),
    (50.5e6, Known(0.68, 0.78, 0.60, HEAD_STEP + ": 0.66 of 33.6 MB, 0.70 of 50.3 MB")),
    (150e6, Known(0.78, 0.88, 0.72, HEAD_STEP + ": 117 MB")),
    (float("inf"), Known(0.89, 0.92, 0.85, HEAD_STEP + ": 0.89 of 235 MB and of 1,051 MB")),
)
STREAM = "measured on an H200, bench/results/weight_stream-h200.json"
OWN_SHARES = (
    (10e6, Known(0.60, 0.75, 0.35, "judged")),
    (50.5e6, Known(0.60, 0.75, 0.50, STREAM + ": all products of a pass of 64 nodes at 0.71 (8B) and 0.68 (7B)")),
    (float("inf"), Known(0.74, 0.85, 0.70, "the same; best: with 16 rows")),
)
RAMP = Known(
    6.4e-6, 4.3e-6, 7.0e-6, STREAM + ": products of 64 rows take so much longer than a copy, best: of one row. On an "
    "H100 5.2 us fit SGLang's 158 tokens a second of Llama-3.1-8B, github.com/sgl-project/sglang/issues/4247",
)  # fmt: skip
GAP = Known(0.5e-6, 0.1e-6, 1.5e-6, HEAD_STEP + ": a step alone less its kernels, 0.22 ms of 436 launches")
AHEAD = Known(
    -0.2, 0.0, -0.45, "of the windows without reading. " + STREAM + ": passes with requests took 1 to 5% longer in all "
    "rows, so that nothing is requested there. On an H100 it was not measured",
)  # fmt: skip
SMALL = Known(2.6e-6, 2.2e-6, 3.0e-6, HEAD_STEP + ": norms 2.0 us, rotary embeddings 2.4 us, silu 2.0 us, and that gap")
ATTENTION = Known(12e-6, 8e-6, 16e-6, HEAD_STEP + ": 11.4 us with the prefix in one part. Best: with fewer rows a part")
DRAW = Known(11e-6, 9e-6, 14e-6, HEAD_STEP + ": 13 us a draw, of 32,000 tokens")
DECIDE = {  # by the size of the vocabulary
    32_000: Known(24e-6, 10e-6, 45e-6, "judged: as the next, whose passes take a quarter of the time"),
    128_256: Known(
        84e-6, 24e-6, 90e-6, HEAD_STEP + ": random weights have nearly all children rejected; best: few are rejected",
    ),
}  # fmt: skip

TENSOR_PEAK = Known(590e12, 690e12, 400e12, "judged: six tenths of the data sheet's 989 TFLOP/s, with few rows")
DRAWN = Known(170e-6, 120e-6, 250e-6, "judged: growth, verification and compaction of 128 nodes, 128,256 tokens")

Pick = Callable[[Known], float]
PICKS: dict[str, Pick] = {
    "likely": lambda one: one.likely,
    "least": lambda one: one.best,
    "most": lambda one: one.worst,
}


def share(size: float, own: bool = False) -> Known:
    """The share of a copy's bandwidth that a product with so many bytes of weights reaches, or one of few_rows.py."""
    return next(found for most, found in (OWN_SHARES if own else SHARES) if size <= most)


def product_seconds(size: float, way: Way, bandwidth: Known, pick: Pick) -> tuple[float, float]:
    """Seconds that a product with so many bytes of weights reads, and those between it and the next kernel."""
    if way.ramps:
        return size / pick(bandwidth), pick(RAMP)
    return size / (pick(bandwidth) * pick(share(size, way.own))), pick(GAP)


def parts_of(
    name: str, sizes: list[int], attention: int, others: int, way: Way, bandwidth: Known, pick: Pick
) -> dict[str, float]:
    """Seconds of products with these bytes of weights, and of other launches, by what they are."""
    products = [product_seconds(size, way, bandwidth, pick) for size in sizes]
    return {
        f"{name}: reading weights": sum(reading for reading, _ in products),
        f"{name}: between products": sum(between for _, between in products),
        f"{name}: attention": attention * pick(ATTENTION),
        f"{name}: other kernels": others * pick(SMALL),
    }


def target_seconds(target: Model, way: Way, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """A pass of a target, whose silu is in a product of few_rows.py."""
    layer, ends = OF_TARGET["layer"], OF_TARGET["ends"]
    others = target.layers * (layer.others - way.own) + ends.others
    parts = parts_of("target", target.products(), target.layers * layer.attention, others, way, bandwidth, pick)
    if way.ahead:
        parts["target: requested ahead"] = -saved_seconds(target, others, pick)
    return parts


def saved_seconds(target: Model, others: int, pick: Pick) -> float:
    """What requests save of a pass whose memory idles in attention, other kernels, and before these and products."""
    return pick(AHEAD) * (target.layers * (pick(ATTENTION) + 4 * pick(GAP)) + others * pick(SMALL))


def step_seconds(pair: Pair, way: Way, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """A step of a target and a draft, by what it spends its time on."""
    counted, draft = COUNTED[pair.kind], pair.draft
    first, level, taps = counted["first pass"], counted["level"], counted["taps"]
    joined = way.draft_bytes == BYTES  # fp8 weights are multiplied one by one
    sizes = [size * way.draft_bytes // BYTES for size in draft.products(joined=joined)]
    draws = (LEVELS - 1) * counted["draw of a level"].others  # which are within a level's
    others = first.others + (LEVELS - 1) * level.others - draws
    if way.own and joined:
        others -= LEVELS * draft.layers
    attention = first.attention + (LEVELS - 1) * level.attention
    parts = target_seconds(pair.target, way, bandwidth, pick)
    parts |= parts_of("draft", LEVELS * sizes, attention, others, way, bandwidth, pick)
    of_taps = parts_of("taps", draft.features, 0, taps.others, way, bandwidth, pick)
    return parts | {
        "draft: taps": sum(of_taps.values()),
        "beside: launches": (draws + counted["last draw and verification"].others) * pick(SMALL),
        "beside: drawing": LEVELS * pick(DRAW),
        "beside: deciding": pick(DECIDE[pair.target.vocabulary]),
    }


def block_seconds(kind: str, nodes: int, way: Way, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """A round with a tree of so many nodes, which one pass of a block drafts."""
    counted, layer, ends = COUNTED[kind], OF_TARGET["layer"], OF_TARGET["ends"]
    first, level, taps = counted["first pass"], counted["level"], counted["taps"]

    def product(size: float, count: int) -> float:
        reading, between = product_seconds(size, way, bandwidth, pick)
        return max(reading, size / BYTES * 2 * count / pick(TENSOR_PEAK)) + between

    hidden = LLAMA_8B.hidden
    context = [*DFLASH.features, *2 * DFLASH.layers * [BYTES * hidden * (LLAMA_8B.keys or hidden)]]
    others = LLAMA_8B.layers * layer.others + ends.others
    saved = {"target: requested ahead": -saved_seconds(LLAMA_8B, others, pick)} if way.ahead else {}
    return saved | {
        "target: products": sum(product(size, nodes) for size in LLAMA_8B.products()),
        "target: other kernels": LLAMA_8B.layers * pick(ATTENTION) + others * pick(SMALL),
        "draft: products": sum(product(size, BLOCK) for size in DFLASH.products()),
        "draft: other kernels": DFLASH.layers * pick(ATTENTION) + first.others * pick(SMALL),
        "draft: levels": (BLOCK_LEVELS - 1) * sum(level) * pick(SMALL),
        "draft: context": sum(product(size, nodes) for size in context) + taps.others * pick(SMALL),
        "beside: launches": counted["last draw and verification"].others * pick(SMALL),
        "beside: drawing, deciding": pick(DRAWN),
    }


def block_rows() -> list[Row]:
    """Milliseconds of each part of such a round, their sum and its range, by GPU, kind of draft, nodes and way."""
    found = []
    for (gpu, bandwidth), kind, nodes, way in product(BANDWIDTH.items(), BLOCK_KINDS, (64, 128), BLOCK_WAYS):
        how = WAYS[way]
        sums = {name: sum(block_seconds(kind, nodes, how, bandwidth, pick).values()) for name, pick in PICKS.items()}
        parts = block_seconds(kind, nodes, how, bandwidth, PICKS["likely"])
        row = {"gpu": gpu, "kernels": f"{kind}, {nodes} nodes, {way}"}
        row |= {name: 1e3 * seconds for name, seconds in parts.items()}
        found.append(row | {f"{name}_ms": 1e3 * seconds for name, seconds in sums.items()})
    return found


def rows() -> list[Row]:
    """Milliseconds of each part, their sum and its range, and these over the limit, by GPU and models."""
    found = []
    for gpu, bandwidth in BANDWIDTH.items():
        microseconds = predict_filters.step(H200._replace(bandwidth=bandwidth.likely / 1e6))
        filtered = 1e-6 * (microseconds["cuts"] + microseconds["draws"])
        for (name, pair), (way, how) in product(PAIRS.items(), WAYS.items()):
            limit = sum(pair.target.products()) / bandwidth.likely
            sums = {name: sum(step_seconds(pair, how, bandwidth, pick).values()) for name, pick in PICKS.items()}
            parts = step_seconds(pair, how, bandwidth, PICKS["likely"])
            rest = sum(seconds for part, seconds in parts.items() if part.startswith("beside"))
            row = {"gpu": gpu, "kernels": f"{name}, {way}"} | {part: 1e3 * seconds for part, seconds in parts.items()}
            row |= {"step_ms": 1e3 * sums["likely"], "least_ms": 1e3 * sums["least"], "most_ms": 1e3 * sums["most"]}
            over = {"over_limit": "likely", "over_least": "least", "over_most": "most"}
            row |= {column: sums[pick] / limit for column, pick in over.items()}
            under_top_p = sums["likely"] - parts["beside: drawing"] + filtered
            found.append(row | {"beside": rest / sums["likely"], "top_p": filtered / under_top_p})
    return found
