"""Checks of the options that say how trees are shaped, where any are given."""

from collections.abc import Mapping
from itertools import accumulate
from numbers import Integral, Real
from operator import mul
from typing import Any

from heavypath.kernels.attention.kernel import MAX_NODES
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a number that is none, or that would make a tree without end."""
    for name in ("width", "max_depth"):
        number = options.get(name, 1)
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"{name} must be an integer, got {number!r}")
    if options.get("width", 1) < 1:
        raise ValueError(f"width must be at least 1, got {options['width']}")
    if not isinstance(options.get("threshold", 0.0), Real):
        raise TypeError(f"threshold must be a number in [0, 1], got {options['threshold']!r}")
    branching = [*options.get("branching", ())]
    if all(isinstance(children, Integral) for children in branching):
        nodes = sum(accumulate(map(int, branching), mul, initial=1))
        if nodes > MAX_NODES:  # before it is made
            raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {nodes}")


def check_given(method: str, usual: TokenTree | Growth, tree: object, others: list[str]) -> None:
    """Raise TypeError or ValueError if a method cannot have this tree, or other options say something about it.

    usual: a tree of the method
    """
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a TokenTree, got {type(tree).__name__}")
    if others:
        raise ValueError(f"tree says all of the tree's shape; leave out {', '.join(others)}")
    if isinstance(usual, Growth):
        raise ValueError(f"method {method!r} grows its trees; give it tree_size, not tree")
    if len(usual) == 1 < len(tree):
        raise ValueError(f"method {method!r} drafts nothing, got a tree of {len(tree)} nodes")
