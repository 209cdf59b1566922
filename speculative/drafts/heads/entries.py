"""Drafting level by level with entries of two tokens, as EAGLE heads and MTP layers do.

A step's first feed computes the entries of all tokens that are new since the last step, from the target's features. The
last of them, the root's, predicts the next token. Entries of drafted nodes are computed from the draft's own outputs
and are not kept: when a node is accepted, its entry is computed again. So the keys and values before a root are those
of a pass over the sequence.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.drafts.heads.native import NativeHead
from heavypath.speculative.drafts.tapped import TappedDraft
from heavypath.speculative.models.forward import PREFILL_CHUNK, Taps, TreeMask, chain_mask, host_can_read


class EntriesDraft(TappedDraft):
    """A draft whose entry i is computed from the target's features of token i and from token i + 1, see `EagleHead`.

    native: the same draft in compiled code, for a CPU; None if it is not available
    """

    overlap = 1  # an entry is computed from two tokens
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
        last: int | None = None,
    ) -> Tensor:
        """The ends [B, last, H] of the last entries, of which logits are made. Keys and values of all entries, and in
        `outputs` what the children of the last ones get instead of features, are stored at their rows of the cache.

        features: [B, N, F], of the tokens before, or of parents what replaces them; tokens: LongTensor[B, N]
        rows: LongTensor[B, N], the entries' rows in the cache; mask: which rows each entry sees
        positions: LongTensor[B, N], if they differ from the rows
        last: how many; None for all
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, n, V] of ends of entries [B, n, H]."""

    @abstractmethod
    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept in the cache of the target's hidden states: [B, N, F] from a list of [B, N, H] for each tap."""

    def mask_features(self) -> Tensor:
        """The features of a mask entry, [1, 1, F], for drafts that draft all levels at once."""
        raise NotImplementedError

    def taps(self, cache: HeadCache) -> Taps:
        """A request for the target's hidden states, of which the features are stored in the cache."""

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            if self.native is not None and self.native.takes(tokens.numel()):
                self.native.keep(states, tokens, cache_rows, cache)
            else:
                cache.keep(self.features(states), tokens, cache_rows)

        return Taps(self.config.taps, read)

    def prefill(self, tokens: Tensor, cache: HeadCache, starts: Sequence[int] | None = None) -> None:
        """Compute all entries but the last of right-padded sequences LongTensor[B, T], which the target has read.

        starts: as in `Forward.prefill`
        """
        batch = len(tokens)
        entries = tokens.shape[1] - 1
        starts = [0] * batch if starts is None else starts
        first = torch.tensor(starts if max(starts) > min(starts) else starts[0], device=tokens.device)  # [B] or []
        for begin in range(0, entries, PREFILL_CHUNK):
            end = min(begin + PREFILL_CHUNK, entries)
            rows = (first[..., None] + torch.arange(begin, end, device=tokens.device)).expand(batch, -1)
            mask = chain_mask(first + begin, end - begin, visible_rows=max(starts) + end)
            run: Callable[..., object] = partial(self.run, last=0)
            if self.native is not None and self.native.takes(rows.numel()):
                run = self.native.prefill
            run(_rows_of(cache.features[:, 0], rows), tokens[:, begin + 1 : end + 1], rows, cache, mask)

    def __call__(self, feed: Feed, cache: HeadCache) -> Tensor:
        """Logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
        if self.native is not None and self.native.takes(len(feed.tokens) * (feed.news or feed.tokens.shape[1])):
            return self.native(feed, cache)
        return self.logits(self.after_root(feed, cache) if feed.news else self.after_nodes(feed, cache))

    def after_root(self, feed: Feed, cache: HeadCache, masks: int = 0) -> Tensor:
        """Compute the entries of new tokens; returns the ends of the roots' entries, [B, 1, H].

        masks: number of mask entries to append (`mask_features`); the ends are then [B, 1 + masks, H]
        """
        lengths = feed.prefix_lengths
        root = feed.tokens[:, -1:]
        drafted = feed.drafted
        entries = feed.news
        if host_can_read(lengths.device):
            new = lengths - cache.known if drafted is None else (lengths - cache.known).where(drafted == 0, 1)
            entries = max(1, int(new.max()))
        cache.known.copy_(lengths if drafted is None else lengths.where(drafted == 0, cache.known))
        # The rows of the last `entries` entries. If a sequence has fewer, its first one is repeated.
        rows = (lengths[:, None] + torch.arange(-entries, 0, device=lengths.device)).clamp(min=0)
        if drafted is not None:
            rows = rows.maximum((lengths - 1).clamp(min=0).where(drafted > 0, 0)[:, None])
        features = _rows_of(cache.features[:, 0], rows)
        features = features.masked_fill((lengths == 0)[:, None, None], 0)  # no features before the first token
        if drafted is not None:
            features = features.where((drafted == 0)[:, None, None], _rows_of(cache.outputs, (rows - 1).clamp(min=0)))
        following = rows + 1
        tokens = _rows_of(cache.tokens[:, 0, :, 0], following.clamp(max=cache.tokens.shape[2] - 1))
        tokens = tokens.where(following < lengths[:, None], root)
        if masks:
            rows = torch.cat([rows, rows[:, -1:] + torch.arange(1, masks + 1, device=rows.device)], 1)
            tokens = torch.cat([tokens, torch.full_like(rows[:, entries:], self.config.mask_token_id or 0)], 1)
            features = torch.cat([features, self.mask_features().expand(len(rows), masks, -1)], 1)
            entries += masks
        visible_rows = max(feed.visible_rows + masks, entries)
        prefix = rows[:, 0].clamp(max=visible_rows - entries)  # limited for sequences whose only entry is repeated
        mask = TreeMask(
            prefix_length=prefix,
            visible_rows=visible_rows,
            ancestor_mask=torch.arange(entries, device=lengths.device) <= (rows - prefix[:, None])[..., None],
        )
        return self.run(features, tokens, rows, cache, mask, last=1 + masks)

    def after_nodes(self, feed: Feed, cache: HeadCache) -> Tensor:
        """The ends [B, n, H] of drafted nodes' entries."""
        before = (feed.prefix_lengths - 1).clamp(min=0)  # the root's row
        shift = (feed.prefix_lengths - before)[:, None]
        rows = feed.cache_rows - shift
        mask = TreeMask(prefix_length=before, visible_rows=feed.visible_rows, ancestor_mask=feed.ancestor_mask)
        features = _rows_of(cache.outputs, feed.parent_rows - shift)
        return self.run(features, feed.tokens, rows, cache, mask, feed.positions - shift)

    def unsure_rows(self, levels: int) -> int:
        """levels + 2: the entries of the last step's accepted nodes, its root, and the token before may be missing."""
        return levels + 2


def _rows_of(field: Tensor, rows: Tensor) -> Tensor:
    """field[b, rows[b]] for all b, where rows is LongTensor[B, N] and field [B, S, ..]; a single kernel launch."""
    every = rows.view(*rows.shape, *(1 for _ in field.shape[2:])).expand(*rows.shape, *field.shape[2:])
    return field.gather(1, every)
