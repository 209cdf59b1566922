"""`Draft`: what the decoder asks of whatever proposes tokens. One of your own is an object with these three methods.

    class Bigrams:                                          # what followed each token in some text
        def __init__(self, logits):                         # [V, V], -inf for tokens that never followed
            self.logits = logits

        def new_cache(self, batch, rows):                   # nothing is remembered: rows without columns
            nothing = self.logits.new_empty(batch, 1, rows, 0)
            return RowCache(nothing, nothing)

        def prefill(self, tokens, cache):
            pass

        def __call__(self, feed, cache):
            return self.logits[feed.tokens]                 # [B, n, V]

    SpeculativeDecoder(target, Bigrams(logits))

The text follows the target's law for any logits: the draft decides how many tokens a step accepts, and nothing else.
`docs/examples/own_draft.py` of the repository is a program that runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Taps
from heavypath.speculative.trees.tails import SMALL_MODEL, Usual

Drafting = Any  # what has weights to draft with: a `Forward`, or a trained head, which has its names


@dataclass(frozen=True)
class Feed:
    """n nodes of each sequence's tree, given to a draft at once; B sequences. Its tensors are to be read only.

    A step's first feed has n = 2: the last committed token, which is the tree's root, and the token before it, whose
    row may not have been written yet. Every later feed has the nodes of one level. In a text of one token the root is
    given twice.

    tokens, positions: LongTensor[B, n]; a position is a token's place in its text, without padding
    cache_rows:     LongTensor[B, n], where the draft's cache keeps each node: to be written by the draft
    parent_rows:    LongTensor[B, n], the cache rows of the tokens before them; -1 before the text
    prefix_lengths: LongTensor[B], cache rows before the tree: they hold the text before the root
    visible_rows:   cache rows that hold the longest prefix and its tree
    ancestor_mask:  bool [n, M] or [B, n, M], which of the tree's first M nodes each node sees, itself among them; the
                    tree's node m has cache row prefix_lengths + m
    news:           of a step's first feed, how many of the text's last tokens may be new since the last step, at most,
                    the root among them; 0 of later ones
    levels:         of a step's first feed, how many the step drafts
    level:          of the nodes: 0 for the root's
    branches:       of a level below the root of a static tree, LongTensor[n]: the draw number of the root's child above
                    each node, which is itself on the first level; else None
    drafted:        of a first feed, LongTensor[B]: how many of the text's last tokens are to count as drafted nodes,
                    whose features a head does not know; None for 0. Acceptance is measured so, at any depth of a tree
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
    """Gives the logits of the token after each node of a growing tree: the three methods, which each draft has.

    An object of yours need not be of this class, and only its three methods are called. The package's own drafts also
    set the attributes that follow the methods, where they differ from the defaults here.

    For each step of the decoder a draft is called once for each level of the tree. The first call has the root (and the
    token before it), the next one the nodes drafted below it, and so on. Tokens are drawn from the logits that it
    returns, and verified by the same numbers.

    A draft remembers a text in its cache, which has a row for each token. When the target has accepted some of the
    drafted nodes, the decoder moves their rows after the text's. When a sequence has ended, it moves those of others
    into its place. State anywhere else is not moved.

    On a GPU all that a call does is captured in a CUDA graph, after one call without a graph. So the shapes in a call
    depend on those of its arguments alone. It must not read tensors on the host: no .item(), .cpu(), .tolist(), nor a
    Python `if` on a tensor. With `SpeculativeDecoder(..., cuda_graphs=False)`, and on a CPU, it may.

    name:     for messages, of a draft without a model
    levels:   how many levels of a tree it can draft; None for any number
    laws:     how many distributions it gives after the root of a static tree, among which the children are dealt
    extra_nodes: how many nodes its `changes` add to each pass of the target, at most
    forward, keeps_state: its forward pass, None without weights; whether a recurrent state says what it has read
    reads_target: whether its cache is filled by passes of the target, see `taps`
    overlap:  None where `prefill` takes a text at once. Else it takes pieces, with `starts` as `Forward.prefill` does,
              and this many tokens are the last ones of a piece and the first ones of the next
    can_rest: whether it may leave steps out, and read the text written meanwhile later, by `prefill` with `starts`
    foreign:  the names of code in it that is not the package's
    """

    name: str = "draft"
    levels: int | None = None
    laws: int = 1
    extra_nodes: int = 0
    forward: Any = None
    reads_target: bool = False
    overlap: int | None = None
    keeps_state: bool = False
    can_rest: bool = False
    foreign: tuple[str, ...] = ()

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and drafted nodes.

        A `RowCache` holds two tensors, keys and values, of one shape [batch, heads, rows, D] and one dtype, on the
        target's device. What their numbers mean is up to the draft; heads may be 1, and D may be 0.
        """
        raise NotImplementedError

    def prefill(self, tokens: Tensor, cache: Any) -> None:
        """Take in the prompts without their last tokens, LongTensor[B, T]: token t of each belongs to row t.

        Shorter prompts are padded on the right with tokens that mean nothing. Their rows are overwritten before the
        text gets there. It is not called for prompts of one token.

        cache: what `new_cache` returned, or a view of its first B sequences
        """
        raise NotImplementedError

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The logits after each node of `feed`, fp32 [B, n, V], with V the size of the target's vocabulary.

        -inf is for tokens that the draft does not propose; a row of nothing else proposes no token. NaN and +inf are
        refused. The draft's temperature and filters are applied to what is returned.
        """
        raise NotImplementedError

    def parts(self, cache: Any) -> "list[tuple[Draft, Any]]":
        """All drafts that take in a text by themselves, with their caches: of one made of drafts it and its parts."""
        return [(self, cache)]

    @property
    def leaves(self) -> "list[Draft]":
        """The drafts that it is made of, down to those that are made of none; itself if it is one of these."""
        return [self]

    def taps(self, cache: Any) -> Taps | None:
        """The hidden states of the target's passes that it reads; None for nothing."""
        return None

    def rules(self, rules: Any) -> Any:
        """The `Rules` of steps that it drafts for: the method's, or others that verify by a verifier that it brings.

        A draft of several `laws` is one for which the verification must know them.
        """
        return rules

    def changes(self, cache: Any) -> Sequence[Any]:
        """Changes of logits, each a `LogitChange`, that it brings to each step that drafts."""
        return ()

    def learn(self, prompts: Tensor, lengths: Tensor, new: Tensor, counts: Tensor) -> None:
        """Take in texts that have ended: `lengths` of prompts' tokens LongTensor[B, T], `counts` of new ones [B, M]."""

    def usual_acceptance(self, temperature: float) -> Usual:
        """How often its tokens are accepted where the target is sampled so: what default trees assume of it.

        It may look at the temperature alone: a text under a seed depends on the tree.
        """
        return SMALL_MODEL

    def unsure_rows(self, levels: int) -> int:
        """The most of a text's last rows that may not have been computed, after steps that draft so many levels.

        It may lack the last root, below which nothing was drafted, and an accepted leaf before it.
        """
        return 2

    @property
    def models(self) -> list[Drafting]:
        """All that drafts with weights of its own."""
        return [leaf.forward for leaf in self.leaves if leaf.forward is not None]

    @property
    def positions(self) -> float:
        """The tokens of a text up to which it proposes any, those of the model that has most; infinity for all texts.

        After a token with a position of so many or more, a model's logits are -inf throughout.
        """
        return max(math.inf if leaf.forward is None else leaf.forward.max_positions for leaf in self.leaves)

    def proposes_all(self, length: int) -> bool:
        """True if it has logits for all tokens, wherever in texts of at most so many."""
        return self.proposes_every_token and all(length <= model.max_positions for model in self.models)

    @property
    def proposes_every_token(self) -> bool:
        """True if it has logits for all tokens, as models have: then more may be drawn than it finds likely."""
        return all(leaf.forward is not None for leaf in self.leaves)

    @property
    def why_not_measured(self) -> str:
        """The reason why its acceptance cannot be counted token by token, in words; "" where it can."""
        return next((leaf.why_not_measured for leaf in self.leaves if leaf is not self and leaf.why_not_measured), "")


NO_DRAFT = Draft()  # in the place of none: it has no models, and no limits


class Draftable:
    """A draft as a user gives it that is neither a model nor a `Draft`: settings, or a module, that make one.

    `kinds.as_draft` has a function for each of its classes, in the file of the draft that it makes.
    """
