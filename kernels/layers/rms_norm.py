"""RMS norm of the residual stream, fused with the addition of the previous layer's output.

    h = x + a                                  x, a: [R, K]; without an a, h = x
    n = h / sqrt(mean(h^2) + epsilon) * w      w: [K], the mean is over a row; centred: (1 + w) in place of w

Zhang and Sennrich 2019, "Root mean square layer normalization". In 16 bits the kernel rounds where transformers does:
h, the quotient, and the product with w. Centred norms round once. The sum of squares is in fp32.
A row is read once and kept in registers: 4 K numbers are moved for it. Two separate operations would read h again.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rounding import rounded

MAX_COLUMNS = 1 << 15  # that a program of 32 warps can keep in registers
_AHEAD = tl.constexpr(1 << 14)  # columns up to which the registers have room for the weight, too


class Norm(NamedTuple):
    """An RMS norm: its weight [K], and the epsilon that is added to the mean of squares."""

    weight: Tensor
    epsilon: float


@operator
def add_rms_norm(
    hidden: Tensor, added: Tensor | None, norm: Norm, *, centred: bool = False, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return hidden + added and its RMS norm, both [R, K]; without `added` the first is `hidden` itself.

    hidden, added: [R, K] of one dtype; impl "triton" supports fp32, fp16 and bf16, and K up to 32,768
    norm:          with a weight [K]; centred: the factor is 1 + weight, as in Gemma and Qwen3.5

    Raises ValueError if the kernel does not support the shapes or dtypes.
    """
    if choose_impl("add_rms_norm", impl, hidden) == "triton":
        return _launch(hidden, added, norm, centred)
    hidden = hidden if added is None else hidden + added
    if centred:
        wide = normalized(hidden.float(), Norm(norm.weight.float() + 1, norm.epsilon))
        return hidden, wide.to(hidden.dtype)
    return hidden, normalized(hidden, norm)


def normalized(hidden: Tensor, norm: Norm) -> Tensor:
    """RMS norm over the last axis: the reference. On a CPU PyTorch's rms_norm runs nine operations, this fewer."""
    if not hidden.is_cpu or hidden.dtype != torch.float32:
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.epsilon)
    squares = (hidden * hidden).sum(-1, keepdim=True)
    scale = torch.add(_scalar(norm.epsilon), squares, alpha=1 / hidden.shape[-1]).rsqrt_()
    return (hidden * scale).mul_(norm.weight)


@lru_cache(maxsize=16)
def _scalar(value: float) -> Tensor:
    """The number as a tensor, cached because it takes longer to make than to add."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device="cpu")


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    hidden,
    added,
    weight,
    total,
    normed,
    rows,
    epsilon,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program computes ROWS whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    if BLOCK <= _AHEAD:  # before the sum, which waits for the row: the weight was evicted from the cache
        w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        x = rounded(x + tl.load(added + at, mask=inside, other=0.0).to(tl.float32), hidden, INTERPRETED)
        tl.store(total + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 1) / COLUMNS + epsilon)[:, None]
    if BLOCK > _AHEAD:
        w = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    out = (1.0 + w) * (x * scale) if CENTRED else w * rounded(x * scale, hidden, INTERPRETED)
    tl.store(normed + at, rounded(out, hidden, INTERPRETED), mask=inside)


def _launch(hidden: Tensor, added: Tensor | None, norm: Norm, centred: bool) -> tuple[Tensor, Tensor]:
    """Check the arguments and launch the kernel of `add_rms_norm`."""
    rows, columns = hidden.shape
    fits = norm.weight.shape == (columns,) and (
        added is None or (added.shape, added.dtype) == (hidden.shape, hidden.dtype)
    )
    if not fits or columns > MAX_COLUMNS or hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        got = [(str(each.dtype), [*each.shape]) for each in (hidden, added, norm.weight) if each is not None]
        raise ValueError(
            f"impl 'triton' takes hidden and added [R, K] of one dtype, float32, float16 or bfloat16, with K up to "
            f"{MAX_COLUMNS}, and a weight [K]; got {got}"
        )
    hidden = hidden.contiguous()
    added = None if added is None else added.contiguous()
    normed = torch.empty_like(hidden)
    total = hidden if added is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(columns)
    at_once = max(1, 512 // block)
    with torch.cuda.device_of(hidden):
        _rms_norm_kernel[(triton.cdiv(rows, at_once),)](
            hidden,
            added,
            norm.weight.contiguous(),
            total,
            normed,
            rows,
            norm.epsilon,
            COLUMNS=columns,
            ROWS=at_once,
            BLOCK=block,
            CENTRED=centred,
            INTERPRETED=not hidden.is_cuda,
            num_warps=min(32, max(4, block // 512)),
            enable_fp_fusion=False,
        )
    return total, normed
