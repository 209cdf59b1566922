"""The published methods, as what they differ in: the tree's shape, how children are drawn, how they are verified."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.noise_rows import MAX_NODES
from heavypath.speculative.decoding.slot_values import DEFAULT_CONFIDENCE, Confidence
from heavypath.speculative.trees.planning import Acceptance, sequoia_tree
from heavypath.speculative.trees.tree import TokenTree

# Unconditional acceptance of children 0, 1, ... of the demo pair at temperature 0.6, drawn without replacement.
DEFAULT_ACCEPTANCE = (0.5688, 0.1168, 0.0582, 0.0373, 0.026, 0.0199, 0.0157, 0.0127)


@dataclass(frozen=True)
class Method:
    """One row of the table below.

    draw:   children are successive draws without replacement, independent draws, or the draft's most likely tokens
    verify: `method` of heavypath.kernels.verification.verify_tree
    shape:  a tree of at most `size` nodes, or how trees of that size grow; its other parameters are the options of
            SpeculativeDecoder that the method has
    fill:   draw uniformly once the draft's support is used up
    """

    draw: Literal["without_replacement", "with_replacement", "top_k"]
    verify: Literal["without_replacement", "with_replacement", "kseq", "race", "target_sample"]
    shape: Callable[..., TokenTree | Growth]
    fill: bool = False

    def kind(self, temperature: float) -> tuple[str, str, bool]:
        """How children are drawn and verified at a temperature, and whether they are sequences drawn apart."""
        apart = self.draw == "with_replacement"
        return ("top_k", "greedy", apart) if temperature == 0 else (self.draw, self.verify, apart)

    @property
    def options(self) -> tuple[str, ...]:
        """What `shape` takes besides the size."""
        return tuple(inspect.signature(self.shape).parameters)[1:]


def _root(size: int) -> TokenTree:
    return TokenTree([-1])


def _chain(size: int, threshold: float = 0.0) -> TokenTree | Growth:
    """One that may end early grows, a node a level."""
    return Growth("slot", size, 1, size - 1, threshold) if threshold > 0 else TokenTree.chain(size - 1)


def _sequences(size: int, width: int = 3) -> TokenTree:
    width = min(width, size - 1)
    return TokenTree.independent(width, max(1, (size - 1) // width))


def _constant(size: int, width: int = 2) -> TokenTree:
    """The deepest tree of constant branching that has at most `size` nodes."""
    nodes, level, depth = 1, width, 0
    while nodes + level <= size:
        nodes, level, depth = nodes + level, level * width, depth + 1
    return TokenTree.k_ary(width, depth) if depth else TokenTree.k_ary(size - 1, 1)


def _depth(size: int) -> int:
    """Levels unless asked for: doubling a tree pays for one more, each of which costs a draft forward."""
    return min(size - 1, max(2, size.bit_length() - 1))


def _planned(size: int, acceptance: Acceptance = DEFAULT_ACCEPTANCE, max_depth: int | None = None) -> TokenTree:
    rates = torch.as_tensor(acceptance)
    children, levels, possible = rates.shape[-1], _depth(size) if max_depth is None else max_depth, 1
    for depth in range(1, (levels if rates.dim() == 1 else min(levels, len(rates))) + 1):
        possible = min(size, possible + children**depth)
    return sequoia_tree(acceptance, possible, levels)


def _beam(size: int, width: int | None = None, max_depth: int | None = None) -> Growth:
    depth = _depth(size) if max_depth is None else max_depth
    width = max(1, (size - 1) // max(1, depth)) if width is None else width
    depth = min(depth, max(1, (size - 1) // max(1, width)))
    return Growth("beam", min(size, 1 + width * depth), width, depth)


def _by_slots(
    size: int,
    width: int | None = None,
    max_depth: int | None = None,
    threshold: float = 0.0,
    confidence: Confidence | Literal["draft"] = DEFAULT_CONFIDENCE,
) -> Growth:
    if confidence != "draft" and not isinstance(confidence, Confidence):
        raise ValueError(f"confidence must be a Confidence or 'draft', got {confidence!r}")
    known = confidence if isinstance(confidence, Confidence) else None
    return _grown("slot", size, width, max_depth, threshold, known)


def _by_nodes(size: int, width: int | None = None, max_depth: int | None = None, threshold: float = 0.0) -> Growth:
    return _grown("node", size, width, max_depth, threshold, None)


def _grown(
    by: Literal["slot", "node"],
    size: int,
    width: int | None,
    max_depth: int | None,
    threshold: float,
    confidence: Confidence | None,
) -> Growth:
    """A level may have half of the nodes, unless asked for: wider ones are rare, and cost the draft's time."""
    depth = _depth(size) if max_depth is None else max_depth
    if width is None:
        half, fits = max(-(-size // 2), -(-(size - 1) // max(1, depth))), (MAX_NODES - 1) // max(1, depth)
        width = min(half, fits)
    return Growth(by, min(size, 1 + width * depth), width, depth, threshold, confidence)


METHODS = {
    # Plain decoding: a tree of one node. Its samples are those of a race without any drafts.
    "autoregressive": Method("without_replacement", "race", _root),
    # Leviathan et al. 2023, Chen et al. 2023
    "chain": Method("without_replacement", "without_replacement", _chain),
    # Miao et al. 2023: independent sequences, multi-step speculative sampling
    "specinfer": Method("with_replacement", "with_replacement", _sequences),
    # Sun et al. 2023: independent sequences, K-SEQ
    "spectr": Method("with_replacement", "kseq", _sequences),
    # Chen et al. 2024
    "sequoia": Method("without_replacement", "without_replacement", _planned, fill=True),
    # Xiong et al. 2024
    "dyspec": Method("without_replacement", "without_replacement", _by_slots),
    # Jeon et al. 2024: constant branching
    "rsd-c": Method("without_replacement", "without_replacement", _constant),
    # Jeon et al. 2024: stochastic beam search
    "rsd-s": Method("without_replacement", "without_replacement", _beam),
    # exponential races: the text of "autoregressive" under the same seed
    "ersd": Method("without_replacement", "race", _planned),
    # Li et al. 2024: expand where the draft is sure, keep the likeliest nodes; the draft's likeliest tokens
    "eagle-2": Method("top_k", "target_sample", _by_nodes),
    # the draft's most likely tokens against a sample of the target
    "top-k": Method("top_k", "target_sample", _planned),
    # Miao et al. 2023, naive sampling: drafted samples against an independent sample of the target
    "naive": Method("without_replacement", "target_sample", _planned),
}
