"""The `Draft` of Medusa heads: a step's first feed computes all heads, and each level of the tree uses one.

The heads read one hidden state, the target's at the token before the root, and have no attention. So only the target's
hidden states are remembered, and only that of the last accepted token is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.native.heads import MedusaWeights, keep, medusa
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.tapped import TappedDraft
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward, Taps, as_logits
from heavypath.speculative.models.linear import Linears, are_plain


class _Linear(NamedTuple):
    """The weight and bias of a linear layer."""

    weight: Tensor
    bias: Tensor | None


class MedusaCache(RowCache):
    """The target's hidden states, in row i of the keys [B, 1, rows, H] that of token i, and the logits of a step.

    logits: [B, K + 1, V], the logits of the K heads, computed in a step's first feed and used in its other feeds. The
        last row is -inf, for nodes deeper than there are heads
    """

    def __init__(self, states: Tensor, logits: Tensor):
        super().__init__(states, states[..., :0])
        self.logits = logits

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.keys.nbytes + self.logits.nbytes

    def first(self, slots: int) -> "MedusaCache":
        """A view of the first `slots` sequences."""
        return MedusaCache(self.keys[:slots], self.logits[:slots])

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the hidden states of an accepted path; arguments as in `RowCache.accept`.

        Nodes have the same rows as in the target's cache, so `node_rows` is ignored.
        """
        step_kernels(path.device).compact([self.keys], path, length, prefix_length)

    def trimmed(self, slots: slice, rows: int) -> "MedusaCache":
        """A copy of the first `rows` hidden states of the sequences in these slots."""
        return MedusaCache(self.keys[slots, :, :rows].clone(), self.logits[slots, :0, :0].clone())


class MedusaDraft(TappedDraft):
    """`MedusaHeads` as a draft for the target whose hidden states they read.

    Children of a node at depth d are drawn from head d, whatever the node's token is; nodes deeper than there are heads
    propose nothing (-inf). Raises ValueError as `TappedDraft` does, and for heads of another width or vocabulary than
    the target's.
    """

    drafts_at_once = True

    def __init__(self, heads: MedusaHeads, target: Forward):
        config = heads.config
        width = target.embedding.weight.shape[1]
        if (config.hidden_size, config.vocab_size) != (width, target.vocab_size):
            raise ValueError(
                f"the Medusa heads were made for a target of width {config.hidden_size} with {config.vocab_size} "
                f"tokens, got one of width {width} with {target.vocab_size}"
            )
        super().__init__(heads, target)
        self.heads = heads
        self.config = config
        self.layers = config.layers
        self.levels = config.heads
        self._lm_head = target.parts.joined(self.target_lm_head, target.parts.of(self.target_lm_head))
        self._linears = Linears(self.name, heads.parameters())
        self.native = self._copied()

    def is_current(self) -> bool:
        """Whether the heads are the same, and copies of their weights are up to date."""
        return super().is_current() and self._linears.is_current()

    def _copied(self) -> MedusaWeights | None:
        """Copies of the weights for compiled code; None if it lacks a part of these heads, or there is no memory."""
        heads = self.heads
        linears = self._linears
        lm_head = self.target_lm_head
        is_own = heads.lm_heads is not None
        usual = is_own or (are_plain([lm_head]) and lm_head.weight.dtype == self.dtype and lm_head.bias is None)
        if not (linears.can_copy and usual and self.target.ranks is None):
            return None
        layers = [
            [linears.copy_of([_Linear(weight, bias)]).blocks for weight, bias in zip(weights, biases, strict=True)]
            for weights, biases in zip(heads.weight, heads.bias, strict=True)
        ]
        lm_heads = [_Linear(own, None) for own in heads.lm_heads] if heads.lm_heads is not None else [lm_head]
        return MedusaWeights(layers, [linears.copy_of([each]).blocks for each in lm_heads])

    def new_cache(self, batch: int, rows: int) -> MedusaCache:
        """An empty cache of `rows` rows for each of `batch` sequences."""
        config = self.config
        like = self.heads.weight
        logits = as_logits(like.new_full((batch, config.heads + 1, config.vocab_size), -torch.inf))
        return MedusaCache(like.new_zeros(batch, 1, rows, config.hidden_size), logits)

    def taps(self, cache: MedusaCache) -> Taps:
        """A request for the target's hidden states after its final norm, which are stored in the cache."""

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            if self.native is None:
                store_rows(cache.keys, states[0][:, :, None], cache_rows)
            else:
                keep(states, ([None], None), None, tokens, cache_rows, (cache.keys[:, 0], None))

        return Taps((self.target.layers,), read)

    def prefill(self, tokens: Tensor, cache: MedusaCache, starts: Sequence[int] | None = None) -> None:
        """Does nothing: the target's passes have stored the hidden states that the heads read."""

    def __call__(self, feed: Feed, cache: MedusaCache) -> Tensor:
        """Logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
        heads = self.config.heads
        nodes = 1 if feed.news else feed.tokens.shape[1]
        if feed.news:
            lengths = feed.prefix_lengths if feed.drafted is None else feed.prefix_lengths - feed.drafted
            self._read_root(lengths, min(feed.levels, heads), cache)
        if feed.drafted is None:
            logits = cache.logits[:, min(feed.level, heads), None].expand(-1, nodes, -1)
            return logits if self.native is None else logits.contiguous()
        sequence = torch.arange(len(feed.drafted), device=feed.drafted.device)
        return cache.logits[sequence, feed.drafted.clamp(max=heads)][:, None]

    def level_weights(self) -> list[Tensor]:
        """The weights of one head, with its lm_head."""
        heads = self.heads
        lm_head = self.target_lm_head.weight if heads.lm_heads is None else heads.lm_heads[0]
        return [heads.weight[:, 0], heads.bias[:, 0], lm_head]

    def unsure_rows(self, levels: int) -> int:
        """0, because none of the last rows may be missing: the target's own passes write them."""
        return 0

    def _read_root(self, lengths: Tensor, heads: int, cache: MedusaCache) -> None:
        """Compute the logits of the first `heads` heads, and store them in cache.logits.

        lengths: LongTensor[B], tokens before each root; the heads read the hidden state of token lengths[b] - 1, or
        zeros in a sequence of one token
        """
        if self.native is not None:
            return medusa(self.native, cache.keys[:, 0], lengths, heads, cache.logits)
        before = cache.keys[torch.arange(len(lengths), device=lengths.device), 0, (lengths - 1).clamp(min=0)]
        before = before.masked_fill((lengths == 0)[:, None], 0)
        cache.logits[:, :heads] = self.heads(before, self._lm_head, heads)
