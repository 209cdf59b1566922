"""What the launch that decides about a tree's nodes should take on a GPU, from bytes, instructions and waiting.

Two things take time (kernels/verifying/decision.py, kernels/sharing.py):

first pass  every row of logits is read once: by bandwidth, by instructions, or by how many loads are on their way at
            once, whichever is slowest
passes      a node's rejections come one after the other, and each takes a pass over the rows of its target and its
            draft, shared by all multiprocessors. Those of the node with most passes are counted, behind the first pass
            of all nodes, and other nodes' passes run beside them

A shared pass takes what assumed_gpu.py says; the next child is tried behind it.

Traversal (kernels/verifying/traversal_kernel.py) has its first pass alone in a launch, then one for the chains of all
nodes, and one that chooses. A chain begins when its node's weight is known, which is behind the passes for the elder
siblings: so what counts is the longest way down, its beginnings and the passes on it. On the shipped pair these are 3
and 7 in a tree of 64 nodes and 8 levels, 8 and 1 in a chain of 8. (All chains take 20 passes in the tree; those that a
walk needs which ends at the accepted node 16, one behind the other; the most of each level 19 together.) A beginning:

    call        the weight is written and fenced, and the word is given                    fence + half a round trip
    notice      a free program's look is on its way                                        1.5 round trips
    take        it takes the chain, and finds that it has not begun                        2 round trips
    load        the tree, both rows' numbers, the children's logits                        3 round trips
    offer       the first child is weighed, by one program                                 instructions that wait

Instructions are counted in the machine code for sm_90 of 64 nodes x 128,256 tokens in bfloat16 (triton 3.9).
"""

from math import ceil
from typing import NamedTuple

import assumed_gpu
from assumed_gpu import H200, SCHEDULERS, Gpu

from heavypath.kernels.verifying.distributions import CHUNK, LANES, PIECE
from heavypath.kernels.verifying.k_seq import SEARCH_STEPS

WARPS = LANES.value // 32
DEEPEST = 8  # levels of the trees below
SPECIAL = 16  # results a cycle of a multiprocessor's units for 2^x


class Code(NamedTuple):
    """Instructions of a warp. A turn of the first pass reads 16 tokens a thread, a chunk of a shared pass 8."""

    first: int = 246
    first_special: int = 18
    programs: int = 2  # that fit on a multiprocessor
    chunk: int = 249
    chunk_special: int = 16
    between: int = 535  # from a pass to the next one
    barriers: int = 33


CHAIN = Code()
K_SEQ = Code(first=235, chunk=159, between=443, barriers=9)
HELD = Code(between=565 + 35, barriers=31 + 4)  # a turn of the loop, and one of that which looks up the coin


class Shape(NamedTuple):
    """A tree: how many nodes have children, and the most passes that a node may take."""

    method: str
    nodes: int
    inner: int
    passes: int
    vocabulary: int
    batch: int = 1
    chains: int = 0  # for traversal, one behind the other: its passes are those between them

    @property
    def code(self) -> Code:
        return {"kseq": K_SEQ, "held": HELD}.get(self.method, CHAIN)


def most_passes(method: str, children: int) -> int:
    """Of a node: a pass before each child but the first; for K-SEQ one at both ends, and one for each step.

    Held siblings take one behind each child, but none where there is one child: and always, not only after rejections.
    """
    if method == "held":
        return children if children > 1 else 0
    if method != "kseq":
        return max(children - 1, 0)
    return 0 if children < 2 else 2 + SEARCH_STEPS.value


def computing(instructions: float, special: float, warps: float, gpu: Gpu) -> float:
    """Microseconds in which a multiprocessor issues this for so many warps."""
    return max(instructions * warps / SCHEDULERS, special * 32 * warps / SPECIAL) / gpu.clock


def first_pass(shape: Shape, gpu: Gpu = H200) -> dict[str, float]:
    """Microseconds by each of the things that bound it."""
    rows, code = shape.batch * (shape.nodes + shape.inner), shape.code
    turns = rows * shape.vocabulary / (16 * 32)  # of a warp
    programs = shape.batch * shape.nodes * ceil(shape.vocabulary / CHUNK.value)
    waves = ceil(programs / (gpu.processors * code.programs))
    steps = CHUNK.value / (16 * LANES.value) * rows / (shape.batch * shape.nodes)  # of a program
    return {
        "bytes": 2 * rows * shape.vocabulary / gpu.bandwidth,
        "instructions": computing(code.first, code.first_special, turns / gpu.processors, gpu),
        "loads": waves * (steps * (gpu.memory + computing(code.first, code.first_special, WARPS, gpu))
                          + gpu.fence + gpu.trip),
    }  # fmt: skip


def shared_pass(shape: Shape, gpu: Gpu = H200, workers: int | None = None) -> dict[str, float]:
    """Microseconds of each of its parts; workers: programs that take part, one a multiprocessor if not given."""
    code, pieces = shape.code, ceil(shape.vocabulary / PIECE.value)
    rounds = ceil(pieces / (workers or gpu.processors))
    chunk = gpu.trip + computing(code.chunk, code.chunk_special, WARPS, gpu)
    deciding = (code.between * gpu.dependent + code.barriers * gpu.barrier) / gpu.clock
    return assumed_gpu.shared_pass(gpu, rounds * chunk + (rounds - 1) * gpu.trip, deciding)


def beginning(shape: Shape, gpu: Gpu = H200) -> dict[str, float]:
    """Microseconds of each of the parts of a chain's beginning."""
    return {
        "call": gpu.fence + gpu.trip / 2,
        "notice": 1.5 * gpu.trip,
        "take": 2 * gpu.trip,
        "load": 3 * gpu.trip,
        "offer": (shape.code.between * gpu.dependent) / gpu.clock,
    }


def decide(shape: Shape, gpu: Gpu = H200) -> float:
    """Microseconds of the launch, or of traversal's three, where the node with most passes takes all of them."""
    leaving = gpu.fence + 2 * gpu.trip
    launches = gpu.launch
    if shape.chains:  # the last of which goes through the levels
        launches = 3 * gpu.launch + 3 * gpu.trip + DEEPEST * 2 * gpu.barrier / gpu.clock
    return launches + max(first_pass(shape, gpu).values()) + shape.passes * sum(
        shared_pass(shape, gpu).values()
    ) + shape.chains * sum(beginning(shape, gpu).values()) + leaving  # fmt: skip


SHAPES = [
    Shape(method, 64, 20, most_passes(method, children), vocabulary)
    for method in ("without_replacement", "held", "kseq")
    for children in (2, 8)
    for vocabulary in (32_000, 128_256)
    if (method, children) != ("kseq", 2)
]
SHAPES += [Shape("traversal", 64, 20, 7, vocabulary, chains=3) for vocabulary in (32_000, 128_256)]
SHAPES += [Shape("traversal", 9, 8, 1, vocabulary, chains=8) for vocabulary in (32_000, 128_256)]  # a chain


def rows() -> list[dict]:
    """All predictions: the first pass is as long as what bounds it most."""
    found = []
    for shape in SHAPES:
        first, one = first_pass(shape), shared_pass(shape)
        slowest = max(first, key=first.__getitem__)
        row = {"method": shape.method, "nodes": shape.nodes, "vocabulary": shape.vocabulary, "passes": shape.passes}
        row |= {"first_pass": first, "shared_pass": one, "first_pass_us": first[slowest], "bound_by": slowest}
        found.append(row | {"a_pass_us": sum(one.values()), "microseconds": decide(shape)})
    return found
