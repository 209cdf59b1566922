"""DySpec's algorithm 1 as published (Xiong et al. 2024): a tree grown by a heap, with a draft call for each node.

It is the reference that defines what `grow_tree` finds with one draft call for each level.
"""

import heapq
from collections.abc import Callable, Sequence


def heap_tree(
    below: Callable[[tuple[int, ...]], tuple[Sequence[float], Sequence[float]]], size: int, max_depth: int
) -> list[tuple[int, ...]]:
    """The drafted nodes as paths of ranks, in the order in which they are drawn; the root is not among them.

    below(path): `slot_values.values` of the node at `path`, asked once for each node. O(size log size) beside that.
    """
    nodes: list[tuple[int, ...]] = [()]
    worths = [1.0]
    rows: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
    queue: list[tuple[float, int, int, int]] = []  # (-value, depth, rank, parent's number)

    def offer(parent: int, rank: int, most: float) -> None:
        depth = len(nodes[parent]) + 1
        if parent not in rows and depth <= max_depth:
            rows[parent] = below(nodes[parent])
        if depth <= max_depth and rank < len(rows[parent][0]):
            heapq.heappush(queue, (-min(most, worths[parent] * rows[parent][0][rank]), depth, rank, parent))

    offer(0, 0, 1.0)
    while queue and queue[0][0] < 0 and len(nodes) < size:
        negative, _, rank, parent = heapq.heappop(queue)
        nodes.append((*nodes[parent], rank))
        worths.append(worths[parent] * rows[parent][1][rank])
        offer(parent, rank + 1, -negative)
        offer(len(nodes) - 1, 0, -negative)
    return nodes[1:]
