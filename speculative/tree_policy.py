"""Tree policies: which tree each step drafts. A decoder has one policy, chosen when it is built.

    FixedTree       always the same tree: given by options, or assigned later
    TreeByCosts     the default: the best tree by estimated costs, for the current number of sequences
    TreeByProfile   the best tree by the measurements of `heavypath calibrate`, see `tree_by_profile`

A step with a tree of n nodes verifies B n rows in a batch of B sequences. So large batches want small trees. From some
batch size on, a drafted token costs more than it saves; then the best tree is the root alone, which is plain decoding.
The number of running sequences is rounded to a few values, so that there are few trees and, on a GPU, few graphs.

While steps draft nothing, the draft does not read the new tokens: it rests. Before it drafts again, it reads the tokens
that it has missed, see `Workspace.rest_or_catch_up`. Drafts that cannot do this always draft at least one token.

On a GPU attention over a long prompt costs more for each node, in models whose query heads share keys. So the default
tree of a long prompt is smaller. Its length is rounded, and that of a batch is its longest prompt's. A service does not
look at lengths: all its requests share a step's tree, and no request's output may depend on another's prompt.

Sampled output depends on the trees: another tree gives another sample of the same distribution. At temperature 0, and
with exponential races (ersd), the output does not depend on them. There the trees follow the batch, also while
sequences end, and a draft without weights gets a larger tree while it copies. For other methods trees follow the batch
only with a profile, because its user wants the fastest trees. Without one the whole generation has one tree: that of
one sequence if it pays for the batch, or else that of the batch when it begins, which is the root alone if drafting
does not pay.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from heavypath.kernels.filtering import Filters
from heavypath.speculative.costs.estimates import estimated_length, estimates
from heavypath.speculative.costs.table import BATCHES, Costs, standing_for
from heavypath.speculative.decoding.drafted import Shape
from heavypath.speculative.decoding.run import Watcher
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import METHODS, Method
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.names import load
from heavypath.speculative.options import TreeOptions
from heavypath.speculative.tree_choice import (
    SURE,
    chosen_tree,
    is_toy,
    tokens_of_tree,
    tree_by_estimates,
    usual_acceptance,
)
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tails import Usual
from heavypath.speculative.trees.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.adapting import Rest

logger = logging.getLogger(__name__)

COPYING = 1 / 4  # misses of a draft that copies text, relative to its usual ones


class TreesByBatch:
    """Maps the number of running sequences to a tree.

    by_batch: number of sequences -> tree or growth; other numbers use the nearest, as `standing_for` finds it
    """

    def __init__(self, by_batch: Mapping[int, TokenTree | Growth]):
        self.by_batch = dict(sorted(by_batch.items()))
        batches = (*self.by_batch,)
        self._standing_for = cache(partial(standing_for, batches=batches))
        for tree in self.by_batch.values():
            if not isinstance(tree, TokenTree | Growth):
                raise TypeError(f"a tree policy must return a TokenTree, as TokenTree.chain(4), got {tree!r}")

    @property
    def trees(self) -> tuple[TokenTree | Growth, ...]:
        """All trees that may be drafted, without duplicates."""
        return tuple(dict.fromkeys(self.by_batch.values()))

    def of(self, running: int) -> TokenTree | Growth:
        """The tree, or the growth, for steps of `running` sequences."""
        return self.by_batch[self._standing_for(running)]


def trees_up_to(
    most: int, batches: Iterable[int], tree_at: Callable[[int], TokenTree | Growth], method: str, *, rests: bool
) -> TreesByBatch:
    """Find the trees for 1 to `most` running sequences.

    batches: numbers of sequences for which `tree_at` can find a tree
    tree_at: returns the tree for one of these numbers
    rests: whether a tree may be the root alone although others are not, so that the draft rests
    """
    known = [*batches]
    needed = {standing_for(running, known) for running in range(1, most + 1)}
    trees = {batch: tree_at(batch) for batch in sorted(needed)}
    fewest = min(needed)
    if len(trees[fewest]) == 1:  # if drafting does not pay for one sequence, it does not for several
        return TreesByBatch({fewest: trees[fewest]})
    if not rests:
        smallest = METHODS[method].tree_of(2)
        trees = _all_drafting(trees, smallest)
    return TreesByBatch(trees)


def _all_drafting(
    trees: Mapping[int, TokenTree | Growth], smallest: TokenTree | Growth
) -> dict[int, TokenTree | Growth]:
    """These trees, with the smallest tree instead of each that is the root alone."""
    drafting = {}
    for running, tree in trees.items():
        drafting[running] = smallest if len(tree) == 1 else tree
    return drafting


class TreePolicy:
    """Base class of tree policies. Assign your own to `SpeculativeDecoder.trees`; it must have `tree`.

    What it chooses can change sampled output, but not its distribution.

    alone: the tree of one sequence; None if that depends on how the target is sampled
    chosen_by: the reason for its choice, in words, for logs and statistics
    """

    alone: TokenTree | Growth | None = None
    chosen_by = "by a policy of your own"

    def for_length(self, length: int) -> "TreePolicy":
        """The policy for prompts of which the longest has `length` tokens: itself, unless the length matters to it."""
        return self

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The tree for `running` sequences whose target is sampled with `filters`; the same for equal arguments.

        It is called before the first step, and between steps if there are several `candidates`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tree(filters, running)")

    def candidates(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, ...]:
        """All trees that steps of a generation of `batch` sequences may draft. On a GPU each is captured as a graph."""
        return self.by_batch(filters, batch).trees

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` running sequences.

        rests: whether a tree may be the root alone although others are not, for drafts that can rest. If False, at
            least one token is drafted in every step, or none in any
        """
        trees = {}
        for running in range(1, most + 1):
            trees[running] = self.tree(filters, running)
        found = TreesByBatch(trees)
        drafts = any(len(tree) > 1 for tree in found.trees)
        if rests or not drafts:
            return found
        smallest = TokenTree.chain(1)
        return TreesByBatch(_all_drafting(trees, smallest))

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees of a service with this many slots, whose requests come and go, and are sampled differently."""
        return self.by_batch(Filters(), slots, rests=False)

    def watcher(self, plan: StepPlan, filters: Filters, batch: int) -> Watcher:
        """The object that chooses the tree after each step, if there are several `candidates`. plan: of step 0."""

        def tree_of(running: int, *_: Any) -> TokenTree | Growth:
            return self.tree(filters, running)

        return load("Adapting")(tree_of, plan.tree)

    def to_warm_up(self, filters: Filters, batch: int) -> Callable[[int], Shape] | None:
        """A function from a number of running sequences to their tree; None if any number may have any candidate."""
        trees = self.by_batch(filters, batch)
        if len(trees.trees) == 1:
            return None
        return trees.of

    def expected_gain(self, stats: Statistics, tree: Shape) -> float | None:
        """The estimated speed of a finished generation divided by that of plain decoding; None without an estimate."""
        return None

    def in_words(self, tree: Shape, batch: int) -> str:
        """The size of a batch's tree and the reason for it, for logs and statistics."""
        return _in_words(tree, self.chosen_by)


def _in_words(tree: Shape, chosen_by: str) -> str:
    if tree.depth == 0:
        return f"1 node, no draft, {chosen_by}"
    levels = "1 level" if tree.depth == 1 else f"{tree.depth} levels"
    return f"{len(tree)} nodes, {levels}, {chosen_by}"


class FixedTree(TreePolicy):
    """The same tree for any number of sequences. A static tree is put into heavy-path order."""

    def __init__(self, tree: TokenTree | Growth, chosen_by: str):
        if isinstance(tree, TokenTree):
            tree, _ = tree.reordered("heavy_path")
        self._tree = tree
        self.alone = tree
        self.chosen_by = chosen_by

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The one tree, for any arguments."""
        return self._tree


class StepCosts:
    """Estimates what a step with a tree costs, in steps of plain decoding."""

    def __init__(self, target: Forward, draft: Draft, length: int = 0):
        """length: of the sequences, see `estimates`."""
        self._target = target
        self._draft = draft
        self._length = length
        self._by_batch: dict[int, Costs] = {}
        self._found: dict[tuple[Shape, int], float] = {}

    def __call__(self, tree: Shape, running: int) -> float:
        """The cost of a step with a tree for `running` sequences, divided by the cost of a step that drafts nothing."""
        key = (tree, running)
        if key not in self._found:
            batch = standing_for(running, BATCHES)
            costs = self._costs_of(batch)
            plain = costs.step[1]
            seconds = costs.step_seconds(len(tree), tree.depth)
            self._found[key] = seconds / plain
        return self._found[key]

    def _costs_of(self, batch: int) -> Costs:
        if batch not in self._by_batch:
            self._by_batch[batch] = estimates(self._target, self._draft.models, batch, length=self._length)
        return self._by_batch[batch]


class TreeByCosts(TreePolicy):
    """The best trees by estimated costs, for decoders without tree options; see `tree_choice`."""

    def __init__(self, method: str, row: Method, target: Forward, draft: Draft, length: int = 0):
        """row: of the method, with the verification that the decoder uses; length: of the sequences, see `estimates`"""
        self.alone, self.chosen_by = chosen_tree(method, {}, target, draft, length)
        self._length = length
        self._by_length: dict[int, TreeByCosts] = {}  # without itself, so that it ends with its decoder
        self._method = method
        self._row = row
        self._target = target
        self._draft = draft
        self._is_fixed = self._draft.why_not_measured != ""  # without a usual acceptance: one tree for all batches
        self._can_rest = draft.can_rest
        self._found: dict[tuple[int, Usual], TokenTree | Growth] = {}
        self._is_toy = is_toy(target)
        self._by_batch: dict[tuple[float, int, bool], TreesByBatch] = {}
        self.cost = StepCosts(target, self._draft, length)

    def for_length(self, length: int) -> "TreeByCosts":
        """The policy for sequences of this length, rounded by `estimated_length`; it is kept for others like them."""
        rounded = estimated_length(self._target, length)
        if rounded == self._length:
            return self
        if rounded not in self._by_length:
            self._by_length[rounded] = TreeByCosts(self._method, self._row, self._target, self._draft, rounded)
        return self._by_length[rounded]

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` sequences; one tree for all if sampled output would depend on the choice.

        A draft that cannot rest drafts at least one token in every step. But if plain decoding is best for all `most`
        sequences, nothing is drafted until they have all ended.
        """
        key = (filters.temperature, most, rests)
        if key not in self._by_batch:
            self._by_batch[key] = self._trees_up_to(filters, most, rests)
        return self._by_batch[key]

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The tree for `running` sequences; the root alone while the draft rests."""
        tree = self.by_batch(filters, running).of(running)
        if self._may_rest(filters):
            return self.rest.first(tree, running)
        return tree

    def candidates(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, ...]:
        """All trees that a generation of `batch` sequences may draft, with the root alone if the draft may rest."""
        trees = self.by_batch(filters, batch)
        if not self._may_rest(filters):
            return trees.trees
        if self.rest.never_drafts(trees.of(batch), batch):
            return (ROOT,)
        copying = self._copying(filters, batch)
        further = [ROOT] if copying is None else [copying, ROOT]
        return tuple(dict.fromkeys((*trees.trees, *further)))

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees of a service with this many slots.

        If sampled output depends on the tree, the tree is always that of one sequence, so that no request's output
        depends on the other requests.
        """
        plain = Filters()
        most = slots if self._row.texts_ignore_trees(plain) else 1
        return self.by_batch(plain, most, rests=False)

    def watcher(self, plan: StepPlan, filters: Filters, batch: int) -> Watcher:
        """The watcher that follows the number of running sequences, and lets the draft rest."""
        trees = self.by_batch(filters, batch)
        rest = None
        if self._may_rest(filters):
            rest = self.rest
            rests = plan.tree != trees.of(batch)
            rest.begin(plan.tree, rests=rests)

        def tree_of(running: int, *_: Any) -> TokenTree | Growth:
            return trees.of(running)

        return load("Adapting")(tree_of, plan.tree, rest, copying=self._copying(filters, batch))

    def _copying(self, filters: Filters, batch: int) -> TokenTree | Growth | None:
        """The tree of a single sequence while its draft copies text, see `adapting`; None for drafts with weights."""
        if batch > 1 or self._draft.models or self._is_fixed or self._is_toy or not self._may_rest(filters):
            return None
        usual = usual_acceptance(self._method, self._draft, filters.temperature)
        return self._tree_of(batch, usual._replace(first=1 - COPYING * (1 - usual.first)))

    def expected_gain(self, stats: Statistics, tree: Shape) -> float | None:
        """Measured tokens per step divided by the estimated cost of a step; None if nothing is drafted."""
        if len(tree) == 1:
            return None
        batch = len(stats.tokens_of)
        return stats.tokens_per_step / self.cost(tree, batch)

    def in_words(self, tree: Shape, batch: int) -> str:
        """The size of a batch's tree and the reason for it, with the number of sequences if the tree depends on it."""
        if tree == self.alone:
            return super().in_words(tree, batch)
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        return _in_words(tree, f"by costs estimated for {sequences}")

    @cached_property
    def rest(self) -> "Rest":
        """Decides when the draft rests because drafting does not pay; kept from one generation to the next."""
        usual = self._draft.usual_acceptance(0.0)
        tokens_of = partial(tokens_of_tree, usual=usual)
        return load("Rest")(self._target, self._draft, self.cost, tokens_of)

    def _may_rest(self, filters: Filters) -> bool:
        return self._can_rest and self._row.texts_ignore_trees(filters)

    def _trees_up_to(self, filters: Filters, most: int, rests: bool) -> TreesByBatch:
        temperature = filters.temperature
        if not self._row.texts_ignore_trees(filters):
            tree = self._for_the_whole_text(most, temperature)
            return TreesByBatch({1: tree})
        assert self.alone is not None
        if self._is_fixed:
            return TreesByBatch({1: self.alone})
        if rests and not self._can_rest:
            largest = standing_for(most, BATCHES)
            of_all = self._tree(largest, temperature)
            if len(of_all) == 1:
                return TreesByBatch({1: ROOT})
            rests = False
        tree_at = partial(self._tree, temperature=temperature)
        return trees_up_to(most, BATCHES, tree_at, self._method, rests=rests)

    def _for_the_whole_text(self, batch: int, temperature: float) -> TokenTree | Growth:
        """The tree of all steps of a generation: that of one sequence if it surely pays for the batch, or the batch's.

        So the same seed gives the same sampled output in every batch size for which the tree of one sequence pays. The
        tree of a larger batch is smaller, and ROOT if no tree surely pays, so that none is slower than plain decoding.
        """
        tree = self._tree(1, temperature)
        if batch == 1 or len(tree) == 1:
            return tree
        if self._is_fixed or self._is_toy:
            return tree
        usual = usual_acceptance(self._method, self._draft, temperature)
        tokens = tokens_of_tree(tree, usual)
        if tokens >= SURE * self.cost(tree, batch):
            return tree
        return self._tree(standing_for(batch, BATCHES), temperature)

    def _tree(self, batch: int, temperature: float) -> TokenTree | Growth:
        return self._tree_of(batch, usual_acceptance(self._method, self._draft, temperature))

    def _tree_of(self, batch: int, usual: Usual) -> TokenTree | Growth:
        key = (batch, usual)
        if key not in self._found:
            self._found[key] = self._new_tree(batch, usual)
        return self._found[key]

    def _new_tree(self, batch: int, usual: Usual) -> TokenTree | Growth:
        assert self.alone is not None
        if self._is_fixed or (batch == 1 and self._is_toy):
            return self.alone
        tree = tree_by_estimates(self._method, self._target, self._draft, batch, usual, self._length)
        logger.debug("the estimated tree for %d sequences: %d nodes, %d levels", batch, len(tree), tree.depth)
        if batch == 1 and tree == self.alone:
            return self.alone
        return tree


def policy_of(method: str, row: Method, options: Mapping[str, Any], target: Forward, draft: Draft) -> TreePolicy:
    """The policy of a decoder without a profile, by its options. Raises TypeError or ValueError if these do not fit."""
    given = given_trees(options)
    if not given:
        return TreeByCosts(method, row, target, draft)
    if "trees" not in given:
        tree, chosen_by = chosen_tree(method, given, target, draft)
        return FixedTree(tree, chosen_by)
    policy = given.pop("trees")
    if not isinstance(policy, TreePolicy):
        hint = ""
        if isinstance(policy, type) and issubclass(policy, TreePolicy):
            hint = f"; give {policy.__name__}(...)"
        raise TypeError(f"trees must be an object of a class that inherits TreePolicy, got {policy!r}{hint}")
    try:
        inspect.signature(policy.tree).bind(None, None)
    except TypeError as error:
        raise TypeError(f"{type(policy).__name__} must be callable as tree(filters, running): {error}") from None
    if given:
        raise ValueError(f"trees chooses all trees; leave out {', '.join(given)}")
    return policy


def given_trees(options: Mapping[str, Any]) -> dict[str, Any]:
    """The tree options of a decoder that are not None, without `profile` and `replan`. options: all its options."""
    given = {}
    for name in TreeOptions.__annotations__:
        value = options.get(name)
        if value is not None and name not in ("profile", "replan"):
            given[name] = value
    return given
