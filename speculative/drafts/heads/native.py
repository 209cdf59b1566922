"""An EAGLE head on a CPU by compiled code: its passes, its entries, and what it keeps of the target's hidden states.

`HeadDraft` does the same with PyTorch's operations, and is the reference.
"""

from collections.abc import Sequence

from torch import Tensor

from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native.heads import Entries, Kept, keep, node_entries, root_entries
from heavypath.kernels.native.products import Blocks
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.native import GivenStates, NativePass


class NativeHead:
    """The work of a `HeadDraft`.

    fc:    that features are made by; None where they are the target's states themselves
    norms: of each tap, and of all taps together
    """

    def __init__(self, over: NativePass, fc: Blocks | None, norms: tuple[Sequence[Norm | None], Norm | None]):
        self._over, self._fc, self._norms = over, fc, norms

    def takes(self, rows: int) -> bool:
        """As of `NativePass`."""
        return self._over.takes(rows)

    def __call__(self, feed: Feed, cache: HeadCache) -> Tensor:
        """Logits after each node [B, n, V]; of a step's first feed after the root alone, [B, 1, V]."""
        kept = Kept(cache.features[:, 0], cache.outputs, cache.tokens[:, 0, :, 0], cache.known)
        if feed.news:
            most = min(feed.news, cache.outputs.shape[1])
            entries = root_entries(feed.tokens[:, -1], feed.prefix_lengths, feed.drafted, most, kept)
            return self._pass(entries, cache, wanted=1)
        nodes = feed.positions, feed.cache_rows, feed.parent_rows
        positions, rows, prefix, given = node_entries(nodes, feed.prefix_lengths, kept.outputs)
        entries = Entries(feed.tokens, positions, rows, prefix, feed.ancestor_mask, given)
        return self._pass(entries, cache, wanted=feed.tokens.shape[1])

    def prefill(self, features: Tensor, tokens: Tensor, rows: Tensor, cache: HeadCache, mask: TreeMask) -> None:
        """Make the entries at rows LongTensor[B, N], of features [B, N, F] and the tokens behind theirs."""
        states = GivenStates(features, wanted=0)
        self._over(tokens, rows, rows, cache, mask, needs_logits=False, states=states)

    def keep(self, taps: list[Tensor], tokens: Tensor, cache_rows: Tensor, cache: HeadCache) -> None:
        """Keep the target's hidden states [B, N, H] of tokens LongTensor[B, N] in a cache."""
        keep(taps, self._norms, self._fc, tokens, cache_rows, (cache.features[:, 0], cache.tokens[:, 0, :, 0]))

    def _pass(self, entries: Entries, cache: HeadCache, wanted: int) -> Tensor:
        tokens, positions, rows, prefix, seen, given, present = entries
        mask = TreeMask(prefix_length=prefix, visible_rows=cache.outputs.shape[1], ancestor_mask=seen)
        states = GivenStates(given, wanted, cache.outputs, present)
        return self._over(tokens, positions, rows, cache, mask, states=states)
