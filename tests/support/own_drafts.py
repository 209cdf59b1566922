"""Helpers of tests/drafts/test_own_draft.py and its neighbours."""

import torch

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


class Recomputed:
    """A model that drafts by reading each node's whole text anew: it keeps tokens and parents, and nothing computed."""

    def __init__(self, model):
        self.model = model

    def new_cache(self, batch, rows):
        return RowCache(*torch.zeros(2, batch, 1, rows, 1, dtype=torch.long))

    def prefill(self, tokens, cache):
        cache.keys[:, 0, : tokens.shape[1], 0] = tokens

    def __call__(self, feed, cache):
        tokens, parents = cache.keys[:, 0, :, 0], cache.values[:, 0, :, 0]
        tokens.scatter_(1, feed.cache_rows, feed.tokens)
        parents.scatter_(1, feed.cache_rows, feed.parent_rows)
        logits = []
        for own, above, rows, prefix in zip(tokens, parents, feed.cache_rows, feed.prefix_lengths, strict=True):
            for row in rows.tolist():
                text = []
                while row >= 0:
                    text.insert(0, int(own[row]))
                    row = int(above[row]) if row >= prefix else row - 1
                logits.append(self.model(torch.tensor([text])).logits[0, -1])
        return torch.stack(logits).view(*feed.tokens.shape, -1)
