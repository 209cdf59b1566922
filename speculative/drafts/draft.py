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
`heavypath.speculative.examples.own_draft` is a program that runs.
"""

from typing import Any, Protocol

from torch import Tensor

from heavypath.speculative.drafts.feed import Feed
from heavypath.speculative.models.caches import RowCache


class Draft(Protocol):
    """Gives the logits of the token after each node of a growing tree.

    For each step of the decoder a draft is called once for each level of the tree: first with the root (and the token
    before it), then with the nodes drafted below it, and so on. Tokens are drawn from the logits that it returns, and
    verified by the same numbers.

    What a draft remembers of a text belongs into its cache, which has a row for each token. When the target has
    accepted some of the drafted nodes, the decoder moves their rows behind the text's, and when a sequence has ended it
    moves those of others into its place. State anywhere else is not moved.

    On a GPU all that a call does is captured in a CUDA graph, after one call without: so a call's shapes depend on
    those of its arguments alone, and it must not read tensors on the host (no .item(), .cpu(), .tolist(), nor a Python
    `if` on a tensor). With `SpeculativeDecoder(..., cuda_graphs=False)`, and on a CPU, it may.
    """

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and drafted nodes.

        A `RowCache` holds two tensors, keys and values, of one shape [batch, heads, rows, D] and one dtype, on the
        target's device. What their numbers mean is up to the draft; heads may be 1, and D may be 0.
        """
        ...

    def prefill(self, tokens: Tensor, cache: Any) -> None:
        """Take in the prompts without their last tokens, LongTensor[B, T]: token t of each belongs to row t.

        Shorter prompts are padded on the right with tokens that mean nothing. Their rows are overwritten before the
        text gets there. It is not called for prompts of one token.

        cache: what `new_cache` returned, or a view of its first B sequences
        """
        ...

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The logits after each node of `feed`, fp32 [B, n, V], with V the size of the target's vocabulary.

        -inf is for tokens that the draft does not propose; a row of nothing else proposes no token. NaN and +inf are
        refused. The draft's temperature and filters are applied to what is returned.
        """
        ...
