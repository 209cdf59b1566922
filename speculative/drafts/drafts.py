"""What can propose tokens: a draft model, the target's own first layers, or the text so far.

All of them are called alike: given a few nodes of a growing tree, the logits of the token after each. Each keeps what
it needs of the text in a cache with a row for each token, which is compacted as the target's is.

A vocabulary padded to another size is cut or filled up with -inf: a token that one model lacks is never drafted, which
costs nothing of the target's law, whatever the token is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.generic import forward_of

MAX_PADDING = 128  # tokens by which vocabularies of one tokenizer are seen to differ (Qwen2: 151,936 and 152,064)


@dataclass(frozen=True)
class PromptLookup:
    """A draft without a model: what followed the last tokens before, in the sequence itself (n-gram lookup).

    The longest suffix of at most max_ngram tokens that occurred before, if it has min_ngram tokens, proposes what
    followed it. The latest occurrence has half of the probability, the one before half of the rest, and so on. Pass it
    to SpeculativeDecoder in the place of a draft model. Saxena 2023 ("prompt lookup decoding"); transformers'
    prompt_lookup_num_tokens.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"PromptLookup needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )


@dataclass(frozen=True)
class EarlyExit:
    """A draft out of the target: its first `layers` layers, then its own final norm and head (self-speculation).

    Pass it to SpeculativeDecoder in the place of a draft model. It needs no memory but a cache of these layers. How
    well it drafts depends on the target: models trained for early exits do (LayerSkip, Elhoushi et al. 2024), others
    hardly.
    """

    layers: int


@dataclass(frozen=True)
class Feed:
    """Some nodes of each sequence's tree, fed to a draft at once.

    tokens, positions: LongTensor[B, n]
    rows, parent_rows: LongTensor[B, n], the cache rows where they go, and those of the tokens before them
    lengths:       LongTensor[B], rows of the cache before the tree
    visible_rows:  cache rows that hold the longest prefix and its tree
    ancestor_mask: bool [n, M] or [B, n, M], which of the tree's first M nodes each one sees
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    parent_rows: Tensor
    lengths: Tensor
    visible_rows: int
    ancestor_mask: Tensor


class ModelDraft:
    """A Llama-family model as a draft, or the first layers of the target."""

    smooth = True  # every token has some probability

    def __init__(self, forward: Forward, vocab_size: int):
        self.forward = forward
        self._vocab_size = vocab_size
        gap = abs(forward.vocab_size - vocab_size)
        if gap > min(MAX_PADDING, min(forward.vocab_size, vocab_size) // 100):
            raise ValueError(
                f"target and draft must share one vocabulary, got {vocab_size} and {forward.vocab_size} tokens; "
                f"padding may differ by at most 1 in 100 and {MAX_PADDING} tokens"
            )

    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for `batch` sequences."""
        return self.forward.new_cache(batch, rows)

    def prefill(self, tokens: Tensor, cache: Any) -> None:
        """Cache right-padded texts LongTensor[B, T]."""
        self.forward.prefill(self._known(tokens), cache)

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """fp32 logits [B, n, V] after each node, V the target's vocabulary."""
        mask = TreeMask(prefix_length=feed.lengths, rows=feed.visible_rows, ancestor_mask=feed.ancestor_mask)
        logits = self.forward(self._known(feed.tokens), feed.positions, feed.rows, cache, mask)
        missing = self._vocab_size - self.forward.vocab_size
        return logits if missing == 0 else pad(logits, (0, missing), value=-torch.inf)  # cuts off where negative

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft has an embedding of; those of the target's padding become another."""
        return tokens if self._vocab_size <= self.forward.vocab_size else tokens.clamp(max=self.forward.vocab_size - 1)


class _Ngrams(RowCache):
    """A row for each token: `keys` [B, 1, rows, M], the M tokens before it, -1 before the text; `values`, it and those
    before it, the same shape."""

    def __init__(self, batch: int, rows: int, length: int, device: torch.device):
        keys = torch.full((batch, 1, rows, length), -1, device=device)
        super().__init__(keys, torch.full_like(keys, -1))


class LookupDraft:
    """`PromptLookup` at work, as an attention over the text: the tokens before a token are its key."""

    smooth = False
    forward = None

    def __init__(self, options: PromptLookup, vocab_size: int, device: torch.device):
        self._options = options
        self._vocab_size = vocab_size
        self._device = device

    def new_cache(self, batch: int, rows: int) -> _Ngrams:
        """An empty cache of `rows` rows for `batch` sequences."""
        return _Ngrams(batch, rows, self._options.max_ngram, self._device)

    def prefill(self, tokens: Tensor, cache: Any) -> None:
        """Cache right-padded texts LongTensor[B, T]; what stands behind a text is overwritten before it is read."""
        length, width = self._options.max_ngram, tokens.shape[1]
        windows = pad(tokens, (length, 0), value=-1).unfold(1, length, 1)  # [B, T + 1, M]
        cache.keys[:, 0, :width], cache.values[:, 0, :width] = windows[:, :-1], windows[:, 1:]

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """fp32 logits [B, n, V] after each node: -inf for all tokens where nothing occurred before."""
        batch, nodes = feed.tokens.shape
        sequence = torch.arange(batch, device=feed.tokens.device)[:, None]
        keys, values = cache.keys[:, 0], cache.values[:, 0]
        for _ in range(2):  # a token's parent may be fed along with it
            before = values[sequence, feed.parent_rows.clamp(min=0)].where(feed.parent_rows[..., None] >= 0, -1)
            keys[sequence, feed.rows] = before
            values[sequence, feed.rows] = torch.cat([before[..., 1:], feed.tokens[..., None]], -1)
        context = values[sequence, feed.rows]  # [B, n, M]

        rows = feed.visible_rows
        same = (context[:, :, None] == keys[:, None, :rows]) & (context >= 0)[:, :, None]  # [B, n, rows, M]
        length = same.flip(-1).cumprod(-1).sum(-1)  # [B, n, rows], tokens in common before row p
        length *= torch.arange(rows, device=length.device) <= feed.lengths[:, None, None]  # the root is text too
        longest = length.amax(-1, keepdim=True)
        found = (length == longest) & (longest >= self._options.min_ngram)
        later = found.flip(-1).cumsum(-1).flip(-1)  # 1 for the latest occurrence
        weight = torch.exp2(-later.float()).where(found, 0)
        followed = values[:, None, :rows, -1].expand(batch, nodes, rows).clamp(min=0)
        return weight.new_zeros(batch, nodes, self._vocab_size).scatter_add_(2, followed, weight).log()


Draft = ModelDraft | LookupDraft
Cache = KeyValueCache | _Ngrams


def as_draft(draft: PreTrainedModel | PromptLookup | EarlyExit, target: Forward, model: PreTrainedModel) -> Draft:
    """The draft that was given for a target, `forward_of(model)`; refused with what differs if it does not fit.

    Raises TypeError or ValueError for a model that is none, or of another vocabulary or device.
    """
    if isinstance(draft, PromptLookup):
        return LookupDraft(draft, target.vocab_size, target.device)
    if isinstance(draft, EarlyExit):
        return ModelDraft(forward_of(model, "draft", layers=draft.layers), target.vocab_size)
    forward = forward_of(draft, "draft")
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return ModelDraft(forward, target.vocab_size)
