"""An EAGLE-3 head that drafts all levels of a tree in one pass (P-EAGLE).

    entries    (f_i, x_{i+1}) of the text, as of any head, up to the root; then (mask_hidden, x_mask) for more levels
    laws       the root's entry is the law of its children, and the j-th mask's that at depth j + 1

So laws are by depth alone. The keys and values of masks are overwritten. Source: "P-EAGLE", as vLLM's speculators have
it; mask_hidden goes through the same norms and the same fc as taps do.
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
    """base: [B, D + 1, V], the logits of the D depths in this step. After them -inf, for nodes that are deeper."""

    base: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
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
    """An `EagleHead` with `mask_hidden` as a draft."""

    drafts_at_once = True

    def __init__(self, head: EagleHead, target: Forward):
        super().__init__(head, target)
        self.levels = DEPTHS

    def pass_weights(self) -> list[Tensor]:
        """All that a level of another head reads."""
        return super().level_weights()

    def level_weights(self) -> list[Tensor]:
        """None."""
        return []

    def new_cache(self, batch: int, rows: int) -> ParallelHeadCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and nodes, and masks after them."""
        cache = self.cache_of(ParallelHeadCache, batch, rows + DEPTHS)
        cache.base = as_logits(cache.keys.new_full((batch, DEPTHS + 1, self.vocab_size), -torch.inf))
        return cache

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """Logits after each node [B, n, V]; of a step's first feed after the root alone, [B, 1, V]."""
        if feed.news:
            levels, given = min(feed.levels, DEPTHS), feed
            if feed.drafted is not None:  # tokens of the text that count as drafted are read later, as if they were new
                lengths = feed.prefix_lengths - feed.drafted
                root = cache.tokens[:, 0, :, 0].gather(1, lengths[:, None])
                root = feed.tokens[:, -1:].where(feed.drafted[:, None] == 0, root)
                given = replace(feed, tokens=root, prefix_lengths=lengths, drafted=None)
            cache.base[:, :levels] = self.logits(self.after_root(given, cache, levels - 1))
        nodes = 1 if feed.news else feed.tokens.shape[1]
        return cache.base[place_of(feed, DEPTHS)][:, None].expand(-1, nodes, -1)
