"""Logits of some tokens as logits of all of the target's.

y[r, v] = x[r, i]             where token i of the draft is token v of the target; -inf where none is
y[b, j, v] = x[b, j, i] + a[b, i]    where v is token i of the few of sequence b; -inf where none is
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple, Self

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rounding import rounded

_BLOCK = 1024  # tokens of a program


class OwnTokens(NamedTuple):
    """The tokens that a draft has.

    of_target: LongTensor[Vd], each token of the draft by its number in the target
    of_draft:  int32 [V], each token of the target by its number in the draft; -1 if the draft does not have it
    """

    of_target: Tensor
    of_draft: Tensor

    @classmethod
    def by_offsets(cls, offsets: Tensor, vocab_size: int) -> Self:
        """The tokens i + offsets[i], LongTensor[Vd], of a target with `vocab_size` tokens."""
        numbers = torch.arange(len(offsets), device=offsets.device)
        of_target = offsets + numbers
        none = torch.full((vocab_size,), -1, dtype=torch.int32, device=offsets.device)
        return cls(of_target, none.index_copy_(0, of_target, numbers.to(torch.int32)))


def spread_logits(logits: Tensor, tokens: OwnTokens, *, impl: str = "auto") -> Tensor:
    """The logits [..., V] of all tokens, from contiguous logits [..., Vd]; "triton" is one launch."""
    vocab_size = len(tokens.of_draft)
    if choose_impl("spread_logits", impl, logits) == "triton":
        return _launch(logits, tokens.of_draft)
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return every.index_copy_(-1, tokens.of_target, logits)


def spread_few(
    logits: Tensor, tokens: Tensor, vocab_size: int, added: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """The logits [B, n, V] of all tokens, from those of a few [B, n, K]; "triton" is one launch.

    tokens: [B, K], different ones for each sequence: integers, or fp32 numbers that are integers
    added:  [B, K], to the logits of all its nodes
    """
    if choose_impl("spread_few", impl, logits) == "triton":
        return _launch_few(logits, tokens, vocab_size, added)
    if added is not None:
        logits = added[:, None] + logits
    every = logits.new_full((*logits.shape[:2], vocab_size), -torch.inf)
    return every.scatter_(2, tokens.long()[:, None].expand(logits.shape), logits)


@triton.jit
def _spread_kernel(logits, of_draft, out, V, own, BLOCK: tl.constexpr):
    """Each program does BLOCK tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(of_draft + token, mask=token < V, other=-1)
    x = tl.load(logits + row * own + number, mask=number >= 0, other=float("-inf"))
    tl.store(out + row * V + token, x, mask=token < V)


def _launch(logits: Tensor, of_draft: Tensor) -> Tensor:
    """Launch the kernel of `spread_logits`."""
    logits = logits.contiguous()
    of_draft = of_draft.contiguous()
    vocab_size = len(of_draft)
    out = logits.new_empty(*logits.shape[:-1], vocab_size)
    rows = out.numel() // vocab_size
    if rows:
        with torch.cuda.device_of(logits):
            _spread_kernel[(rows, triton.cdiv(vocab_size, _BLOCK))](
                logits, of_draft, out, vocab_size, logits.shape[-1], BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
            )
    return out


@triton.jit(do_not_specialize=["nodes"])
def _spread_few_kernel(
    logits,  # [B * nodes, FEW]
    tokens,  # [B, FEW]
    added,  # [B, FEW], or None
    out,  # [B * nodes, V]
    nodes,
    V,
    tokens_b,
    FEW: tl.constexpr,
    COLUMNS: tl.constexpr,  # FEW, up to a power of two
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does BLOCK tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // nodes
    start = tl.program_id(1) * BLOCK
    token = start + tl.arange(0, BLOCK)
    out += row * V
    tl.store(out + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=token < V)
    few = tl.arange(0, COLUMNS)
    chosen = tl.load(tokens + sequence * tokens_b + few, mask=few < FEW, other=-1).to(tl.int64)
    own = (chosen >= start) & (chosen < start + BLOCK)
    x = tl.load(logits + row * FEW + few, mask=own, other=0.0).to(tl.float32)
    if added is not None:
        x = rounded(tl.load(added + sequence * FEW + few, mask=own, other=0.0).to(tl.float32) + x, out, INTERPRETED)
    tl.debug_barrier()  # other threads have stored -inf there
    tl.store(out + chosen, x, mask=own)


def _launch_few(logits: Tensor, tokens: Tensor, vocab_size: int, added: Tensor | None) -> Tensor:
    """Launch the kernel of `spread_few`."""
    batch, count, few = logits.shape
    if added is not None and added.dtype != logits.dtype:
        raise ValueError(f"impl 'triton' takes logits of one dtype, got {logits.dtype} and {added.dtype}")
    tokens = in_rows(tokens)
    out = logits.new_empty(batch, count, vocab_size)
    if batch * count:
        with torch.cuda.device_of(logits):
            _spread_few_kernel[(batch * count, triton.cdiv(vocab_size, _BLOCK))](
                logits.contiguous(),
                tokens,
                None if added is None else added.contiguous(),
                out,
                count,
                vocab_size,
                tokens.stride(0),
                FEW=few,
                COLUMNS=triton.next_power_of_2(few),
                BLOCK=_BLOCK,
                INTERPRETED=not logits.is_cuda,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return out
