"""Units of block drafts' terms. Two lead along a path from a parent's state, and a product, to a node's state:

    rnn   s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)                        and tanh(o);  [g, c, o]: [n, 3 S]
    gru   s' = z s + (1 - z) tanh(n_a + sigmoid(r_a + r_s) n_s)               and [h; s']
          z = sigmoid(z_a + z_s);  [r_a, z_a, n_a], [r_s, z_s, n_s]: [n, 3 S]

s is the parent's state, s' the node's, [n, S]; h: [n, H] is what the next product reads with it. PyTorch takes seven
and eleven operations, and one more to keep s' in the row of a cache; the kernels are a launch each. They round where
PyTorch's operations do. Cho et al. 2014, arXiv 1406.1078, has the second.

The third makes a node's message from products g, m: [n, S] of its token, with r: [S] and a factor l of its depth:

    message   l sigmoid(r + c g) c m                                          c: a constant

PyTorch takes five operations. The kernel computes in fp32, and rounds once.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl, in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.layers.rounding import rounded
from heavypath.kernels.layers.side_by_side import FieldRows


def rnn_unit(product: Tensor, state: Tensor, kept: FieldRows | None, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """tanh(o), [B, n, S], and the nodes' states [B, n, S].

    product: [B, n, 3 S]; state: [B, n, S], the parents' states
    kept:    the field [B, any, S] and the rows of it in which the nodes' states are stored; None to store none
    impl:    see `implementation`; "triton" supports fp32, fp16 and bf16, and does not check rows
    """
    if choose_impl("rnn_unit", impl, product) == "triton":
        return _launch_rnn(product, state, kept)
    gate, new, word = product.chunk(3, -1)
    opened = torch.sigmoid(gate)
    state = opened * state + (1 - opened) * torch.tanh(new)
    _keep(state, kept)
    return torch.tanh(word), state


def gru_unit(
    of_input: Tensor, of_state: Tensor, state: Tensor, row: Tensor, kept: FieldRows | None, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """[h; s'], [B, n, H + S], and the nodes' states [B, n, S], which may be a view of it.

    of_input, of_state: [B, n, 3 S], the products with a node's input and with its parent's state
    state:  [B, n, S], the parents' states; row: h, [B, n, H]
    kept, impl: as in `rnn_unit`
    """
    if choose_impl("gru_unit", impl, of_input) == "triton":
        return _launch_gru(of_input, of_state, state, row, kept)
    reset, gate, new = of_input.chunk(3, -1)
    reset_of, gate_of, new_of = of_state.chunk(3, -1)
    gate = torch.sigmoid(gate + gate_of)
    state = gate * state + (1 - gate) * torch.tanh(new + torch.sigmoid(reset + reset_of) * new_of)
    _keep(state, kept)
    return torch.cat([row, state], -1), state


def message_unit(
    gate: Tensor, message: Tensor, receiver: Tensor, length: Tensor, scale: float, *, impl: str = "auto"
) -> Tensor:
    """The messages to B sequences' nodes, [B, n, S], of the dtype of `message`.

    gate, message:    g and m, [B, n, S], of one dtype
    receiver, length: r and l, [B, S] and [B, 1]
    scale:            c
    impl:             see `implementation`; "triton" supports fp32, fp16 and bf16
    """
    if choose_impl("message_unit", impl, message) == "triton":
        return _launch_message(gate, message, receiver, length, scale)
    opened = torch.sigmoid(receiver.float()[:, None] + scale * gate.float())
    return (length.float()[:, None] * opened * (scale * message.float())).to(message.dtype)


def _keep(state: Tensor, kept: FieldRows | None) -> None:
    if kept is not None and kept.at is not None:
        store_rows(kept.field[:, None], state[:, :, None], kept.at)


@triton.jit
def _sigmoid(x, like, INTERPRETED: tl.constexpr):
    return rounded(1.0 / (1.0 + tl.exp(-x)), like, INTERPRETED)


@triton.jit
def _tanh(x, like, INTERPRETED: tl.constexpr):
    """By the exponential of a negative number, which does not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return rounded(tl.where(x < 0, -size, size), like, INTERPRETED)


@triton.jit
def _mixed(gate, state, new, like, INTERPRETED: tl.constexpr):
    """gate * state + (1 - gate) * new, with the roundings of four operations."""
    old = rounded(gate * state, like, INTERPRETED)
    fresh = rounded(rounded(1.0 - gate, like, INTERPRETED) * new, like, INTERPRETED)
    return rounded(old + fresh, like, INTERPRETED)


@triton.jit
def _store(state, out, field, rows, entry, sequence, field_b, field_s, column, SIZE: tl.constexpr):
    """Store a node's state in the result, and in its row of the field if there is one."""
    tl.store(out + column, state, mask=column < SIZE)
    if field is not None:
        to = field + sequence * field_b + tl.load(rows + entry) * field_s
        tl.store(to + column, state, mask=column < SIZE)


@triton.jit(do_not_specialize=["nodes"])
def _rnn_kernel(
    product,  # [B * nodes, 3 * SIZE]
    state,  # [B * nodes, SIZE]
    field,  # [B, any, SIZE], or None
    rows,  # [B, nodes]
    word,  # [B * nodes, SIZE]
    out,  # [B * nodes, SIZE]
    nodes,
    state_b,
    state_n,
    field_b,
    field_s,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does one node."""
    entry = tl.program_id(0).to(tl.int64)
    sequence = entry // nodes
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    product += entry * (3 * SIZE) + column
    gate = _sigmoid(tl.load(product, mask=inside, other=0.0).to(tl.float32), out, INTERPRETED)
    new = _tanh(tl.load(product + SIZE, mask=inside, other=0.0).to(tl.float32), out, INTERPRETED)
    said = _tanh(tl.load(product + 2 * SIZE, mask=inside, other=0.0).to(tl.float32), out, INTERPRETED)
    at = state + sequence * state_b + (entry % nodes) * state_n + column
    above = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(word + entry * SIZE + column, said, mask=inside)
    below = _mixed(gate, above, new, out, INTERPRETED)
    _store(below, out + entry * SIZE, field, rows, entry, sequence, field_b, field_s, column, SIZE)


@triton.jit(do_not_specialize=["nodes"])
def _gru_kernel(
    of_input,  # [B * nodes, 3 * SIZE]
    of_state,
    state,  # [B, nodes, SIZE]
    h,  # [B, nodes, WIDTH]
    field,  # [B, any, SIZE], or None
    rows,  # [B, nodes]
    joined,  # [B * nodes, WIDTH + SIZE]
    nodes,
    state_b,
    state_n,
    h_b,
    h_n,
    field_b,
    field_s,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does one node."""
    entry = tl.program_id(0).to(tl.int64)
    sequence = entry // nodes
    node = entry % nodes
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    of_input += entry * (3 * SIZE) + column
    of_state += entry * (3 * SIZE) + column
    joined += entry * (WIDTH + SIZE)
    reset = tl.load(of_input, mask=inside, other=0.0).to(tl.float32)
    reset += tl.load(of_state, mask=inside, other=0.0).to(tl.float32)
    reset = _sigmoid(rounded(reset, joined, INTERPRETED), joined, INTERPRETED)
    gate = tl.load(of_input + SIZE, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(of_state + SIZE, mask=inside, other=0.0).to(tl.float32)
    gate = _sigmoid(rounded(gate, joined, INTERPRETED), joined, INTERPRETED)
    new = tl.load(of_state + 2 * SIZE, mask=inside, other=0.0).to(tl.float32)
    new = rounded(reset * new, joined, INTERPRETED)
    new += tl.load(of_input + 2 * SIZE, mask=inside, other=0.0).to(tl.float32)
    new = _tanh(rounded(new, joined, INTERPRETED), joined, INTERPRETED)
    at = state + sequence * state_b + node * state_n + column
    above = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    below = _mixed(gate, above, new, joined, INTERPRETED)
    _store(below, joined + WIDTH, field, rows, entry, sequence, field_b, field_s, column, SIZE)
    wide = tl.arange(0, WIDE)
    x = tl.load(h + sequence * h_b + node * h_n + wide, mask=wide < WIDTH, other=0.0)
    tl.store(joined + wide, x, mask=wide < WIDTH)


@triton.jit(do_not_specialize=["nodes"])
def _message_kernel(
    gate,  # [B * nodes, SIZE]
    message,  # [B * nodes, SIZE]
    receiver,  # [B, SIZE]
    length,  # [B, 1]
    out,  # [B * nodes, SIZE]
    nodes,
    receiver_b,
    length_b,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each program does one node."""
    entry = tl.program_id(0).to(tl.int64)
    sequence = entry // nodes
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    g = tl.load(gate + entry * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(message + entry * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(receiver + sequence * receiver_b + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(length + sequence * length_b).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-(r + scale * g)))
    said = factor * opened * (scale * m)
    tl.store(out + entry * SIZE + column, rounded(said, out, INTERPRETED), mask=inside)


def _launch_message(gate: Tensor, message: Tensor, receiver: Tensor, length: Tensor, scale: float) -> Tensor:
    """Launch the kernel of `message_unit`."""
    batch, count, size = message.shape
    usual = message.dtype in (torch.float32, torch.float16, torch.bfloat16)
    fits = gate.shape == message.shape and receiver.shape == (batch, size) and length.shape == (batch, 1)
    if not usual or not fits or gate.dtype != message.dtype:
        got = [(str(each.dtype), [*each.shape]) for each in (gate, message, receiver, length)]
        raise ValueError(
            "impl 'triton' takes a gate and a message [B, n, S] of one dtype, float32, float16 or bfloat16, a receiver "
            f"[B, S] and a length [B, 1]; got {got}"
        )
    receiver = in_rows(receiver)
    out = torch.empty_like(message, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    if batch * count:
        with torch.cuda.device_of(message):
            _message_kernel[(batch * count,)](
                gate.contiguous(),
                message.contiguous(),
                receiver,
                length,
                out,
                count,
                receiver.stride(0),
                length.stride(0),
                scale,
                SIZE=size,
                BLOCK=block,
                INTERPRETED=not message.is_cuda,
                num_warps=min(8, max(1, block // 128)),
                enable_fp_fusion=False,
            )
    return out


def _launch_rnn(product: Tensor, state: Tensor, kept: FieldRows | None) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `rnn_unit`."""
    batch, count, size = state.shape
    field, rows, field_b, field_s = _checked([product], state, kept)
    state = in_rows(state)
    word, out = (product.new_empty(state.shape) for _ in range(2))
    block = triton.next_power_of_2(size)
    if batch * count:
        with torch.cuda.device_of(product):
            _rnn_kernel[(batch * count,)](
                product.contiguous(),
                state,
                field,
                rows,
                word,
                out,
                count,
                state.stride(0),
                state.stride(1),
                field_b,
                field_s,
                SIZE=size,
                BLOCK=block,
                INTERPRETED=not product.is_cuda,
                num_warps=min(8, max(1, block // 128)),
                enable_fp_fusion=False,
            )
    return word, out


def _launch_gru(
    of_input: Tensor, of_state: Tensor, state: Tensor, row: Tensor, kept: FieldRows | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `gru_unit`."""
    batch, count, size = state.shape
    field, rows, field_b, field_s = _checked([of_input, of_state], state, kept)
    state = in_rows(state)
    row = in_rows(row)
    width = row.shape[-1]
    joined = of_input.new_empty(batch, count, width + size)
    block = triton.next_power_of_2(size)
    if batch * count:
        with torch.cuda.device_of(of_input):
            _gru_kernel[(batch * count,)](
                of_input.contiguous(),
                of_state.contiguous(),
                state,
                row,
                field,
                rows,
                joined,
                count,
                state.stride(0),
                state.stride(1),
                row.stride(0),
                row.stride(1),
                field_b,
                field_s,
                SIZE=size,
                WIDTH=width,
                BLOCK=block,
                WIDE=triton.next_power_of_2(width),
                INTERPRETED=not of_input.is_cuda,
                num_warps=min(8, max(1, block // 128)),
                enable_fp_fusion=False,
            )
    return joined, joined[..., width:]


def _checked(
    products: list[Tensor], state: Tensor, kept: FieldRows | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The field in which states are stored, the rows, and its strides; ValueError for tensors that do not fit."""
    kinds = {each.dtype for each in (*products, state)}
    shapes = {each.shape[-1] for each in products}
    usual = state.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if len(kinds) > 1 or not usual or shapes != {3 * state.shape[-1]}:
        got = [(str(each.dtype), [*each.shape]) for each in (*products, state)]
        raise ValueError(
            "impl 'triton' takes products [B, n, 3 S] and states [B, n, S] of one dtype, float32, float16 or bfloat16; "
            f"got {got}"
        )
    if kept is None or kept.at is None:
        return None, None, 0, 0
    field = kept.field
    if field.stride(-1) != 1:
        raise ValueError(f"the field of states must have contiguous columns, got strides {[*field.stride()]}")
    return field, kept.at.contiguous(), field.stride(0), field.stride(1)
