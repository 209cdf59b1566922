"""A draft model with another tokenizer than the target's: it drafts the tokens that both vocabularies have.

    drafting  Q(t) = softmax over common tokens of the draft's logit for its token with the same bytes; 0 for others
    reading   a token that the draft lacks is read as several of the draft's tokens, with the same bytes

So a drafted node is one token in both vocabularies, and drafting and verification are those of any draft; the output is
lossless for any Q. Source: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", arXiv 2502.05202, algorithm 4 (token-level intersection).

The sequence is never tokenized again: the draft reads each of the target's tokens separately, although its own
tokenizer might split the text differently. So its cache depends only on the target's tokens, as for any other draft.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.drafts.model import silence
from heavypath.speculative.drafts.vocabularies import Vocabularies
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import PREFILL_CHUNK, Forward, TreeMask, host_can_read
from heavypath.speculative.models.forward_of import forward_of

MOST_STRETCH = 2  # a sequence has at most this many of the draft's tokens for each of the target's


@dataclass(frozen=True, eq=False)
class Translated(Draftable):
    """A draft model whose tokenizer differs from the target's.

        SpeculativeDecoder(target, Translated(draft, draft_tokenizer, target_tokenizer))

    It proposes the target's tokens that its own vocabulary also has. `load_draft` returns one if the tokenizers differ.

    model: a causal language model with attention layers, as transformers loads it
    tokenizer: the draft's
    target_tokenizer: the target's

    Raises TypeError for tokenizers that are not of the tokenizers library, and ValueError if too few tokens are common.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        _ = self.vocabularies

    @cached_property
    def vocabularies(self) -> Vocabularies:
        """Both vocabularies, with their common tokens."""
        return Vocabularies(self.target_tokenizer, self.tokenizer)


class TranslatedCache(RowCache):
    """The cache of a model that reads a sequence as another number of tokens than the target.

    model: its keys and values, a row for each of its own tokens
    ends: LongTensor[B, 1, rows, 1], for each of the target's tokens, the row after its last row
    stretch: the target's first n tokens have at most stretch * n rows
    """

    def __init__(self, model: KeyValueCache, stretch: int):
        super().__init__(model.keys, model.values)
        self.model = model
        self.stretch = stretch
        batch, _, rows, _ = model.keys.shape
        self.ends = torch.zeros(batch, 1, rows, 1, dtype=torch.long, device=model.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.ends.nbytes

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.model = self.model.first(slots)
        view.ends = self.ends[:slots]
        return view

    def end_of(self, rows: Tensor) -> Tensor:
        """The draft's row after the last row of each of the target's tokens with these indices, LongTensor[B, any].

        rows: LongTensor[B, any], indices of the target's tokens; the result is 0 for negative ones
        """
        return self.ends[:, 0, :, 0].gather(1, rows.clamp(min=0)).where(rows >= 0, 0)

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [self.keys, self.values, self.ends]

    def swap(self, one: int, other: int, rows: int | None = None) -> None:
        """Exchange two sequences. rows: how many of the target's tokens are in use (default: all)."""
        super().swap(one, other, None if rows is None else self.stretch * rows)

    def receive(self, sequence: int, source: RowCache, of: int, rows: int) -> None:
        """Copy sequence `of` of `source` to `sequence`. rows: how many of the target's tokens are in use."""
        super().receive(sequence, source, of, self.stretch * rows)

    def take(self, sequence: int, source: RowCache, of: int, rows: int) -> int:
        """Copy the first `rows` of the target's tokens of sequence `of` of another cache to `sequence`.

        Returns the number of tokens copied; 0 if that cache belongs to a draft of another kind.
        """
        if not isinstance(source, TranslatedCache):
            return 0
        self.receive(sequence, source, of, rows)
        return rows

    def trimmed_bytes(self, slots: slice, rows: int) -> int:
        """The size in bytes of the result of `trimmed`."""
        return sum(each[slots, :, : self.stretch * rows].nbytes for each in self.remembered())

    def trimmed(self, slots: slice, rows: int) -> "TranslatedCache":
        """A copy with the rows of the target's first `rows` tokens. Only for copying from; no model may be called with
        it.
        """
        kept = copy(self)
        kept.keys, kept.values, kept.ends = (
            each[slots, :, : self.stretch * rows].clone() for each in self.remembered()
        )
        return kept

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path to after the root's last row, one row for each node, and set their ends.

        Arguments as in `RowCache.accept`.
        """
        drafted = path if node_rows is None else node_rows.gather(1, path.clamp(min=0))
        end = self.end_of(prefix_length[:, None])
        steps = torch.arange(path.shape[1], device=path.device)
        step_kernels(path.device).compact([self.keys, self.values], drafted, length, end[:, 0] - 1)
        store_rows(self.ends, (end + steps)[..., None, None], prefix_length[:, None] + steps)


class TranslatedDraft(Draft):
    """The `Draft` of `Translated`: reads and drafts with its model, and returns logits of the target's tokens.

    It is made for a target with this vocabulary size.
    """

    overlap = 0
    can_rest = True

    def __init__(self, given: Translated, forward: Forward, vocab_size: int):
        if forward.state_bytes or forward.rope_limit is not None:
            raise ValueError(
                "a draft with another tokenizer must have attention layers alone, and rotary embeddings that do not "
                "depend on the text's length, as longrope; got one with "
                + ("recurrent layers" if forward.state_bytes else "longrope")
            )
        self.forward = forward
        size = forward.vocab_size
        device = forward.device
        pieces, counts = given.vocabularies.pieces(vocab_size, size)
        self._pieces = pieces.to(device)
        self._counts = counts.to(device)
        self._most = pieces.shape[1]
        self._stretch = min(self._most, MOST_STRETCH)
        drafted = [given.vocabularies.shared.get(token, size) for token in range(vocab_size)]
        # The draft's token for each of the target's; for those it lacks, an additional index, whose logit is -inf.
        self._drafted = torch.tensor(drafted, device=device).clamp(max=size)

    @property
    def proposes_every_token(self) -> bool:
        """False if it lacks one of the target's tokens, because such tokens must not be drawn."""
        return bool((self._drafted < self.forward.vocab_size).all())

    def new_cache(self, batch: int, rows: int) -> TranslatedCache:
        """An empty cache for `batch` sequences of at most `rows` of the target's tokens and drafted nodes."""
        return TranslatedCache(self.forward.new_cache(batch, self._stretch * rows), self._stretch)

    def prefill(self, tokens: Tensor, cache: TranslatedCache, starts: Sequence[int] | None = None) -> None:
        """Read right-padded sequences of the target's tokens, LongTensor[B, T]; starts: as in `Forward.prefill`."""
        batch, width = tokens.shape
        first = torch.tensor([0] * batch if starts is None else starts, device=tokens.device)
        own, rows = self._read(tokens, first[:, None] + torch.arange(width, device=tokens.device), cache)
        for part, part_rows in zip(own.split(PREFILL_CHUNK, 1), rows.split(PREFILL_CHUNK, 1), strict=True):
            self._run_chain(part, part_rows, cache, needs_logits=False)

    def __call__(self, feed: Feed, cache: TranslatedCache) -> Tensor:
        """Logits after each node [B, n, V], in the model's dtype; for a step's first feed only those after the root."""
        if feed.news:
            tokens, positions = self._read(feed.tokens, feed.cache_rows, cache)
            logits, positions = (each[:, -1:] for each in (self._run_chain(tokens, positions, cache), positions))
        else:
            root = feed.prefix_lengths[:, None]
            last = cache.end_of(root) - 1  # the root's last row: the tree's node m is m rows after it
            positions, rows = (each - root + last for each in (feed.positions, feed.cache_rows))
            mask = _mask_of(last, feed.ancestor_mask, cache)
            logits = self.forward(self._pieces[feed.tokens, -1], positions, rows, cache.model, mask)
        if cache.keys.shape[2] > self.forward.max_positions:
            silence(logits, positions, self.forward.max_positions)
        return pad(logits, (0, 1), value=-torch.inf).index_select(2, self._drafted)

    def _read(self, tokens: Tensor, rows: Tensor, cache: TranslatedCache) -> tuple[Tensor, Tensor]:
        """The draft's tokens for a chain of the target's tokens, and their cache rows, LongTensor[B, any] each.

        If token t has c_t pieces, its rows end at e_t = min(e_(t-1) + c_t, stretch * (t + 1)). So e_t is the minimum of
        e_before + c_first + .. + c_t, and of stretch * (k + 1) + c_(k+1) + .. + c_t over k. If a token has no room for
        all of its pieces, the last ones are read. Sequences with fewer rows than others repeat their first row.

        tokens, rows: LongTensor[B, n], the target's; the chain's first token may be repeated
        """
        before = cache.end_of(rows[:, :1] - 1)
        counts = self._counts[tokens]
        counts[:, 1:] *= rows.diff(dim=1)  # 0 for a token that is given again
        total = counts.cumsum(1)
        ends = total + (self._stretch * (rows + 1) - total).cummin(1).values.minimum(before)
        store_rows(cache.ends, ends[..., None, None], rows)
        width = self._most * tokens.shape[1]
        if host_can_read(tokens.device):
            width = int((ends[:, -1:] - before).max())
        width = min(max(2, width), cache.keys.shape[2])
        own = (ends[:, -1:] + torch.arange(-width, 0, device=tokens.device)).maximum(before)
        token = torch.searchsorted(ends, own, right=True)
        piece = self._most - ends.gather(1, token) + own
        return self._pieces[tokens.gather(1, token), piece], own

    def _run_chain(self, tokens: Tensor, rows: Tensor, cache: TranslatedCache, *, needs_logits: bool = True) -> Tensor:
        """The model's logits for chains of its own tokens at cache rows LongTensor[B, n], which may begin with repeats.

        Positions equal the rows.
        """
        count = rows.shape[1]
        before = (rows[:, -1:] + 1 - count).clamp(min=0)
        seen = torch.arange(count, device=rows.device) <= (rows - before)[..., None]
        return self.forward(tokens, rows, rows, cache.model, _mask_of(before, seen, cache), needs_logits=needs_logits)


def _mask_of(before: Tensor, ancestor_mask: Tensor, cache: TranslatedCache) -> TreeMask:
    """The attention mask of nodes that follow `before`, LongTensor[B, 1], rows of the draft's cache."""
    visible = int(before.max()) + ancestor_mask.shape[-1] if host_can_read(before.device) else cache.keys.shape[2]
    return TreeMask(before[:, 0], visible, ancestor_mask=ancestor_mask)


@as_draft.register
def _(given: Translated, target: Forward, model: PreTrainedModel) -> Draft:
    forward = forward_of(given.model, "draft")
    if forward.device != target.device:
        raise ValueError(f"target and draft must be on one device, got {target.device} and {forward.device}")
    return TranslatedDraft(given, forward, target.vocab_size)


@describe.register
def _(given: Translated) -> str:
    return f"{describe(given.model)}, which drafts {given.vocabularies}"


@draft_parameter_count.register
def _(given: Translated, target: PreTrainedModel) -> int:
    return parameter_count(given.model)
