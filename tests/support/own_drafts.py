"""Helpers of tests/drafts/test_own_draft.py and its neighbours."""

from heavypath.speculative import RowCache


class Bigrams:
    """Logits [V, V] by the last token alone; nothing is remembered."""

    def __init__(self, logits):
        self.logits = logits

    def new_cache(self, batch, rows):
        nothing = self.logits.new_empty(batch, 1, rows, 0)
        return RowCache(nothing, nothing)

    def prefill(self, tokens, cache):
        pass

    def __call__(self, feed, cache):
        return self.logits[feed.tokens]
