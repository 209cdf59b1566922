"""SwiGLU activation of a Llama MLP: silu(gate) * up, elementwise, with silu(x) = x / (1 + exp(-x)).

    out = round(silu(gate)) * up      gate, up, out: [R, F]

Shazeer 2020, "GLU variants improve transformer". Gate and up may be the two halves of one product; they are not copied.
In 16 bits silu is rounded before the product, as in transformers.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

import torch
from torch import Tensor
from torch.nn.functional import silu

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rounding import rounded

_ELEMENTS = 1024  # of a program


@operator
def silu_product(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """Return silu(gate) * up, [R, F].

    gate, up: [R, F] of one dtype, with contiguous rows; impl "triton" supports fp32, fp16 and bf16

    Raises ValueError if the kernel does not support the shapes or dtypes.
    """
    if choose_impl("silu_product", impl, gate) == "triton":
        return _launch(gate, up)
    return silu(gate) * up


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    gate,
    up,
    out,
    rows,
    gate_row,
    up_row,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program computes BLOCK columns of ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < COLUMNS)
    row = row.to(tl.int64)
    x = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    opened = rounded(x / (1.0 + tl.exp(-x)), out, INTERPRETED)
    tl.store(out + row * COLUMNS + column, rounded(opened * y, out, INTERPRETED), mask=inside)


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    """Check the arguments and launch the kernel of `silu_product`."""
    alike = (
        gate.dim() == 2 and gate.shape == up.shape and gate.dtype == up.dtype and gate.stride(1) == up.stride(1) == 1
    )
    if not alike or gate.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            "impl 'triton' takes gate and up [R, F] of one dtype, float32, float16 or bfloat16, with contiguous rows; "
            f"got {gate.dtype} {[*gate.shape]} and {up.dtype} {[*up.shape]}"
        )
    rows, columns = gate.shape
    block = min(_ELEMENTS, triton.next_power_of_2(columns))
    at_once = _ELEMENTS // block
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(gate):
        _gated_kernel[(triton.cdiv(rows, at_once), triton.cdiv(columns, block))](
            gate,
            up,
            out,
            rows,
            gate.stride(0),
            up.stride(0),
            COLUMNS=columns,
            ROWS=at_once,
            BLOCK=block,
            INTERPRETED=not gate.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
