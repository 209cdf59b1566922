"""The Triton kernel of `gumbel_topk`, whose formula and reference are in `sampling`, and its launcher.

The kernel reads the logits once, for k independent draws k times. It computes exact logarithms only for a few tokens.
With u <= -log(1 - u) = E,

    logit / T - log(u)  >=  logit / T + G,      G = -log E,

is an upper bound of a token's key. It is tight for small u, which make large keys. A row is split into chunks, with a
program for each, which stores the largest bound of each group of tokens and the chunk's part of the softmax. The last
of a row's programs to finish opens groups in the order of their bounds, and computes the exact keys of their tokens. It
stops when no bound is above the k-th best key. So the result is the reference's, for any split of the row into chunks
and groups.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import filter_cuts, filtered
from heavypath.kernels.filtering import LOG2E, LOWEST, Filters, score, softmax_scale, sum_of_products, within_fp32
from heavypath.kernels.language import tl, triton
from heavypath.kernels.noise import Noise, Stream, gumbel_of, log2_below, octet_bits, seed_arguments, seed_words
from heavypath.kernels.tickets import is_last, tickets

LANES = tl.constexpr(128)  # threads of a program; each holds eight adjacent tokens of a tile
TILES = tl.constexpr(8)  # tiles in a program's chunk
CHUNK = tl.constexpr(8 * 128 * 8)  # tokens
NEVER = tl.constexpr(-(2**63))  # less than any packed key
_LATEST = tl.constexpr(2**63 - 1)
_FILL = tl.constexpr(int(Stream.FILL))


@triton.jit
def pack(key, token):
    """Pack key and token in an int64 whose order is that of fp32 keys; of equal keys the lower token is larger."""
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def unpack(packed):
    """Return the keys and tokens of `pack`."""
    bits = (packed >> 32).to(tl.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return key, 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _merge(top, packed, K, PLACES: tl.constexpr):
    """Return the K largest of the packed keys in both tensors, largest first."""
    place = tl.arange(0, PLACES)
    merged = tl.full([PLACES], NEVER, tl.int64)
    for i in range(K):
        best = tl.maximum(tl.max(top), tl.max(packed))
        merged = tl.where(place == i, best, merged)
        top = tl.where(top == best, NEVER, top)
        packed = tl.where(packed == best, NEVER, packed)
    return merged


@triton.jit
def scan_chunk(
    row_ptr,
    noise_row,
    stream,
    draw,
    chunk,
    bounds_ptr,
    parts_ptr,
    V,
    seed_low,
    seed_high,
    scale,
    cut,
    end_of_ties,
    NOISY: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the largest bound of each group of a chunk, and the chunk's largest logit and sum of exponentials."""
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    bound = tl.full([LANES], float("-inf"), tl.float32)
    octet = chunk * TILES * LANES + lane
    token = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    end = tl.minimum(V, (chunk + 1) * CHUNK)
    ahead = tl.load(row_ptr + token, mask=token < end, other=float("-inf"))
    for _ in range(tl.minimum(TILES, tl.cdiv(V - chunk * CHUNK, LANES * 8))):
        x = ahead.to(tl.float32)
        here = token
        token += LANES * 8
        ahead = tl.load(row_ptr + token, mask=token < end, other=float("-inf"))
        wanted = True
        if FILTERED:  # few tiles have a token that is kept, and the noise costs more than the rest
            x = filtered(x, here, cut, end_of_ties)
            wanted = (tl.max(x) > float("-inf")) | (cut != cut)
        if wanted:
            top = tl.max(x, 1)
            higher = tl.maximum(largest, top)
            total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
            largest = higher
            limit = x * scale
            if NOISY:
                bits = octet_bits(seed_low, seed_high, octet, noise_row, stream)
                limit -= log2_below(bits, INTERPRETED)
            bound = tl.maximum(bound, tl.where(top > float("-inf"), tl.maximum(tl.max(limit, 1), LOWEST), bound))
        octet += LANES

    group = draw.to(tl.int64) * CHUNKS * LANES + chunk * LANES + lane
    tl.store(bounds_ptr + group, bound)
    highest = tl.max(largest)
    part_ptr = parts_ptr + draw.to(tl.int64) * 2 * CHUNKS + chunk
    tl.store(part_ptr, highest)
    tl.store(part_ptr + CHUNKS, sum_of_products(total, tl.exp2((largest - highest) * scale)))


@triton.jit
def sum_of_parts(parts_ptr, draw, scale, CHUNKS: tl.constexpr):
    """Return a row's largest logit, and its sum of exponentials relative to it: NaN for a row with NaN or +inf."""
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    part_ptr = parts_ptr + draw.to(tl.int64) * 2 * CHUNKS + chunk
    parts = tl.load(part_ptr, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(part_ptr + CHUNKS, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    largest = tl.max(parts)
    return largest, sum_of_products(sums, tl.exp2((parts - largest) * scale))


@triton.jit
def open_groups(
    row_ptr,
    noise_row,
    stream,
    draw,
    bounds_ptr,
    largest,
    total,
    V,
    K,
    seed_low,
    seed_high,
    temperature,
    cut,
    end_of_ties,
    NOISY: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
    OPENED: tl.constexpr,
):
    """Return the K best keys of a row, packed, largest first, after all programs have stored parts and bounds."""
    scale = softmax_scale(temperature)
    # Make bounds relative to the largest logit, and raise them a little for the rounding of products with the scale.
    group = tl.arange(0, triton.next_power_of_2(CHUNKS * LANES))
    first = (group // LANES) * CHUNK + (group % LANES) * 8
    group_ptr = draw.to(tl.int64) * CHUNKS * LANES + group
    there = (group < CHUNKS * LANES) & (first < tl.where(total > 0, V, 0))
    bound = tl.load(bounds_ptr + group_ptr, mask=there, other=float("-inf"), cache_modifier=".cg")
    there &= bound > float("-inf")  # a group without tokens to draw is never opened
    bound -= largest * scale
    bound += 1e-3 + 1e-6 * (tl.abs(bound) + tl.abs(largest * scale))
    bound = tl.where(bound == bound, bound, float("inf"))
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
        if FILTERED:
            x = filtered(x, token, cut, end_of_ties)
        key = x
        if NOISY:
            key = score(x, largest, temperature)
            key += gumbel_of(octet_bits(seed_low, seed_high, octet, noise_row, stream))
        packed = tl.where(x > float("-inf"), pack(key, token), NEVER)
        best = _merge(best, tl.reshape(packed, [OPENED * TILES * 8]), K, PLACES)
        last = tl.min(tl.where(place < K, best, _LATEST))
        worst, _ = unpack(last)
        if not NOISY:
            worst -= largest
        worst *= LOG2E
        worst = tl.where(last == NEVER, float("-inf"), worst)
    return best


@triton.jit
def store_draws(
    best,
    row_ptr,
    noise_row,
    draw,
    tokens_ptr,
    keys_ptr,
    logprobs_ptr,
    largest,
    total,
    V,
    K,
    seed_low,
    seed_high,
    temperature,
    cut,
    end_of_ties,
    NOISY: tl.constexpr,
    FILL: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Store the first K of the best keys as tokens, keys and log-probabilities."""
    place = tl.arange(0, PLACES)
    undefined = tl.where(total == total, float("-inf"), float("nan"))
    normalizer = tl.log(tl.where(total > 0, total, 1.0))  # 0 for a row of only -inf, or with NaN or +inf
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
            filler = _filler(row_ptr, noise_row, V, K - count, seed_low, seed_high, cut, end_of_ties, PLACES)
            for i in range(K - count):
                earliest = tl.min(filler)
                filled = (place == count + i) & (earliest < _LATEST - PLACES)
                token = tl.where(filled, (earliest & 0x7FFFFFFF).to(tl.int32), token)
                filler = tl.where(filler == earliest, _LATEST, filler)
    out = draw.to(tl.int64) * K + place
    tl.store(tokens_ptr + out, token, mask=place < K)
    tl.store(keys_ptr + out, key, mask=place < K)
    tl.store(logprobs_ptr + out, logprob, mask=place < K)


@triton.jit(do_not_specialize=["K", "seed_ptr", "seed_low", "seed_high", "temperature"])
def _gumbel_topk_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R] if HAS_ROWS
    cut_ptr,  # [R] if FILTERED, as end_ptr: see `filter_cuts`
    end_ptr,
    tokens_ptr,  # [R * DRAWS, K], as keys_ptr and logprobs_ptr
    keys_ptr,
    logprobs_ptr,
    bounds_ptr,  # [R * DRAWS, CHUNKS, LANES], the largest bound of each group
    parts_ptr,  # [R * DRAWS, 2, CHUNKS], each chunk's largest logit and sum of exponentials
    tickets_ptr,  # [R * DRAWS]
    V,
    row_stride,
    K,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    STREAM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    DRAWS: tl.constexpr,  # independent draws from each row, of K tokens each
    NOISY: tl.constexpr,
    FILTERED: tl.constexpr,
    FILL: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,  # K, rounded up to a power of two
    OPENED: tl.constexpr,  # groups that are opened in one iteration
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
    cut = tl.full([], float("-inf"), tl.float32)
    end_of_ties = V + tl.full([], 0, tl.int32)
    if FILTERED:
        cut = tl.load(cut_ptr + draw // DRAWS)
        end_of_ties = tl.load(end_ptr + draw // DRAWS)
    scan_chunk(
        row_ptr,
        noise_row,
        stream,
        draw,
        chunk,
        bounds_ptr,
        parts_ptr,
        V,
        seed_low,
        seed_high,
        scale,
        cut,
        end_of_ties,
        NOISY,
        FILTERED,
        CHUNKS,
        INTERPRETED,
    )
    if is_last(tickets_ptr + draw, CHUNKS):
        largest, total = sum_of_parts(parts_ptr, draw, scale, CHUNKS)
        best = open_groups(
            row_ptr,
            noise_row,
            stream,
            draw,
            bounds_ptr,
            largest,
            total,
            V,
            K,
            seed_low,
            seed_high,
            temperature,
            cut,
            end_of_ties,
            NOISY,
            FILTERED,
            CHUNKS,
            PLACES,
            OPENED,
        )
        store_draws(
            best,
            row_ptr,
            noise_row,
            draw,
            tokens_ptr,
            keys_ptr,
            logprobs_ptr,
            largest,
            total,
            V,
            K,
            seed_low,
            seed_high,
            temperature,
            cut,
            end_of_ties,
            NOISY,
            FILL,
            PLACES,
        )


@triton.jit
def _filler(row_ptr, noise_row, V, count, seed_low, seed_high, cut, end_of_ties, PLACES: tl.constexpr):
    """Return the `count` tokens outside the support with the smallest noise words: words << 31 | tokens, unsorted."""
    place = tl.arange(0, PLACES)
    filler = tl.where(place < count, tl.full([PLACES], _LATEST, tl.int64) - 1 - place, -1)
    for start in range(0, V, LANES * 8):
        octet = start // 8 + tl.arange(0, LANES)
        token = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = tl.load(row_ptr + token, mask=token < V, other=0.0).to(tl.float32)
        outside = filtered(x, token, cut, end_of_ties) == float("-inf")
        bits = octet_bits(seed_low, seed_high, octet, noise_row, tl.full([], _FILL, tl.int32))
        packed = tl.where((token < V) & outside, (bits.to(tl.int64) << 31) | token, _LATEST)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `gumbel_topk` from logits [R, V]: tokens, keys and logprobs [R, k]. noise.rows: LongTensor[R]."""
    count, vocab_size = logits.shape
    device = logits.device
    noisy = filters.temperature > 0
    draws = k if replacement and noisy else 1
    programs = count * draws
    places = k // draws
    tokens = torch.empty(count, k, dtype=torch.long, device=device)
    keys, logprobs = (torch.empty(count, k, dtype=torch.float32, device=device) for _ in range(2))
    if programs == 0:
        return tokens, keys, logprobs
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    cuts = filter_cuts(logits[None], filters) if noisy else None
    bounds = torch.empty(programs, chunks, LANES.value, dtype=torch.float32, device=device)
    parts = torch.empty(programs, 2, chunks, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(places)
    with torch.cuda.device_of(logits):
        _gumbel_topk_kernel[(programs * chunks,)](
            logits_ptr=logits,
            rows_ptr=None if noise.rows is None else noise.rows.contiguous(),
            cut_ptr=None if cuts is None else cuts.cut,
            end_ptr=None if cuts is None else cuts.end,
            tokens_ptr=tokens,
            keys_ptr=keys,
            logprobs_ptr=logprobs,
            bounds_ptr=bounds,
            parts_ptr=parts,
            tickets_ptr=tickets(programs, device),
            V=vocab_size,
            row_stride=logits.stride(0),
            K=places,
            **seed_arguments(noise.seed),
            temperature=within_fp32(filters.temperature) if noisy else 1.0,
            STREAM=int(stream),
            HAS_ROWS=noise.rows is not None,
            DRAWS=draws,
            NOISY=noisy,
            FILTERED=cuts is not None,
            FILL=uniform_fill and noisy and not replacement,
            CHUNKS=chunks,
            PLACES=block,
            OPENED=min(16, max(4, block)),
            INTERPRETED=not logits.is_cuda,
            num_warps=4,
            enable_fp_fusion=True,
            maxnreg=255,
        )
    return tokens, keys, logprobs
