"""An EAGLE head on a CPU with compiled code: its forward pass, its entries, and storing the target's hidden states.

`HeadDraft` does the same with PyTorch operations, and is the reference.
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
    """The compiled form of a `HeadDraft`, for a CPU; its cache is the same.

    over: the compiled forward pass
    fc: the layer that computes features from the target's states; None if the states are the features
    norms: for each tap, and for all taps together
    """

    def __init__(self, over: NativePass, fc: Blocks | None, norms: tuple[Sequence[Norm | None], Norm | None]):
        self._over = over
        self._fc = fc
        self._norms = norms

    def takes(self, rows: int) -> bool:
        """Whether compiled code is faster than PyTorch for this many entries of all sequences together."""
        return self._over.takes(rows)

    def __call__(self, feed: Feed, cache: HeadCache) -> Tensor:
        """Logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
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
        """Compute entries, and store their keys and values at rows LongTensor[B, N] of the cache.

        features: [B, N, F]; tokens: LongTensor[B, N], the tokens after those of the features
        """
        states = GivenStates(features, wanted=0)
        self._over(tokens, rows, rows, cache, mask, needs_logits=False, states=states)

    def keep(self, taps: list[Tensor], tokens: Tensor, cache_rows: Tensor, cache: HeadCache) -> None:
        """Store the features of the target's hidden states [B, N, H] after tokens LongTensor[B, N] in a cache."""
        keep(taps, self._norms, self._fc, tokens, cache_rows, (cache.features[:, 0], cache.tokens[:, 0, :, 0]))

    def _pass(self, entries: Entries, cache: HeadCache, wanted: int) -> Tensor:
        tokens, positions, rows, prefix, seen, given, present = entries
        mask = TreeMask(prefix_length=prefix, visible_rows=cache.outputs.shape[1], ancestor_mask=seen)
        states = GivenStates(given, wanted, cache.outputs, present)
        return self._over(tokens, positions, rows, cache, mask, states=states)
