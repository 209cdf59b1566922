"""A drafted tree inside a kernel: its nodes and their ranks, which contexts are equal, coins, and a node's path."""

# A type checker does not understand Triton kernels.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import triton
import triton.language as tl

from heavypath.kernels.noise import Stream, philox_words, seed_words

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))


@triton.jit
def nodes_of(tokens_ptr, parents_ptr, index, N, V):
    """A tree's parents and tokens, -1 for places behind its N nodes, and which nodes were drafted and are there."""
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    token = tl.load(tokens_ptr + index, mask=index < N, other=-1).to(tl.int32)
    return parent, token, (parent >= 0) & (parent < index) & (token >= 0) & (token < V)


@triton.jit
def ranks_of(parent, index, parents_ptr, ranks_ptr, begin, N, HAS_RANKS: tl.constexpr):
    """Each node's place among its siblings: from ranks_ptr + begin on if HAS_RANKS, else they are in index order."""
    if HAS_RANKS:
        rank = tl.load(ranks_ptr + begin + index, mask=index < N, other=0).to(tl.int32)
    else:
        rank = tl.zeros_like(index)
        for other in range(N):
            rank += tl.where((parent == tl.load(parents_ptr + other)) & (index > other), 1, 0)
    return rank


@triton.jit
def equal_contexts(parent, token, node, parents_ptr, tokens_ptr):
    """Whether the tokens on the path from the root to each `parent` are those on the path to `node`."""
    same = parent == node
    equal = parent >= 0
    while node > 0:
        there = equal & (parent > 0)
        their = tl.load(tokens_ptr + parent, mask=there, other=-1)
        equal = same | (there & (their == tl.load(tokens_ptr + node)) & (their >= 0))
        parent = tl.load(parents_ptr + parent, mask=there, other=-1).to(tl.int32)
        node = tl.load(parents_ptr + node).to(tl.int32)
    return equal & (parent == node)


@triton.jit
def coins_of(rank, row, seed_ptr, seed_low, seed_high):
    """The coin of each child, from its rank and the noise row of the node above it."""
    c0, c1, c2 = (rank // 4).to(tl.uint32), row.to(tl.uint32), (row >> 32).to(tl.uint32)
    seed_low, seed_high = seed_words(seed_ptr, seed_low, seed_high)
    w0, w1, w2, w3 = philox_words(seed_low, seed_high, c0, c1, c2, tl.full([], _ACCEPT, tl.uint32))
    word = rank % 4
    word = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return (word >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def store_path(path_ptr, length_ptr, parents_ptr, last, length, max_depth, PATH: tl.constexpr):
    """Store the path of so many edges to node `last`, and its length. PATH: max_depth + 1, up to a power of two."""
    place = tl.arange(0, PATH)
    path = tl.where(place == 0, 0, -1)
    node, position = last, length
    while position > 0:
        path = tl.where(place == position, node, path)
        node = tl.load(parents_ptr + node).to(tl.int32)
        position -= 1
    tl.store(path_ptr + place, path, mask=place <= max_depth)
    tl.store(length_ptr, length)
