"""A mixture of distributions: the logits of a draft that is made of several drafts.

    y(v) = log sum_i w_i softmax(x_i)(v)          over the parts i that have a logit above -inf

The parts are added one after another. The first is x_1 - logsumexp(x_1) + log w_1. On a CPU a further part changes only
the tokens whose logits are above -inf, which in a lookup are few.

A part's logits are read twice, and y is read and written once: 16 V bytes a row, in one launch. PyTorch takes seven
operations, and a recording of a step on a CPU cannot repeat all of them.

A program does a whole row, since y needs logsumexp(x_i) of all of it. So a single row uses one multiprocessor: 2 MB for
V = 128,000, about 20 us at 100 GB per second (arithmetic, not measured). Several programs a row would take a second
launch, or chunks that wait for each other's sums, and are worth it only for fewer rows than multiprocessors.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.language import tl, triton
from heavypath.kernels.native.sampling import mix

_BLOCK = 4096  # tokens that a program reads at once


def add_to_mixture(mixed: Tensor | None, logits: Tensor, log_weight: float, *, impl: str = "auto") -> Tensor:
    """Return y with another part, fp32 [B, n, V].

    mixed:      y of the parts before, fp32 [B, n, V], which may be overwritten; None for the first part
    logits:     x of the part, [B, n, V]; a row of only -inf adds nothing, and one with NaN or +inf becomes NaN
    log_weight: log w of the part
    impl:       "auto", "native", "triton" or "torch", see `implementation`

    Raises ValueError if `mixed` has another shape or dtype, with which kernels would read and write other memory.
    """
    impl = choose_impl("add_to_mixture", impl, logits, native=True)
    if mixed is not None and (mixed.shape != logits.shape or mixed.dtype != torch.float32):
        got = f"{mixed.dtype} {[*mixed.shape]}"
        raise ValueError(f"mixed must be torch.float32 {[*logits.shape]}, as the logits are shaped, got {got}")
    if impl == "triton":
        return _launch(mixed, logits, log_weight)
    if impl == "native":
        return mix(mixed, logits, log_weight)
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    own = (logits.log_softmax(-1) + log_weight).where(largest != -torch.inf, -torch.inf)
    return own if mixed is None else torch.logaddexp(mixed, own)


@triton.jit(do_not_specialize=["nodes"])
def _mix_kernel(
    logits_ptr,  # [B, nodes, V]
    mixed_ptr,  # [B, nodes, V], or None
    out_ptr,  # [B, nodes, V]
    nodes,
    V,
    sequence_stride,
    node_stride,
    log_weight,
    BLOCK: tl.constexpr,
):
    """Each program does one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += (row // nodes) * sequence_stride + (row % nodes) * node_stride
    first = row * V  # of the row's numbers in y
    token = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)  # of the tokens that a thread has read
    total = tl.zeros([BLOCK], tl.float32)  # of exp(x - most)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + token, mask=start + token < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - shift) + tl.exp(x - shift)
        most = larger
    largest = tl.max(most)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = tl.sum(total * tl.exp(most - shift))
    subtracted = shift + tl.log(tl.where(normalizer == 0, 1.0, normalizer)) - log_weight
    for start in range(0, V, BLOCK):
        inside = start + token < V
        x = tl.load(logits_ptr + start + token, mask=inside, other=float("-inf")).to(tl.float32)
        y = x - subtracted
        if mixed_ptr is not None:
            before = tl.load(mixed_ptr + first + start + token, mask=inside, other=float("-inf"))
            larger = tl.maximum(before, y, propagate_nan=tl.PropagateNan.ALL)
            below = tl.minimum(before, y) - tl.where(larger == float("-inf"), 0.0, larger)
            y = larger + tl.log(1.0 + tl.exp(below))
        tl.store(out_ptr + first + start + token, y, mask=inside)


def _launch(mixed: Tensor | None, logits: Tensor, log_weight: float) -> Tensor:
    """Compute `add_to_mixture` by the kernel."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    batch, nodes, vocab_size = logits.shape
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    if batch * nodes:
        with torch.cuda.device_of(logits):
            _mix_kernel[(batch * nodes,)](
                logits,
                None if mixed is None else mixed.contiguous(),
                out,
                nodes,
                vocab_size,
                logits.stride(0),
                logits.stride(1),
                log_weight,
                BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
                num_warps=16,
                enable_fp_fusion=False,
            )
    return out
