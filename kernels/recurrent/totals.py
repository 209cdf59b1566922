"""Log-decays from the root of a tree to its nodes: sums of gates along each path.

    G_i = sum of g_j over the nodes j of the path from the root to i, both included          g <= 0

An ancestor's contribution reaches a node with factor exp(G_i - G_j). In fp32 the factor would be wrong by 2e-3 if
strong gates are above weak ones (|G| of 3,000), so sums are in fp64.

Gated DeltaNet computes its gates g and strengths beta from two projections a and b, with weights A and t:

    g = -e^A softplus(a + t)        beta = sigmoid(b)                    softplus(x) = log(1 + e^x)

With PyTorch's operations this takes eight launches for a few KiB. The kernel computes gates, their sums and beta in one
launch. g is in fp32, and beta is rounded to the dtype of b, as in transformers.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rounding import rounded
from heavypath.kernels.recurrent.paths import BLOCK, KeptNodes, Paths

_BLOCK = tl.constexpr(BLOCK)  # nodes of a program
_COLUMNS = tl.constexpr(16)  # gates of a program


class GateWeights(NamedTuple):
    """The weights A and t of the gates, both [H]; see the top of this file."""

    log_rate: Tensor
    bias: Tensor

    def opened(self, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """Return g in fp32 and beta, from the projections a and b [B, Q, H]: the reference."""
        gates = -self.log_rate.float().exp() * softplus(decay.float() + self.bias)
        return gates, strength.sigmoid()


def path_totals(gates: Tensor, paths: Paths, above: KeptNodes | None, *, impl: str = "auto") -> Tensor:
    """Return G of the Q new nodes, fp64, shaped as gates: [B, Q, H] or [B, Q, H, Dk]; above: nodes of earlier passes.

    impl: see `implementation`; "triton" takes trees in one pass. For others "auto" is "torch"
    """
    mask = paths.mask
    before = paths.before
    if (impl != "auto" or not before) and choose_impl("path_totals", impl, gates) == "triton":
        return _launch(gates, paths)
    totals = torch.einsum("bij,bj...->bi...", mask[..., before:].double(), gates.double())
    if above is None:
        return totals
    number = torch.arange(before, device=mask.device)
    nearest = number.where(mask[..., :before], -1).amax(-1) + 1  # 0 if none of the earlier nodes is an ancestor
    with_none = torch.cat([torch.zeros_like(above.totals[:, :1]), above.totals], 1)
    return totals + with_none[torch.arange(len(mask), device=mask.device)[:, None], nearest]


def totals_of_projected(decay: Tensor, strength: Tensor, weights: GateWeights, paths: Paths) -> tuple[Tensor, Tensor]:
    """Return G of trees in one pass, fp64 [B, N, H], and beta in the dtype of `strength`, by the kernel.

    decay, strength: [B, N, H], the projections a and b. `GateWeights.opened`, then `path_totals`, is the reference
    """
    rows = _in_rows(strength)
    beta = torch.empty(strength.shape, dtype=strength.dtype, device=strength.device)
    return _launch(decay, paths, rows, beta, weights), beta


@triton.jit
def _softplus(x):
    """Return log(1 + e^x), exact for small results, too (Kahan)."""
    power = tl.exp(tl.where(x > 20.0, 20.0, x))
    more = 1.0 + power
    rest = more - 1.0
    log = tl.where(rest == 0.0, power, tl.log(more) * (power / tl.where(rest == 0.0, 1.0, rest)))
    return tl.where(x > 20.0, x, log)


@triton.jit(do_not_specialize=["N"])
def _totals_kernel(
    gates_ptr,  # [B, N, gates], rows of a node `gates_node` apart; with weights the projection a
    mask_ptr,  # [B, N, N], bytes
    above_ptr,  # int32 [B, blocks, N], from `Paths.outside`
    count_ptr,  # int32 [B, blocks]
    totals_ptr,  # fp64 [B, N, gates]
    strength_ptr,  # [B, N, gates], rows of a node `strength_node` apart
    beta_ptr,  # [B, N, gates]
    log_rate_ptr,  # [gates]; None if there are no weights and no strength
    bias_ptr,  # [gates]
    N,
    gates,
    gates_node,
    strength_node,
    INTERPRETED: tl.constexpr,
):
    """Each program does 16 gates of 16 nodes of a sequence."""
    block = tl.program_id(1)
    batch = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, _BLOCK)
    gate = tl.program_id(2) * _COLUMNS + tl.arange(0, _COLUMNS)
    node = block * _BLOCK + place
    known = gate < gates
    real = node < N
    own = (batch * N + node)[:, None]
    mask_ptr += batch * N * N
    above_ptr += (batch * tl.num_programs(1) + block) * N
    if log_rate_ptr is not None:
        rate = tl.exp(tl.load(log_rate_ptr + gate, mask=known, other=0.0).to(tl.float32))[None, :]
        bias = tl.load(bias_ptr + gate, mask=known, other=0.0).to(tl.float32)[None, :]
        to_beta = real[:, None] & known[None, :]
        strength = tl.load(strength_ptr + own * strength_node + gate[None, :], mask=to_beta, other=0.0).to(tl.float32)
        beta = rounded(1.0 / (1.0 + tl.exp(-strength)), beta_ptr, INTERPRETED)
        tl.store(beta_ptr + own * gates + gate[None, :], beta, mask=to_beta)
    count = tl.load(count_ptr + batch * tl.num_programs(1) + block)
    total = tl.zeros([_BLOCK, _COLUMNS], tl.float64)
    rounded_up = tl.cdiv(count, _BLOCK) * _BLOCK
    for start in range(0, rounded_up + _BLOCK, _BLOCK):  # the block itself comes last
        which = start + place
        outside = which < count
        there = outside | ((which >= rounded_up) & real)
        other = tl.load(above_ptr + which, mask=outside, other=0)
        other = tl.where(which >= rounded_up, node, other)
        seen = tl.load(mask_ptr + node[:, None] * N + other[None, :], mask=real[:, None] & there[None, :], other=0) != 0
        their = tl.load(
            gates_ptr + (batch * N + other)[:, None] * gates_node + gate[None, :],
            mask=there[:, None] & known[None, :],
            other=0.0,
        )
        if log_rate_ptr is not None:
            their = -rate * _softplus(their.to(tl.float32) + bias)
        total += tl.sum(tl.where(seen[:, :, None], their.to(tl.float64)[None, :, :], 0.0), 1)
    tl.store(totals_ptr + own * gates + gate[None, :], total, mask=real[:, None] & known[None, :])


def _in_rows(each: Tensor) -> Tensor:
    """Return [B, N, any] as [B * N, any]: a view if its rows are equally far apart, else a copy."""
    return in_rows(each.flatten(2).flatten(0, 1))


def _launch(
    gates: Tensor,
    paths: Paths,
    strength: Tensor | None = None,
    beta: Tensor | None = None,
    weights: GateWeights | None = None,
) -> Tensor:
    """Launch the kernel of `path_totals` and `totals_of_projected`, for trees in one pass."""
    if paths.before:
        raise ValueError("path_totals: impl 'triton' takes trees in one pass; take impl 'torch' for those that grow")
    batch, nodes = gates.shape[:2]
    totals = torch.empty(gates.shape, dtype=torch.float64, device=gates.device)
    rows = _in_rows(gates)
    above, count = paths.outside
    log_rate, bias = (None, None) if weights is None else (each.contiguous() for each in weights)
    with torch.cuda.device_of(gates):
        _totals_kernel[(batch, above.shape[1], triton.cdiv(rows.shape[1], _COLUMNS))](
            rows,
            paths.mask.contiguous().view(torch.int8),
            above,
            count,
            totals,
            strength,
            beta,
            log_rate,
            bias,
            nodes,
            rows.shape[1],
            rows.stride(0),
            0 if strength is None else strength.stride(0),
            INTERPRETED=not gates.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return totals
