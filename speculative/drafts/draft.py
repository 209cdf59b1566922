"""`Draft`: the interface between the decoder and whatever proposes tokens. Your own is an object that can be called:

    class Bigrams:                                          # what followed each token in some text
        def __init__(self, logits):                         # [V, V], -inf for tokens that never followed
            self.logits = logits

        def __call__(self, feed, cache):
            return self.logits[feed.tokens]                 # [B, n, V]

    SpeculativeDecoder(target, Bigrams(logits))

The output has the target's distribution for any logits: a draft only decides how many tokens a step accepts. A draft
that remembers its sequences has `new_cache` and `prefill`, too. `docs/guides/extend.md` in the repository has both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Taps
from heavypath.speculative.trees.tails import SMALL_MODEL, Usual

Drafting = Any  # a `Forward`, or a trained head with the same attributes


@dataclass(frozen=True)
class Feed:
    """n nodes of each sequence's tree, passed to a draft together. Do not write to its tensors. B is the number of
    sequences.

    A step's first feed has n = 2: the tree's root, which is the last committed token, and the token before it, whose
    cache row may not have been written yet. Every later feed has the nodes of one level. In a sequence of one token,
    the root is given twice.

    tokens, positions: LongTensor[B, n]; a position is a token's index in its sequence, without padding
    cache_rows: LongTensor[B, n], the row of the draft's cache in which the draft must store each node
    parent_rows: LongTensor[B, n], the cache row of each node's parent; -1 for the first token of a sequence
    prefix_lengths: LongTensor[B], number of cache rows before the tree; they hold the tokens before the root
    visible_rows: number of cache rows that hold the longest prefix and its tree
    ancestor_mask: bool [n, M] or [B, n, M]: which of the tree's first M nodes each node attends to, itself included.
        The tree's node m has cache row prefix_lengths + m
    news: in a step's first feed, an upper bound for how many of the last tokens are new since the last step, root
        included; 0 in later feeds
    levels: in a step's first feed, how many levels the step drafts
    level: the nodes' level: 0 for the root
    branches: below the root of a static tree, LongTensor[n]: the draw number of the root's child that is an ancestor of
        each node, or the node itself; else None
    drafted: in a first feed, LongTensor[B]: how many of the last tokens count as drafted nodes, whose target features a
        head must not use; None for 0. Acceptance is measured with this, at any depth of a tree
    """

    tokens: Tensor
    positions: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    prefix_lengths: Tensor
    visible_rows: int
    ancestor_mask: Tensor
    news: int = 0
    levels: int = 0
    drafted: Tensor | None = None
    level: int = 0
    branches: Tensor | None = None


class Draft:
    """Base class of drafts: returns the logits of the next token after each node of a growing tree.

    Your own draft does not have to be of this class, unless it is an nn.Module without a cache. Of a user's draft only
    __call__, new_cache and prefill are called; one that remembers nothing has neither of the last two. The package's
    own drafts also override the attributes and methods that follow, where the defaults do not fit.

    In each step a draft is called once for each level of the tree. The first call has the root (and the token before
    it), the next one the nodes drafted below it, and so on. Tokens are drawn from the returned logits, and verified
    with the same logits.

    A draft remembers sequences in its cache, which has a row for each token. When the target has accepted some drafted
    nodes, the decoder moves their rows to the end of the sequence. When a sequence has ended, the decoder moves other
    sequences' rows into its slot. State stored anywhere else is not moved.

    On a GPU everything that a call does is captured in a CUDA graph, after one call without a graph. So shapes may
    depend only on the shapes of the arguments, and the call must not read tensors on the host: no .item(), .cpu(),
    .tolist(), and no Python `if` on a tensor. On a CPU, and with `SpeculativeDecoder(..., cuda_graphs=False)`, it may.

    name: for messages, if the draft has no model
    levels: how many levels of a tree it can draft; None for any number
    root_distributions: how many the draft has after the root of a static tree, whose children are drawn from them in
        turn
    extra_nodes: the most nodes that its `changes` add to a pass of the target
    forward: its forward pass; None without weights
    keeps_state: whether it has a recurrent state
    reads_target: whether its cache is filled during passes of the target, see `taps`
    overlap: None if `prefill` takes whole sequences. Otherwise prefill also takes them in chunks, with `starts` as in
        `Forward.prefill`, and consecutive chunks overlap by this many tokens
    can_rest: whether it can skip steps, and later read the tokens written in them, by `prefill` with `starts`
    foreign: names of code in it that is not part of the package
    """

    name: str = "draft"
    levels: int | None = None
    root_distributions: int = 1
    extra_nodes: int = 0
    forward: Any = None
    reads_target: bool = False
    overlap: int | None = None
    keeps_state: bool = False
    can_rest: bool = False
    foreign: tuple[str, ...] = ()

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and drafted nodes.

        A `RowCache` holds two tensors, keys and values, of the same shape [batch, heads, rows, D] and dtype, on the
        target's device. What they contain is up to the draft; heads may be 1, and D may be 0.
        """
        raise NotImplementedError

    def prefill(self, tokens: Tensor, cache: Any) -> None:
        """Read the prompts without their last tokens, LongTensor[B, T]; token t of each belongs to cache row t.

        Shorter prompts are padded on the right with arbitrary tokens, whose rows are overwritten later. Prompts of one
        token are not prefilled.

        cache: what `new_cache` returned, or a view of its first B sequences
        """
        raise NotImplementedError

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The logits after each node of `feed`, fp32 [B, n, V], where V is the size of the target's vocabulary.

        -inf excludes a token; a row of only -inf proposes nothing. NaN and +inf are refused. The draft's temperature
        and filters are applied later.
        """
        raise NotImplementedError

    def parts(self, cache: Any) -> "list[tuple[Draft, Any]]":
        """The drafts that have to be prefilled, with their caches; a composite draft returns itself and its parts."""
        return [(self, cache)]

    @property
    def leaves(self) -> "list[Draft]":
        """The drafts that a composite draft consists of, recursively; else a list of the draft itself."""
        return [self]

    def taps(self, cache: Any) -> Taps | None:
        """A request for hidden states of the target's passes, which it stores in its cache; None if it reads none."""
        return None

    def rules(self, rules: Any) -> Any:
        """The `Rules` by which its steps draw and verify: the method's `rules`, or a copy with another verifier.

        A draft with several `root_distributions` needs a verifier for these, if the method's verification uses the
        draft's distributions.
        """
        return rules

    def changes(self, cache: Any) -> Sequence[Any]:
        """The `LogitChange`s that it adds to each step that drafts."""
        return ()

    def learn(self, prompts: Tensor, lengths: Tensor, new: Tensor, counts: Tensor) -> None:
        """Learn from finished sequences; here it does nothing.

        prompts, lengths: LongTensor[B, T] and LongTensor[B], the prompts, right-padded, and their numbers of tokens
        new, counts:      LongTensor[B, M] and LongTensor[B], the new tokens and their numbers
        """

    def usual_acceptance(self, temperature: float) -> Usual:
        """How often tokens of such drafts are usually accepted, as measured before; default trees are planned with it.

        It may depend only on the temperature: sampled output depends on the tree, and must be reproducible.
        """
        return SMALL_MODEL

    def unsure_rows(self, levels: int) -> int:
        """An upper bound for how many of a sequence's last cache rows may be missing after steps of `levels` levels.

        By default two: the last root, if nothing was drafted below it, and an accepted leaf before it.
        """
        return 2

    @property
    def models(self) -> list[Drafting]:
        """The forward passes of all its models."""
        return [leaf.forward for leaf in self.leaves if leaf.forward is not None]

    @property
    def positions(self) -> float:
        """The length up to which it proposes tokens: the most positions that one of its models has; infinity without a
        limit.

        A model's logits are all -inf after its last position.
        """
        most = 0.0
        for leaf in self.leaves:
            if leaf.forward is None:
                return math.inf
            most = max(most, leaf.forward.max_positions)
        return most

    def proposes_all(self, length: int) -> bool:
        """Whether it proposes every token of the vocabulary, everywhere in sequences of at most `length` tokens."""
        return self.proposes_every_token and all(length <= model.max_positions for model in self.models)

    @property
    def proposes_every_token(self) -> bool:
        """Whether it proposes every token of the vocabulary, as models do. If so, more tokens can be drawn than have
        probability.
        """
        return all(leaf.forward is not None for leaf in self.leaves)

    @property
    def why_not_measured(self) -> str:
        """Why its acceptance cannot be measured token by token, for messages; "" if it can."""
        for leaf in self.leaves:
            if leaf is not self and leaf.why_not_measured:
                return leaf.why_not_measured
        return ""


class _NoDraft(Draft):
    """Stands for no draft: it has no model, no limits, and a cache of no bytes, and is never called."""

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """A cache that keeps nothing."""
        nothing = torch.empty(batch, 0, rows, 0, device="cpu")
        return RowCache(nothing, nothing)

    def parts(self, cache: Any) -> list[tuple[Draft, Any]]:
        """An empty list, as nothing has to be prefilled."""
        return []


NO_DRAFT = _NoDraft()


class Draftable:
    """Base class of drafts as users pass them that are neither a model nor a `Draft`: settings or modules.

    `kinds.as_draft` has a function for each subclass, registered in the file of the `Draft` that it makes.
    """
