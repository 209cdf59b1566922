"""Trees chosen by a profile: the fastest for the number of running sequences; with `replan` also by recent acceptance.

A profile has the average acceptance. Some sequences are easier for the draft, some harder, and a sequence may change
half way. So with `replan` the host looks at the counts every EVERY steps; the weight of a count halves every HALF_LIFE
steps. Child j of a node at depth d was offered O[d, j] times, accepted A[d, j] times, and tried T[d, j] times: tried
means that all earlier siblings were rejected. c[d, j] is the share of T that the profile expects to be accepted; W =
WEIGHT counts is the weight of this prior:

    T[d, j] = O[d, j] (1 - sum_{i<j} A[d, i] / O[d, i])
    s = (sum A + W) / (sum T c + W)                       how much more is accepted in this sequence than on average
    share[d, j] = (A + W min(1, s c)) / (T + W)           rate[d, j] = share[d, j] prod_{i<j} (1 - share[d, i])
    speed(tree) = expected tokens(tree, rate) / cost(tree)

The next steps draft the shape with the highest speed, by the costs for the current number of sequences. There are only
a few shapes, so that on a GPU each is captured once: the best trees for the profile's shares multiplied by each of
SCALES, for each batch size in the profile up to this one. A child that was never offered is assumed to be s times as
good as in the profile. As counts fade, the estimate returns to the profile, so larger trees are tried again without a
special rule. Each shape drafts at least one level, since nothing is learned without drafting; whether to draft at all
is decided by `adapting.Rest`.

The choice depends only on finished steps (on a GPU, not even on the last of them). So draws and verification keep the
target's distribution for any choice. Sampled output does depend on the choice, as on any tree. A batch shares its
trees, so a sequence in a batch is another sample than the same sequence alone.

Source: Sequoia (Chen et al. 2024) plans once. Measuring acceptance while decoding is ours.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative.adapting import Adapting, Rest
from heavypath.speculative.costs.table import standing_for
from heavypath.speculative.decoding.drafted import Shape
from heavypath.speculative.decoding.rules import OWN
from heavypath.speculative.decoding.run import Watcher
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.methods import Method
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.profile import Profile
from heavypath.speculative.tree_choice import as_drafted, best_plan, top
from heavypath.speculative.tree_policy import TreePolicy, TreesByBatch, given_trees, trees_up_to
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.planning import expected_tokens, node_probabilities
from heavypath.speculative.trees.tree import ROOT, TokenTree

logger = logging.getLogger(__name__)

EVERY = 4  # steps between two choices
HALF_LIFE = 8  # steps
WEIGHT = 6.0  # the weight of the profile's acceptance, in counts
SCALES = (0.5, 0.75, 1.0, 1.25, 1.6)  # factors of the profile's shares; there is a shape for each


def profile_of(method: str, row: Method, options: Mapping[str, Any]) -> "Profile | None":
    """The profile among a decoder's options, read from its file if needed; None if there is none.

    method, row: name and row of the decoder's method; options: all options of the decoder

    Raises ValueError if the method or other options do not allow a profile, or if `replan` lacks one, and TypeError for
    another kind of object.
    """
    given = options.get("profile")
    replan = options.get("replan", False)
    others = given_trees(options)
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
        raise ValueError(f"a profile chooses the trees; leave out {', '.join(others)}")
    if not isinstance(given, Profile | str | PathLike):
        raise TypeError(f"profile must be a Profile or the file of one, got {given!r}")
    return given if isinstance(given, Profile) else Profile.load(Path(given))


class ValuedShape(NamedTuple):
    """A tree that may be drafted, and what is needed to value it.

    tree: the tree, or a growth
    planned: the static tree by which its expected tokens are computed
    costs: number of sequences decoded together -> seconds of a step with the tree
    """

    tree: TokenTree | Growth
    planned: TokenTree
    costs: Mapping[int, float]


class Shapes(NamedTuple):
    """The trees among which `replan` chooses.

    shapes: the first is the best for the profile's acceptance
    rates: this acceptance, fp64 [depth, child]
    """

    shapes: tuple[ValuedShape, ...]
    rates: Tensor

    @classmethod
    def of(cls, profile: Profile, method: str, filters: Filters, levels: int | None, most: int = 1) -> "Shapes":
        """Plan the shapes of a method: the best trees for several degrees of acceptance and numbers of sequences.

        filters: how the target is sampled
        levels: most levels that the draft can draft; None for any number
        most: number of sequences at the beginning
        """
        batches = sorted({standing_for(running, profile.costs.batches) for running in range(1, most + 1)})
        entry = profile.plan(method, filters, batches[-1]).acceptance
        confidence = entry.confidence() if filters.temperature > 0 else None
        found: dict[TokenTree, None] = {}
        for batch in reversed(batches):
            known = profile.costs.at(batch)
            steps = known.steps_of(range(1, max(known.step) + 1))
            level = known.level / known.step[1]
            for scale in (1.0, *SCALES):
                rates = _rates((scale * _shares(entry.rates())).clamp(max=1))
                planned = best_plan(method, rates, steps, level, entry.sequence_count).tree
                planned = top(planned if len(planned) > 1 else TokenTree.chain(1), levels)
                assert isinstance(planned, TokenTree)
                found[planned] = None
        shapes = [
            ValuedShape(
                as_drafted(method, planned, confidence),
                planned,
                {batch: profile.costs.at(batch).step_seconds(len(planned), planned.depth) for batch in batches},
            )
            for planned in found
        ]
        return cls(tuple(shapes), entry.rates())

    @property
    def trees(self) -> tuple[TokenTree | Growth, ...]:
        """The tree, or the growth, of each shape."""
        return tuple(shape.tree for shape in self.shapes)


class TreeByProfile(TreePolicy):
    """The tree policy of a decoder with a profile: the trees that are fastest by its measurements.

    Trees are planned once for each combination of sampling and number of sequences.

    method, row: name and row of the method
    target, draft: the forward pass of the target, and the draft; `NO_DRAFT` for plain decoding
    replan: whether trees are chosen again while decoding, by the acceptance in the current sequences
    """

    chosen_by = "by the profile"

    def __init__(
        self, profile: Profile, method: str, row: Method, target: Forward, draft: Draft, *, replan: bool = False
    ):
        self._profile = profile
        self._method = method
        self._row = row
        self._target = target
        self._draft = draft
        self._replan = replan
        self._trees: dict[tuple[Filters, int], TokenTree | Growth] = {}
        self._shapes: dict[tuple[Filters, int], Shapes] = {}
        self._rests: dict[Filters, Rest] = {}
        self._by_length: dict[int, TreeByProfile] = {}

    def for_length(self, length: int) -> "TreeByProfile":
        """The policy for prompts of this length; it is kept for others like them."""
        known = max((each for each in self._profile.attention if each <= length), default=0)
        if known == 0:
            return self
        if known not in self._by_length:
            profile = self._profile.for_length(known)
            self._by_length[known] = TreeByProfile(
                profile, self._method, self._row, self._target, self._draft, replan=self._replan
            )
        return self._by_length[known]

    def by_batch(self, filters: Filters, most: int, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` sequences that are fastest on average.

        rests: whether a tree may be the root alone although others are not
        """
        rests = rests and self._draft.can_rest
        return trees_up_to(most, self._profile.costs.batches, partial(self._tree, filters), self._method, rests=rests)

    def tree(self, filters: Filters, running: int) -> TokenTree | Growth:
        """The tree for `running` sequences; with `replan`, that of the first step."""
        if not self._replan:
            return self.by_batch(filters, running).of(running)
        tree = self.shapes(filters, running).trees[0]
        rest = self._rest(filters)
        return tree if rest is None else rest.first(tree, running)

    def candidates(self, filters: Filters, batch: int) -> tuple[TokenTree | Growth, ...]:
        """All trees that may be drafted; with `replan` all shapes, and the root alone if the draft can rest."""
        if not self._replan:
            return super().candidates(filters, batch)
        trees = self.shapes(filters, batch).trees
        return trees if self._rest(filters) is None else (*trees, ROOT)

    def for_serving(self, slots: int) -> TreesByBatch:
        """The trees of a service with this many slots.

        If sampled output depends on the tree, all steps have the tree for full slots, so that no request's output
        depends on the other requests.
        """
        plain = Filters()
        trees = self.by_batch(plain, slots, rests=False)
        return trees if self._row.texts_ignore_trees(plain) else TreesByBatch({1: trees.of(slots)})

    def watcher(self, plan: StepPlan, filters: Filters, batch: int) -> Watcher:
        """The watcher that chooses the tree after each step of a generation of `batch` sequences.

        It follows the number of running sequences; with `replan` also acceptance, and it lets the draft rest.
        """
        if not self._replan:
            trees = self.by_batch(filters, batch)
            return Adapting(lambda running, *_: trees.of(running), plan.tree)
        shapes = self.shapes(filters, batch)
        rest = self._rest(filters)
        if rest is not None:
            rest.begin(plan.tree, rests=plan.tree != shapes.trees[0])
        return Adapting(BestShape(plan, shapes), plan.tree, rest, counts=True)

    def to_warm_up(self, filters: Filters, batch: int) -> Callable[[int], Shape] | None:
        """A function from the number of running sequences to its tree; None with `replan`, which may use any shape."""
        return None if self._replan else super().to_warm_up(filters, batch)

    def shapes(self, filters: Filters, most: int = 1) -> Shapes:
        """The shapes that `replan` chooses among, for 1 to `most` running sequences."""
        key = filters, standing_for(most, self._profile.costs.batches)
        if key not in self._shapes:
            levels = self._draft.levels
            self._shapes[key] = shapes = Shapes.of(self._profile, self._method, filters, levels, most)
            logger.debug("%d shapes for %s, by the profile", len(shapes.shapes), filters)
        return self._shapes[key]

    def _rest(self, filters: Filters) -> Rest | None:
        """Decides when the draft rests for requests with these filters; None for a draft that cannot rest."""
        if not self._draft.can_rest:
            return None
        if filters not in self._rests:
            cost = partial(_cost, self._profile)
            expected = partial(_expected_tokens, self._shapes, filters)
            self._rests[filters] = Rest(self._target, self._draft, cost, expected)
        return self._rests[filters]

    def _tree(self, filters: Filters, batch: int) -> TokenTree | Growth:
        if self._draft is NO_DRAFT:
            return ROOT  # plain decoding drafts nothing
        if (filters, batch) not in self._trees:
            tree = top(self._profile.tree_for(self._method, filters, batch), self._draft.levels)
            self._trees[filters, batch] = tree
            logger.debug(
                "the profile's tree for %s and %d sequences: %d nodes, %d levels", filters, batch, len(tree), tree.depth
            )
            if len(tree) == 1 and batch == 1:
                logger.warning(
                    "by the profile no tree of %r pays at temperature %g: decoding without the draft",
                    self._method,
                    filters.temperature,
                )
        return self._trees[filters, batch]


def _cost(profile: Profile, tree: Shape, running: int) -> float:
    """The measured cost of a step with a tree, in steps of plain decoding of the same number of sequences."""
    costs = profile.costs.at(standing_for(running, profile.costs.batches))
    return costs.step_seconds(len(tree), tree.depth) / costs.step[1]


def _expected_tokens(known: Mapping[tuple[Filters, int], Shapes], filters: Filters, tree: Shape) -> float:
    """The expected tokens of a step with one of the shapes planned so far, for these target filters.

    known: the planned shapes by filters and batch size
    """
    fitting = [shapes for (sampled, _), shapes in known.items() if sampled == filters]
    planned = next(shape.planned for shapes in fitting for shape in shapes.shapes if shape.tree == tree)
    return expected_tokens(planned, fitting[0].rates)


class BestShape:
    """Chooses among the shapes of one generation, by the acceptance in it so far."""

    def __init__(self, plan: StepPlan, shapes: Shapes):
        """plan: of the first steps, whose depth and branching bound those of all shapes."""
        self._shapes = shapes.shapes
        self._nodes, self._has = _together([shape.planned for shape in self._shapes])
        batches = self._shapes[0].costs
        self._costs = {batch: np.array([shape.costs[batch] for shape in self._shapes]) for batch in batches}
        self._expected = torch.zeros(plan.depth, plan.branching, dtype=torch.float64, device="cpu")
        rows, children = (min(pair) for pair in zip(self._expected.shape, shapes.rates.shape, strict=True))
        self._expected[:rows, :children] = _shares(shapes.rates)[:rows, :children]
        self._before = torch.zeros(2, *self._expected.shape, dtype=torch.float64, device="cpu")
        self._counts = torch.zeros_like(self._before)
        self._best = self._shapes[0].tree

    def __call__(self, running: int, steps: int, counts: Tensor | None) -> Shape:
        """The best tree for `running` sequences after `steps` steps. It is chosen again every `EVERY` steps.

        counts: LongTensor[2, any], how often each child was offered and accepted so far, at depth * branching + child
        """
        if steps % EVERY:
            return self._best
        assert counts is not None
        table = counts[:, : self._expected.numel()].view_as(self._before).double()
        self._counts = self._counts * 0.5 ** (EVERY / HALF_LIFE) + table - self._before
        self._before = table
        tokens = self._has @ node_probabilities(self._nodes, self.rates()).numpy()
        costs = self._costs[standing_for(running, self._costs)]
        self._best = self._shapes[int((tokens / costs).argmax())].tree
        return self._best

    def rates(self) -> Tensor:
        """The estimated acceptance of this generation, fp64 [depth, child]."""
        offered, accepted = self._counts
        each = accepted / offered.clamp(min=1e-9)
        tried = (offered * (1 - (each.cumsum(1) - each))).clamp(min=accepted)
        scale = (accepted.sum() + WEIGHT) / ((tried * self._expected).sum() + WEIGHT)
        return _rates((accepted + WEIGHT * (scale * self._expected).clamp(max=1)) / (tried + WEIGHT))


def _together(trees: Sequence[TokenTree]) -> tuple[TokenTree, np.ndarray]:
    """The union of some static trees, and which of its nodes each tree has: fp64 [trees, nodes]."""
    paths = []
    for tree in trees:
        own: list[tuple[int, ...]] = [()]
        for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist(), strict=True):
            own.append((*own[parent], rank))
        paths.append(set(own))
    every = sorted({path for own in paths for path in own}, key=lambda path: (len(path), path))
    return TokenTree.from_paths(every[1:]), np.array([[path in own for path in every] for own in paths], np.float64)


def _shares(rates: Tensor) -> Tensor:
    """Conditional acceptance [depth, child]: how often a child is accepted if all earlier siblings were rejected.

    rates: [depth, child], how often it is the accepted child
    """
    left = 1 - (rates.cumsum(1) - rates)
    return torch.where(left > 1e-9, rates / left, 0.0).clamp(max=1)


def _rates(shares: Tensor) -> Tensor:
    """How often each child is the accepted one, [depth, child], by conditional acceptance: the inverse of `_shares`."""
    refused = (1 - shares).cumprod(1)
    return shares * torch.cat([torch.ones_like(refused[:, :1]), refused[:, :-1]], 1)
