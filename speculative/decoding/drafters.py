"""Drafters of the trees of a step: the kinds of trees plug in here.

A kind of tree has `depth`, `branching`, `cache_rows` and a length, and a function that says who drafts it:

    @drafter_of.register
    def _(tree: Mine, depth: int, draft: Draft | None, rules: Rules, device: torch.device) -> Drafter:
        return MyDrafter(tree.top(depth), rules)

That of static trees is in `drafting`. That of a `Growth` is in `growing`, which is loaded for the first one.
"""

from functools import singledispatch
from typing import Any, Protocol

import torch

from heavypath.speculative.decoding.drafted import Drafted, Lap, Reach
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.caches import RowCache


class Shape(Protocol):
    """The trees that a method drafts: one static tree, or how trees grow; it is hashable.

    depth: its levels; branching: the most children of a node; cache_rows: that it takes; its length: nodes, at most
    grows: whether its nodes depend on what is drafted
    """

    @property
    def grows(self) -> bool: ...  # noqa: D102
    @property
    def depth(self) -> int: ...  # noqa: D102
    @property
    def branching(self) -> int: ...  # noqa: D102
    @property
    def cache_rows(self) -> int: ...  # noqa: D102
    def __len__(self) -> int: ...


class Drafter(Protocol):
    """Drafts a tree for each sequence. depth: its levels."""

    @property
    def depth(self) -> int: ...  # noqa: D102

    def __call__(
        self, draft: Draft | None, cache: RowCache | None, state: Sequences, reach: Reach, lap: Lap
    ) -> Drafted:
        """The trees. A node is absent where its draft proposes nothing more, and after the end of its text."""
        ...


@singledispatch
def drafter_of(tree: Any, depth: int, draft: Draft | None, rules: Rules, device: torch.device) -> Drafter:
    """The drafter of the top `depth` levels of a tree, at least one: fewer than all near the end of a text."""
    if getattr(tree, "grows", False):
        from heavypath.speculative.decoding.growing import growing_drafter

        return growing_drafter(tree, depth, rules, device)
    raise TypeError(f"expected a TokenTree or a Growth, got {type(tree).__name__}")
