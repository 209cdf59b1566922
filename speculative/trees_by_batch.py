"""Trees by the number of sequences that run together: a batch of B verifies B n rows, so large ones want small trees.

The number of running sequences is rounded to a few, so that there are few trees and, on a GPU, few graphs. The smallest
tree is the root alone, plain decoding: from some batch on a drafted token costs more than it brings. While steps draft
nothing the draft reads nothing, it rests; before it drafts again `Workspace.turn` gives it what it has missed. Drafts
that cannot be given that have trees of one drafted token at least.

A text depends on the trees that it is drafted by, as one sample of its law differs from another. It does not at
temperature 0 and where tokens are the outcomes of races (ersd): there trees follow the batch by themselves. Elsewhere
they do with a profile alone, whose user has asked for the trees that are fastest.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative.costs.table import standing_for
from heavypath.speculative.decoder_options import TreeOptions
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.engine import Watcher
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.methods import METHODS, Method
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.tree_choice import chosen_tree, top, tree_by_estimates
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.replanning import Shapes

logger = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # for which costs are estimated


class TreesByBatch:
    """The trees of steps at each number of running sequences.

    by_batch: {sequences: the tree, or how trees grow}; a number between these takes the nearest's, see `standing_for`
    """

    def __init__(self, by_batch: Mapping[int, TokenTree | Growth]):
        self._by_batch = dict(sorted(by_batch.items()))

    @property
    def trees(self) -> tuple[TokenTree | Growth, ...]:
        """All trees that may be drafted, each once: `others` of a `StepPlan`."""
        return tuple(dict.fromkeys(self._by_batch.values()))

    def of(self, running: int) -> TokenTree | Growth:
        """The tree or growth that is drafted while so many sequences run."""
        return self._by_batch[standing_for(running, self._by_batch)]


def trees_up_to(
    most: int, batches: Iterable[int], tree_at: Callable[[int], TokenTree | Growth], method: str, *, rests: bool
) -> TreesByBatch:
    """The trees for 1 to `most` running sequences.

    batches: for which trees can be found; tree_at: finds one for such a number of sequences
    rests: whether the draft may rest, so that a tree may be the root alone
    """
    known = [*batches]
    needed = sorted({standing_for(running, known) for running in range(1, most + 1)})
    trees = {batch: tree_at(batch) for batch in needed}
    if len(trees[needed[0]]) == 1:  # where one sequence does not gain by drafts, several do not either
        return TreesByBatch({needed[0]: trees[needed[0]]})
    if not rests:
        smallest = METHODS[method].tree_of(2)
        trees = {batch: tree if len(tree) > 1 else smallest for batch, tree in trees.items()}
    return TreesByBatch(trees)


class EstimatedTrees:
    """The trees of a decoder without a profile and without options for the tree, by costs that are estimated."""

    def __init__(self, method: str, target: Forward, draft: Draft | None, alone: TokenTree | Growth):
        """alone: the tree of one sequence."""
        self._method, self._target, self._draft, self.alone = method, target, draft, alone
        self._found = {1: alone}

    def up_to(self, most: int, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` running sequences; rests: whether the draft may rest, if it can catch up.

        A lookahead adds nodes of its own to each pass. The trees of a merge have a child of the root for each of its
        drafts. So their trees are the same in all batches.
        """
        draft = self._draft or NO_DRAFT
        fixed, rests = draft.extra_nodes > 0 or draft.laws > 1, rests and draft.can_rest
        return trees_up_to(most, (1,) if fixed else BATCHES, self._tree, self._method, rests=rests)

    def _tree(self, batch: int) -> TokenTree | Growth:
        if batch not in self._found:
            self._found[batch] = tree = tree_by_estimates(self._method, self._target, self._draft, batch)
            logger.debug("the estimated tree for %d sequences: %d nodes, %d levels", batch, len(tree), tree.depth)
        return self._found[batch]


class ProfileTrees:
    """The trees of a decoder with a profile, for each way to sample and each number of sequences, computed once."""

    def __init__(self, profile: "Profile", method: str, draft: Draft | None):
        self._profile, self._method, self._draft = profile, method, draft
        self._trees: dict[tuple[Filters, int], TokenTree | Growth] = {}
        self._shapes: dict[tuple[Filters, int], Shapes] = {}

    def up_to(self, most: int, filters: Filters, rests: bool = True) -> TreesByBatch:
        """The trees that are best on average for 1 to `most` running sequences; rests: as of `EstimatedTrees.up_to`."""
        batches, rests = self._profile.costs.batches, rests and (self._draft or NO_DRAFT).can_rest
        return trees_up_to(most, batches, partial(self._tree, filters), self._method, rests=rests)

    def shapes(self, filters: Filters, most: int = 1) -> "Shapes":
        """The shapes that may be drafted where trees are chosen anew, for 1 to `most` running sequences."""
        key = filters, standing_for(most, self._profile.costs.batches)
        if key not in self._shapes:
            from heavypath.speculative.replanning import Shapes

            levels = (self._draft or NO_DRAFT).levels
            self._shapes[key] = shapes = Shapes.of(self._profile, self._method, filters, levels, most)
            logger.debug("%d shapes for %s, by the profile", len(shapes.shapes), filters)
        return self._shapes[key]

    def _tree(self, filters: Filters, batch: int) -> TokenTree | Growth:
        if self._draft is None:
            return TokenTree([-1])  # plain decoding drafts nothing, whatever the profile knows
        if (filters, batch) not in self._trees:
            tree = top(self._profile.tree_for(self._method, filters, batch), self._draft.levels)
            self._trees[filters, batch] = tree
            logger.debug(
                "the profile's tree for %s and %d sequences: %d nodes, %d levels", filters, batch, len(tree), tree.depth
            )
            if len(tree) == 1 and batch == 1:
                logger.warning(
                    "by the profile no tree of %r pays at temperature %g: decoding without the draft",
                    self._method, filters.temperature,
                )  # fmt: skip
        return self._trees[filters, batch]


class FollowBatch(Watcher):
    """Chooses the tree of the next steps by how many sequences are running."""

    def __init__(self, trees: TreesByBatch):
        self.trees = trees

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """The plan of the next steps."""
        tree = self.trees.of(running)
        return plan if tree == plan.tree else replace(plan, tree=tree)


def checked_profile(method: str, row: Method, options: Mapping[str, Any], *, is_own_verifier: bool) -> "Profile | None":
    """The profile that a decoder was given, or None; ValueError where the decoder cannot have one, or needs one.

    options: of the decoder
    """
    given, replan, others = options.get("profile"), options.get("replan", False), _given_trees(options)
    if given is not None and not row.is_lossless:
        raise ValueError(f"a profile is for methods that keep the target's law; give {method!r} tree or tree_size")
    if given is not None and is_own_verifier:
        raise ValueError(
            "a profile measures the method's own verification; with a verifier of your own give tree or tree_size "
            "instead: tree=profile.tree_for(method, Filters(temperature)) has the same tree"
        )
    if replan and given is None:
        raise ValueError("replan needs a profile, by which trees are chosen anew; `heavypath calibrate` makes one")
    if replan and method == "autoregressive":
        raise ValueError("method 'autoregressive' drafts nothing, so there is nothing to replan")
    if given is None:
        return None
    if others:
        raise ValueError(f"a profile says what trees to take; leave out {', '.join(others)}")
    from heavypath.speculative.profile import Profile

    return given if isinstance(given, Profile) else Profile.load(given)


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
        draft: Draft | None, *, is_own_verifier: bool,
    ):  # fmt: skip
        """options: of the decoder; row: of the method; the profile fits the models."""
        given = _given_trees(options)
        self._row, self._is_own_verifier = row, is_own_verifier
        self.tree: TokenTree | Growth | None = None
        self.tree_from, self._replan = "by the profile", options.get("replan", False)
        self._by_profile, self._estimated = None, None
        if profile is not None:
            self._by_profile = ProfileTrees(profile, method, draft)
            return
        self.tree, self.tree_from = chosen_tree(method, given, target, draft)
        if not given:
            self._estimated = EstimatedTrees(method, target, draft, self.tree)

    @property
    def replans(self) -> bool:
        """True if trees are chosen anew by the tokens that were accepted."""
        return self._replan and self._by_profile is not None and self.tree is None

    def ignored_by_texts(self, filters: Filters) -> bool:
        """True if a text is the same by all trees: where the target's likeliest tokens are taken, and by races."""
        raced = self._row.kind(filters.temperature).verification == "race"
        return not self._is_own_verifier and (filters.temperature == 0 or raced)

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees of steps while 1 to `most` sequences are decoded together, where the target is sampled so.

        It is one tree where that was given by options; and where a sampled text would be another one in another batch,
        unless a profile was given. rests: whether steps may draft nothing, which asks for `Workspace.turn`
        """
        if self.tree is None:
            assert self._by_profile is not None
            return self._by_profile.up_to(most, filters, rests)
        if self._estimated is not None and self._estimated.alone is self.tree and self.ignored_by_texts(filters):
            return self._estimated.up_to(most, rests)
        return TreesByBatch({1: self.tree})

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees for requests that come and go, each sampled in its own way.

        Where their texts depend on the tree it is always the one for all slots: a text is not to depend on the others.
        """
        plain = Filters()
        trees = self.by_batch(plain, slots, rests=False)
        return trees if self.ignored_by_texts(plain) else TreesByBatch({1: trees.of(slots)})

    def first(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, TreesByBatch]:
        """The tree of the first steps of a batch, and all that later ones may draft."""
        if not self.replans:
            trees = self.by_batch(filters, batch)
            return trees.of(batch), trees
        assert self._by_profile is not None
        shapes = self._by_profile.shapes(filters, batch).trees
        return shapes[0], TreesByBatch(dict(enumerate(shapes, 1)))

    def changing(self, plan: StepPlan, filters: Filters, batch: int) -> list[Watcher]:
        """The object that chooses the trees of a batch's later steps; nothing where they are all the same."""
        if self.replans:
            from heavypath.speculative.replanning import Replanner

            assert self._by_profile is not None
            return [Replanner(plan, self._by_profile.shapes(filters, batch))]
        trees = self.by_batch(filters, batch)
        return [FollowBatch(trees)] if len(trees.trees) > 1 else []

    def of_slots(self, filters: Filters, batch: int) -> Callable[[int], Shape] | None:
        """The tree of so many running sequences; None where any may be drafted in any batch."""
        trees = None if self.replans else self.by_batch(filters, batch)
        return None if trees is None or len(trees.trees) < 2 else trees.of

    def in_words(self, tree: Shape, batch: int) -> str:
        """The size of a batch's tree, and what it was chosen by."""
        estimated = self._estimated is not None and batch > 1 and tree != self.tree
        chosen_by = f"by costs estimated for {batch} sequences" if estimated else self.tree_from
        return f"{len(tree)} nodes, {tree.depth} levels, {chosen_by}"
