"""Linear layers for few rows, where reading the weight takes the time; fused with a gated activation or an fp8 scale.

    y = x W'                            x: [R, K], W: [N, K], y: [R, N], R up to 128
    y = round(silu(g)) * u              gated: W = [G; U], g = round(x G'), u = round(x U'), y: [R, N / 2]
    y = (x F') s                        W = diag(s) F with F in fp8, s: [N]

Every weight is read once. In the tensor cores' products W is the operand with many rows, 64 per program, and x is the
one with few, so no work is spent on padding R. A weight with few outputs has too few tiles to read at full speed. So K
is split into parts, with one program for each (split-K). The partial sums are stored in fp32, and the last program to
finish a tile adds them in a fixed order.

The split depends only on the weight's shape. So a row's result has the same bits whatever other rows are in the batch,
and however many, which cuBLAS does not promise. In 16 bits sums are in fp32, and rounded where transformers rounds.

The residual stream is not added here: the norm that follows reads it anyway, so adding it there costs nothing.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor
from torch.nn.functional import linear

from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.measured import is_faster
from heavypath.kernels.layers.rounding import rounded
from heavypath.kernels.tickets import is_last, tickets

MOST_ROWS = 128  # that the kernel takes
FEWER = 64  # that it takes with a gate or a scale
FP8 = torch.float8_e4m3fn
BLOCK_N = 64
BLOCK_K = 128
PROGRAMS = 264  # that run at the same time: two for each multiprocessor of an H100
MOST_PARTS = 8  # of a weight's columns
LEAST_BLOCKS = 4  # of columns in a part


@operator
def few_rows_product(
    x: Tensor, weight: Tensor, *, scale: Tensor | None = None, gated: bool = False, impl: str = "auto"
) -> Tensor:
    """Return x W', [R, N]; if gated silu(x G') * (x U'), [R, N / 2].

    x:      [R, K]; impl "triton" supports fp16 and bf16, R up to 128, and K a multiple of 8
    weight: [N, K] of the same dtype, contiguous; or of float8_e4m3fn
    scale:  fp32 [N], by which the rows of an fp8 weight are multiplied; not with gated
    gated:  the weight is [G; U]: the first half of its rows is the gate's, the second half is multiplied by silu(gate)

    Gated or in fp8 the kernel takes R up to 64, and in fp8 K a multiple of 16. On a GPU impl "auto" uses the kernel for
    fp8, and for shapes in `measured`. Otherwise it is PyTorch's product, for which an fp8 weight is first converted to
    x's dtype. Raises ValueError if the kernel does not support the shapes or dtypes.
    """
    if gated and (scale is not None or len(weight) % 2):
        raise ValueError(f"gated takes an even number of outputs and no scale, got {len(weight)} outputs")
    chosen = choose_impl("few_rows_product", impl, x)
    if chosen == "triton" and (impl == "triton" or _pays(x, weight, scale, gated)):
        return _launch(x, weight, scale, gated)
    if scale is not None:
        weight = weight.to(x.dtype).mul_(scale[:, None])
    product = linear(x, weight)
    return silu_product(*product.chunk(2, -1), impl=impl) if gated else product


def _pays(x: Tensor, weight: Tensor, scale: Tensor | None, gated: bool) -> bool:
    """Whether impl "auto" uses the kernel."""
    if scale is None:
        return is_faster(x, weight, gated)
    return x.dtype.itemsize == 2 and len(x) <= FEWER and weight.shape[1] % 16 == 0 and _has_fp8(x)


def _has_fp8(x: Tensor) -> bool:
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


@triton.jit
def _store_part(parts, sums, part, output, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """Store the partial sums [BLOCK_N, ROWS] of a part in `parts`."""
    at = (part.to(tl.int64) * OUTPUTS + output)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(parts + at, sums, mask=(output < OUTPUTS)[:, None])


@triton.jit
def _sum_of_parts(parts, output, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Add the partial sums of all parts, in their order: [BLOCK_N, ROWS]."""
    at = output.to(tl.int64)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    sums = tl.load(parts + at, mask=(output < OUTPUTS)[:, None], other=0.0, cache_modifier=".cg")
    for _ in tl.static_range(1, PARTS):
        parts += OUTPUTS * ROWS
        sums += tl.load(parts + at, mask=(output < OUTPUTS)[:, None], other=0.0, cache_modifier=".cg")
    return sums


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,  # [rows, COLUMNS]
    weight,  # [OUTPUTS, COLUMNS], or [2 * OUTPUTS, COLUMNS] if GATED
    scale,  # fp32 [OUTPUTS] of a weight in fp8, or None
    out,  # [rows, OUTPUTS]
    parts,  # fp32 [1, or 2 if GATED, PARTS, OUTPUTS, ROWS] if PARTS > 1
    tickets_ptr,  # [tiles of outputs]
    rows,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,  # columns of a part; the last one may have fewer
    GATED: tl.constexpr,
    ROWS: tl.constexpr,  # rows, up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program computes BLOCK_N outputs of all rows, from one part of the columns."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (output < OUTPUTS)[:, None]
    end = tl.minimum((part + 1) * PART, COLUMNS)
    x += row.to(tl.int64)[None, :] * COLUMNS
    weight += output.to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    ups = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(part * PART, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        of_weight = there & (column < end)[None, :]
        of_x = (row < rows)[None, :] & (column < end)[:, None]
        w = tl.load(weight + column[None, :], mask=of_weight, other=0.0)
        given = tl.load(x + column[:, None], mask=of_x, other=0.0)
        if scale is not None:
            w = w.to(tl.float32).to(x.dtype.element_ty)  # by way of fp32: directly it goes through a slow unit
        if INTERPRETED:  # the interpreter's bfloat16 products are wrong
            w = w.to(tl.float32)
            given = given.to(tl.float32)
        sums = tl.dot(w, given, sums)
        if GATED:
            w = tl.load(weight + OUTPUTS * COLUMNS + column[None, :], mask=of_weight, other=0.0)
            ups = tl.dot(w.to(given.dtype), given, ups)
    last = True
    if PARTS > 1:
        _store_part(parts, sums, part, output, OUTPUTS, ROWS)
        if GATED:
            _store_part(parts + PARTS * OUTPUTS * ROWS, ups, part, output, OUTPUTS, ROWS)
        last = is_last(tickets_ptr + tile, PARTS)
    if last:
        if PARTS > 1:
            sums = _sum_of_parts(parts, output, OUTPUTS, PARTS, ROWS)
            if GATED:
                ups = _sum_of_parts(parts + PARTS * OUTPUTS * ROWS, output, OUTPUTS, PARTS, ROWS)
        if scale is not None:
            sums *= tl.load(scale + output, mask=output < OUTPUTS, other=0.0)[:, None]
        sums = rounded(sums, out, INTERPRETED)
        at = row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
        inside = there & (row < rows)[None, :]
        if GATED:
            sums = rounded(sums / (1.0 + tl.exp(-sums)), out, INTERPRETED) * rounded(ups, out, INTERPRETED)
        tl.store(out + at, rounded(sums, out, INTERPRETED), mask=inside)


def parts_of(outputs: int, columns: int) -> tuple[int, int]:
    """Return how many parts a weight's columns are split into, and the columns of each part.

    It is the count of the least cost, see `cost_of_parts`; of equal ones the smaller.
    """
    tiles = -(-outputs // BLOCK_N)
    blocks = -(-columns // BLOCK_K)
    most = max(1, min(MOST_PARTS, blocks // LEAST_BLOCKS))
    parts = min(range(1, most + 1), key=lambda parts: cost_of_parts(parts, tiles, blocks))
    each = -(-blocks // parts)
    return -(-blocks // each), each * BLOCK_K


def cost_of_parts(parts: int, tiles: int, blocks: int) -> float:
    """The time of a product whose columns are split into parts, in bytes that a program moves, for `FEWER` rows.

    tiles: of outputs; blocks: of columns

    A program reads its blocks of the weight and of x, and stores its partial sums. Programs run in waves, and the last
    program of a tile reads the partial sums of all its parts.
    """
    block = 2 * BLOCK_K * (BLOCK_N + FEWER)
    partial = 4 * BLOCK_N * FEWER if parts > 1 else 0
    waves = -(-tiles * parts // PROGRAMS)
    return waves * (-(-blocks // parts) * block + partial) + parts * partial


def _launch(x: Tensor, weight: Tensor, scale: Tensor | None, gated: bool) -> Tensor:
    """Check the arguments and launch the kernel of `few_rows_product`."""
    rows, columns = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    most = FEWER if gated or scale is not None else MOST_ROWS
    fits = x.dtype in (torch.float16, torch.bfloat16) and rows <= most and weight.shape[1] == columns
    fits = fits and columns * weight.dtype.itemsize % 16 == 0 and weight.is_contiguous()
    if scale is None:
        fits = fits and x.dtype == weight.dtype
    else:
        fits = fits and (weight.dtype, scale.dtype) == (FP8, torch.float32) and scale.shape == (outputs,)
    if not fits:
        got = [(str(each.dtype), [*each.shape]) for each in (x, weight, scale) if each is not None]
        raise ValueError(
            f"impl 'triton' takes at most {MOST_ROWS} rows x [R, K], {FEWER} if gated or in fp8, and a contiguous "
            "weight [N, K] of one dtype, float16 or bfloat16, with K a multiple of 8, or of float8_e4m3fn, with a "
            f"scale [N] of float32 and K a multiple of 16; got {got}"
        )
    x = x.contiguous()
    scale = None if scale is None else scale.contiguous()
    out = x.new_empty(rows, outputs)
    parts, part = parts_of(outputs, columns)
    tiles = triton.cdiv(outputs, BLOCK_N)
    # With fewer rows an fp8 weight would be loaded only 8 bytes at a time.
    padded = max(16 if scale is None else FEWER, triton.next_power_of_2(rows))
    stored = x.new_empty(parts * len(weight) * padded, dtype=torch.float32) if parts > 1 else None
    if rows == 0:
        return out
    with torch.cuda.device_of(x):
        _few_rows_kernel[(tiles, parts)](
            x,
            weight,
            scale,
            out,
            stored,
            tickets(tiles, x.device) if parts > 1 else None,
            rows,
            OUTPUTS=outputs,
            COLUMNS=columns,
            PARTS=parts,
            PART=part,
            GATED=gated,
            ROWS=padded,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            INTERPRETED=not x.is_cuda,
            num_warps=8 if padded > 64 else 4,
            num_stages=3,
            enable_fp_fusion=False,
        )
    return out
