"""A tree as lines of text, and the number of blocks in its attention mask that are not empty."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def as_text(parents: np.ndarray, children: np.ndarray, first: np.ndarray) -> str:
    """A tree as text: a line with nodes and depth, then a line for each node, siblings in draw order.

    parents: int64 [N], -1 for the root
    children: int64 [N - 1], the children of node 0, then those of node 1, ...
    first: int64 [N + 1], where the children of each node begin in `children`
    """
    own = [children[begin:end].tolist() for begin, end in pairwise(first.tolist())]
    lines = ["0"]
    stack = [(child, "") for child in reversed(own[0])]
    depth = 0
    while stack:
        node, indent = stack.pop()
        last = node == own[parents[node]][-1]
        depth = max(depth, len(indent) // 3 + 1)
        lines.append(f"{indent}{'└─' if last else '├─'} {node}")
        below = indent + ("   " if last else "│  ")
        stack.extend((child, below) for child in reversed(own[node]))
    return "\n".join([f"{len(parents)} nodes, depth {depth}", *lines])


def occupied_blocks(above: Sequence[np.ndarray], nodes: int, block_size: int) -> int:
    """The number of block_size x block_size blocks of a tree's attention mask [N, N] that have a True entry.

    above: for 1, 2, 4, ... edges, the ancestor that many edges above each node, int64 [N]; 0 if there is none
    nodes: N

    Raises ValueError for a block_size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    block_size = min(block_size, nodes)
    block = np.arange(nodes) // block_size
    bit = np.uint64(1) << (block % 64).astype(np.uint64)
    occupied = 0
    for word in range(int(block[-1]) // 64 + 1):  # 64 columns of blocks at a time, as the bits of an integer
        columns = bit * (block // 64 == word)
        columns |= columns[0]  # every node sees the root
        for each in above:
            columns |= columns[each]
        rows = np.bitwise_or.reduceat(columns, np.arange(0, nodes, block_size))
        occupied += int(np.bitwise_count(rows).sum())
    return occupied
