"""Logits of a few tokens after a residual sum and its norm: the end of a pass whose other tokens have no logits.

    y[b, j, i] = <norm(x[b] + a[b, j]), W[t[b, i]]>        norm: RMS norm; W: lm_head [V, K]; t: F tokens

x, a: [B, K], [B, n, K]. A program computes one y, and so reads 4 K numbers: the norm again for each token, which costs
less than a launch. PyTorch takes five operations, and writes the F rows of W. Sums are in fp32; x + a and the norm are
rounded as in `rms_norm`.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rms_norm import MAX_COLUMNS, Norm, normalized
from heavypath.kernels.layers.rounding import rounded


def few_logits(
    hidden: Tensor, added: Tensor, norm: Norm, lm_head: Tensor, tokens: Tensor, *, impl: str = "auto"
) -> Tensor:
    """The logits y, fp32 [B, n, F].

    hidden:  [B, K], fp32 or of the dtype of the others; added: [B, n, K]
    lm_head: [V, K]; tokens: [B, F], integers, or fp32 numbers that are integers
    impl:    see `implementation`; "triton" is one launch, and supports fp32, fp16 and bf16, and K up to 32,768. It does
             not check tokens

    Raises ValueError if the kernel does not support the shapes or dtypes.
    """
    if choose_impl("few_logits", impl, added) == "triton":
        return _launch(hidden, added, norm, lm_head, tokens)
    normed = normalized(hidden[:, None].to(added.dtype) + added, norm)
    return (normed @ lm_head[tokens.long()].mT).float()


@triton.jit(do_not_specialize=["nodes"])
def _few_logits_kernel(
    hidden,  # [B, COLUMNS]
    added,  # [B * nodes, COLUMNS]
    weight,  # [COLUMNS]
    lm_head,  # [V, COLUMNS]
    tokens,  # [B, FEW]
    out,  # [B * nodes, FEW]
    nodes,
    hidden_b,
    lm_head_v,
    tokens_b,
    epsilon,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does one token of one node."""
    entry = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    sequence = entry // nodes
    token = tl.load(tokens + sequence * tokens_b + number).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    row = tl.load(lm_head + token * lm_head_v + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(hidden + sequence * hidden_b + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(added + entry * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    x = rounded(x, added, INTERPRETED)
    scale = tl.rsqrt(tl.sum(x * x) / COLUMNS + epsilon)
    normed = rounded(w * rounded(x * scale, added, INTERPRETED), added, INTERPRETED)
    tl.store(out + entry * FEW + number, tl.sum(normed * row))


def _launch(hidden: Tensor, added: Tensor, norm: Norm, lm_head: Tensor, tokens: Tensor) -> Tensor:
    """Check the arguments and launch the kernel of `few_logits`."""
    batch, count, columns = added.shape
    few = tokens.shape[-1]
    of_columns = hidden.shape == (batch, columns) and lm_head.shape[1:] == norm.weight.shape == (columns,)
    alike = lm_head.dtype == added.dtype == norm.weight.dtype and hidden.dtype in (added.dtype, torch.float32)
    usual = added.dtype in (torch.float32, torch.float16, torch.bfloat16) and columns <= MAX_COLUMNS
    if not of_columns or not alike or not usual or len(tokens) != batch:
        got = [(str(each.dtype), [*each.shape]) for each in (hidden, added, norm.weight, lm_head, tokens)]
        raise ValueError(
            "impl 'triton' takes hidden [B, K], added [B, n, K], a norm's weight [K] and lm_head [V, K] of one dtype, "
            f"float32, float16 or bfloat16, with K up to {MAX_COLUMNS}, and tokens [B, F]; got {got}"
        )
    hidden = in_rows(hidden)
    lm_head = in_rows(lm_head)
    tokens = in_rows(tokens)
    out = added.new_empty(batch, count, few, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    if out.numel():
        with torch.cuda.device_of(added):
            _few_logits_kernel[(batch * count, few)](
                hidden,
                added.contiguous(),
                norm.weight.contiguous(),
                lm_head,
                tokens,
                out,
                count,
                hidden.stride(0),
                lm_head.stride(0),
                tokens.stride(0),
                norm.epsilon,
                COLUMNS=columns,
                FEW=few,
                BLOCK=block,
                INTERPRETED=not added.is_cuda,
                num_warps=min(32, max(4, block // 512)),
                enable_fp_fusion=False,
            )
    return out
