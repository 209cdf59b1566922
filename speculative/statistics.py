"""What a generation did: counts, acceptance and seconds by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heavypath.kernels.verification import Verified
from heavypath.speculative.drafting import Drafted


@dataclass
class Statistics:
    """Sums over the batch; `str()` is a small table.

    depth, branching: levels of the largest tree drafted, and the most children of a node
    steps:         target forwards, the prefill of each prompt included
    new_tokens:    tokens generated, end-of-sequence included, padding not
    seconds:       wall time by phase: prefill, draft, target, verify, compact, commit
    total_seconds: wall time of the whole call
    nodes:         nodes that the target scored, roots and absent ones included
    cache_bytes:   of the target's and the draft's caches
    steps_of, tokens_of: LongTensor[B], steps and new_tokens of each sequence
    offered:       LongTensor[depth, branching]: how often an accepted node at depth d had child j; accepted: how often
                   that child was the accepted one
    clock:         seconds so far; phases on a GPU are told apart only by one that waits for it
    """

    depth: int
    branching: int
    steps: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    nodes: int = 0
    cache_bytes: int = 0
    steps_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long), repr=False)
    tokens_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long), repr=False)
    offered: Tensor = field(init=False, repr=False)
    accepted: Tensor = field(init=False, repr=False)
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def __post_init__(self) -> None:
        self.offered = torch.zeros(self.depth, self.branching, dtype=torch.long)
        self.accepted = torch.zeros_like(self.offered)

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: tokens per target forward."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def acceptance_by_rank(self) -> list[float]:
        """[j]: of the accepted nodes with a child of rank j, the share of which that child was accepted.

        Where draws with replacement gave equal siblings, only the accepted path's node counts, not its equals.
        """
        return _shares(self.accepted.sum(0), self.offered.sum(0))

    @property
    def acceptance_by_depth(self) -> list[float]:
        """[d]: of the accepted nodes at depth d with children, the share of which a child was accepted."""
        first = self.offered[:, :1].sum(1)  # a node with children has one of rank 0
        return _shares(self.accepted.sum(1), first)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to a phase."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start

    def count(self, drafted: Drafted, verified: Verified, active: Tensor) -> None:
        """Tally one verification; active: bool [B], the sequences still generating."""
        tokens = drafted.tokens
        reached = torch.zeros(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool, device=tokens.device)
        reached = reached.scatter_(1, verified.path.where(verified.path >= 0, tokens.shape[1]), True)[:, :-1]
        stepped = active.long().cpu()
        self.steps_of = self.steps_of + stepped if len(self.steps_of) else stepped
        self.steps += int(stepped.sum())
        self.nodes += int(stepped.sum()) * tokens.shape[1]
        if tokens.shape[1] == 1:
            return
        place = ((drafted.depths - 1) * self.branching + drafted.ranks).expand_as(tokens)[:, 1:]  # [B, N - 1]
        above = drafted.parents.clamp(min=0).expand_as(tokens)[:, 1:]
        counted = active[:, None] & reached.gather(1, above) & (tokens[:, 1:] >= 0)
        for total, which in ((self.offered, counted), (self.accepted, counted & reached[:, 1:])):
            total += torch.bincount(place[which], minlength=total.numel()).view_as(total).cpu()

    def _rows_of_sequences(self) -> list[tuple[str, str]]:
        """How the sequences of a batch differ."""
        if len(self.steps_of) < 2:
            return []
        each = self.tokens_of / self.steps_of.clamp(min=1)
        return [("  of each sequence", f"{float(each.min()):.2f} to {float(each.max()):.2f} tokens per step")]

    def __str__(self) -> str:
        rows = [
            ("new tokens", f"{self.new_tokens}"),
            ("steps", f"{self.steps}"),
            ("tokens per step", f"{self.tokens_per_step:.2f}"),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
            *self._rows_of_sequences(),
            ("cache, MiB", f"{self.cache_bytes / 2**20:.1f}"),
            ("acceptance by rank", " ".join(f"{share:.2f}" for share in self.acceptance_by_rank)),
            ("acceptance by depth", " ".join(f"{share:.2f}" for share in self.acceptance_by_depth)),
            *((f"seconds, {name}", f"{seconds:.3f}") for name, seconds in self.seconds.items()),
        ]
        return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _shares(accepted: Tensor, offered: Tensor) -> list[float]:
    return (accepted.double() / offered.clamp(min=1)).tolist()
