"""Logits of a draft's own tokens as logits of all of the target's.

y[r, v] = x[r, i] where token i of the draft is token v of the target; -inf where none is
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple, Self

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.language import tl, triton

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


@triton.jit
def _spread_kernel(logits, of_draft, out, V, own, BLOCK: tl.constexpr):
    """Each program does BLOCK tokens of a row."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(of_draft + token, mask=token < V, other=-1)
    x = tl.load(logits + row * own + number, mask=number >= 0, other=float("-inf"))
    tl.store(out + row * V + token, x, mask=token < V)


def _launch(logits: Tensor, of_draft: Tensor) -> Tensor:
    """Launch the kernel of `spread_logits`."""
    logits = logits.contiguous()
    vocab_size = len(of_draft)
    out = logits.new_empty(*logits.shape[:-1], vocab_size)
    rows = out.numel() // vocab_size
    if rows:
        with torch.cuda.device_of(logits):
            _spread_kernel[(triton.cdiv(vocab_size, _BLOCK), rows)](
                logits, of_draft, out, vocab_size, logits.shape[-1], BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
            )
    return out
