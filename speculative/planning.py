"""Choose the shape of a static tree from measured acceptance.

With a[j] the unconditional probability that child j of an accepted node is the one accepted, a path of child indices
(c_1, c_2, ...) is accepted with probability a[c_1] a[c_2] ..., and a tree yields on average

    expected tokens = 1 + sum over nodes below the root of the product of a along the node's path

(Sequoia, Chen et al. 2024, section 3.1; depth-dependent a[d, j] for the node at depth d + 1). Where acceptance falls
with the child index, taking the most probable node next is optimal at every size (ERSD's algorithm 3, Tunstall coding):
a node is never more probable than its parent or its elder sibling, so the tree stays whole.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from heavypath.speculative.tree import TokenTree


def _acceptance_matrix(acceptance: Sequence | Tensor) -> Tensor:
    """Checked fp64 [depth or 1, child]."""
    matrix = torch.as_tensor(acceptance, dtype=torch.float64)
    if matrix.dim() not in (1, 2) or matrix.numel() == 0:
        raise ValueError(f"acceptance must be [child] or [depth, child], not empty, got shape {[*matrix.shape]}")
    matrix = matrix.reshape(-1, matrix.shape[-1])
    if not ((matrix >= 0) & (matrix <= 1)).all() or (matrix.sum(-1) > 1 + 1e-6).any():
        raise ValueError(f"acceptance must lie in [0, 1] with rows that sum to at most 1, got {matrix.tolist()}")
    return matrix


def expected_tokens(tree: TokenTree, acceptance: Sequence | Tensor) -> float:
    """Tokens a step yields on average: accepted nodes and the one after them.

    acceptance: [child], or [depth, child] where row d is for nodes at depth d + 1; children beyond it count 0, and so
    do levels beyond a 2-D one's rows.
    """
    matrix = _acceptance_matrix(acceptance)
    per_depth = torch.as_tensor(acceptance).dim() == 2
    probability = [1.0] * len(tree)
    parents, ranks, depths = tree.parents.tolist(), tree.ranks.tolist(), tree.depths.tolist()
    for node in range(1, len(tree)):
        level = depths[node] - 1 if per_depth else 0
        known = level < matrix.shape[0] and ranks[node] < matrix.shape[1]
        probability[node] = probability[parents[node]] * (float(matrix[level, ranks[node]]) if known else 0.0)
    return sum(probability)


def greedy_tree(acceptance: Sequence | Tensor, size: int, max_depth: int | None = None) -> TokenTree:
    """The tree of `size` nodes, root included, that yields most tokens, by a priority queue in O(size log size).

    acceptance: [child] or [depth, child], entries in [0, 1], falling with the child index; its length bounds the
    branching, and a 2-D one's rows the depth. max_depth: edges. The result is in heavy-path order.

    Raises ValueError where acceptance rises with the child index, or where no such tree has `size` nodes.
    """
    matrix = _acceptance_matrix(acceptance)
    if (matrix.diff(dim=-1) > 0).any():
        raise ValueError(f"greedy_tree needs acceptance that falls with the child index, got {matrix.tolist()}")
    if torch.as_tensor(acceptance).dim() == 2:
        max_depth = min(len(matrix), len(matrix) if max_depth is None else max_depth)
    rows = matrix.tolist()
    parents, ranks, depths = [-1], [0], [0]
    # (-probability, depth, parent, rank, parent's probability): ties go to the shallower node, then the earlier parent.
    queue: list[tuple[float, int, int, int, float]] = []

    def offer(parent: int, rank: int, parent_probability: float) -> None:
        depth = depths[parent] + 1
        if rank < matrix.shape[1] and (max_depth is None or depth <= max_depth):
            row = rows[depth - 1 if len(rows) > 1 else 0]
            heapq.heappush(queue, (-parent_probability * row[rank], depth, parent, rank, parent_probability))

    offer(0, 0, 1.0)
    while len(parents) < size:
        if not queue:
            raise ValueError(
                f"at most {len(parents)} nodes fit {matrix.shape[1]} children and depth {max_depth}, not {size}"
            )
        probability, depth, parent, rank, parent_probability = heapq.heappop(queue)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth)
        offer(parent, rank + 1, parent_probability)
        offer(len(parents) - 1, 0, -probability)
    if size < 1:
        raise ValueError(f"size counts the root and must be at least 1, got {size}")
    return TokenTree(parents, ranks).reordered("heavy_path")[0]
