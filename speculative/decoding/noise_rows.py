"""The row of random numbers of each node: the layout of `rows` that drawing and verifying take.

    row  =  | sequence id, 27 bits | position of the root, 24 bits | node, 12 bits |

A row is used for one node of one step and never again: the next step has another root. So results do not depend on the
batch, and a sequence has the same noise in any batch in which it has the same id. A node's number is the one that it
has in the whole tree, so a tree that is cut near the end of a text keeps its noise.

An exponential race keys its noise by the node's own position in the text instead, with node number 0. A position has
the same noise wherever in the tree it is reached, and in plain decoding: so the text depends neither on tree nor on
draft.
"""

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.native.steps import numbered
from heavypath.speculative.trees.tree import NODE_BITS

POSITION_BITS = 24
SEQUENCE_BITS = 27
ROWS_PER_ROOT = 1 << NODE_BITS  # nodes of a tree, or slots of a growing one, are at most so many
MAX_SEQUENCES = 1 << SEQUENCE_BITS  # sequence ids are below this


def sequence_rows(sequence_ids: Tensor) -> Tensor:
    """The first noise row of each sequence, LongTensor[B]."""
    return sequence_ids << (POSITION_BITS + NODE_BITS)


def root_rows(sequence_rows: Tensor, positions: Tensor) -> Tensor:
    """The noise rows of roots at these positions, LongTensor[B]; sequence_rows: of `sequence_rows`."""
    return _below(sequence_rows, positions[:, None], ROWS_PER_ROOT)[:, 0]


def node_rows(root_rows: Tensor, nodes: Tensor) -> Tensor:
    """The noise rows LongTensor[B, n] of the nodes (or slots) LongTensor[n] or [B, n] below these roots."""
    return _below(root_rows, nodes, 1)


def race_rows(root_rows: Tensor, depths: Tensor) -> Tensor:
    """The noise rows LongTensor[B, N] of the positions that nodes of depths LongTensor[N] have, for a race."""
    return _below(root_rows, depths, ROWS_PER_ROOT)


def _below(root_rows: Tensor, places: Tensor, step: int) -> Tensor:
    if choose_impl("noise_rows", "auto", places, native=True) == "native":
        return numbered(root_rows, places, step)
    return torch.add(root_rows[:, None], places, alpha=step)
