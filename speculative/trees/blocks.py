"""The work of block-sparse attention to a tree: how many blocks of its mask have a true entry."""

import numpy as np

from heavypath.speculative.trees.tree import TokenTree


def occupied_blocks(tree: TokenTree, block_size: int) -> int:
    """The number of block_size x block_size blocks of tree.mask() with a true entry."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    block_size, nodes = min(block_size, len(tree)), np.arange(len(tree))
    block = nodes // block_size
    bit = np.uint64(1) << (block % 64).astype(np.uint64)
    occupied = 0
    for word in range(int(block[-1]) // 64 + 1):  # 64 columns of blocks at a time, as the bits of an integer
        columns = bit * (block // 64 == word)
        columns |= columns[0]  # every node sees the root
        above = np.maximum(tree.arrays()[0], 0)
        while above.any():  # the ancestors 1, 2, 4, ... edges above
            columns |= columns[above]
            above = above[above]
        rows = np.bitwise_or.reduceat(columns, np.arange(0, len(tree), block_size))
        occupied += int(np.bitwise_count(rows).sum())
    return occupied
