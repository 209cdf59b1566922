"""What a generation did: counts, acceptance and seconds by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heavypath.kernels.verification import Verified
from heavypath.speculative.tree import TokenTree


@dataclass
class Statistics:
    """Sums over the batch; `str()` is a small table.

    tree:          the whole tree that was drafted from
    steps:         target forwards, the prefill of each prompt included
    new_tokens:    tokens generated, end-of-sequence included, padding not
    seconds:       wall time by phase: prefill, draft, target, verify, compact, commit
    total_seconds: wall time of the whole call
    offered:       LongTensor[N], how often node i hung below an accepted node; accepted: how often it was accepted
    """

    tree: TokenTree
    steps: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    offered: Tensor = field(init=False, repr=False)
    accepted: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.offered = torch.zeros(len(self.tree), dtype=torch.long)
        self.accepted = torch.zeros(len(self.tree), dtype=torch.long)

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
        return self._shares(self.tree.ranks, self.offered)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """[d]: of the accepted nodes at depth d with children, the share of which a child was accepted."""
        first = self.offered * (self.tree.ranks == 0)  # a node with children has one of rank 0
        return self._shares(self.tree.depths - 1, first)

    def _shares(self, group: Tensor, offered: Tensor) -> list[float]:
        group, offered, accepted = group[1:], offered[1:], self.accepted[1:]
        if not len(group):
            return []
        total = torch.zeros(int(group.max()) + 1).index_add_(0, group, offered.float())
        kept = torch.zeros_like(total).index_add_(0, group, accepted.float())
        return (kept / total.clamp(min=1)).tolist()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, parents: Tensor, kept: Tensor, tokens: Tensor, verified: Verified, active: Tensor) -> None:
        """Tally one verification of a part of the tree.

        parents, kept: LongTensor[N] of the part, kept[i] its node i's number in the whole tree; tokens:
        LongTensor[B, N], -1 absent; active: bool [B], the sequences still generating.
        """
        reached = torch.zeros(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool, device=tokens.device)
        reached = reached.scatter_(1, verified.path.where(verified.path >= 0, tokens.shape[1]), True)[
            active, :-1
        ]  # [A, N]
        offered = reached[:, parents.clamp(min=0)] & (tokens[active] >= 0)
        self.steps += len(reached)
        kept = kept.cpu()
        self.offered[kept] += offered.sum(0).cpu()
        self.accepted[kept] += reached.sum(0).cpu()

    def __str__(self) -> str:
        rows = [
            ("new tokens", f"{self.new_tokens}"),
            ("steps", f"{self.steps}"),
            ("tokens per step", f"{self.tokens_per_step:.2f}"),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
            ("acceptance by rank", " ".join(f"{share:.2f}" for share in self.acceptance_by_rank)),
            ("acceptance by depth", " ".join(f"{share:.2f}" for share in self.acceptance_by_depth)),
            *((f"seconds, {name}", f"{seconds:.3f}") for name, seconds in self.seconds.items()),
        ]
        return "\n".join(f"{name:<22}{value}" for name, value in rows)
