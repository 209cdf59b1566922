"""Log-decays from the root of a tree to its nodes: what gates sum up to along each path.

    G_i = sum of g_j over the nodes j of the path from the root to i, both included          g <= 0

What a node keeps of an ancestor is exp(G_i - G_j). In fp32 that would be off by 2e-3 where strong gates lie above weak
ones (|G| of 3,000), so sums are in fp64.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.language import tl, triton
from heavypath.kernels.recurrent.paths import BLOCK, KeptNodes, Paths

_BLOCK, _COLUMNS = tl.constexpr(BLOCK), tl.constexpr(16)  # nodes and gates of a program


def path_totals(gates: Tensor, paths: Paths, above: KeptNodes | None, *, impl: str = "auto") -> Tensor:
    """G of the Q new nodes, fp64 [B, Q, H] or [B, Q, H, Dk]; gates: shaped so; above: the nodes given before.

    impl: see `implementation`; "triton" takes trees in one pass. Others go through "torch" by "auto"
    """
    mask, before = paths.mask, paths.before
    if (impl != "auto" or not before) and choose_impl("path_totals", impl, gates) == "triton":
        return _launch(gates, paths)
    totals = torch.einsum("bij,bj...->bi...", mask[..., before:].double(), gates.double())
    if above is None:
        return totals
    number = torch.arange(before, device=mask.device)
    nearest = number.where(mask[..., :before], -1).amax(-1) + 1  # 0 where none of these nodes is an ancestor
    with_none = torch.cat([torch.zeros_like(above.totals[:, :1]), above.totals], 1)
    return totals + with_none[torch.arange(len(mask), device=mask.device)[:, None], nearest]


@triton.jit(do_not_specialize=["N"])
def _totals_kernel(
    gates_ptr,  # [B, N, gates]
    mask_ptr,  # [B, N, N], bytes
    above_ptr,  # int32 [B, blocks, N], as of `Paths.outside`
    count_ptr,  # int32 [B, blocks]
    totals_ptr,  # fp64 [B, N, gates]
    N, gates,
):  # fmt: skip
    """A program for 16 gates of 16 nodes of a sequence."""
    block, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, gate = tl.arange(0, _BLOCK), tl.program_id(0) * _COLUMNS + tl.arange(0, _COLUMNS)
    node, known = block * _BLOCK + place, gate < gates
    real = node < N
    mask_ptr += batch * N * N
    above_ptr += (batch * tl.num_programs(1) + block) * N
    count = tl.load(count_ptr + batch * tl.num_programs(1) + block)
    total = tl.zeros([_BLOCK, _COLUMNS], tl.float64)
    rounded = tl.cdiv(count, _BLOCK) * _BLOCK
    for start in range(0, rounded + _BLOCK, _BLOCK):  # the block itself comes last
        which = start + place
        outside = which < count
        there = outside | ((which >= rounded) & real)
        other = tl.load(above_ptr + which, mask=outside, other=0)
        other = tl.where(which >= rounded, node, other)
        seen = tl.load(
            mask_ptr + node[:, None] * N + other[None, :], mask=real[:, None] & there[None, :], other=0
        ) != 0  # fmt: skip
        their = tl.load(
            gates_ptr + (batch * N + other)[:, None] * gates + gate[None, :],
            mask=there[:, None] & known[None, :], other=0.0,
        ).to(tl.float64)  # fmt: skip
        total += tl.sum(tl.where(seen[:, :, None], their[None, :, :], 0.0), 1)
    at = (batch * N + node)[:, None] * gates + gate[None, :]
    tl.store(totals_ptr + at, total, mask=real[:, None] & known[None, :])


def _launch(gates: Tensor, paths: Paths) -> Tensor:
    """`path_totals` by the kernel, of trees in one pass."""
    if paths.before:
        raise ValueError("path_totals: impl 'triton' takes trees in one pass; take impl 'torch' for those that grow")
    batch, nodes = gates.shape[:2]
    gates, (above, count) = gates.contiguous(), paths.outside
    totals = torch.empty(gates.shape, dtype=torch.float64, device=gates.device)
    columns = gates[0, 0].numel()
    with torch.cuda.device_of(gates):
        _totals_kernel[(triton.cdiv(columns, _COLUMNS), above.shape[1], batch)](
            gates, paths.mask.contiguous().view(torch.int8), above, count, totals, nodes, columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return totals
