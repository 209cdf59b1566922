"""The published methods, as what they differ in: the tree's shape, how children are drawn, how they are verified."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from heavypath.speculative.planning import greedy_tree
from heavypath.speculative.tree import TokenTree

MAX_DEPTH = 6  # edges: each level costs a draft forward, and few paths go deeper


@dataclass(frozen=True)
class Method:
    """One row of the table below.

    draw:   children are successive draws without replacement, independent draws, or the draft's most likely tokens
    verify: `method` of heavypath.kernels.verification.verify_tree
    shape:  the tree of at most `size` nodes for an acceptance vector
    fill:   draw uniformly once the draft's support is used up
    """

    draw: Literal["without_replacement", "with_replacement", "top_k"]
    verify: Literal["without_replacement", "with_replacement", "race", "target_sample"]
    shape: Callable[[int, Sequence[float]], TokenTree]
    fill: bool = False


def _planned(size: int, acceptance: Sequence[float]) -> TokenTree:
    children = len(acceptance)
    largest = len(TokenTree.k_ary(children, MAX_DEPTH)) if children < 3 else size
    return greedy_tree(acceptance, min(size, largest), MAX_DEPTH)


def _three_chains(size: int, _: Sequence[float]) -> TokenTree:
    return TokenTree.independent(min(3, size - 1), max(1, (size - 1) // 3))


def _binary(size: int, _: Sequence[float]) -> TokenTree:
    return TokenTree.k_ary(2, (size + 1).bit_length() - 2) if size > 2 else TokenTree.chain(1)


METHODS = {
    # Plain decoding: a tree of one node. Its samples are those of a race without any drafts.
    "autoregressive": Method("without_replacement", "race", lambda size, _: TokenTree([-1])),
    # Leviathan et al. 2023, Chen et al. 2023
    "chain": Method("without_replacement", "without_replacement", lambda size, _: TokenTree.chain(size - 1)),
    # Miao et al. 2023: independent sequences, multi-step speculative sampling
    "specinfer": Method("with_replacement", "with_replacement", _three_chains),
    # Jeon et al. 2024: constant branching
    "rsd-c": Method("without_replacement", "without_replacement", _binary),
    # Chen et al. 2024
    "sequoia": Method("without_replacement", "without_replacement", _planned, fill=True),
    # exponential races: the text of "autoregressive" under the same seed
    "ersd": Method("without_replacement", "race", _planned),
    # the draft's most likely tokens against a sample of the target
    "top-k": Method("top_k", "target_sample", _planned),
    # Miao et al. 2023, naive sampling: drafted samples against an independent sample of the target
    "naive": Method("without_replacement", "target_sample", _planned),
}
