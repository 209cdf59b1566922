"""A model as a draft: a smaller one with the target's vocabulary, or some of the target's own layers.

If the vocabularies are padded to different sizes, the draft's logits are cut off or padded with -inf, so a token that
one of the models lacks is never drafted. That keeps the target's distribution and can only reduce acceptance.

A model may have fewer positions than the target. After its last position it proposes nothing, and prompts are read only
up to there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.numbers import whole
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward, TreeMask

MAX_PADDING = 128  # the most tokens by which padded vocabularies may differ (Qwen2 has 151,936 and 152,064)


@dataclass(frozen=True)
class EarlyExit(Draftable):
    """A draft made of some of the target's layers, followed by its own final norm and lm_head (self-speculation).

        EarlyExit(4)            # the first four
        EarlyExit([0, 1, 5])    # these; `choose_layers` and `heavypath layers` find the best ones

    Pass it to SpeculativeDecoder instead of a draft model. It needs no memory except a cache for these layers. How well
    it drafts depends on the target: models trained for early exits draft well (LayerSkip, Elhoushi et al. 2024), others
    better without some layers in the middle (Draft & Verify, Zhang et al. 2024), or hardly at all.
    """

    layers: int | Sequence[int]

    def __post_init__(self) -> None:
        layers: Any = self.layers
        if not isinstance(layers, Sequence) or isinstance(layers, str | bytes):
            layers = [layers]
        for layer in layers:
            whole("layers", layer)

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the layers that run."""
        layers: Any = self.layers
        if isinstance(layers, Sequence):
            return tuple(map(int, layers))
        return tuple(range(int(layers)))


class ModelDraft(Draft):
    """A model with the target's vocabulary as a draft: each level of a tree is one pass of the model."""

    overlap = 0
    can_rest = True

    def __init__(self, forward: Forward, vocab_size: int):
        """vocab_size: the target's. Raises ValueError if the vocabularies differ by more than padding."""
        self.forward = forward
        self.keeps_state = forward.state_bytes > 0
        self._vocab_size = vocab_size
        gap = abs(forward.vocab_size - vocab_size)
        smaller = min(forward.vocab_size, vocab_size)
        if gap > min(MAX_PADDING, smaller // 100):
            raise ValueError(
                f"target and draft must share one vocabulary, got {vocab_size} and {forward.vocab_size} tokens; "
                f"padding may differ by at most 1 in 100 and {MAX_PADDING} tokens; for a draft with another tokenizer "
                "give Translated(draft, its tokenizer, the target's)"
            )

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache of `rows` rows for each of `batch` sequences."""
        return self.forward.new_cache(batch, rows, lag=1)

    def prefill(self, tokens: Tensor, cache: Any, starts: Sequence[int] | None = None) -> None:
        """Cache keys and values of right-padded sequences LongTensor[B, T], up to the model's last position.

        starts: as in `Forward.prefill`
        """
        earliest = min(starts or [0])
        within = self.forward.max_positions - earliest
        if within > 0:
            known = self._known(tokens[:, :within])
            self.forward.prefill(known, cache, starts)

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """Logits [B, n, V] after each node, in the model's dtype; V is the size of the target's vocabulary."""
        mask = TreeMask(feed.prefix_lengths, feed.visible_rows, ancestor_mask=feed.ancestor_mask, level=feed.level)
        positions = self.forward.positions_within_limit(feed.positions, feed.prefix_lengths)
        known = self._known(feed.tokens)
        logits = self.forward(known, positions, feed.cache_rows, cache, mask)
        most = self.forward.max_positions
        if cache.keys.shape[2] > most:  # sequences in this cache may be longer than the positions
            silence(logits, feed.positions, most)
        missing = self._vocab_size - self.forward.vocab_size
        if missing == 0:
            return logits
        return pad(logits, (0, missing), value=-torch.inf)  # a negative number cuts off

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens, LongTensor[...], as input of the draft: padding ids of the target, which the draft lacks, become
        the draft's last token.
        """
        own_size = self.forward.vocab_size
        if self._vocab_size <= own_size:
            return tokens
        return tokens.clamp(max=own_size - 1)


def silence(logits: Tensor, positions: Tensor, most: int) -> None:
    """Set logits [B, n, V] to -inf, in place, after tokens whose positions LongTensor[B, n] are `most` or more."""
    is_beyond = positions >= most
    logits.masked_fill_(is_beyond[..., None], -torch.inf)
