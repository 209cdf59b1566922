"""Which tree a step drafts: the policy of a decoder, chosen once.

    FixedTree       one tree: that of the options, or one that was set later
    TreeByCosts     by default: the best by estimated costs, for as many sequences as are running
    TreeByProfile   the best by the measurements of `heavypath calibrate`, see `tree_by_profile`

A batch of B sequences verifies B n rows, so large batches want small trees, down to the root alone, which is plain
decoding: from some batch on a drafted token costs more than it brings. The number of running sequences is rounded to a
few, so that there are few trees and, on a GPU, few graphs. While steps draft nothing the draft reads nothing, it rests;
before it drafts again `Workspace.turn` gives it what it has missed. Drafts that cannot be given that have trees of one
drafted token at least.

A sampled text depends on the trees that it is drafted by, as one sample of a distribution differs from another. It does
not at temperature 0 and where tokens are the outcomes of races (ersd): there trees follow the batch by themselves, also
while sequences end. Elsewhere they do with a profile alone, whose user has asked for the trees that are fastest. A
default tree is that of one sequence, or none for a whole generation where the batch would be slower by it than plain
decoding.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from heavypath.kernels.filtering import Filters
from heavypath.speculative.costs.estimates import estimates
from heavypath.speculative.costs.table import BATCHES, Costs, standing_for
from heavypath.speculative.decoding.drafted import Shape
from heavypath.speculative.decoding.run import Watcher
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.methods import METHODS, Method
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.names import load
from heavypath.speculative.options import TreeOptions
from heavypath.speculative.tree_choice import (
    chosen_tree,
    is_toy,
    tokens_of_tree,
    tree_by_estimates,
    usual_acceptance,
)
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.adapting import Rest

logger = logging.getLogger(__name__)


class TreesByBatch:
    """The trees of steps at each number of running sequences.

    by_batch: {sequences: the tree, or how trees grow}; a number between these takes the nearest's, see `standing_for`
    """

    def __init__(self, by_batch: Mapping[int, TokenTree | Growth]):
        self.by_batch = dict(sorted(by_batch.items()))

    @property
    def trees(self) -> tuple[TokenTree | Growth, ...]:
        """All trees that may be drafted, each once."""
        return tuple(dict.fromkeys(self.by_batch.values()))

    def of(self, running: int) -> TokenTree | Growth:
        """The tree or growth that is drafted while `running` sequences are decoded."""
        return self.by_batch[standing_for(running, self.by_batch)]


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


class TreePolicy:
    """Chooses trees; the base of all policies. One's own may take the place of `SpeculativeDecoder.trees`.

    It has `tree`. Sampled texts depend on what it chooses, their distribution does not.

    alone: the tree of one sequence; None where that depends on how the target is sampled
    chosen_by: what it chooses by, in words
    """

    alone: TokenTree | Growth | None = None
    chosen_by = "by a policy of your own"

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The tree for `running` sequences, where the target is sampled by `filters`; the same for the same arguments.

        It is asked before the first step, and between steps where `candidates` are several.
        """
        raise NotImplementedError

    def candidates(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, ...]:
        """All trees that steps of a generation of `batch` sequences may draft; on a GPU each has a graph."""
        return self.by_batch(filters, batch).trees

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` running sequences.

        rests: whether steps may draft nothing and later ones draft again, which asks for `Workspace.turn`; else a
            token at least is drafted wherever any is
        """
        trees = {running: self.tree(filters, running) for running in range(1, most + 1)}
        if not rests and max(map(len, trees.values())) > 1:
            trees = {running: tree if len(tree) > 1 else TokenTree.chain(1) for running, tree in trees.items()}
        return TreesByBatch(trees)

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees for requests that come and go, each sampled in its own way."""
        return self.by_batch(Filters(), slots, rests=False)

    def watcher(self, plan: StepPlan, filters: Filters, batch: int) -> Watcher:
        """What chooses the trees of a generation's later steps, where `candidates` are several."""
        return load("Adapting")(lambda running, *_: self.tree(filters, running))

    def to_warm_up(self, filters: Filters, batch: int) -> Callable[[int], Shape] | None:
        """The tree of each number of running sequences; None where any of the candidates may be drafted at any."""
        trees = self.by_batch(filters, batch)
        return None if len(trees.trees) < 2 else trees.of

    def expected_gain(self, stats: Statistics, tree: Shape) -> float | None:
        """The gain of a tree over plain decoding that a generation had by estimated costs; None if there are none."""
        return None

    def in_words(self, tree: Shape, batch: int) -> str:
        """The size of a batch's tree, and what it was chosen by."""
        return _in_words(tree, self.chosen_by)


def _in_words(tree: Shape, chosen_by: str) -> str:
    size = f"{len(tree)} nodes, {tree.depth} level{'s' * (tree.depth > 1)}" if tree.depth else "1 node, no draft"
    return f"{size}, {chosen_by}"


class FixedTree(TreePolicy):
    """One tree, for any number of sequences. A static one is put into heavy-path order."""

    def __init__(self, tree: TokenTree | Growth, chosen_by: str):
        self._tree = self.alone = tree.reordered("heavy_path")[0] if isinstance(tree, TokenTree) else tree
        self.chosen_by = chosen_by

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The one tree."""
        return self._tree


class StepCosts:
    """The estimated costs of steps with trees, in steps of plain decoding."""

    def __init__(self, target: Forward, draft: Draft):
        self._target, self._draft = target, draft
        self._by_batch: dict[int, Costs] = {}

    def __call__(self, tree: Shape, running: int) -> float:
        """The cost of a step with a tree for `running` sequences; 1 is a step that drafts nothing."""
        batch = standing_for(running, BATCHES)
        if batch not in self._by_batch:
            self._by_batch[batch] = estimates(self._target, self._draft.models, batch)
        costs = self._by_batch[batch]
        return costs.step_seconds(len(tree), tree.depth) / costs.step[1]


class TreeByCosts(TreePolicy):
    """The best trees by estimated costs, where no option says anything of trees; see `tree_choice`."""

    def __init__(self, method: str, row: Method, target: Forward, draft: Draft | None):
        """row: of the method, verified as it will be."""
        self.alone, self.chosen_by = chosen_tree(method, {}, target, draft)
        self._method, self._row, self._target, self._draft = method, row, target, draft or NO_DRAFT
        self._is_fixed = self._draft.why_not_measured != ""  # what has no usual acceptance has one tree in all batches
        self._can_rest = draft is not None and draft.can_rest
        self._found: dict[tuple[int, bool], TokenTree | Growth] = {}
        self._is_toy = is_toy(target)
        self._by_batch: dict[tuple[float, int, bool], TreesByBatch] = {}
        self.cost = StepCosts(target, self._draft)

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """See `TreePolicy`; where texts depend on trees, one tree for all that a batch of `most` does.

        A draft that cannot catch up with what was written while it rested drafts a token at least. But where plain
        decoding is best for all `most` sequences, that is done until they have ended.
        """
        asked = filters.temperature, most, rests
        if asked not in self._by_batch:
            self._by_batch[asked] = self._trees_up_to(filters, most, rests)
        return self._by_batch[asked]

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """See `TreePolicy`; the root alone while the draft rests."""
        tree = self.by_batch(filters, running).of(running)
        return self.rest.first(tree, running) if self._may_rest(filters) else tree

    def candidates(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, ...]:
        """See `TreePolicy`; the root among them where the draft may rest."""
        trees = self.by_batch(filters, batch)
        if not self._may_rest(filters):
            return trees.trees
        return (ROOT,) if self.rest.never_drafts(trees.of(batch), batch) else tuple(dict.fromkeys((*trees.trees, ROOT)))

    def for_serving(self, slots: int) -> TreesByBatch:
        """See `TreePolicy`; the tree of one sequence where a text depends on its tree: it must not depend on others."""
        plain = Filters()
        return self.by_batch(plain, slots if self._row.texts_ignore_trees(plain) else 1, rests=False)

    def watcher(self, plan: StepPlan, filters: Filters, batch: int) -> Watcher:
        """See `TreePolicy`."""
        trees, rest = self.by_batch(filters, batch), None
        if self._may_rest(filters):
            rest = self.rest
            rest.begin(plan.tree, rests=plan.tree != trees.of(batch))
        return load("Adapting")(lambda running, *_: trees.of(running), rest)

    def expected_gain(self, stats: Statistics, tree: Shape) -> float | None:
        """See `TreePolicy`."""
        return None if len(tree) == 1 else stats.tokens_per_step / self.cost(tree, len(stats.tokens_of))

    def in_words(self, tree: Shape, batch: int) -> str:
        """See `TreePolicy`; of a tree that another number of sequences would not have, with that number."""
        if tree == self.alone:
            return super().in_words(tree, batch)
        return _in_words(tree, f"by costs estimated for {batch} sequence{'s' * (batch > 1)}")

    @cached_property
    def rest(self) -> "Rest":
        """What has the draft rest where it does not pay."""
        usual = self._draft.usual_acceptance(0.0)
        return load("Rest")(self._target, self._draft, self.cost, lambda tree: tokens_of_tree(tree, usual))

    def _may_rest(self, filters: Filters) -> bool:
        return self._can_rest and self._row.texts_ignore_trees(filters)

    def _trees_up_to(self, filters: Filters, most: int, rests: bool) -> TreesByBatch:
        temperature = filters.temperature
        if not self._row.texts_ignore_trees(filters):
            return TreesByBatch({1: self._for_the_whole_text(most, temperature)})
        assert self.alone is not None
        if self._is_fixed:
            return TreesByBatch({1: self.alone})
        if rests and not self._can_rest and len(self._tree(standing_for(most, BATCHES), temperature)) == 1:
            return TreesByBatch({1: ROOT})
        rests = rests and self._can_rest
        return trees_up_to(most, BATCHES, lambda batch: self._tree(batch, temperature), self._method, rests=rests)

    def _for_the_whole_text(self, batch: int, temperature: float) -> TokenTree | Growth:
        """The tree of one sequence if it pays for a batch, else the root.

        So sampled texts are the same in all batches that gain by drafts, and none is slower than plain decoding.
        """
        tree = self._tree(1, temperature)
        if batch == 1 or self._is_fixed or len(tree) == 1 or self._is_toy:
            return tree
        tokens = tokens_of_tree(tree, usual_acceptance(self._method, self._draft, temperature))
        return tree if tokens >= self.cost(tree, batch) else ROOT

    def _tree(self, batch: int, temperature: float) -> TokenTree | Growth:
        asked = batch, temperature == 0
        if asked not in self._found:
            tree = tree_by_estimates(self._method, self._target, self._draft, batch, temperature)
            is_alone = batch == 1 and (tree == self.alone or self._is_toy)
            assert self.alone is not None
            self._found[asked] = self.alone if self._is_fixed or is_alone else tree
            logger.debug("the estimated tree for %d sequences: %d nodes, %d levels", batch, len(tree), tree.depth)
        return self._found[asked]


def policy_of(method: str, row: Method, options: Mapping[str, Any], target: Forward, draft: Draft | None) -> TreePolicy:
    """The policy of a decoder without a profile. Raises TypeError or ValueError for options that do not fit."""
    given = given_trees(options)
    if not given:
        return TreeByCosts(method, row, target, draft)
    return FixedTree(*chosen_tree(method, given, target, draft))


def given_trees(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of trees that were given, but for a profile."""
    names = [name for name in TreeOptions.__annotations__ if name not in ("profile", "replan")]
    return {name: options[name] for name in names if options.get(name) is not None}
