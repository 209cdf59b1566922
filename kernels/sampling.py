"""Draw k tokens from each row of logits by Gumbel-top-k, with or without replacement.

For one row with log-probabilities logq (after temperature and filters) and independent Gumbels G(v):

    without replacement   the k largest keys logq(v) + G(v), largest first, are k successive draws, each from the
                          distribution renormalised over the tokens not drawn before
                          (Vieira 2014; Kool et al., "Stochastic beams and where to find them", ICML 2019, sec. 2.2)
    with replacement      draw j is the largest key under its own Gumbels G_j: k independent draws
    temperature 0         the k largest logits

Equal keys go to the lower token index, on every path.

The kernel reads the logits once and takes no exact logarithm but for a few tokens. With u <= -log(1 - u) = E,

    logit / T - log(u)  >=  logit / T + G,      G = -log E,

bounds the key of a token from above; it is tight where it matters, for small u and large keys. A row is cut into
chunks, a program each, that keep the largest bound of each group of tokens and the chunk's part of the softmax. The
last of a row's programs to finish then opens groups in the order of their bounds, takes the exact keys of their tokens,
and stops when no bound exceeds the k-th best key. So the result is the reference's for any cut into chunks and groups.
"""

# Triton's language is no Python that a type checker knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.filtering import (
    HIDDEN_BITS,
    LOG2E,
    LOWEST,
    Filters,
    cut_of,
    filter_cut,
    filtered_scores,
    is_kept,
    largest_first,
    score,
    softmax_scale,
)
from heavypath.kernels.implementation import check_can_launch, choose_impl
from heavypath.kernels.noise import (
    Noise,
    Stream,
    check_seed,
    gumbel_of,
    gumbels,
    log2_below,
    noise_bits,
    octet_bits,
    seed_arguments,
    seed_words,
)
from heavypath.kernels.tickets import is_last, tickets

_FEW = 8  # draws of a row that are found one after the other, without sorting


class TopK(NamedTuple):
    """Drawn tokens in draw order.

    tokens:   LongTensor[..., R, k], -1 where the support ran out
    keys:     fp32 [..., R, k], the perturbed log-probabilities (the logits at temperature 0), -inf where undefined
    logprobs: fp32 [..., R, k], log-probability of the token in the filtered distribution (of the plain softmax at
              temperature 0), -inf where undefined or filled

    A row with NaN or +inf in it has tokens -1, and keys and logprobs NaN: `keys[..., 0].isnan()` tells such rows.
    """

    tokens: Tensor
    keys: Tensor
    logprobs: Tensor


def gumbel_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    replacement: bool = False,
    uniform_fill: bool = False,
    impl: str = "auto",
) -> TopK:
    """Draw k tokens per row of logits [..., R, V]; see `TopK` for what comes back.

    rows: LongTensor[..., R] >= 0 names each row's noise (default 0, 1, 2, ...): the same (seed, rows) gives the same
        draw in any batch. seed: any integer, taken modulo 2**64, or a LongTensor [] on the logits' device, which the
        kernel reads when it runs.
    replacement: k independent draws instead of k distinct tokens.
    uniform_fill: where fewer than k tokens have support, draw the rest uniformly from the other tokens.
    temperature 0 takes the k largest logits and ignores the filters.
    logits: fp32, fp16 or bf16 (the kernel), any floating point (the reference); rows may lie apart, so that
        `logits[..., :vocabulary]` leaves out a padded vocabulary's last tokens without a copy.
    impl: "triton": one launch, no host synchronisation; CUDA tensors, or any under Triton's interpreter. "torch":
        anything. "auto": triton for CUDA tensors, else torch. Both draw the same tokens, without gradients; keys and
        logprobs agree to fp32 rounding of the normaliser. (Where top_p or min_p cut within rounding, they may cut
        differently.)

    Raises ValueError for a bad shape, dtype or option, and (CPU tensors) for negative rows.
    """
    filters = Filters(temperature, top_k, top_p, min_p).check()
    if not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be floating point [..., R, V] with V >= 1, got {logits.dtype} {[*logits.shape]}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    lead, vocab_size = logits.shape[:-1], logits.shape[-1]
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.shape != lead or rows.dtype != torch.long:
            given = f"{rows.dtype} {[*rows.shape]}" if isinstance(rows, Tensor) else repr(rows)
            raise ValueError(f"rows must be a LongTensor {[*lead]}, one per row of logits, got {given}")
        if rows.device != logits.device:
            raise ValueError(f"rows must be on the logits' device {logits.device}, got {rows.device}")
        if rows.device.type == "cpu" and rows.numpy().min(initial=0) < 0:
            raise ValueError(f"rows must be at least 0, got {int(rows.min())}")
        rows = rows.reshape(-1)
    check_seed(seed, logits.device)
    impl = choose_impl("gumbel_topk", impl, logits)
    if impl == "triton":
        if logits.dtype not in HIDDEN_BITS:
            raise ValueError(f"impl 'triton' takes fp32, fp16 or bf16 logits, got {logits.dtype}; take impl 'torch'")
        check_can_launch(logits)

    run = launch_topk if impl == "triton" else _reference
    drawn = run(
        logits.reshape(-1, vocab_size),
        k,
        filters,
        noise=Noise(seed, rows),
        stream=Stream.DRAFT,
        replacement=replacement,
        uniform_fill=uniform_fill,
    )
    return TopK(*(field.view(*lead, k) for field in drawn))


def draw_unchecked(
    logits: Tensor,
    k: int,
    *,
    filters: Filters,
    noise: Noise,
    replacement: bool = False,
    uniform_fill: bool = False,
) -> TopK:
    """`gumbel_topk` without its checks, of logits [R, V] and noise.rows LongTensor[R]; impl is "auto"."""
    run = launch_topk if choose_impl("draw_unchecked", "auto", logits) == "triton" else _reference
    return run(logits, k, filters, noise=noise, stream=Stream.DRAFT, replacement=replacement, uniform_fill=uniform_fill)


@np.errstate(all="ignore")
def _reference(
    logits: Tensor,
    k: int,
    filters: Filters,
    *,
    noise: Noise,
    stream: Stream,
    replacement: bool,
    uniform_fill: bool,
) -> TopK:
    """Logits [R, V], noise.rows [R]; TopK of [R, k]. In NumPy, whose calls on short rows cost less than PyTorch's."""
    device, vocab_size = logits.device, logits.shape[-1]
    values = logits.detach().float().cpu().numpy()
    seed = int(noise.seed)
    noise_rows = np.arange(len(values)) if noise.rows is None else noise.rows.cpu().numpy()
    largest, noisy = values.max(-1, keepdims=True), filters.temperature > 0
    scores = filtered_scores(values, largest, filters if noisy else Filters())  # [R, V]
    normalizer = np.log(np.exp(scores).sum(-1, keepdims=True, dtype=np.float64))
    if noisy and replacement:
        keys = scores[:, None] + gumbels(seed, stream, noise_rows, vocab_size, draws=k)  # [R, k, V], independent draws
        tokens = keys.argmax(-1)
        ranked = keys.max(-1)
    else:
        keys = scores + gumbels(seed, stream, noise_rows, vocab_size) if noisy else values
        ranked, tokens = stable_topk(keys, min(k, vocab_size))
        if k > vocab_size:
            beyond = (0, 0), (0, k - vocab_size)
            ranked, tokens = np.pad(ranked, beyond, constant_values=-np.inf), np.pad(tokens, beyond)
    logprobs = scores[np.arange(len(scores))[:, None], tokens] - normalizer
    keys = ranked - normalizer if noisy else ranked
    undefined = largest - np.inf  # -inf, but NaN in a row with NaN or +inf in it
    defined = ranked > undefined
    if not defined.all():
        tokens, keys, logprobs = (
            np.where(defined, field, none) for field, none in ((tokens, -1), (keys, undefined), (logprobs, undefined))
        )
    if uniform_fill and noisy and not replacement and not defined.all():
        # Tokens outside the support, in a uniformly random order, take the places behind it.
        words = np.where(
            scores > -np.inf, 1 << 32, noise_bits(seed, Stream.FILL, noise_rows, vocab_size).astype(np.int64)
        )
        words[np.isnan(undefined[:, 0])] = 1 << 32
        filler = words.argsort(-1, kind="stable")[:, :k]
        filler = np.where(np.take_along_axis(words, filler, -1) < 1 << 32, filler, -1)
        filler = np.pad(filler, ((0, 0), (0, k - filler.shape[1])), constant_values=-1)
        place = np.arange(k) - defined.sum(-1, keepdims=True)
        tokens = np.where(defined, tokens, np.take_along_axis(filler, np.maximum(place, 0), -1))
    fields = tokens, keys.astype(np.float32), logprobs.astype(np.float32)
    return TopK(*(torch.from_numpy(field).to(device) for field in fields))


class Beam(NamedTuple):
    """The children that a stochastic beam keeps, largest key first; [..., W].

    parent:   LongTensor, which of the R rows a child belongs to, -1 where there are fewer than W children
    tokens:   LongTensor, -1 likewise
    logprobs: log-probability of the child's whole sequence, -inf likewise
    keys:     its Gumbel, conditioned on its parent's being the largest of the parent's children, -inf likewise
    """

    parent: Tensor
    tokens: Tensor
    logprobs: Tensor
    keys: Tensor


def stochastic_beam(
    logits: Tensor,
    parent_logprob: Tensor,
    parent_key: Tensor,
    width: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Beam:
    """One step of stochastic beam search, which draws whole sequences without replacement (RSD-S).

    Kool et al. 2019, algorithm 1: a parent of log-probability phi and key u has children with Gumbels
    G(v) = phi + log Q(v) + Gumbel(v), the largest of which is made u, and the others moved along:

        key(v) = -log(exp(-u) - exp(-max G) + exp(-G(v)))
               = u - max(0, z) - log(1 + exp(-|z|)),    z = u - G(v) + log(1 - exp(G(v) - max G))      (their B.3)

    That rises with G, so the `width` largest keys of all rows are among each row's `width` first draws. Siblings in the
    order of their keys are successive draws without replacement from their parent's distribution.

    logits: [..., R, V]; parent_logprob, parent_key: floating point [..., R], 0 and 0 at the root, -inf for an absent
    parent. Temperature 0 is a plain beam: keys are log-probabilities. The rest as `gumbel_topk`. Works in fp64, and
    gives logprobs and keys in parent_key's dtype.

    Raises ValueError for a bad shape, dtype or option.
    """
    for name, value in (("parent_logprob", parent_logprob), ("parent_key", parent_key)):
        if value.shape != logits.shape[:-1] or not value.is_floating_point() or value.device != logits.device:
            raise ValueError(
                f"{name} must be floating point {[*logits.shape[:-1]]} on {logits.device}, one for each row of logits, "
                f"got {value.dtype} {[*value.shape]} on {value.device}"
            )
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    drawn = gumbel_topk(
        logits, min(width, logits.shape[-1]), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed, rows=rows, impl=impl,
    )  # fmt: skip
    phi, u = parent_logprob.double()[..., None], parent_key.double()[..., None]
    logprobs = phi + drawn.logprobs
    if temperature == 0:
        keys = logprobs
    else:
        below = (drawn.keys - drawn.keys[..., :1]).double()  # G(v) - max G <= 0
        z = (
            u
            - (phi + drawn.keys)
            + torch.where(below > -math.log(2), (-torch.expm1(below)).log(), torch.log1p(-below.exp()))
        )
        keys = u - z.clamp(min=0) - torch.log1p((-z.abs()).exp())
    there = (drawn.tokens >= 0) & (phi > -torch.inf)
    order = keys.where(there, -torch.inf).flatten(-2)  # [..., R * K]
    order = order.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    there = there.flatten(-2).gather(-1, order)
    beam = Beam(
        (order // drawn.tokens.shape[-1]).where(there, -1),
        drawn.tokens.flatten(-2).gather(-1, order).where(there, -1),
        *(
            field.flatten(-2).gather(-1, order).where(there, -torch.inf).to(parent_key.dtype)
            for field in (logprobs, keys)
        ),
    )
    missing = (0, width - order.shape[-1])
    return Beam(
        *(pad(field, missing, value=-1) for field in beam[:2]),
        *(pad(field, missing, value=-math.inf) for field in beam[2:]),
    )


def stable_topk(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of each row of fp32 values [R, V], and their indices; equal values by lower index first.

    Where fewer than k are above -inf, the indices of the rest are any.
    """
    if k <= _FEW:
        left, place = values if k == 1 else values.copy(), np.arange(len(values))
        ranked, tokens = np.empty((len(values), k), dtype=values.dtype), np.empty((len(values), k), dtype=np.int64)
        for rank in range(k):
            tokens[:, rank] = token = left.argmax(-1)
            ranked[:, rank] = left[place, token]
            if rank < k - 1:
                left[place, token] = -np.inf
        return ranked, tokens
    tokens = largest_first(values, k)
    return np.take_along_axis(values, tokens, -1), tokens


LANES = tl.constexpr(128)  # threads of a program; each holds eight neighbouring tokens of a tile
TILES = tl.constexpr(8)  # of a program's chunk
CHUNK = tl.constexpr(8 * 128 * 8)
NEVER = tl.constexpr(-(2**63))  # less than every packed key
_LATEST = tl.constexpr(2**63 - 1)
_FILL = tl.constexpr(int(Stream.FILL))


@triton.jit
def pack(key, token):
    """int64 that orders tokens by falling fp32 key, then by index."""
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def unpack(packed):
    """Keys and tokens."""
    bits = (packed >> 32).to(tl.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return key, 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _merge(top, packed, K, PLACES: tl.constexpr):
    """The K largest of both, largest first."""
    place = tl.arange(0, PLACES)
    merged = tl.full([PLACES], NEVER, tl.int64)
    for i in range(K):
        best = tl.maximum(tl.max(top), tl.max(packed))
        merged = tl.where(place == i, best, merged)
        top = tl.where(top == best, NEVER, top)
        packed = tl.where(packed == best, NEVER, packed)
    return merged


@triton.jit(do_not_specialize=["K", "seed_ptr", "seed_low", "seed_high", "temperature", "top_k", "top_p", "log_min_p"])
def _gumbel_topk_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R] if HAS_ROWS
    tokens_ptr,  # [R * DRAWS, K], as keys_ptr and logprobs_ptr
    keys_ptr,
    logprobs_ptr,
    bounds_ptr,  # [R * DRAWS, CHUNKS, LANES], the largest bound of each group
    tops_ptr,  # [R * DRAWS, CHUNKS, LANES], the largest logit of each group, if FILTERED
    parts_ptr,  # [R * DRAWS, 2, CHUNKS], each chunk's largest logit and sum of exponentials
    tickets_ptr,  # [R * DRAWS]
    V,
    row_stride,
    K,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    top_k,
    top_p,
    log_min_p,
    STREAM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    DRAWS: tl.constexpr,  # independent draws of each row, K of each
    NOISY: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    FILL: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,  # K, rounded up to a power of two
    OPENED: tl.constexpr,  # groups at a time
    INTERPRETED: tl.constexpr,
):
    chunk = tl.program_id(0) % CHUNKS
    draw = tl.program_id(0) // CHUNKS
    row_ptr = logits_ptr + (draw // DRAWS).to(tl.int64) * row_stride
    noise_row = (draw // DRAWS).to(tl.int64)
    if HAS_ROWS:
        noise_row = tl.load(rows_ptr + noise_row)
    stream = STREAM + 256 * (draw % DRAWS)
    seed_low, seed_high = seed_words(seed_ptr, seed_low, seed_high)
    scale = softmax_scale(temperature)

    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    bound = tl.full([LANES], LOWEST, tl.float32)
    octet = chunk * TILES * LANES + lane
    token = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    end = tl.minimum(V, (chunk + 1) * CHUNK)
    ahead = tl.load(row_ptr + token, mask=token < end, other=float("-inf"))
    for _ in range(tl.minimum(TILES, tl.cdiv(V - chunk * CHUNK, LANES * 8))):
        x = ahead.to(tl.float32)
        token += LANES * 8
        ahead = tl.load(row_ptr + token, mask=token < end, other=float("-inf"))
        higher = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
        largest = higher
        limit = x * scale
        if NOISY:
            bits = octet_bits(seed_low, seed_high, octet, noise_row, stream)
            limit -= log2_below(bits, INTERPRETED)
        bound = tl.maximum(bound, tl.max(limit, 1))
        octet += LANES

    group = draw.to(tl.int64) * CHUNKS * LANES + chunk * LANES + lane
    tl.store(bounds_ptr + group, bound)
    if FILTERED:
        tl.store(tops_ptr + group, largest)
    highest = tl.max(largest)
    part_ptr = parts_ptr + draw.to(tl.int64) * 2 * CHUNKS + chunk
    tl.store(part_ptr, highest)
    tl.store(part_ptr + CHUNKS, tl.sum(total * tl.exp2((largest - highest) * scale)))
    if is_last(tickets_ptr + draw, CHUNKS):
        _open_groups(
            row_ptr, noise_row, stream, draw, tokens_ptr, keys_ptr, logprobs_ptr, bounds_ptr, tops_ptr, parts_ptr,
            V, K, seed_low, seed_high, temperature, top_k, top_p, log_min_p,
            NOISY, FILTERED, HAS_TOP_K, HAS_TOP_P, FILL, HIDDEN, CHUNKS, PLACES, OPENED,
        )  # fmt: skip


@triton.jit
def _open_groups(
    row_ptr, noise_row, stream, draw, tokens_ptr, keys_ptr, logprobs_ptr, bounds_ptr, tops_ptr, parts_ptr,
    V, K, seed_low, seed_high, temperature, top_k, top_p, log_min_p,
    NOISY: tl.constexpr, FILTERED: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, FILL: tl.constexpr,
    HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, PLACES: tl.constexpr, OPENED: tl.constexpr,
):  # fmt: skip
    """The exact draw of a row, whose parts and bounds all programs have stored."""
    scale = softmax_scale(temperature)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    part_ptr = parts_ptr + draw.to(tl.int64) * 2 * CHUNKS + chunk
    parts = tl.load(part_ptr, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(part_ptr + CHUNKS, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    largest = tl.max(parts)
    total = tl.sum(sums * tl.exp2((parts - largest) * scale))
    usable = total > 0  # not where all is -inf, nor with NaN or +inf
    undefined = tl.where(total == total, float("-inf"), float("nan"))
    cut_key, cut_end = tl.full([], 0, tl.uint32), V + tl.full([], 0, tl.int32)
    if FILTERED:
        cut_key, cut_end, total = filter_cut(
            row_ptr, V, largest, temperature, top_k, top_p, log_min_p, HAS_TOP_K, HAS_TOP_P, HIDDEN
        )
    normalizer = tl.log(tl.where(usable, total, 1.0))

    # Bounds, less the largest logit; with room for the rounding of all that was multiplied by the scale.
    group = tl.arange(0, triton.next_power_of_2(CHUNKS * LANES))
    first = (group // LANES) * CHUNK + (group % LANES) * 8
    group_ptr = draw.to(tl.int64) * CHUNKS * LANES + group
    there = (group < CHUNKS * LANES) & (first < tl.where(usable, V, 0))
    bound = tl.load(bounds_ptr + group_ptr, mask=there, other=0.0, cache_modifier=".cg") - largest * scale
    bound += 1e-3 + 1e-6 * (tl.abs(bound) + tl.abs(largest * scale))
    bound = tl.where(bound == bound, bound, float("inf"))
    if FILTERED:
        top = tl.load(tops_ptr + group_ptr, mask=there, other=float("-inf"), cache_modifier=".cg")
        there &= is_kept(top, 0, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
    bound = tl.where(there, bound, float("-inf"))

    best = tl.full([PLACES], NEVER, tl.int64)
    place = tl.arange(0, PLACES)
    worst = tl.full([], float("-inf"), tl.float32)
    while tl.max(bound) > worst:
        opened = tl.full([OPENED], 0, tl.int32)
        for i in tl.static_range(OPENED):
            value, index = tl.max(bound, 0, return_indices=True)
            opened = tl.where(tl.arange(0, OPENED) == i, tl.where(value > worst, index, -1), opened)
            bound = tl.where(group == index, float("-inf"), bound)
        tile = tl.arange(0, TILES)
        octet = ((opened // LANES) * TILES * LANES + opened % LANES)[:, None] + tile[None, :] * LANES
        octet = tl.reshape(tl.where(opened[:, None] >= 0, octet, V // 8 + 1), [OPENED * TILES])
        token = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        key = x
        drawable = x > float("-inf")
        if NOISY:
            key = score(x, largest, temperature)
            key += gumbel_of(octet_bits(seed_low, seed_high, octet, noise_row, stream))
        if FILTERED:
            drawable &= is_kept(x, token, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
        packed = tl.where(drawable, pack(key, token), NEVER)
        best = _merge(best, tl.reshape(packed, [OPENED * TILES * 8]), K, PLACES)
        last = tl.min(tl.where(place < K, best, _LATEST))
        worst, _ = unpack(last)
        if not NOISY:
            worst -= largest
        worst *= LOG2E
        worst = tl.where(last == NEVER, float("-inf"), worst)

    drawn = best > NEVER
    key, token = unpack(best)
    x = tl.load(row_ptr + token, mask=drawn, other=0.0).to(tl.float32)
    if NOISY:
        key -= normalizer
        logprob = score(x, largest, temperature) - normalizer
    else:
        logprob = x - largest - normalizer
    key = tl.where(drawn, key, undefined)
    logprob = tl.where(drawn, logprob, undefined)
    token = tl.where(drawn, token, -1)
    if FILL:
        count = tl.sum(drawn.to(tl.int32))
        if (count < K) & (undefined == undefined):
            filler = _filler(
                row_ptr, noise_row, V, K - count, seed_low, seed_high,
                largest, temperature, cut_key, cut_end, log_min_p, HIDDEN, PLACES,
            )  # fmt: skip
            for i in range(K - count):
                earliest = tl.min(filler)
                filled = (place == count + i) & (earliest < _LATEST - PLACES)
                token = tl.where(filled, (earliest & 0x7FFFFFFF).to(tl.int32), token)
                filler = tl.where(filler == earliest, _LATEST, filler)
    out = draw.to(tl.int64) * K + place
    tl.store(tokens_ptr + out, token, mask=place < K)
    tl.store(keys_ptr + out, key, mask=place < K)
    tl.store(logprobs_ptr + out, logprob, mask=place < K)


@triton.jit
def _filler(
    row_ptr, noise_row, V, count, seed_low, seed_high, largest, temperature, cut_key, cut_end, log_min_p,
    HIDDEN: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The `count` tokens outside the support with the least words of noise: words << 31 | tokens, in no order."""
    place = tl.arange(0, PLACES)
    filler = tl.where(place < count, tl.full([PLACES], _LATEST, tl.int64) - 1 - place, -1)
    for start in range(0, V, LANES * 8):
        octet = start // 8 + tl.arange(0, LANES)
        token = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = tl.load(row_ptr + token, mask=token < V, other=0.0).to(tl.float32)
        inside = is_kept(x, token, largest, temperature, cut_key, cut_end, log_min_p, HIDDEN)
        bits = octet_bits(seed_low, seed_high, octet, noise_row, tl.full([], _FILL, tl.int32))
        packed = tl.where((token < V) & (inside == 0), (bits.to(tl.int64) << 31) | token, _LATEST)
        packed = tl.reshape(packed, [LANES * 8])
        while tl.min(packed) < tl.max(filler):
            earliest = tl.min(packed)
            filler = tl.where(filler == tl.max(filler), earliest, filler)
            packed = tl.where(packed == earliest, _LATEST, packed)
    return tl.where(filler < 0, _LATEST, filler)


def launch_topk(
    logits: Tensor,
    k: int,
    filters: Filters,
    *,
    noise: Noise,
    stream: Stream,
    replacement: bool = False,
    uniform_fill: bool = False,
) -> TopK:
    """As `_reference`."""
    count, vocab_size = logits.shape
    device, noisy = logits.device, filters.temperature > 0
    draws = k if replacement and noisy else 1
    programs, places = count * draws, k // draws
    cut = cut_of(filters if noisy else Filters(), vocab_size)
    drawn = TopK(
        torch.empty(count, k, dtype=torch.long, device=device),
        torch.empty(count, k, device=device),
        torch.empty(count, k, device=device),
    )
    if programs == 0:
        return drawn
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    bounds, tops = torch.empty(2, programs, chunks, LANES.value, device=device)
    parts = torch.empty(programs, 2, chunks, device=device)
    block = triton.next_power_of_2(places)
    with torch.cuda.device_of(logits):
        _gumbel_topk_kernel[(programs * chunks,)](
            logits_ptr=logits, rows_ptr=None if noise.rows is None else noise.rows.contiguous(),
            tokens_ptr=drawn.tokens, keys_ptr=drawn.keys, logprobs_ptr=drawn.logprobs,
            bounds_ptr=bounds, tops_ptr=tops, parts_ptr=parts, tickets_ptr=tickets(programs, device),
            V=vocab_size, row_stride=logits.stride(0), K=places, **seed_arguments(noise.seed),
            temperature=cut.temperature, top_k=cut.top_k, top_p=cut.top_p, log_min_p=cut.log_min_p,
            STREAM=int(stream), HAS_ROWS=noise.rows is not None, DRAWS=draws, NOISY=noisy, FILTERED=cut.filtered,
            HAS_TOP_K=cut.has_top_k, HAS_TOP_P=cut.has_top_p, FILL=uniform_fill and noisy and not replacement,
            HIDDEN=HIDDEN_BITS[logits.dtype], CHUNKS=chunks, PLACES=block, OPENED=min(16, max(4, block)),
            INTERPRETED=not logits.is_cuda, num_warps=4, enable_fp_fusion=True, maxnreg=255,
        )  # fmt: skip
    return drawn
