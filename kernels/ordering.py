"""Number the nodes of trees in heavy-path order: preorder, with the child of the largest subtree first.

Then every subtree is an interval of node numbers, as `tree_attention` requires, and the mask occupies few blocks.

    above_k[v]   the ancestor 2^k edges above v, if there is one:    above_{k+1}[v] = above_k[above_k[v]]
    size[v]      v and the nodes below it:    size_0 = 1,  size_{k+1}[v] = size_k[v] + sum_{u: above_k[u] = v} size_k[u]
    offset[v]    1 + the sizes of the siblings visited before v: larger ones, and of equal ones those of lower rank
    position[v]  the sum of the offsets from v up to the root, minus 1, again found by doubling over above_k

Sorting all nodes by (parent, -size, rank) makes siblings contiguous in the order of the visit, so that one running sum
of sizes gives all offsets. This is for trees that are drafted on a GPU; `TokenTree.reordered` does the same on the
host.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import sibling_order

MAX_NODES = 2048  # limit of the kernel: parent, size, rank and node have 11 bits each in a sorting key
_FIELD = tl.constexpr(MAX_NODES)


class Ordering(NamedTuple):
    """A tree's nodes renumbered; LongTensors [N] or [B, N].

    permutation: permutation[new] = old
    parents:     in new numbers; -1 for the root and for absent nodes
    ranks:       each node's index among its siblings in draw order, as before; 0 for root and absent nodes
    subtree_end: the subtree of j is the nodes j .. subtree_end[j] - 1; for an absent node only itself
    """

    permutation: Tensor
    parents: Tensor
    ranks: Tensor
    subtree_end: Tensor


@operator
def heavy_path_order(parents: Tensor, ranks: Tensor | None = None, *, impl: str = "auto") -> Ordering:
    """Number the nodes of each tree in preorder, siblings by falling subtree size, then by rank.

    parents: LongTensor[N] or [B, N], parents[0] = -1 and parents[i] < i. Any other -1 marks an absent node, which has
             no children; absent nodes come last, in index order.
    ranks:   LongTensor shaped as parents, different among siblings and in [0, N); default: 0, 1, 2, ... in index order
    impl:    see `implementation`; "triton" is one launch without host synchronisation, for at most 2,048 nodes

    Raises ValueError for shapes, dtypes or options that do not fit and, on the CPU, for values that are not trees. On a
    GPU a node whose parent does not come before it counts as absent.
    """
    if parents.dtype != torch.long or parents.dim() not in (1, 2) or parents.shape[-1] == 0:
        raise ValueError(
            f"parents must be a LongTensor [N] or [B, N] with N >= 1, got {parents.dtype} {[*parents.shape]}"
        )
    if ranks is not None and (ranks.dtype != torch.long or ranks.shape != parents.shape):
        raise ValueError(f"ranks must be a LongTensor {[*parents.shape]}, got {ranks.dtype} {[*ranks.shape]}")
    impl = choose_impl("heavy_path_order", impl, parents)
    if impl == "triton" and parents.shape[-1] > MAX_NODES:
        raise ValueError(f"impl 'triton' takes at most {MAX_NODES} nodes, got {parents.shape[-1]}; take impl 'torch'")

    batched = parents.view(-1, parents.shape[-1])
    batched_ranks = None if ranks is None else ranks.view(batched.shape)
    if parents.device.type == "cpu":
        _check_values(batched, batched_ranks)
    order = (launch_order if impl == "triton" else _reference)(batched, batched_ranks)
    return Ordering(*(field.view(parents.shape) for field in order))


def _check_values(parents: Tensor, ranks: Tensor | None) -> None:
    parent = parents.numpy()
    nodes = parents.shape[1]
    index = np.arange(nodes)
    if (parent[:, 0] != -1).any() or ((parent < -1) | (parent >= index)).any():
        raise ValueError(f"parents must hold -1 at node 0 and -1 <= parents[i] < i elsewhere, got {parents.tolist()}")
    drafted = parent >= 0
    if ((parent > 0) & ~np.take_along_axis(drafted, np.maximum(parent, 0), 1)).any():
        raise ValueError(f"absent nodes, those with a parent of -1, must have no children, got {parents.tolist()}")
    if ranks is not None:
        rank = ranks.numpy()
        places = np.sort(np.where(drafted, parent * nodes + rank, -1 - index), axis=1)
        if (drafted & ((rank < 0) | (rank >= nodes))).any() or (places[:, 1:] == places[:, :-1]).any():
            raise ValueError(f"ranks must differ among siblings and be in [0, {nodes}), got {ranks.tolist()}")


def _reference(parents: Tensor, ranks: Tensor | None) -> Ordering:
    """Order one tree after the other on the host."""
    before = torch.arange(parents.shape[1], device=parents.device)
    parents = parents.where((parents >= 0) & (parents < before), -1)
    ranks = sibling_order(parents) if ranks is None else ranks.clamp(0, parents.shape[1] - 1)
    fields = torch.tensor([*map(_visited, parents.tolist(), ranks.tolist())], dtype=torch.long, device=parents.device)
    return Ordering(*fields.view(-1, 4, parents.shape[1]).unbind(1))


def _visited(parent: list[int], rank: list[int]) -> tuple[list[int], ...]:
    """Visit one tree; return the fields of its `Ordering`."""
    nodes = range(len(parent))
    size = [1] * len(parent)
    children = [[] for _ in nodes]
    for node in reversed(nodes):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
            children[parent[node]].insert(0, node)
    order = []
    waiting = [node for node in reversed(nodes) if parent[node] < 0]
    while waiting:
        order.append(waiting.pop())
        waiting += sorted(children[order[-1]], key=lambda child: (-size[child], rank[child]))[::-1]
    number = {node: place for place, node in enumerate(order)} | {-1: -1}
    ranks = [rank[node] if parent[node] >= 0 else 0 for node in order]
    return order, [number[parent[node]] for node in order], ranks, [number[node] + size[node] for node in order]


@triton.jit
def _at(values, index, otherwise):
    """Return values[index], and `otherwise` where the index is -1."""
    return tl.where(index >= 0, tl.gather(values, tl.maximum(index, 0), 0), otherwise)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _within_family(values, family, index):
    """Return each of the rising `values` minus the value at which its family begins."""
    begins = family != _at(family, index - 1, -1)
    return values - tl.associative_scan(tl.where(begins, values, 0), 0, _larger)


@triton.jit
def _scattered(values, place, scratch_ptr, index, N):
    """Return an array with values[i] at place[i], by way of scratch memory that no other program uses."""
    tl.debug_barrier()
    tl.store(scratch_ptr + place, values, mask=place < N)
    tl.debug_barrier()
    return tl.load(scratch_ptr + index, mask=index < N, other=0, volatile=True).to(tl.int32)


@triton.jit(do_not_specialize=["N"])
def _heavy_path_kernel(
    parents_ptr,  # [B, N]
    ranks_ptr,  # [B, N] if HAS_RANKS
    permutation_ptr,  # [B, N], as all below; scratch memory until the end, and so is end_ptr
    new_parents_ptr,
    new_ranks_ptr,
    end_ptr,
    N,
    HAS_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program does one tree. Its threads exchange values through memory, with barriers in between."""
    row = tl.program_id(0).to(tl.int64) * N
    permutation_ptr += row
    end_ptr += row
    index = tl.arange(0, BLOCK)
    exists = index < N
    parent = tl.load(parents_ptr + row + index, mask=exists, other=-1)
    parent = tl.where((parent >= 0) & (parent < index), parent, -1).to(tl.int32)
    drafted = parent >= 0

    if HAS_RANKS:
        rank = tl.load(ranks_ptr + row + index, mask=exists, other=0)
        rank = tl.minimum(tl.maximum(rank, 0), N - 1).to(tl.int32)
    else:
        siblings = tl.sort((parent + 1) * _FIELD + index)
        rank = _within_family(index, siblings // _FIELD, index)
        rank = _scattered(rank, siblings % _FIELD, permutation_ptr, index, N)
    rank = tl.where(drafted, rank, 0)

    # Sizes are summed in end_ptr, because each thread adds to nodes of other threads.
    tl.store(end_ptr + index, tl.full([BLOCK], 1, tl.int64), mask=exists)
    above = parent
    while tl.max(above) >= 0:
        tl.debug_barrier()
        size = tl.load(end_ptr + index, mask=exists, other=0, volatile=True)
        tl.debug_barrier()
        tl.atomic_add(end_ptr + above, size, mask=above >= 0, sem="relaxed", scope="cta")
        above = _at(above, above, -1)
    tl.debug_barrier()
    size = tl.load(end_ptr + index, mask=exists, other=0, volatile=True).to(tl.int32)

    visit = (parent + 1).to(tl.int64) * _FIELD + tl.where(drafted, _FIELD - size, 0)
    visit = tl.sort((visit * _FIELD + rank) * _FIELD + index)
    node = (visit % _FIELD).to(tl.int32)
    before = tl.gather(size, node, 0)
    before = tl.cumsum(before) - before
    offset = 1 + _within_family(before, tl.gather(parent, node, 0), index)

    position = _scattered(offset, node, permutation_ptr, index, N)
    above = parent
    while tl.max(above) >= 0:
        position += _at(position, above, 0)
        above = _at(above, above, -1)
    position -= 1

    tl.debug_barrier()
    tl.store(permutation_ptr + position, index, mask=exists)
    tl.store(new_parents_ptr + row + position, _at(position, parent, -1), mask=exists)
    tl.store(new_ranks_ptr + row + position, rank, mask=exists)
    tl.store(end_ptr + position, position + size, mask=exists)


def launch_order(parents: Tensor, ranks: Tensor | None) -> Ordering:
    """Compute `heavy_path_order` of trees [B, N] by the kernel, without checks."""
    batch, nodes = parents.shape
    order = Ordering(*(torch.empty(batch, nodes, dtype=torch.long, device=parents.device) for _ in range(4)))
    if batch == 0:
        return order
    ranks = None if ranks is None else ranks.contiguous()
    block = max(32, triton.next_power_of_2(nodes))
    warps = max(1, min(block // 128, 16 if ranks is not None else 8))  # with 16 the sort that finds ranks would spill
    with torch.cuda.device_of(parents):
        _heavy_path_kernel[(batch,)](
            parents_ptr=parents.contiguous(),
            ranks_ptr=ranks,
            permutation_ptr=order.permutation,
            new_parents_ptr=order.parents,
            new_ranks_ptr=order.ranks,
            end_ptr=order.subtree_end,
            N=nodes,
            HAS_RANKS=ranks is not None,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,  # Triton 3.9 warns if this is not given
        )
    return order
