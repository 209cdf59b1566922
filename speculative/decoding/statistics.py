"""Statistics of a generation: counts, acceptance and seconds by phase."""

import math
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from heavypath.speculative.models.layer_weights import StreamCounts, WeightStream

ENOUGH_STEPS = 32  # before `does_not_pay` judges
LEAST_GAIN = 1.02  # a smaller gain is less than the tree's costs outside of drafting, which are not measured separately
LEAST_WAITING = 0.1  # of the time: if weight loading takes less, the tree is larger than what loading hides
MOST_REPLANS = 5  # changes of the tree that the table shows
PHASES = (
    "prefill",
    "draft",
    "sampling",
    "target",
    "processing",
    "verification",
    "compaction",
    "step",
    "host",
    "trace",
)


@dataclass
class Statistics:
    """Sums over the batch. `str()` is a small table.

    depth, branching: levels of the largest tree drafted, and the most children of a node
    tree:          its size in words, and how it was chosen
    replans:       (step, new tree) for each change of the tree: with replan=True, or because fewer sequences ran
    law_changed_by: name of what changed the output's distribution, such as typical acceptance; "" if it is lossless
    verification:  `method` of `verify_tree`, "typical", or "own" for a user's or the draft's verifier
    steps:         target forwards over a tree; the prompt's forward pass does not count
    new_tokens:    tokens generated, end-of-sequence tokens included, padding not
    seconds:       wall time by phase. "prefill"; "draft", its forward passes; "sampling" of its tokens; "target", its
                   forward pass; "processing", logits processors on both; "verification"; "compaction" of the caches,
                   and commit; "trace"; "host", the rest. With CUDA graphs "step" replaces the phases inside a step
    total_seconds: wall time of the whole call
    nodes:         nodes that the target scored, roots and absent ones included
    cache_bytes:   bytes of the target's and the draft's caches
    prefill_tokens: prompt tokens that the target computed before the first step; each prompt's last one is a root
    reused_tokens: prompt tokens that it did not compute, because their rows were in `past`
    streaming:     counts of the target's weight stream during the call; None if all weights stay in memory
    steps_of, tokens_of: LongTensor[B], steps and new_tokens of each sequence
    offered:       LongTensor[depth, branching], how often an accepted node at depth d had child j
    accepted:      LongTensor[depth, branching], how often that child was the accepted one
    clock:         returns seconds; on a GPU it must wait for the device to separate phases
    begin:         the clock's value at the beginning; None for now
    stream:        the stream of the target's weights; None if all stay in memory
    """

    depth: int
    branching: int
    tree: str = ""
    replans: list[tuple[int, str]] = field(default_factory=list)
    law_changed_by: str = ""
    verification: str = ""
    steps: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    nodes: int = 0
    cache_bytes: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    streaming: StreamCounts | None = None
    steps_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"), repr=False)
    tokens_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"), repr=False)
    offered: Tensor = field(init=False, repr=False)
    accepted: Tensor = field(init=False, repr=False)
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)
    begin: float | None = None
    stream: InitVar[WeightStream | None] = None

    def __post_init__(self, stream: WeightStream | None) -> None:
        self._stream = stream
        self.streaming = None if stream is None else stream.counts()
        self.offered = torch.zeros(self.depth, self.branching, dtype=torch.long, device="cpu")
        self.accepted = torch.zeros_like(self.offered)
        if self.begin is None:
            self.begin = self.clock()
        self._last = self.begin

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step, which is per pass of the target (block efficiency in papers)."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def drafting_share(self) -> float:
        """The share of drafting in the time after the prompt; 0 with CUDA graphs, which hide it."""
        steps = 0.0
        drafting = 0.0
        for phase, seconds in self.seconds.items():
            if phase not in ("prefill", "trace"):
                steps += seconds
            if phase in ("draft", "sampling"):
                drafting += seconds
        return drafting / steps if steps else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of the call's time in which the target waited for its weights to be read.

        NaN if CUDA graphs copied them, where it cannot be measured.
        """
        if self.streaming is None or not self.total_seconds:
            return 0.0
        if self.streaming.untimed:
            return math.nan
        return self.streaming.waiting / self.total_seconds

    @property
    def gain_at_most(self) -> float:
        """An upper bound of the speedup over plain decoding.

        A step of plain decoding does for one node everything that a step here does for a tree, except drafting. So it
        takes no longer than this step without drafting.
        """
        return self.tokens_per_step * (1 - self.drafting_share)

    @property
    def does_not_pay(self) -> str:
        """A message that speculation costs more than it gains; "" if it pays, or after too few steps to judge."""
        if self.streaming and self.nodes > self.steps > 7 and self.waiting_share < LEAST_WAITING:
            return (
                f"the target waited for its weights in {self.waiting_share:.0%} of the time: its trees of "
                f"{self.nodes // self.steps} nodes take longer to compute than weights to be read, so that a smaller "
                "tree_size is faster"
            )
        if self.steps < ENOUGH_STEPS or self.gain_at_most > LEAST_GAIN:
            return ""
        return (
            f"the draft does not pay: {self.tokens_per_step:.2f} tokens a step, and {self.drafting_share:.0%} of the "
            "time for drafting, so that method 'autoregressive' would be faster"
        )

    @property
    def acceptance_by_rank(self) -> list[float]:
        """For each rank j, of the accepted nodes with a child of rank j, the share whose child j was accepted.

        If draws with replacement gave equal siblings, only the node on the accepted path counts.
        """
        accepted = self.accepted.sum(0)
        offered = self.offered.sum(0)
        return _shares(accepted, offered)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth d, of the accepted nodes at depth d with children, the share with an accepted child."""
        accepted = self.accepted.sum(1)
        first = self.offered[:, :1].sum(1)  # a node with children has one of rank 0
        return _shares(accepted, first)

    def lap(self, phase: str) -> None:
        """Add the time since the last call of `lap` to this phase's seconds."""
        now = self.clock()
        before = self.seconds.get(phase, 0.0)
        self.seconds[phase] = before + now - self._last
        self._last = now

    def end(self, counts: Tensor, tokens_of: Tensor, steps_of: Tensor, nodes: int) -> None:
        """Set the final counts, and end the clock.

        counts: LongTensor[2, any], how often each child was offered, and accepted
        tokens_of, steps_of: LongTensor[B] on the CPU, of each sequence; nodes: scored by the target, in all
        """
        children = self.offered.numel()
        counts = counts[:, :children].cpu()
        self.offered, self.accepted = counts.view(2, *self.offered.shape)
        self.tokens_of = tokens_of
        self.steps_of = steps_of
        self.new_tokens = int(tokens_of.sum())
        self.steps = int(steps_of.sum())
        self.nodes = nodes
        if self._stream is not None and self.streaming is not None:
            now = self._stream.counts()
            self.streaming = now.since(self.streaming)
            self._stream = None
        self.lap("host")
        self.total_seconds = self._last - (self.begin or 0.0)

    def _rows_of_sequences(self) -> list[tuple[str, str]]:
        """A row of the table with the least and the most tokens per step of a sequence; none for one sequence."""
        if len(self.steps_of) < 2:
            return []
        each = self.tokens_of / self.steps_of.clamp(min=1)
        least = float(each.min())
        most = float(each.max())
        return [("  of each sequence", f"{least:.2f} to {most:.2f} tokens per step")]

    def _rows_of_streaming(self) -> list[tuple[str, str]]:
        """Rows of the table on reading streamed weights; none if all weights are in memory."""
        if self.streaming is None:
            return []
        read = self.streaming.bytes_read / 1e9
        rate = self.streaming.bandwidth / 1e9
        waited = f"{self.waiting_share:.0%} of the time"
        if self.streaming.untimed:
            waited = "not known with CUDA graphs"
        return [("weights read, GB", f"{read:.2f} at {rate:.2f} GB/s"), ("  waited for them", waited)]

    def __str__(self) -> str:
        by_rank = _to_the_last(self.acceptance_by_rank)
        rows = [
            ("new tokens", f"{self.new_tokens}"),
            ("steps", f"{self.steps}"),
            ("tree", self.tree),
        ]
        for step, tree in self.replans[-MOST_REPLANS:]:
            rows.append((f"  after step {step}", tree))
        if self.law_changed_by:
            rows.append(("output distribution", f"changed by {self.law_changed_by}"))
        rows += [
            ("tokens per step", f"{self.tokens_per_step:.2f}"),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
            *self._rows_of_sequences(),
            ("prompt tokens", f"{self.prefill_tokens} computed, {self.reused_tokens} reused"),
            ("cache, MiB", f"{self.cache_bytes / 2**20:.1f}"),
            *self._rows_of_streaming(),
            ("acceptance by rank", _in_words(by_rank)),
            ("acceptance by depth", _in_words(self.acceptance_by_depth)),
        ]
        for phase in PHASES:
            if phase in self.seconds:
                rows.append((f"seconds, {phase}", f"{self.seconds[phase]:.3f}"))
        return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _shares(accepted: Tensor, offered: Tensor) -> list[float]:
    shares = accepted.double() / offered.clamp(min=1)
    return shares.tolist()


def _in_words(shares: list[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _to_the_last(shares: list[float]) -> list[float]:
    """The shares without zeros at the end, but at least the first: a grown tree has hundreds of ranks."""
    count = len(shares)
    while count > 1 and shares[count - 1] == 0:
        count -= 1
    return shares[:count]
