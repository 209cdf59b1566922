"""What a step of a static tree at batch 1 should take on a GPU: how likely each part is, and how well that is known.

A step is a chain of kernels, each of which waits for the one before:

    product of few rows    weight bytes / (bandwidth x share) + GAP     every weight is read once
    attention              ATTENTION                                    with its parts and their merge
    any other kernel       SMALL                                        a launch in a graph, and what it does
    draw of a level        + DRAW, verification + DECIDE                what these take beyond a small kernel

`before` is a layer as PyTorch's operations make it, with seven products and fourteen other kernels. `now` is with
joined products and fused kernels, as tests/kernels/test_layer_kernels.py and tests/core/test_step.py count them. `few
rows` is with the products of kernels/layers/few_rows.py, silu behind one of them: the decoder takes these where
kernels/layers/measured.py has them as faster on the GPU that it runs on. The limit is the time to read the target's
weights once, at a copy's bandwidth. `fp8 draft` is that with a draft whose weights torchao left in fp8. `top_p` is the
share of a step that cuts and draws take under top-p, of rows of 128,256 tokens, by predict_filters.py.

Each constant is what we expect, the best and the worst that published measurements allow, and where these are from. The
least and the most of a step have all constants at their best, or all at their worst, so they are wide.

`block_rows` is of a round of Llama-3.1-8B with a DFlash draft of five layers: one pass of a block for all levels, whose
context is projected from five taps, and a larger tree. Its products may take longer than reading: of the two the longer
counts, product by product, at a share of the tensor cores' peak.
"""

from collections.abc import Callable
from itertools import product
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


class Model(NamedTuple):
    """The shape of a Llama, or of an EAGLE-3 head, whose queries, keys and values are made of two states."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int = 32000
    keys: int | None = None  # width of all key heads; None: as many as query heads
    states: int = 1

    def layer(self, *, joined: bool) -> list[int]:
        """Bytes of the weights of each product of a layer, in bf16."""
        square, wide = BYTES * self.hidden**2, BYTES * self.hidden * self.inner
        key = square if self.keys is None else BYTES * self.hidden * self.keys
        made = [self.states * each for each in (square, key, key)]
        return [sum(made), square, 2 * wide, wide] if joined else [*made, square, *[wide] * 3]

    @property
    def head(self) -> int:
        return BYTES * self.hidden * self.vocabulary

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a pass reads: all but the token embedding."""
        return self.layers * sum(self.layer(joined=True)) + self.head


class Kernels(NamedTuple):
    """Other kernels of a layer than products and attention, those beside the layers of either model, and of a step."""

    joined: bool
    own_products: bool
    others: int
    target_ends: int
    draft_ends: int
    step: int
    draft_bytes: int = 2  # of a draft's weight


BYTES = 2  # of a weight
PAIRS = {
    "7B + 68M": (Model(32, 4096, 11008), Model(2, 768, 3072)),  # Llama-2-7B and llama-68m
    "8B + EAGLE-3": (Model(32, 4096, 14336, 128_256, 1024), Model(1, 4096, 14336, 32_000, 1024, 2)),  # Llama-3.1-8B
}
LEVELS = 5
LLAMA_8B, DFLASH = PAIRS["8B + EAGLE-3"][0], Model(5, 4096, 14336, 128_256, 1024)
BLOCK, TAPS = 16, 5  # rows of a block, and hidden states that its context is made of
WAYS = {
    "before": Kernels(False, False, 13, 3, 7, 78),
    "now": Kernels(True, False, 4, 2, 3, 23),
    "few rows": Kernels(True, True, 3, 2, 3, 23),
    "fp8 draft": Kernels(True, True, 3, 2, 3, 23, 1),
}

# Bytes in a second of a large copy.
BANDWIDTH = {
    "H200": Known(4.3e12, 4.4e12, 4.1e12, "nine tenths of the data sheet's 4.8 TB/s"),
    "H100": Known(3.0e12, 3.1e12, 2.9e12, "nine tenths of the data sheet's 3.35 TB/s"),
}
# The share of a copy's bandwidth that a product of 33 to 128 rows reaches, by bytes of its weights, at most.
SHARES = (
    (10e6, Known(0.50, 0.70, 0.35, "judged: too few blocks for all multiprocessors")),
    (50e6, Known(
        0.62, 0.80, 0.45, "github.com/NVIDIA/cutlass/issues/1176: of an H100's nominal bandwidth, of which a copy has "
        "90%, cuBLAS reaches 40% with 23 MB of fp16, and a kernel by hand 55%",
    )),
    (150e6, Known(0.78, 0.88, 0.70, "github.com/NVIDIA/cutlass/issues/1139: 68 to 70% of it with 59 MB of fp8")),
    (float("inf"), Known(
        0.85, 0.92, 0.78, "hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles: 78% of it by one kernel for all of a "
        "model",
    )),
)  # fmt: skip
OWN_SHARES = (
    (10e6, Known(0.60, 0.75, 0.35, "judged")),
    (50e6, Known(0.75, 0.85, 0.45, "judged: all multiprocessors have work")),
    (float("inf"), Known(0.85, 0.92, 0.70, "judged: as the best that was published of a hand-written kernel")),
)
GAP = Known(1.5e-6, 1.0e-6, 2.5e-6, "the same page: 1.3 us from kernel to kernel in a CUDA graph on an H100")
SMALL = Known(2.3e-6, 1.8e-6, 3.0e-6, "that gap, and a load and a store to memory that wait for each other")
ATTENTION = Known(7e-6, 5e-6, 8e-6, "judged: 256 to 1,000 rows of keys, parts, a ticket, a merge")
DRAW = Known(5e-6, 4e-6, 8e-6, "bench/predict.py verification: instructions of 32,000 tokens, and the last program")
DECIDE = Known(12e-6, 10e-6, 24e-6, "bench/predict.py verification; the worst with five rejected children")

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


def pass_seconds(
    model: Model, kernels: Kernels, ends: int, bandwidth: Known, pick: Pick, nbytes: int = BYTES
) -> dict[str, float]:
    """A forward pass over few tokens, by what it spends its time on. nbytes: of a weight."""
    products = [size * nbytes // BYTES for size in [*model.layers * model.layer(joined=kernels.joined), model.head]]
    reading = sum(size / (pick(bandwidth) * pick(share(size, kernels.own_products))) for size in products)
    return {
        "reading weights": reading,
        "between products": len(products) * pick(GAP),
        "attention": model.layers * pick(ATTENTION),
        "other kernels": (model.layers * kernels.others + ends) * pick(SMALL),
    }


def step_seconds(models: tuple[Model, Model], kernels: Kernels, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """A step of a target and a draft, by what it spends its time on."""
    target = pass_seconds(models[0], kernels, kernels.target_ends, bandwidth, pick)
    nbytes = kernels.draft_bytes
    own = kernels if nbytes == BYTES else kernels._replace(joined=False, others=kernels.others + 1)  # each by itself
    draft = pass_seconds(models[1], own, own.draft_ends, bandwidth, pick, nbytes)
    parts = {f"target: {name}": seconds for name, seconds in target.items()}
    parts |= {f"draft: {name}": LEVELS * seconds for name, seconds in draft.items()}
    return parts | {
        "beside: launches": kernels.step * pick(SMALL), "beside: drawing": LEVELS * pick(DRAW),
        "beside: deciding": pick(DECIDE),
    }  # fmt: skip


def block_seconds(nodes: int, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """A round with a tree of so many nodes, which one pass of a block drafts."""

    def product(size: float, count: int) -> float:
        reading = size / (pick(bandwidth) * pick(share(size)))
        return max(reading, size / BYTES * 2 * count / pick(TENSOR_PEAK)) + pick(GAP)

    def products(model: Model, count: int) -> float:
        sizes = model.layers * model.layer(joined=True) + [model.head]
        return sum(product(size, count) for size in sizes)

    def others(model: Model) -> float:
        return model.layers * (pick(ATTENTION) + WAYS["now"].others * pick(SMALL))

    hidden = LLAMA_8B.hidden
    context = [TAPS * BYTES * hidden**2, 2 * DFLASH.layers * BYTES * hidden * LLAMA_8B.keys]
    return {
        "target: products": products(LLAMA_8B, nodes), "target: other kernels": others(LLAMA_8B),
        "draft: products": products(DFLASH, BLOCK), "draft: other kernels": others(DFLASH),
        "draft: context": sum(product(size, nodes) for size in context),
        "beside: launches": WAYS["now"].step * pick(SMALL), "beside: drawing, deciding": pick(DRAWN),
    }  # fmt: skip


def block_rows() -> list[Row]:
    """Milliseconds of each part of such a round, their sum and its range, by GPU and nodes."""
    found = []
    for gpu, bandwidth in BANDWIDTH.items():
        for nodes in (64, 128):
            sums = {name: sum(block_seconds(nodes, bandwidth, pick).values()) for name, pick in PICKS.items()}
            parts = block_seconds(nodes, bandwidth, PICKS["likely"])
            row = {"gpu": gpu, "kernels": f"{nodes} nodes"} | {name: 1e3 * seconds for name, seconds in parts.items()}
            found.append(row | {f"{name}_ms": 1e3 * seconds for name, seconds in sums.items()})
    return found


def rows() -> list[Row]:
    """Milliseconds of each part, their sum and its range, and these over the limit, by GPU and models."""
    found = []
    for gpu, bandwidth in BANDWIDTH.items():
        microseconds = predict_filters.step(H200._replace(bandwidth=bandwidth.likely / 1e6))
        filtered = 1e-6 * (microseconds["cuts"] + microseconds["draws"])
        for (pair, models), (way, kernels) in product(PAIRS.items(), WAYS.items()):
            limit = models[0].read_bytes / bandwidth.likely
            sums = {name: sum(step_seconds(models, kernels, bandwidth, pick).values()) for name, pick in PICKS.items()}
            parts = step_seconds(models, kernels, bandwidth, PICKS["likely"])
            rest = sum(seconds for name, seconds in parts.items() if name.startswith("beside"))
            row = {"gpu": gpu, "kernels": f"{pair}, {way}"} | {name: 1e3 * seconds for name, seconds in parts.items()}
            row |= {"step_ms": 1e3 * sums["likely"], "least_ms": 1e3 * sums["least"], "most_ms": 1e3 * sums["most"]}
            over = {"over_limit": "likely", "over_least": "least", "over_most": "most"}
            row |= {name: sums[pick] / limit for name, pick in over.items()}
            under_top_p = sums["likely"] - parts["beside: drawing"] + filtered
            found.append(row | {"beside": rest / sums["likely"], "top_p": filtered / under_top_p})
    return found
