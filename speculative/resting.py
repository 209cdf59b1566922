"""Let the draft rest where it does not pay, and try it again at times.

A step over a tree of n nodes and d levels costs (t(n) + d c) / t(1) steps of plain decoding, of which it saves one for
each token. What drafting has lost so far, but never less than nothing, says when it does not pay (CUSUM, Page 1954):

    cost = (t(n) + d c) / t(1)        loss <- max(0, loss + cost - tokens)

t and c are estimated for the device (`costs.estimates`), tokens are counted. When more than MOST steps are lost, steps
draft nothing. After a pause the draft is tried again, until TRY more are lost. Before that it reads what was written
meanwhile: READING r steps for a token, where r is the draft's share of the target's bytes. Pauses are so long that both
cost at most a share LOSS of the time, whatever comes of it:

    pause = 2^vain TRY / (LOSS - READING r)        vain <= LONGER trials before it that found no more

A draft without weights has nothing to read, and a text that repeats itself shows at once. So it loses LOOK in place of
TRY, its pauses are as much shorter, and each text begins with a trial.

A draft for which there is no such pause rests until the end of the text. A draft rests from the beginning where fewer
tokens are expected than the tree costs. It never drafts where the tree costs more tokens than it has levels.

Only for texts that are the same by all trees, and for trees by default: other texts would become other samples. What is
known of the draft is kept for the decoder's next text. The choice depends on counts and estimates alone, so that all
ranks make the same one, and each run of a program.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from heavypath.speculative.costs.estimates import estimates
from heavypath.speculative.costs.roofline import Work
from heavypath.speculative.costs.table import BATCHES, Costs, standing_for
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.engine import SlotNumbers, Watcher
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.methods import METHODS
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.tree_choice import TreesByBatch, is_toy, tree_by_estimates, trees_up_to, usual_acceptance
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.planning import expected_tokens
from heavypath.speculative.trees.tails import Usual
from heavypath.speculative.trees.tree import ROOT, TokenTree

logger = logging.getLogger(__name__)

MOST, FIRST = 8.0, 4.0  # steps of plain decoding: the loss that ends drafting, and how much less a first text may lose
TRY = 2.0  # steps of plain decoding: what a trial may lose
LOOK = 0.25  # that of a draft without weights
LOSS = 0.02  # of the time, for drafts that are tried in vain
LONGER = 3  # times that pauses double
READING = 1 / 8  # of a pass over one token: what each token of a text costs that is read at once


class Gain:
    """The factor by which trees write texts sooner than plain decoding, and whether the draft rests.

    loss: of drafting so far; pause: steps that are left of one
    """

    def __init__(self, target: Forward, draft: Draft):
        self._target, self._draft = target, draft
        self._costs: dict[int, Costs] = {}
        self._looks = not draft.models
        self._trial = LOOK if self._looks else TRY  # what it may lose
        self.loss, self.pause, self._vain = MOST - LOOK if self._looks else FIRST, 0, -1
        self._said, self._is_new = False, True

    def of(self, tokens: float, tree: Shape, running: int) -> float:
        """The gain of a tree whose steps bring so many tokens to each of the running sequences."""
        return tokens / self._cost(tree, running)

    def first(self, tree: TokenTree | Growth, running: int) -> TokenTree | Growth | None:
        """The tree of a text's first step; None where no step of it is to draft."""
        if tree.depth + 1 <= self._cost(tree, running):
            self._say("no draft is expected to pay, not even one that is always right")
            return None if len(tree) > 1 else tree
        doubtful = (
            self._is_new and self.of(_expected_tokens(tree, self._draft.usual_acceptance(0.0)), tree, running) < 1
        )
        waits = self.pause > self._rest_of_text and not self._looks
        return ROOT if doubtful or waits else tree

    def begin(self, first: Shape, *, rests: bool) -> None:
        """Begin a text, whose first step drafts a tree or, if the draft `rests`, nothing in its place."""
        if rests and self._is_new:
            self._rest()
        elif len(first) > 1:
            self.pause = 0
        self._is_new = False

    def after(self, tree: Shape, running: int, tokens: float | None) -> Shape:
        """The tree of the next step, or the root alone.

        tree: without any rest; tokens: of a sequence in this step, None if nothing was drafted
        """
        if tokens is not None:
            self.loss = max(0.0, self.loss + self._cost(tree, running) - tokens)
            if self.loss > MOST:
                self._rest()
            elif self.loss == 0:
                self._vain = -1
        elif self.pause:
            self.pause = max(self.pause - 1, self._rest_of_text)
        return ROOT if self.pause else tree

    @property
    def _rest_of_text(self) -> int:
        """Steps of a pause that no text outlasts: 1 where the draft would read too much for a trial within a text."""
        return int(self._share_of_trials <= 0)

    def _rest(self) -> None:
        share = self._share_of_trials if self._share_of_trials > 0 else LOSS
        self._vain = min(self._vain + 1, LONGER)
        self.pause, self.loss = math.ceil(2**self._vain * self._trial / share), MOST - self._trial
        self._say("it does not pay; it is tried again at times")

    @cached_property
    def _share_of_trials(self) -> float:
        """The share of the time that trials may take, beside the draft's reading of what it has missed."""
        read = sum(work.weight_bytes for model in self._draft.models for work in Work.split(model))
        return LOSS - READING * read / Work.of(self._target).weight_bytes

    def _cost(self, tree: Shape, running: int) -> float:
        costs = self._at(running)
        return costs.step_seconds(len(tree), tree.depth) / costs.step[1]

    def _at(self, running: int) -> Costs:
        batch = standing_for(running, BATCHES)
        if batch not in self._costs:
            self._costs[batch] = estimates(self._target, self._draft.models, batch)
        return self._costs[batch]

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.info("the draft rests, which changes no text: by estimated costs %s. `tree_size` drafts always", why)


class EstimatedTrees:
    """The trees of a decoder without a profile and without options for the tree, by costs that are estimated."""

    def __init__(self, method: str, target: Forward, draft: Draft | None, alone: TokenTree | Growth):
        """alone: the tree of one sequence that is sampled."""
        self._method, self._target, self._draft, self.alone = method, target, draft or NO_DRAFT, alone
        self.rests = draft is not None and draft.can_rest
        self._is_fixed = self._draft.why_not_measured != ""  # what has no usual acceptance has one tree in all batches
        self._found: dict[tuple[int, bool], TokenTree | Growth] = {}

    def up_to(self, most: int, temperature: float, rests: bool = True) -> TreesByBatch:
        """The trees for 1 to `most` running sequences, for texts that are the same by all trees.

        rests: whether the draft may rest, if it can catch up with what was written meanwhile. One that cannot drafts a
        token at least; but where plain decoding is best for all `most` sequences, that is done until they have ended
        """
        if self._is_fixed:
            return TreesByBatch({1: self.alone})
        if rests and not self.rests and len(self._tree(standing_for(most, BATCHES), temperature)) == 1:
            return TreesByBatch({1: ROOT})
        return trees_up_to(
            most, BATCHES, lambda batch: self._tree(batch, temperature), self._method, rests=rests and self.rests
        )

    def fixed(self, batch: int, temperature: float) -> TokenTree | Growth:
        """The tree of a batch for texts that depend on trees: that of one sequence if it pays there, else the root.

        So sampled texts are the same in all batches that gain by drafts, and none is slower than plain decoding.
        """
        tree = self._tree(1, temperature)
        if batch == 1 or self._is_fixed or len(tree) == 1 or is_toy(self._target):
            return tree
        usual = usual_acceptance(self._method, self._draft, temperature)
        pays = self.gain.of(_expected_tokens(tree, usual), tree, batch) >= 1
        return tree if pays else ROOT

    @cached_property
    def gain(self) -> Gain:
        """The gain of the trees."""
        return Gain(self._target, self._draft)

    def _tree(self, batch: int, temperature: float) -> TokenTree | Growth:
        asked = batch, temperature == 0
        if asked not in self._found:
            tree = tree_by_estimates(self._method, self._target, self._draft, batch, temperature)
            is_alone = batch == 1 and (tree == self.alone or is_toy(self._target))
            self._found[asked] = self.alone if self._is_fixed or is_alone else tree
            logger.debug("the estimated tree for %d sequences: %d nodes, %d levels", batch, len(tree), tree.depth)
        return self._found[asked]


class Resting(Watcher):
    """Chooses between the tree for as many sequences as run, and the root alone.

    gain: of the decoder; tree_of: the tree of so many sequences without any rest
    """

    def __init__(self, gain: Gain, tree_of: Callable[[int], Shape]):
        self._gain, self._tree_of = gain, tree_of
        self._before: dict[int, tuple[int, int, int]] = {}
        self._tokens: float | None = None

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Count the tokens of a step that has drafted."""
        tokens, drafted = 0, False
        for row in rows:
            now, before = (row.produced, row.steps, row.nodes), self._before.get(row.member, (0, 0, 0))
            produced, steps, nodes = (new - old for new, old in zip(now, before, strict=True))
            self._before[row.member] = now
            tokens, drafted = tokens + produced, drafted or nodes > steps
        self._tokens = tokens / len(rows) if drafted else None

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """The plan of the next steps."""
        tree = self._gain.after(self._tree_of(running), running, self._tokens)
        return plan if tree == plan.tree else replace(plan, tree=tree)


def _expected_tokens(tree: Shape, usual: Usual) -> float:
    """The tokens that a step with a tree brings."""
    static = METHODS["sequoia"].tree_of(len(tree), max_depth=tree.depth) if tree.grows else tree
    assert isinstance(static, TokenTree)
    return expected_tokens(static, usual.rates())
