"""Checks of the options that set the shape of trees."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from torch import Tensor

from heavypath.kernels.attention.layouts import MAX_NODES
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if `width`, `max_depth`, `threshold` or `branching` is not valid.

    options: the options given, by name; others are not checked. A branching of more than MAX_NODES nodes is refused
    """
    for name in ("width", "max_depth"):
        whole(name, options.get(name, 1))
    if options.get("width", 1) < 1:
        raise ValueError(f"width must be at least 1, got {options['width']}")
    real("threshold", options.get("threshold", 0.0))
    branching = options.get("branching", ())
    is_list = isinstance(branching, Sequence | np.ndarray | Tensor) and not isinstance(branching, str)
    if not is_list or not np.ndim(branching):
        raise TypeError(f"branching must be a list of integers, children of a node by its level, got {branching!r}")
    nodes = sum(accumulate((whole("branching", children) for children in branching), mul, initial=1))
    if nodes > MAX_NODES:  # checked before the tree is built
        raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {nodes}")


def check_given(method: str, usual: TokenTree | Growth, tree: object, others: list[str]) -> None:
    """Raise TypeError or ValueError if a method cannot draft a user's tree, or if other options set its shape, too.

    usual: a tree, or a growth, that the method drafts by default
    tree: the value of the option `tree`
    others: names of the other options given that set a tree's shape
    """
    if not isinstance(tree, TokenTree):
        how = f"; for a number of nodes give tree_size={tree}" if isinstance(tree, int) else ""
        raise TypeError(f"tree must be a TokenTree, got {type(tree).__name__}{how}")
    if others:
        raise ValueError(f"tree says all of the tree's shape; leave out {', '.join(others)}")
    if isinstance(usual, Growth):
        raise ValueError(f"method {method!r} grows its trees; give it tree_size, not tree")
    if len(usual) == 1 < len(tree):
        raise ValueError(f"method {method!r} drafts nothing, got a tree of {len(tree)} nodes")
