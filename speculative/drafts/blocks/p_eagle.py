"""An EAGLE-3 head that drafts all levels of a tree in one pass (P-EAGLE).

    input    the entries (f_i, x_{i+1}) of the sequence up to the root, as in any head; then (mask_hidden, x_mask) for
             each further level
    output   the root's entry gives the distribution of its children, the j-th mask that at depth j + 1

So distributions depend on the depth alone. The keys and values of masks are overwritten later. Source: "P-EAGLE", as in
vLLM's speculators; mask_hidden goes through the same norms and the same fc as taps.
"""

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from heavypath.speculative.drafts.blocks.draft import place_of
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.models.forward import Forward, as_logits

DEPTHS = 8  # levels that are drafted at most; the published heads were trained with 8


class ParallelHeadCache(HeadCache):
    """The cache of a head, and the logits of a step.

    base: [B, D + 1, V], the logits of the D depths in this step; the last row is -inf, for deeper nodes
    """

    base: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.base.nbytes

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.base = self.base[:slots]
        return view

    def trimmed(self, slots: slice, rows: int) -> HeadCache:
        """A copy of the first `rows` rows of the sequences in these slots."""
        copied: Any = super().trimmed(slots, rows)
        copied.base = self.base[slots, :0, :0].clone()
        return copied


class ParallelHeadDraft(HeadDraft):
    """P-EAGLE: drafts all levels in one pass, so that distributions depend on depth alone.

    Made of an `EagleHead` that has `mask_hidden`.
    """

    drafts_at_once = True

    def __init__(self, head: EagleHead, target: Forward):
        super().__init__(head, target)
        self.levels = DEPTHS

    def pass_weights(self) -> list[Tensor]:
        """The weights that a step's one pass reads."""
        return super().level_weights()

    def level_weights(self) -> list[Tensor]:
        """Empty: no level reads weights after the step's pass."""
        return []

    def new_cache(self, batch: int, rows: int) -> ParallelHeadCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and nodes, with further rows for masks."""
        cache = self.cache_of(ParallelHeadCache, batch, rows + DEPTHS)
        cache.base = as_logits(cache.keys.new_full((batch, DEPTHS + 1, self.vocab_size), -torch.inf))
        return cache

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
        if feed.news:
            levels = min(feed.levels, DEPTHS)
            given = feed
            if feed.drafted is not None:  # tokens that count as drafted are read in a later step, as new ones
                lengths = feed.prefix_lengths - feed.drafted
                root = cache.tokens[:, 0, :, 0].gather(1, lengths[:, None])
                root = feed.tokens[:, -1:].where(feed.drafted[:, None] == 0, root)
                given = replace(feed, tokens=root, prefix_lengths=lengths, drafted=None)
            cache.base[:, :levels] = self.logits(self.after_root(given, cache, levels - 1))
        nodes = 1 if feed.news else feed.tokens.shape[1]
        return cache.base[place_of(feed, DEPTHS)][:, None].expand(-1, nodes, -1)
