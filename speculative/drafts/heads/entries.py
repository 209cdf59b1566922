"""Drafting level by level with entries of two tokens, as EAGLE heads and layers for multi-token prediction do.

A step's first feed makes the entries of all tokens that are new since the last step, of the target's features. The last
of them, the root's, predicts the token after it. The entries of drafted nodes are made of the draft's own outputs, and
not kept: an accepted node gets its entry anew. So the keys and values before a root are those of a pass over the text.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from heavypath.kernels.layers.rotary import store_rows
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.drafts.heads.native import NativeHead
from heavypath.speculative.drafts.tapped import TappedDraft
from heavypath.speculative.models.forward import PREFILL_CHUNK, Taps, TreeMask, chain_mask, host_can_read


class EntriesDraft(TappedDraft):
    """A draft whose entry i is made of the target's features of token i and of token i + 1, see `EagleHead`.

    native: the same by compiled code, where there is any
    """

    overlap = 1  # an entry is made of two tokens
    native: NativeHead | None = None

    @abstractmethod
    def run(
        self,
        features: Tensor,
        tokens: Tensor,
        rows: Tensor,
        cache: HeadCache,
        mask: TreeMask,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The outputs [B, N, H] of entries, whose keys and values are stored at these rows of the cache.

        positions: where they are not the rows
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, n, V] of outputs [B, n, H]."""

    @abstractmethod
    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """The kept part [B, N, F] of the target's hidden states [B, N, H] each."""

    def fed_back(self, hidden: Tensor) -> Tensor:
        """The input of the entries below in the place of features, [B, n, H] of outputs."""
        return hidden

    def mask_features(self) -> Tensor:
        """The features of a mask, [1, 1, F], of a draft of all levels at once."""
        raise NotImplementedError

    def taps(self, cache: HeadCache) -> Taps:
        """The hidden states of the target's passes that the head reads, to be kept in a cache."""

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            if self.native is not None and self.native.takes(tokens.numel()):
                self.native.keep(states, tokens, cache_rows, cache)
            else:
                cache.keep(self.features(states), tokens, cache_rows)

        return Taps(self.config.taps, read)

    def prefill(self, tokens: Tensor, cache: HeadCache, starts: Sequence[int] | None = None) -> None:
        """Make the entries of right-padded texts LongTensor[B, T], all but the last; the target has read the texts.

        starts: as of `Forward.prefill`
        """
        batch, entries = len(tokens), tokens.shape[1] - 1
        starts = [0] * batch if starts is None else starts
        first = torch.tensor(starts if max(starts) > min(starts) else starts[0], device=tokens.device)  # [B] or []
        for begin in range(0, entries, PREFILL_CHUNK):
            end = min(begin + PREFILL_CHUNK, entries)
            rows = (first[..., None] + torch.arange(begin, end, device=tokens.device)).expand(batch, -1)
            mask = chain_mask(first + begin, end - begin, visible_rows=max(starts) + end)
            run = self.run
            if self.native is not None and self.native.takes(rows.numel()):
                run = self.native.prefill
            run(_rows_of(cache.features[:, 0], rows), tokens[:, begin + 1 : end + 1], rows, cache, mask)

    def __call__(self, feed: Feed, cache: HeadCache) -> Tensor:
        """Logits after each node [B, n, V]; of a step's first feed after the root alone, [B, 1, V]."""
        if self.native is not None and self.native.takes(len(feed.tokens) * (feed.news or feed.tokens.shape[1])):
            return self.native(feed, cache)
        return self.logits(self.after_root(feed, cache) if feed.news else self._after_nodes(feed, cache))

    def after_root(self, feed: Feed, cache: HeadCache, masks: int = 0) -> Tensor:
        """Make the entries of what is new in the texts; the outputs of the roots', [B, 1, H].

        masks: entries that follow, made of `mask_hidden`; then the outputs are [B, 1 + masks, H]
        """
        lengths, root, drafted = feed.prefix_lengths, feed.tokens[:, -1:], feed.drafted
        new = lengths - cache.known if drafted is None else (lengths - cache.known).where(drafted == 0, 1)
        entries = max(1, int(new.max())) if host_can_read(lengths.device) else feed.news
        cache.known.copy_(lengths if drafted is None else lengths.where(drafted == 0, cache.known))
        # The last so many rows of entries. Where there are not so many, the first of them is made several times.
        first = torch.zeros_like(lengths) if drafted is None else (lengths - 1).clamp(min=0).where(drafted > 0, 0)
        rows = (lengths[:, None] + torch.arange(-entries, 0, device=lengths.device)).maximum(first[:, None])
        features = _rows_of(cache.features[:, 0], rows)
        features = features.masked_fill((lengths == 0)[:, None, None], 0)  # nothing is before a text of one token
        if drafted is not None:
            features = features.where((drafted == 0)[:, None, None], _rows_of(cache.outputs, (rows - 1).clamp(min=0)))
        tokens = _rows_of(cache.tokens[:, 0, :, 0], (rows + 1).clamp(max=cache.tokens.shape[2] - 1))
        tokens = tokens.where(rows + 1 < lengths[:, None], root)
        if masks:
            rows = torch.cat([rows, rows[:, -1:] + torch.arange(1, masks + 1, device=rows.device)], 1)
            tokens = torch.cat([tokens, torch.full_like(rows[:, entries:], self.config.mask_token_id or 0)], 1)
            features = torch.cat([features, self.mask_features().expand(len(rows), masks, -1)], 1)
            entries += masks
        visible_rows = max(feed.visible_rows + masks, entries)
        prefix = rows[:, 0].clamp(max=visible_rows - entries)  # of a text whose entries are one, made several times
        mask = TreeMask(
            prefix_length=prefix,
            visible_rows=visible_rows,
            ancestor_mask=torch.arange(entries, device=lengths.device) <= (rows - prefix[:, None])[..., None],
        )
        hidden = self.run(features, tokens, rows, cache, mask)[:, -1 - masks :]
        self._keep_outputs(hidden[:, :1], rows[:, -1 - masks : rows.shape[1] - masks], cache)
        return hidden

    def _after_nodes(self, feed: Feed, cache: HeadCache) -> Tensor:
        """The outputs [B, n, H] of drafted nodes."""
        before = (feed.prefix_lengths - 1).clamp(min=0)  # the root's row
        shift = (feed.prefix_lengths - before)[:, None]
        rows = feed.cache_rows - shift
        mask = TreeMask(prefix_length=before, visible_rows=feed.visible_rows, ancestor_mask=feed.ancestor_mask)
        features = _rows_of(cache.outputs, feed.parent_rows - shift)
        hidden = self.run(features, feed.tokens, rows, cache, mask, feed.positions - shift)
        self._keep_outputs(hidden, rows, cache)
        return hidden

    def unsure_rows(self, levels: int) -> int:
        """The entries of all that was accepted last, of the last root and of the token before it."""
        return levels + 2

    def _keep_outputs(self, hidden: Tensor, rows: Tensor, cache: HeadCache) -> None:
        """Keep what the entries below get in the place of features."""
        store_rows(cache.outputs[:, None], self.fed_back(hidden)[:, :, None], rows)


def _rows_of(field: Tensor, rows: Tensor) -> Tensor:
    """The rows LongTensor[B, N] of [B, S, ..]; by one launch, where an index would need the numbers of sequences."""
    every = rows.view(*rows.shape, *(1 for _ in field.shape[2:])).expand(*rows.shape, *field.shape[2:])
    return field.gather(1, every)
