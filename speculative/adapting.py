"""Change the tree during decoding: by the number of running sequences and by acceptance, and pause drafting if it
loses.

`Adapting` chooses the tree before each step. `Rest` pauses drafting where it does not pay.

A draft that copies text is right for long, or hardly at all. So after a step in which a node of every level was
accepted, the next step has a larger tree: `copying`, the best one if the misses are a quarter of the usual ones.

A step with a tree of n nodes and d levels costs (t(n) + d c) / t(1) steps of plain decoding, and saves one such step
for each token. The loss of drafting so far, but never less than -SAVED, decides whether to pause (CUSUM, Page 1954):

    cost = (t(n) + d c) / t(1)        loss <- max(-SAVED, loss + cost - tokens)

So what a text has gained may be lost again, but MOST more may not. A gain counts for its own generation alone. t and c
are estimated for the device (`costs.estimates`) or measured (`profile`); tokens are counted. When the loss exceeds
MOST, steps draft nothing for a while. After such a pause drafting is tried again, until TRY more are lost. First the
draft reads the tokens written during the pause, which costs READING r steps for each, where r is the draft's bytes
divided by the target's. The pause is long enough that trials and reading together cost at most a share LOSS of the
time:

    pause = 2^vain lost / (LOSS - READING r)       lost: by this trial, at least TRY
                                                   vain: number of unsuccessful trials in a row, at most LONGER

A draft without weights has nothing to read, and repetition in a sequence shows at once. So it uses LOOK instead of TRY,
has shorter pauses in proportion, which do not double, and each generation begins with a trial.

If there is no such pause (READING r >= LOSS), the draft rests until the end of the generation. It rests from the
beginning if the expected tokens are fewer than the tree's cost. It never drafts if the tree costs more than it could
bring even if all levels were accepted.

Drafts rest only where the output does not depend on the tree, and with `replan`; elsewhere the sampled output would
change. What is known about the draft is kept for the decoder's next generation. The choice depends on counts and costs
alone, so all ranks make the same one, and so does every run of a program.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from heavypath.speculative.costs.estimates import Work
from heavypath.speculative.decoding.drafted import Shape
from heavypath.speculative.decoding.run import SlotNumbers, Watcher
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import ROOT, TokenTree

logger = logging.getLogger(__name__)

# Losses are in steps of plain decoding.
MOST = 8.0  # the loss above which drafting pauses
SAVED = 8.0  # the gain that makes up for later losses; more is not counted
FIRST = 4.0  # the loss that a decoder's first generation starts with
TRY = 2.0  # what a trial may lose
LOOK = 0.25  # what a trial may lose, for a draft without weights
LOSS = 0.02  # share of the time that unsuccessful trials may cost
LONGER = 3  # how often pauses may double, for a draft with weights
READING = 1 / 8  # cost for each token that is read in one pass over many, relative to a pass over one token

Choose = Callable[[int, int, Tensor | None], Shape]  # (running sequences, steps so far, counts of `commit`)


class Adapting(Watcher):
    """Chooses the tree of each step of one generation.

    choose: returns the best tree, given the number of running sequences, the steps so far, and counts of acceptance
    first: the tree of the first step
    rest: decides when the draft rests; None if it never does
    copying: the tree after a step in which all levels were accepted; None for the one that `choose` returns
    counts: whether `choose` gets the counts, LongTensor[2, any], of offered and accepted children; otherwise None
    """

    def __init__(
        self,
        choose: Choose,
        first: Shape,
        rest: "Rest | None" = None,
        *,
        copying: Shape | None = None,
        counts: bool = False,
    ):
        self._choose = choose
        self._rest = rest
        self._copying = copying
        self._counts = counts
        self._before: dict[int, tuple[int, int, int]] = {}
        self._tokens: float | None = None
        self._next = first
        self._launched: deque[Shape] = deque()  # trees of steps that were not seen yet; on a GPU one is under way
        self._seen = first

    def looks_at(self, state: Sequences) -> Tensor | None:
        """The counts of offered and accepted nodes of all steps, if `choose` needs them."""
        return state.counts if self._counts else None

    def before(self, state: Sequences) -> None:
        """Called before each step: note its tree."""
        self._launched.append(self._next)

    def see(self, stepped: Stepped, state: Sequences, rows: Sequence[SlotNumbers], looked: Tensor | None) -> None:
        """Called after each step: note its tree and, if it drafted, the average new tokens of a sequence."""
        self._seen = self._launched.popleft()
        tokens = 0
        has_drafted = False
        for row in rows:
            now = (row.produced, row.steps, row.nodes)
            before = self._before.get(row.member, (0, 0, 0))
            produced, steps, nodes = (new - old for new, old in zip(now, before, strict=True))
            self._before[row.member] = now
            tokens = tokens + produced
            has_drafted = has_drafted or nodes > steps
        self._tokens = tokens / len(rows) if has_drafted else None

    def replanned(self, plan: StepPlan, steps: int, running: int, looked: Tensor | None) -> StepPlan:
        """The plan of the next steps: `plan` itself, or with another tree.

        steps: steps so far; running: sequences that have not ended; looked: the counts, if they are needed
        """
        tree = self._choose(running, steps, looked)
        if self._copying is not None and self._tokens is not None and self._tokens > self._seen.depth:
            tree = self._copying
        if self._rest is not None:
            tree = self._rest.after(tree, running, self._tokens, self._seen)
        self._next = tree
        return plan if tree == plan.tree else replace(plan, tree=tree)


class Rest:
    """Decides when a decoder's draft rests, by the formulas at the top of this file. Kept between generations.

    loss: what drafting has lost so far, in steps of plain decoding
    pause: remaining steps of the current pause, at least 1 if it lasts until the generation's end; 0 while the draft is
           used
    """

    def __init__(
        self, target: Forward, draft: Draft, cost: Callable[[Shape, int], float], expected: Callable[[Shape], float]
    ):
        """cost: returns the cost of a step, given tree and number of sequences, in steps of plain decoding
        expected: returns the expected tokens of a step, given the tree
        """
        self._target = target
        self._draft = draft
        self._cost = cost
        self._expected = expected
        self._looks = not draft.models
        self._trial, self._longer = (LOOK, 0) if self._looks else (TRY, LONGER)
        self.loss = MOST - LOOK if self._looks else FIRST
        self.pause = 0
        self._vain = -1
        self._said = False
        self._is_new = True

    def never_drafts(self, tree: TokenTree | Growth, running: int) -> bool:
        """Whether a tree, for `running` sequences, would not pay even if a node of every level was accepted."""
        never = tree.depth + 1 <= self._cost(tree, running)
        if never:
            self._say("no draft is expected to pay, not even one that is always right")
        return never and len(tree) > 1

    def first(self, tree: TokenTree | Growth, running: int) -> TokenTree | Growth:
        """The tree of a generation's first step: `tree`, or the root alone if the draft begins by resting."""
        if self.never_drafts(tree, running):
            return ROOT
        doubtful = self._is_new and self._expected(tree) < self._cost(tree, running)
        waits = self.pause > self._rest_of_text and not self._looks
        return ROOT if doubtful or waits else tree

    def begin(self, first: Shape, *, rests: bool) -> None:
        """Note that a generation begins. If its first step drafts, an earlier pause is over.

        first: the tree of the first step
        rests: whether this tree is the root alone because the draft rests
        """
        self.loss = max(0.0, self.loss)  # a gain is that of the last generation
        if rests and self._is_new:
            self._rest()
        elif len(first) > 1:
            self.pause = 0
        self._is_new = False

    def after(self, tree: Shape, running: int, tokens: float | None, drafted: Shape | None = None) -> Shape:
        """Account for the last step. Returns the tree of the next step: `tree`, or the root alone during a pause.

        tree: the tree of the next step if it drafts
        running: sequences that have not ended
        tokens: average new tokens of a sequence in the last step; None if it drafted nothing
        drafted: the tree of the last step that drafted; default: `tree`
        """
        if tokens is not None:
            self.loss = max(-SAVED, self.loss + self._cost(drafted or tree, running) - tokens)
            if self.loss > MOST:
                self._rest()
            elif self.loss <= 0:
                self._vain = -1
        elif self.pause:
            self.pause = max(self.pause - 1, self._rest_of_text)
        return ROOT if self.pause else tree

    @property
    def _rest_of_text(self) -> int:
        """1 if a pause lasts until the end of the generation, because trials would have to read too much; else 0."""
        return int(self._share_of_trials <= 0)

    def _rest(self) -> None:
        share = self._share_of_trials if self._share_of_trials > 0 else LOSS
        self._vain = min(self._vain + 1, self._longer)
        lost = max(self._trial, self.loss - MOST + self._trial)
        self.pause = math.ceil(2**self._vain * lost / share)
        self.loss = MOST - self._trial
        self._say("it does not pay; it is tried again at times")

    @cached_property
    def _share_of_trials(self) -> float:
        """The share of the time that trials may take: LOSS less the cost of reading what the draft has missed."""
        read = sum(work.weight_bytes for model in self._draft.models for work in Work.split(model))
        return LOSS - READING * read / Work.of(self._target).weight_bytes

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.info("the draft rests: by the costs of steps %s. With `tree_size` it drafts always", why)
