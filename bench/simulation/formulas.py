"""Costs of decoding where a target is larger than a device: it is read through a link in each pass, or split.

`python bench/simulate.py` prints what follows from them.

The target has P weights in W bytes and l layers. Each of R ranks has 1/R of it, room for m bytes of that, and reads the
other S = max(0, W/R - m) bytes through its link in each pass. A pass over n nodes takes

    reading     L    = S / link
    memory      M    = W/R / bandwidth                of a mixture of experts only those that n nodes choose
    products    C(n) = 2 n P/R / peak                 and those that a node chooses: see `shapes`. A link brings all
    telling     K(n) = (2 l + 1) (a log2 R + 2 (R-1)/R x n h / wire) + (a log2 R + (R-1)/R x n V / wire)
    device      D(n) = hypot(M, C(n)) + K(n) + F

with (2 l + 1) all-reduces of n x h activations of x bytes and one all-gather of the logits (see `ranks.shards`). Here a
is the latency of a collective, and F the small kernels between the products. hypot is `roofline`'s: memory and products
delay each other where they are alike. A level of drafting is a pass of the draft, on every rank, and a draw:

    drafting    Q(n, d) = d (M_draft + F_draft + draw) + C_draft(n)

A step with a tree of n nodes and d levels is one pass of the target after d levels of drafting. An engine that reads
*ahead* has the link busy while layers compute. It also reads while a tree is drafted, as far as its `AHEAD` places for
layers are free, A = AHEAD S / (l link). An engine without it does one after the other:

    T(n, d) = max(Q + D(n),  L + max(0, Q - A))     ahead
    T(n, d) = L + D(n) + Q                          else

Plain decoding takes T(1, 0), so G tokens a step make decoding G T(1, 0) / T(n, d) times as fast.

**How many nodes are free.** Ahead, a tree costs no more than a token until D(n) = L, which is, by M + F + K << L,

    N* = sqrt((L - F)^2 - M^2) / (2 P/R / peak)  ~  (bytes of a weight / 2) (peak / link) (S / (W/R))

So it does not depend on the model except for the share of it that is read. In fp16 it is peak / link: 3700 nodes on an
RTX 4090 (0.6 of 165.2 TFLOP/s, 0.85 of 31.5 GB/s). In fp32 it is 196 nodes on two threads of a CPU before a disk of 2
GB/s. Where nothing is read, the device's own bandwidth takes the place of the link. N* is then where products take as
long as reading the weights: 115 nodes on the RTX 4090. One after the other no node is free, and N* is where the
products take as long as the reading.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulation.hardware import Hardware
from simulation.shapes import ModelSize

from heavypath.speculative.costs.gpu_step import DRAW, LEVEL_KERNELS, LEVEL_NODES, STEP_KERNELS
from heavypath.speculative.costs.roofline import LAYER_KERNELS, SMALL_KERNEL
from heavypath.speculative.profile import MATTERS
from heavypath.speculative.trees.planning import select_tree
from heavypath.speculative.trees.rates import Acceptance
from heavypath.speculative.trees.tree import TokenTree

AHEAD = 2  # places for layers that pass, as `streaming.stream` has them
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_DEPTH = 32  # levels of a tree
REMOVABLE = ("products", "drafting", "telling")  # what a tree costs beside a token


class StepSeconds(NamedTuple):
    """Seconds of what a step does, some of it at the same time: of the link, and of the device."""

    reading: float
    memory: float
    products: float
    telling: float
    drafting: float
    kernels: float


@dataclass(frozen=True)
class Setting:
    """A target on some machine, with its draft.

    memory:  bytes of a device for the target's weights. Default: what the draft leaves of it
    ranks:   devices that the target is split over, each with the whole draft
    ahead:   whether weights are read while layers compute and trees are drafted
    plain:   seconds of a token of plain decoding, where they have been measured: then the link is as fast as they say
    without: of REMOVABLE, what costs no time, to see what it limits

    Raises ValueError for a split without a wire, and where `plain` is less than what the device alone takes.
    """

    hardware: Hardware
    target: ModelSize
    draft: ModelSize | None = None
    memory: float | None = None
    ranks: int = 1
    ahead: bool = True
    plain: float | None = None
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if self.ranks > 1 and not self.hardware.wire:
            raise ValueError(
                f"{self.ranks} ranks tell each other something, and this device has no wire: give its bytes a second "
                "(wire=, --wire)"
            )
        if self.memory is not None and not self.memory >= 0:
            raise ValueError(f"memory must be bytes for the target's weights, at least 0, got {self.memory}")
        if self.plain is not None and not self.plain > replace(self, plain=None).device(1):
            raise ValueError(f"plain decoding cannot take {self.plain} s: the device alone takes longer")
        if not self.without <= {*REMOVABLE}:
            raise ValueError(f"without must be among {', '.join(REMOVABLE)}, got {sorted(self.without)}")

    @property
    def streamed(self) -> float:
        """Bytes that each rank reads through its link in a pass."""
        beside = 0 if self.draft is None else self.draft.nbytes + self.draft.embedding * self.draft.itemsize
        room = self.hardware.memory - beside if self.memory is None else self.memory
        return max(0.0, self.target.nbytes / self.ranks - max(0.0, room - self.target.embedding * self.target.itemsize))

    @property
    def reading(self) -> float:
        """Seconds of the link in a pass."""
        if self.plain is None:
            return self.streamed / self.hardware.brings
        return self.plain if self.ahead else self.plain - replace(self, plain=None, without=frozenset()).device(1)

    @property
    def kernels(self) -> float:
        """Seconds of a pass's small kernels, and of the step's."""
        return (self.target.layers * LAYER_KERNELS + STEP_KERNELS) * SMALL_KERNEL

    @property
    def read_ahead(self) -> float:
        """Seconds of reading that drafting hides at most."""
        return self.reading * AHEAD / self.target.layers if self.ahead else 0.0

    def products(self, shape: ModelSize, rows: float) -> float:
        """Seconds of the products of a pass over so many rows."""
        return 0.0 if "products" in self.without else 2 * rows * shape.used / self.hardware.computes

    def fetching(self, shape: ModelSize, rows: float) -> float:
        """Seconds of reading from the device's memory what a pass over so many rows needs of a model's weights."""
        return shape.read(rows) / self.hardware.reads

    def telling(self, nodes: int) -> float:
        """Seconds of what ranks tell each other in a pass over so many nodes."""
        if self.ranks == 1 or "telling" in self.without:
            return 0.0
        each = self.hardware.collective * math.log2(self.ranks)
        part = 2 * (self.ranks - 1) / self.ranks / self.hardware.wire  # activations and logits have 2 bytes
        reduced = each + 2 * part * nodes * self.target.hidden
        return (2 * self.target.layers + 1) * reduced + each + part * nodes * self.target.vocab

    def device(self, nodes: int) -> float:
        """D(n), seconds of a pass without its reading."""
        memory = self.fetching(self.target, nodes) / self.ranks
        products = self.products(self.target, nodes) / self.ranks
        return math.hypot(memory, products) + self.telling(nodes) + self.kernels

    @property
    def level(self) -> float:
        """Seconds of drafting a level, without the products of its nodes."""
        if self.draft is None or "drafting" in self.without:
            return 0.0
        kernels = self.draft.layers * LAYER_KERNELS + LEVEL_KERNELS
        return self.fetching(self.draft, LEVEL_NODES) + kernels * SMALL_KERNEL + DRAW

    def drafting(self, nodes: int, depth: int) -> float:
        """Q(n, d), seconds."""
        rows = 0 if self.draft is None or "drafting" in self.without or not depth else nodes
        return depth * self.level + (self.products(self.draft, rows) if self.draft and rows else 0.0)

    def step(self, nodes: int, depth: int) -> float:
        """T(n, d): seconds of a step with a tree of so many nodes, root included, and so many levels below it."""
        drafting, device = self.drafting(nodes, depth), self.device(nodes)
        if not self.ahead:
            return self.reading + device + drafting
        return max(drafting + device, self.reading + max(0.0, drafting - self.read_ahead))

    def parts(self, nodes: int, depth: int) -> StepSeconds:
        """The times of a step's parts, each by itself."""
        return StepSeconds(
            self.reading,
            self.fetching(self.target, nodes) / self.ranks,
            self.products(self.target, nodes) / self.ranks,
            self.telling(nodes),
            self.drafting(nodes, depth),
            self.kernels,
        )

    @property
    def free_nodes(self) -> float:
        """N*: nodes whose products are hidden by reading; where nothing hides them, those that take as long."""
        node, memory = self.products(self.target, 1) / self.ranks, self.fetching(self.target, math.inf) / self.ranks
        if not node:
            return math.inf
        spare = self.reading - self.kernels if self.ahead else self.reading
        if spare <= memory:
            return memory / node
        return (math.sqrt(spare**2 - memory**2) if self.ahead else spare) / node


class SimulatedTree(NamedTuple):
    """A tree, and what a step with it brings.

    tokens:  expected of a step
    seconds: of a step
    gain:    over plain decoding
    """

    tree: TokenTree
    tokens: float
    seconds: float
    gain: float
    parts: StepSeconds

    @property
    def slowest(self) -> str:
        """The part that takes longest."""
        return max(StepSeconds._fields, key=lambda name: getattr(self.parts, name))


class Simulated(NamedTuple):
    """A setting's steps.

    plain: seconds of a token of plain decoding
    rows:  the best tree of each size
    best:  the best of all
    limit: what limits the best tree's gain: of `REMOVABLE`, or acceptance
    unlimited: the gain over the same plain decoding if that cost no time; for acceptance, if the likeliest path were
        always accepted
    """

    plain: float
    rows: tuple[SimulatedTree, ...]
    best: SimulatedTree
    limit: str
    unlimited: float


def simulate(
    setting: Setting,
    acceptance: Acceptance,
    sizes: Sequence[int] = SIZES,
) -> Simulated:
    """The best tree of each of some sizes, the best of all, and what limits it.

    acceptance: of children, [child] or [depth, child], as `select_tree` takes it
    sizes:      nodes of trees, root included; those that the acceptance has no tree of are left out

    Trees are planned by T(n, d) without what drafting hides, which is linear in the levels; their seconds have it.
    Raises ValueError for acceptance or sizes out of range.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be numbers of nodes of at least 1, got {[*sizes]}")
    plain, rows = setting.step(1, 0), []
    for size in sorted({1, *sizes}):
        if (row := _planned(setting, acceptance, [size], plain)) is not None:
            rows.append(row)
    best = max(rows, key=lambda row: row.gain)
    limits = {}
    for name in REMOVABLE:
        freed = replace(setting, without=frozenset({name}))
        found = _planned(freed, acceptance, [len(row.tree) for row in rows], plain)
        assert found is not None
        limits[name] = found.gain
    limit = max(limits, key=lambda name: limits[name])
    if limits[limit] >= MATTERS * best.gain:
        return Simulated(plain, tuple(rows), best, limit, limits[limit])
    return Simulated(plain, tuple(rows), best, "acceptance", (best.tree.depth + 1) * plain / best.seconds)


def _planned(setting: Setting, acceptance: Acceptance, sizes: Sequence[int], plain: float) -> SimulatedTree | None:
    """The best tree of some sizes; None if none has one of them."""
    base = setting.reading if not setting.ahead else 0.0
    rows = {size: setting.products(setting.draft, size) if setting.draft and size > 1 else 0.0 for size in sizes}
    if "drafting" in setting.without:
        rows = dict.fromkeys(sizes, 0.0)
    costs = {size: max(base + setting.device(size), setting.reading) + rows[size] for size in sizes}
    try:
        tree = select_tree(acceptance, costs, setting.level, MOST_DEPTH)
    except ValueError:
        if min(sizes) == 1:
            raise
        return None
    seconds = setting.step(len(tree.tree), tree.tree.depth)
    gain = tree.expected_tokens * plain / seconds
    return SimulatedTree(tree.tree, tree.expected_tokens, seconds, gain, setting.parts(len(tree.tree), tree.tree.depth))
