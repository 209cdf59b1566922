"""A causal short convolution over the nodes of a tree: each node's window is its own path.

    out_i = bias + sum_t w_(K-1-t) x_(a_t(i))        a_t(i) the t-th ancestor; before the root the newest of the state

The state is the last K - 1 inputs of the sequence, oldest first. After an accepted node it is that node's window
without the oldest input: a gather, without computing anything again. `paths.Paths` has the windows.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton

_NODES = tl.constexpr(16)  # of a program
_CHANNELS = tl.constexpr(64)  # of a program


@operator
def tree_conv(
    inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, *, impl: str = "auto"
) -> Tensor:
    """Return the outputs [B, Q, C] of Q nodes, in the weight's dtype; the sum is in fp32.

    inputs: [B, M, C], of all nodes so far; state: [B, K - 1, C]; weight: [C, K]; bias: [C]
    window: LongTensor[B, Q, K], columns of [state | inputs]; impl: see `implementation`

    Raises ValueError if the kernel does not support the shapes.
    """
    if choose_impl("tree_conv", impl, inputs) == "triton":
        return _launch(inputs, state, weight, bias, window)
    batch, queries, taps = window.shape
    every = torch.cat([state, inputs.to(state.dtype)], 1)
    seen = every.gather(1, window.flatten(1)[..., None].expand(-1, -1, every.shape[-1]))
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = (seen.view(batch, queries, taps, every.shape[-1]).to(wide) * weight.T).sum(2)
    return (out if bias is None else out + bias).to(weight.dtype)


def accept_conv(inputs: Tensor, state: Tensor, window: Tensor, last: Tensor) -> None:
    """Set states [B, K - 1, C], in place, to the states after nodes `last`, LongTensor[B]; -1 leaves a state as it is.

    inputs, window: of all nodes, [B, M, C] and LongTensor[B, M, K]
    """
    every = torch.cat([state, inputs.to(state.dtype)], 1)
    own = window[torch.arange(len(last), device=last.device), last.clamp(min=0), 1:]
    own = own.where(last[:, None] >= 0, torch.arange(own.shape[1], device=last.device))
    state.copy_(every.gather(1, own[..., None].expand(-1, -1, every.shape[-1])))


@triton.jit(do_not_specialize=["queries", "nodes"])
def _convolution_kernel(
    inputs_ptr,  # [B, nodes, C], a node's channels `node` apart
    state_ptr,  # [B, TAPS - 1, C]
    weight_ptr,  # [C, TAPS]
    bias_ptr,  # [C], or None
    window_ptr,  # [B, queries, TAPS]
    out_ptr,  # [B, queries, C]
    queries,
    nodes,
    channels,
    batch_stride,
    node_stride,
    TAPS: tl.constexpr,
):
    """Each program does 64 channels of 16 nodes of a sequence."""
    batch = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * _NODES + tl.arange(0, _NODES)
    channel = tl.program_id(2) * _CHANNELS + tl.arange(0, _CHANNELS)
    real = (query < queries)[:, None]
    there = (channel < channels)[None, :]
    total = tl.zeros([_NODES, _CHANNELS], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for tap in range(TAPS):
        column = tl.load(window_ptr + (batch * queries + query) * TAPS + tap, mask=query < queries, other=0)[:, None]
        old = column
        new = column - (TAPS - 1)
        from_state = tl.load(
            state_ptr + (batch * (TAPS - 1) + old) * channels + channel[None, :],
            mask=real & there & (new < 0),
            other=0.0,
        ).to(tl.float32)
        from_nodes = tl.load(
            inputs_ptr + batch * batch_stride + new * node_stride + channel[None, :],
            mask=real & there & (new >= 0),
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < channels, other=0.0).to(tl.float32)
        total += (from_state + from_nodes) * weight[None, :]
    at = (batch * queries + query)[:, None] * channels + channel[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=real & there)


def _launch(inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
    """Check the arguments and launch the kernel of `tree_conv`."""
    batch, queries, taps = window.shape
    channels = inputs.shape[2]
    expected = {"state": (state, (batch, taps - 1, channels)), "weight": (weight, (channels, taps))}
    expected |= {"inputs": (inputs, (batch, inputs.shape[1], channels))}
    expected |= {} if bias is None else {"bias": (bias, (channels,))}
    for name, (each, shape) in expected.items():
        if each.shape != shape:
            raise ValueError(f"{name} must be {[*shape]} beside a window {[*window.shape]}, got {[*each.shape]}")
    inputs = inputs if inputs.stride(2) == 1 else inputs.contiguous()
    out = torch.empty(batch, queries, channels, dtype=weight.dtype, device=inputs.device)
    with torch.cuda.device_of(inputs):
        _convolution_kernel[(batch, triton.cdiv(queries, _NODES), triton.cdiv(channels, _CHANNELS))](
            inputs,
            state.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            window.contiguous(),
            out,
            queries,
            inputs.shape[1],
            channels,
            inputs.stride(0),
            inputs.stride(1),
            TAPS=taps,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
