"""Lookahead decoding: a draft without a model, from n-grams that the target computes in the same pass as each tree.

Let the root be at position L. After the drafted tree, the target's pass of each step has a window of W columns and N -
1 levels of guesses (Fu et al. 2024, sec. 3; N is `ngram`, W is `window`). Guess (i, l) is for position L + i + l:

    level 0      root - (1, 0) - (2, 0) - ..  - (W-1, 0)            column 0 hangs below the root itself,
                  |       |        |               |               column i below the guess (i, 0);
    level 1     (0, 1)  (1, 1)   (2, 1)   ..    (W-1, 1)            each attends to the guesses on its way from the root
                  :       :        :               :
    level N-2   (0,N-2) (1,N-2)  (2,N-2)  ..    (W-1,N-2)

The target's likeliest token after guess (i, N-2), for position L + i + N - 1, is new and acts as level N - 1. With it a
column has N tokens: an n-gram, which is added to a pool. If m drafted tokens are accepted, the root moves by m + 1
positions. Guesses keep their positions in the sequence, except for those of level 0, which are dropped:

    (i, l)  <-  (i + m, l + 1);     missing guesses are filled with tokens of the sequence

This is Jacobi iteration for the fixed point that greedy decoding is, and the n-grams are parts of its trajectories. In
depth-first order guess (i, l) is number i (N - 1) + l, column by column, with the root as (0, 0).

A tree is drafted from the pool and the sequence together, as `PromptLookup` drafts from the sequence. Any proposal is
allowed in lossless verification, so the target's likeliest tokens can be used when it samples, too.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from heavypath.kernels.nodes import Verified
from heavypath.kernels.retrieval.latest import Places, logprobs_by_places, write_rows
from heavypath.kernels.retrieval.ranges import Appended
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.lookup import LookupDraft, NgramCache, PromptLookup
from heavypath.speculative.models.forward import Forward


@dataclass(frozen=True)
class Lookahead(Draftable):
    """A draft without a model: n-grams that the target computes ahead, and those that occurred in the sequence.

    Each pass of the target has window * (ngram - 1) - 1 nodes more than the drafted tree, and yields `window` n-grams
    of `ngram` tokens. Proposed are the tokens that followed the longest matching suffix of at most ngram - 1 tokens.
    The latest occurrence gets half of the probability, the one before it half of the rest, and so on; the sequence's
    occurrences count as later than the pool's. Pass it to SpeculativeDecoder instead of a draft model. Source: Fu,
    Bailis, Stoica and Zhang 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv
    2402.02057). In the paper, n-grams that begin with the last token are verified separately. Here they form a tree,
    which any method can draw and verify.

    window: columns of the window, W
    ngram: tokens of an n-gram, N; at least 3, so that every column has guesses besides level 0
    pool: number of n-grams that are kept for each sequence, the latest ones
    """

    window: int = 10
    ngram: int = 4
    pool: int = 512

    def __post_init__(self) -> None:
        if self.window < 1 or self.ngram < 3 or self.pool < 1:
            raise ValueError(
                "Lookahead needs window >= 1, ngram >= 3 and pool >= 1, "
                f"got {self.window}, {self.ngram} and {self.pool}"
            )


class LookaheadCache(NgramCache):
    """The cache of `NgramCache`, with a window and a pool for each sequence.

    window: LongTensor[B, W, N - 1], guess (i, l) at [i, l], the root at [0, 0]; -1 for missing guesses
    pool: LongTensor[B, P, N], from the oldest n-gram to the latest; -1 for empty entries
    """

    def __init__(self, batch: int, rows: int, options: Lookahead, device: torch.device):
        super().__init__(batch, rows, options.ngram - 1, device)
        self.window = torch.full((batch, options.window, options.ngram - 1), -1, device=device)
        self.pool = torch.full((batch, options.pool, options.ngram), -1, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + self.window.nbytes + self.pool.nbytes

    def begin(self, lengths: Tensor) -> None:
        """Clear window and pool, so that a sequence does not depend on earlier ones."""
        self.window.fill_(-1)
        self.pool.fill_(-1)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.window = self.window[:slots]
        view.pool = self.pool[:slots]
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [*super().remembered(), self.window, self.pool]


class LookaheadDraft(LookupDraft):
    """The `Draft` of `Lookahead`: proposes what followed the last tokens in its pool and in the sequence.

    columns: LongTensor[W], the indices of the window's columns
    depths, ends: LongTensor[W (N - 1)], for each node of the window in depth-first order, with the root first: its
        depth, and the number after its last descendant
    """

    can_rest = False  # it needs what the target computes for its window in each step

    def __init__(self, options: Lookahead, vocab_size: int, device: torch.device):
        super().__init__(PromptLookup(options.ngram - 1), vocab_size, device)
        self._lookahead = options
        columns = options.window
        levels = options.ngram - 1
        self.extra_nodes = columns * levels - 1
        self.columns = torch.arange(columns, device=device)
        self.depths = (self.columns[:, None] + torch.arange(levels, device=device)).flatten()
        self.ends = ((self.columns[:, None] + 1) * levels).repeat(1, levels)
        self.ends[:, 0] = columns * levels  # the descendants of (i, 0) are its own column and all columns after it
        self.ends = self.ends.flatten()

    def new_cache(self, batch: int, rows: int) -> LookaheadCache:
        """An empty cache of `rows` rows for each of `batch` sequences."""
        return LookaheadCache(batch, rows, self._lookahead, self.columns.device)

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """fp32 logits [B, n, V] after each node, in plain PyTorch, as there is no kernel for pools."""
        nodes = Appended(feed.tokens, feed.cache_rows, feed.parent_rows)
        write_rows(nodes, cache.keys, cache.values, is_chain=feed.news > 0)
        sequence = torch.arange(len(feed.tokens), device=feed.tokens.device)[:, None]
        context = cache.values[sequence, 0, feed.cache_rows]
        return logprobs_by_places(context, self.places(feed, cache), 1, self.vocab_size)

    def places(self, feed: Feed, cache: Any) -> Places:
        """The tokens that can be proposed after a feed's nodes: n-grams of the pool, then tokens up to the root."""
        rows = feed.visible_rows
        in_text = torch.arange(rows, device=feed.tokens.device) <= feed.prefix_lengths[:, None]
        pool = cache.pool
        length = pool.shape[2] - 1
        before = pad(pool[..., :-1], (length - 1, 0), value=-1).unfold(2, length, 1)  # [B, P, N - 1, N - 1]
        tokens = pool[..., 1:].flatten(1)
        return Places(
            before=torch.cat([before.flatten(1, 2), cache.keys[:, 0, :rows]], 1),
            tokens=torch.cat([tokens, cache.values[:, 0, :rows, -1]], 1),
            counts=torch.cat([tokens >= 0, in_text], 1),
        )

    def changes(self, cache: LookaheadCache) -> list[LogitChange]:
        """The change that adds the window to the target's pass."""
        return [_Window(self, cache)]

    @property
    def why_not_measured(self) -> str:
        """Why its acceptance cannot be measured token by token, in words."""
        return "the n-grams of a lookahead come of a decoder's steps"


class _Window(LogitChange):
    """Adds a cache's window of guesses to each pass of the target, and the n-grams that they complete to its pool."""

    def __init__(self, draft: LookaheadDraft, cache: LookaheadCache):
        self._draft = draft
        self._cache = cache

    def before_scoring(self, inputs: Any, state: Any) -> Any:
        """The nodes for the target's pass: `inputs`, and after them the window as further subtrees of the root.

        A missing guess is replaced by a token of the sequence, a fixed number of positions before the guess.
        """
        window = self._cache.window
        depths = self._draft.depths
        lengths = state.lengths[:, None]
        back = window.shape[1] + window.shape[2] - 1  # so that the last guess gets the token before the root
        guesses = self._cache.values[:, 0, :, -1].gather(1, (lengths + depths - back).clamp(min=0)).view_as(window)
        window.copy_(window.where(window >= 0, guesses))
        window[:, 0, 0] = state.root
        nodes = inputs.subtree_end.shape[-1]
        ends = inputs.subtree_end
        indices = torch.arange(nodes, nodes + len(depths) - 1, device=ends.device)
        window_ends = (self._draft.ends + nodes - 1).expand(*ends.shape[:-1], -1)  # for the root and the guesses
        return type(inputs)(
            tokens=torch.cat([inputs.tokens, window.flatten(1)[:, 1:]], 1),
            positions=torch.cat([inputs.positions, lengths + depths[1:]], 1),
            cache_rows=torch.cat([inputs.cache_rows, lengths + indices], 1),
            subtree_end=torch.cat([window_ends[..., :1], ends[..., 1:], window_ends[..., 1:]], -1),
        )

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The logits after the tree's nodes, without the window's; from these the tokens that end n-grams are kept."""
        nodes = drafted.tokens.shape[1]
        levels = self._cache.window.shape[2]
        newest = logits[:, nodes + levels - 2 :: levels].argmax(-1)  # [B, W]
        self._ngrams = torch.cat([self._cache.window, newest[..., None]], -1)  # [B, W, N]
        return logits[:, :nodes]

    def after_verifying(self, verified: Verified) -> None:
        """Add the n-grams to the pool, and move the window by the accepted tokens."""
        window = self._cache.window
        pool = self._cache.pool
        columns = self._draft.columns
        # Column 0 comes last, so it counts as the latest: most of the tokens before it are certain.
        pool.copy_(torch.cat([pool, self._ngrams.flip(1)], 1)[:, -pool.shape[1] :])
        source = verified.length[:, None] + columns  # [B, W]
        moved = self._ngrams[..., 1:].take_along_dim(source.clamp(max=len(columns) - 1)[..., None], 1)
        window.copy_(moved.where((source < len(columns))[..., None], -1))


@as_draft.register
def _(given: Lookahead, target: Forward, model: PreTrainedModel) -> Draft:
    return LookaheadDraft(given, target.vocab_size, target.device)
