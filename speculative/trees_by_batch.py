"""Trees by the number of sequences that run together: a batch of B verifies B n rows, so large ones want small trees.

The number of running sequences is rounded to a few, so that there are few trees and, on a GPU, few graphs. The smallest
tree is the root alone, plain decoding: from some batch on a drafted token costs more than it brings. While steps draft
nothing the draft reads nothing, it rests; before it drafts again `Workspace.turn` gives it what it has missed. Drafts
that cannot be given that have trees of one drafted token at least.

A text depends on the trees that it is drafted by, as one sample of its law differs from another. It does not at
temperature 0 and where tokens are the outcomes of races (ersd): there trees follow the batch by themselves, also while
sequences end. Elsewhere they do with a profile alone, whose user has asked for the trees that are fastest. A default
tree is that of one sequence, or none for all of a text where the batch would be slower by it than plain decoding.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.engine import Watcher
from heavypath.speculative.decoding.rules import OWN
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import Method
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.options import TreeOptions
from heavypath.speculative.tree_choice import TreesByBatch, chosen_tree
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.resting import EstimatedTrees, Gain


class FollowBatch(Watcher):
    """Chooses the tree of the next steps by how many sequences are running."""

    def __init__(self, trees: TreesByBatch):
        self.trees = trees

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """The plan of the next steps."""
        tree = self.trees.of(running)
        return plan if tree == plan.tree else replace(plan, tree=tree)


def checked_profile(method: str, row: Method, options: Mapping[str, Any]) -> "Profile | None":
    """The profile that a decoder was given, or None; ValueError where the decoder cannot have one, or needs one.

    options: of the decoder
    """
    given, replan, others = options.get("profile"), options.get("replan", False), _given_trees(options)
    if given is not None and row.verification == OWN:
        raise ValueError(
            "a profile measures the method's own verification; with a verifier of your own give tree or tree_size "
            "instead: tree=profile.tree_for(method, Filters(temperature)) has the same tree"
        )
    if given is not None and not row.is_lossless:
        raise ValueError(f"a profile is for methods that keep the target's law; give {method!r} tree or tree_size")
    if replan and given is None:
        raise ValueError("replan needs a profile, by which trees are chosen anew; `heavypath calibrate` makes one")
    if replan and method == "autoregressive":
        raise ValueError("method 'autoregressive' drafts nothing, so there is nothing to replan")
    if given is None:
        return None
    if others:
        raise ValueError(f"a profile says what trees to take; leave out {', '.join(others)}")
    from heavypath.speculative.profile import Profile

    if not isinstance(given, Profile | str | PathLike):
        raise TypeError(f"profile must be a Profile or the file of one, got {given!r}")
    return given if isinstance(given, Profile) else Profile.load(Path(given))


def _given_trees(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of trees that were given, but for a profile."""
    names = [name for name in TreeOptions.__annotations__ if name not in ("profile", "replan")]
    return {name: options[name] for name in names if options.get(name) is not None}


class TreeSource:
    """The trees of one decoder.

    tree: the one of its options, or the one of a single sequence by estimates; None by a profile. It may be replaced by
        another, which then is drafted in any batch

    Raises ValueError for options that do not fit each other, TypeError or ValueError for those of the tree.
    """

    def __init__(
        self, method: str, row: Method, options: Mapping[str, Any], profile: "Profile | None", target: Forward,
        draft: Draft | None,
    ):  # fmt: skip
        """options: of the decoder; row: of the method; the profile fits the models."""
        self._row, given = row, _given_trees(options)
        self.tree: TokenTree | Growth | None = None
        self.tree_from, self._replan = "by the profile", options.get("replan", False)
        self._by_profile, self._estimated = None, None
        if profile is not None:
            from heavypath.speculative.replanning import ProfileTrees

            self._by_profile = ProfileTrees(profile, method, draft)
            return
        self.tree, self.tree_from = chosen_tree(method, given, target, draft)
        if not given:
            from heavypath.speculative.resting import EstimatedTrees

            self._estimated = EstimatedTrees(method, target, draft, self.tree)

    @property
    def replans(self) -> bool:
        """True if trees are chosen anew by the tokens that were accepted."""
        return self._replan and self._by_profile is not None and self.tree is None

    def ignored_by_texts(self, filters: Filters) -> bool:
        """True if a text is the same by all trees: where the target's likeliest tokens are taken, and by races."""
        _, verification = self._row.at(filters.temperature)
        return verification in ("greedy", "race")

    def _gain_of(self, filters: Filters) -> "Gain | None":
        """The object that has the draft rest where it does not pay; None where it is not to."""
        estimated = self._by_default
        return estimated.gain if estimated and estimated.rests and self.ignored_by_texts(filters) else None

    def expected_gain(self, stats: Statistics, tree: Shape) -> float | None:
        """The gain of a default tree by estimated costs, after a generation; None for other trees."""
        if self._by_default is None or len(tree) == 1:
            return None
        return self._by_default.gain.of(stats.tokens_per_step, tree, len(stats.tokens_of))

    @property
    def _by_default(self) -> "EstimatedTrees | None":
        return self._estimated if self._estimated is not None and self._estimated.alone is self.tree else None

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees of steps while 1 to `most` sequences are decoded together, where the target is sampled so.

        It is one tree where that was given by options, and where a sampled text would become another one by the trees
        of later steps, unless a profile was given. rests: whether steps may draft nothing, which asks for
        `Workspace.turn`
        """
        if self.tree is None:
            assert self._by_profile is not None
            return self._by_profile.up_to(most, filters, rests)
        if self._by_default is None:
            return TreesByBatch({1: self.tree})
        if self.ignored_by_texts(filters):
            return self._by_default.up_to(most, filters.temperature, rests)
        return TreesByBatch({1: self._by_default.fixed(most, filters.temperature)})

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees for requests that come and go, each sampled in its own way.

        Where their texts depend on the tree it is always the same one, since a text is not to depend on the others: by
        default that of one sequence, by a profile that for all slots.
        """
        plain = Filters()
        if self._by_default is not None and not self.ignored_by_texts(plain):
            return TreesByBatch({1: self._by_default.fixed(1, plain.temperature)})
        trees = self.by_batch(plain, slots, rests=False)
        return trees if self.ignored_by_texts(plain) else TreesByBatch({1: trees.of(slots)})

    def first(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, TreesByBatch]:
        """The tree of the first steps of a batch, and all that later ones may draft."""
        if not self.replans:
            trees = self.by_batch(filters, batch)
            gain = self._gain_of(filters)
            tree = trees.of(batch)
            if gain is None:
                return tree, trees
            first = gain.first(tree, batch)
            return (ROOT, TreesByBatch({1: ROOT})) if first is None else (first, TreesByBatch(trees.by_batch, ROOT))
        assert self._by_profile is not None
        shapes = self._by_profile.shapes(filters, batch).trees
        return shapes[0], TreesByBatch(dict(enumerate(shapes, 1)))

    def changing(self, plan: StepPlan, filters: Filters, batch: int) -> list[Watcher]:
        """The object that chooses the trees of a batch's later steps; nothing where they are all the same."""
        if self.replans:
            from heavypath.speculative.replanning import Replanner

            assert self._by_profile is not None
            return [Replanner(plan, self._by_profile.shapes(filters, batch))]
        trees, gain = self.by_batch(filters, batch), self._gain_of(filters)
        if len(plan.trees) == 1:
            return []
        if gain is None:
            return [FollowBatch(trees)]
        from heavypath.speculative.resting import Resting

        gain.begin(plan.tree, rests=plan.tree != trees.of(batch))
        return [Resting(gain, trees.of)]

    def of_slots(self, filters: Filters, batch: int) -> Callable[[int], Shape] | None:
        """The tree of so many running sequences; None where any may be drafted in any batch."""
        trees = None if self.replans else self.by_batch(filters, batch)
        return None if trees is None or len(trees.trees) < 2 else trees.of

    def in_words(self, tree: Shape, batch: int) -> str:
        """The size of a batch's tree, and what it was chosen by."""
        estimated, sequences = self._estimated is not None and tree != self.tree, "sequence" + "s" * (batch > 1)
        chosen_by = f"by costs estimated for {batch} {sequences}" if estimated else self.tree_from
        size = f"{len(tree)} nodes, {tree.depth} level{'s' * (tree.depth > 1)}" if tree.depth else "1 node, no draft"
        return f"{size}, {chosen_by}"
