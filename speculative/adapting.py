"""Adapt the tree while a text is decoded: to how many sequences run, to what was accepted, and whether drafting pays.

`Adapting` asks before each step for the best tree, and has the draft rest where it does not pay.

A step over a tree of n nodes and d levels costs (t(n) + d c) / t(1) steps of plain decoding, of which it saves one for
each token. What drafting has lost so far, but never less than nothing, says when it does not pay (CUSUM, Page 1954):

    cost = (t(n) + d c) / t(1)        loss <- max(0, loss + cost - tokens)

t and c are estimated for the device (`costs.estimates`) or measured (`profile`), tokens are counted. When more than
MOST steps are lost, steps draft nothing. After a pause the draft is tried again, until TRY more are lost. Before that
it reads what was written meanwhile: READING r steps for a token, where r is the draft's share of the target's bytes.
Pauses are so long that both cost at most a share LOSS of the time, whatever comes of it:

    pause = 2^vain TRY / (LOSS - READING r)        vain <= LONGER trials before it that found no more

A draft without weights has nothing to read, and a text that repeats itself shows at once. So it loses LOOK in place of
TRY, its pauses are as much shorter, and each text begins with a trial.

A draft for which there is no such pause rests until the end of the text. A draft rests from the beginning where fewer
tokens are expected than the tree costs. It never drafts where the tree costs more tokens than it has levels.

Drafts rest only where texts are the same by all trees, and with `replan`: other texts would become other samples. What
is known of the draft is kept for the decoder's next text. The choice depends on counts and costs alone, so that all
ranks make the same one, and each run of a program.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from heavypath.speculative.costs.roofline import Work
from heavypath.speculative.decoding.drafted import Shape
from heavypath.speculative.decoding.run import SlotNumbers, Watcher
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import ROOT, TokenTree

logger = logging.getLogger(__name__)

MOST, FIRST = 8.0, 4.0  # steps of plain decoding: the loss that ends drafting, and how much less a first text may lose
TRY = 2.0  # steps of plain decoding: what a trial may lose
LOOK = 0.25  # that of a draft without weights
LOSS = 0.02  # of the time, for drafts that are tried in vain
LONGER = 3  # times that pauses double
READING = 1 / 8  # of a pass over one token: what each token of a text costs that is read at once

Choose = Callable[[int, int, Tensor | None], Shape]  # of running sequences, steps so far, and the counts of `commit`


class Adapting(Watcher):
    """Chooses the tree of each step of one generation.

    choose: gives the best tree; counts: whether it is shown what was accepted so far
    rest: whether the draft rests instead; None where it never does
    """

    def __init__(self, choose: Choose, rest: "Rest | None" = None, *, counts: bool = False):
        self._choose, self._rest, self._counts = choose, rest, counts
        self._before: dict[int, tuple[int, int, int]] = {}
        self._tokens: float | None = None

    def looks_at(self, state: Sequences) -> Tensor | None:
        """The counts of all steps."""
        return state.counts if self._counts else None

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
        tree = self._choose(running, steps, looked)
        if self._rest is not None:
            tree = self._rest.after(tree, running, self._tokens)
        return plan if tree == plan.tree else replace(plan, tree=tree)


class Rest:
    """Whether the draft of a decoder rests; see the formulas above.

    loss: of drafting so far; pause: steps that are left of one
    """

    def __init__(
        self, target: Forward, draft: Draft, cost: Callable[[Shape, int], float], expected: Callable[[Shape], float]
    ):
        """cost: of a step with a tree and running sequences, in steps of plain decoding; expected: its tokens."""
        self._target, self._draft, self._cost, self._expected = target, draft, cost, expected
        self._looks = not draft.models
        self._trial = LOOK if self._looks else TRY  # what it may lose
        self.loss, self.pause, self._vain = MOST - LOOK if self._looks else FIRST, 0, -1
        self._said, self._is_new = False, True

    def never_drafts(self, tree: TokenTree | Growth, running: int) -> bool:
        """True if a tree would not pay even if all of it was accepted."""
        never = tree.depth + 1 <= self._cost(tree, running)
        if never:
            self._say("no draft is expected to pay, not even one that is always right")
        return never and len(tree) > 1

    def first(self, tree: TokenTree | Growth, running: int) -> TokenTree | Growth:
        """The tree of a text's first step, or the root alone."""
        if self.never_drafts(tree, running):
            return ROOT
        doubtful = self._is_new and self._expected(tree) < self._cost(tree, running)
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

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.info("the draft rests: by the costs of steps %s. With `tree_size` it drafts always", why)
