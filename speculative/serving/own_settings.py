"""A change of logits by which sequences with different sampling settings share one batch."""

from typing import Any

from torch import Tensor

from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoding.drafted import Drafted
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Feed


class OwnSettings(LogitChange):
    """Replaces logits by scores to which each sequence's own temperature and filters have been applied.

    Sampled at temperature 1 without filters, scores give the distribution that the request wants.
    `Sequences.settings` has the settings, `kernels.sequence_scores` the formula.
    """

    def before_drawing(self, draft: Draft, state: Sequences) -> Draft:
        """Wrap the draft, so that it returns scores instead of logits."""
        return _Scored(draft, state.settings[:, 1])

    def before_verifying(self, logits: Tensor, drafted: Drafted, state: Sequences) -> Tensor:
        """The target's scores [B, N, V], made from its logits [B, N, V]."""
        return step_kernels(logits.device).sequence_scores(logits, state.settings[:, 0])


class _Scored(Draft):
    """A draft whose logits are turned into scores by settings [B, 4]."""

    def __init__(self, draft: Draft, settings: Tensor):
        self._draft = draft
        self._settings = settings
        self.root_distributions = draft.root_distributions

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """Scores [B, n, V] after the n nodes of a feed; for a step's first feed, of the root's D distributions."""
        logits = self._draft(feed, cache)
        last = logits[:, -self.root_distributions :] if feed.news else logits
        return step_kernels(last.device).sequence_scores(last, self._settings)
