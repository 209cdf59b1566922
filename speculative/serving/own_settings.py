"""A change of logits by which sequences with different sampling settings share one batch."""

from typing import Any

from torch import Tensor

from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoding.drafted import Drafted
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Feed


class OwnSettings(LogitChange):
    """Replaces logits by scores in which each sequence's own temperature and filters are applied.

    The settings are in `Sequences.settings`; `kernels.sequence_scores` has the formula.
    """

    def before_drawing(self, draft: Draft, state: Sequences) -> Draft:
        """The draft, with scores in place of its logits."""
        return _Scored(draft, state.settings[:, 1])

    def before_verifying(self, logits: Tensor, drafted: Drafted, state: Sequences) -> Tensor:
        """The target's scores."""
        return step_kernels(logits.device).sequence_scores(logits, state.settings[:, 0])


class _Scored(Draft):
    """A draft whose logits are turned into scores by settings [B, 4]."""

    def __init__(self, draft: Draft, settings: Tensor):
        self._draft, self._settings, self.laws = draft, settings, draft.laws

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """Scores [B, n, V]; for the first feed of a step only those after the root, [B, D, V] with D drafts."""
        logits = self._draft(feed, cache)
        last = logits[:, -self.laws :] if feed.news else logits
        return step_kernels(last.device).sequence_scores(last, self._settings)
