"""Draw tokens under top-p, usually without finding its cut: only the candidates for the draw are classified.

`filter_cuts` needs three or four passes over a row to find top-p's cut. A draw seldom needs the cut. First the
candidates are found, the tokens with the best keys of the whole row, twice as many as are drawn, as `sampling_kernel`
finds them without filters. Then a pass sums the weights of tokens:

    M(x) = sum over all tokens with a logit of at least x;   the cut is the largest x with M(x) >= p M(-inf)

The thresholds x of this pass are the candidates' logits. Let c be the largest of them with M(c) >= p M(-inf), and b the
next larger one. Candidates above c are kept, those below c are dropped. c itself is the cut, and kept, if M(c) - M(b)
is the weight of one token: then no other token is at c or between. The first K kept candidates are the draw. If fewer
are kept, there are no other tokens to draw if the weights of the kept ones sum to M(c).

If this does not decide, the search continues until it does or the cut is found. Then the draw is made again with this
cut. M has the same bits as in `filter_cuts`, so the tokens are always those that are drawn with its cut.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import CHUNK as TOKENS_OF_PASS
from heavypath.kernels.filter_cuts import (
    PASS,
    THRESHOLDS,
    end_of_ties,
    help_rows,
    key_of,
    needed_ties,
    number_of,
    sums_of_pass,
)
from heavypath.kernels.filtering import HIDDEN_BITS, LOWEST, Filters, softmax_scale, within_fp32
from heavypath.kernels.language import tl, triton
from heavypath.kernels.noise import Noise, Stream, seed_arguments, seed_words
from heavypath.kernels.sampling_kernel import (
    CHUNK,
    LANES,
    NEVER,
    launch_topk,
    open_groups,
    scan_chunk,
    store_draws,
    sum_of_parts,
    unpack,
)
from heavypath.kernels.sharing import counters, helpers, leave
from heavypath.kernels.tickets import is_last, tickets

# Tokens of a draw: more candidates do not fit in registers, nor do tiles of rows that are read without vector loads.
MOST = 16
ALIGNED = 16  # rows must be a multiple of this many logits apart, for vector loads
_NO_KEY = tl.constexpr(-(2**62))


@triton.jit
def _search(
    best,
    memory,
    row,
    row_ptr,
    V,
    K,
    largest,
    scale,
    top_p,
    PASS_CHUNKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Search the cut as `filter_cuts` does, first among the candidates' keys, until the draw is decided.

    best: the candidates, packed, largest first

    Returns the draw, packed in the same way; whether it is decided; the key of the cut, if the draw is not decided or
    has fewer than K tokens; and how many tokens at the cut are kept, 0 for all.
    """
    place = tl.arange(0, PLACES)
    threshold = tl.arange(0, THRESHOLDS)
    there = best > NEVER
    _, token = unpack(best)
    x = tl.load(row_ptr + token, mask=there, other=float("-inf")).to(tl.float32)
    key = tl.where(there, key_of(x, HIDDEN), _NO_KEY)
    weight = tl.exp2(tl.maximum((x - largest) * scale, -1000.0))
    low = key_of(tl.full([], LOWEST, tl.float32), HIDDEN)
    high = key_of(largest, HIDDEN) + 1
    reached = tl.full([], float("inf"), tl.float32)
    above = tl.full([], 0.0, tl.float32)
    enough = tl.full([], 0.0, tl.float32)
    drawn = best
    decided = low > high
    first = low < high
    while first | ((high - low > 1) & (decided == 0)):
        # The least threshold is the window's lower end. The others are candidates in the window, evenly spaced by rank.
        inside = tl.where((key > low) & (key < high), key, _NO_KEY)
        earlier = inside[None, :] > inside[:, None]
        earlier |= (inside[None, :] == inside[:, None]) & (place[None, :] < place[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        count = tl.sum((inside > _NO_KEY).to(tl.int32))
        last = tl.maximum(count, THRESHOLDS - 1) - 1
        chosen = tl.minimum((THRESHOLDS - 1 - threshold) * last // (THRESHOLDS - 2), count - 1)
        keys = tl.max(tl.where(rank[:, None] == chosen[None, :], inside[:, None], _NO_KEY), 0)
        keys = tl.where((threshold == 0) | (keys == _NO_KEY), low, keys)
        even = low + threshold * ((high - low + THRESHOLDS - 1) // THRESHOLDS)
        keys = tl.where(count > 0, keys, tl.minimum(even, high - 1))
        sums = tl.sum(sums_of_pass(memory, row, row_ptr, V, number_of(keys, HIDDEN), largest, scale, PASS_CHUNKS), 0)
        enough = tl.where(first, tl.max(sums) * top_p, enough)
        first = low > high
        is_enough = sums >= enough
        above = tl.maximum(above, tl.max(tl.where(is_enough, 0.0, sums)))
        reached = tl.minimum(reached, tl.min(tl.where(is_enough, sums, float("inf"))))
        low = tl.maximum(low, tl.max(tl.where(is_enough, keys, low)))
        high = tl.minimum(high, tl.min(tl.where(is_enough, high, keys)))

        # Whether one token is at the key `low`, and none between it and `high`: a second would weigh the same or more.
        at_low = tl.max(tl.where(key == low, weight, 0.0))
        is_cut = (reached - above < 1.5 * at_low) & (at_low > 1e-4 * reached)
        kept = there & (key >= tl.where(is_cut, low, high))
        rest = reached - tl.sum(tl.where(kept, weight, 0.0))
        before = tl.cumsum(kept.to(tl.int32))
        doubts = tl.sum((there & (key >= low) & (before < K) & (kept == 0)).to(tl.int32))
        decided = (doubts == 0) & ((tl.max(before) >= K) | (is_cut & (tl.abs(rest) < 0.5 * at_low)))
        to = tl.where(kept & (before <= K), before - 1, PLACES)
        drawn = tl.max(tl.where(to[None, :] == place[:, None], best[None, :], NEVER), 1)
    weight = tl.exp2((number_of(low, HIDDEN) - largest) * scale)
    return drawn, decided, low, needed_ties(weight, above, reached, enough)


@triton.jit(do_not_specialize=["K", "seed_ptr", "seed_low", "seed_high", "temperature", "top_p", "helping"])
def _nucleus_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R] if HAS_ROWS
    tokens_ptr,  # [R, K], as keys_ptr and logprobs_ptr
    keys_ptr,
    logprobs_ptr,
    bounds_ptr,  # of `sampling_kernel`, as parts_ptr
    parts_ptr,
    passes_ptr,  # of `filter_cuts`, as sums_ptr
    sums_ptr,
    tickets_ptr,  # [R], followed by the counters of `sharing`
    V,
    row_stride,
    K,
    seed_ptr,
    seed_low,
    seed_high,
    temperature,
    top_p,
    helping,
    STREAM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FILL: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    PASS_CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,  # candidates
    OPENED: tl.constexpr,  # groups that are opened in one iteration
    INTERPRETED: tl.constexpr,
):
    rows = (tl.num_programs(0) - helping) // CHUNKS
    memory = (tickets_ptr + rows, rows, passes_ptr, sums_ptr)
    program = tl.program_id(0)
    if program >= rows * CHUNKS:
        help_rows(memory, program - rows * CHUNKS, logits_ptr, rows, 0, row_stride, V, PASS_CHUNKS)
        leave(tickets_ptr + rows, rows, helping)
        return
    row = program // CHUNKS
    chunk = program % CHUNKS
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    noise_row = row.to(tl.int64)
    if HAS_ROWS:
        noise_row = tl.load(rows_ptr + noise_row)
    stream = STREAM + tl.full([], 0, tl.int32)
    seed_low, seed_high = seed_words(seed_ptr, seed_low, seed_high)
    scale = softmax_scale(temperature)
    cut = tl.full([], float("-inf"), tl.float32)
    end = V + tl.full([], 0, tl.int32)
    scan_chunk(
        row_ptr,
        noise_row,
        stream,
        row,
        chunk,
        bounds_ptr,
        parts_ptr,
        V,
        seed_low,
        seed_high,
        scale,
        cut,
        end,
        True,
        False,
        CHUNKS,
        INTERPRETED,
    )
    if is_last(tickets_ptr + row, CHUNKS):
        largest, total = sum_of_parts(parts_ptr, row, scale, CHUNKS)
        best = tl.full([PLACES], NEVER, tl.int64)
        turn = tl.full([], 0, tl.int32)
        while turn < 2:  # turn 0 with all tokens; turn 1, if that does not decide, with the tokens that the cut keeps
            best = open_groups(
                row_ptr,
                noise_row,
                stream,
                row,
                bounds_ptr,
                largest,
                total,
                V,
                tl.where(turn == 0, PLACES, K),
                seed_low,
                seed_high,
                temperature,
                cut,
                end,
                True,
                True,
                CHUNKS,
                PLACES,
                OPENED,
            )
            turn += tl.where(total > 0, 1, 2)
            if turn == 1:
                drawn, decided, low, needed = _search(
                    best, memory, row, row_ptr, V, K, largest, scale, top_p, PASS_CHUNKS, HIDDEN, PLACES
                )
                cut = number_of(low, HIDDEN)
                if decided:
                    best = drawn
                    turn = tl.full([], 2, tl.int32)
                elif needed > 0:
                    end = end_of_ties(memory, row, row_ptr, V, low, needed, largest, PASS_CHUNKS, HIDDEN)
        store_draws(
            best,
            row_ptr,
            noise_row,
            row,
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
            end,
            True,
            FILL,
            PLACES,
        )
        leave(tickets_ptr + rows, rows, helping)


def launch_tokens(
    logits: Tensor, k: int, filters: Filters, *, noise: Noise, stream: Stream, uniform_fill: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens as `launch_topk`; keys and log-probabilities may be those before top-p, so use only the tokens."""
    count, vocab_size = logits.shape
    device = logits.device
    by_p_alone = Filters(top_p=filters.top_p).drop(vocab_size) and not filters._replace(top_p=None).drop(vocab_size)
    aligned = vocab_size % ALIGNED == 0 and logits.stride() == (logits.stride(0) // ALIGNED * ALIGNED, 1)
    if not (by_p_alone and aligned) or filters.temperature == 0 or k > MOST or count == 0:
        return launch_topk(logits, k, filters, noise=noise, stream=stream, uniform_fill=uniform_fill)
    tokens = torch.empty(count, k, dtype=torch.long, device=device)
    keys, logprobs = (torch.empty(count, k, dtype=torch.float32, device=device) for _ in range(2))
    chunks, in_pass = (triton.cdiv(vocab_size, size.value) for size in (CHUNK, TOKENS_OF_PASS))
    sizes = [chunks * LANES.value, in_pass * THRESHOLDS.value, PASS.value, 2 * chunks]  # as in `filter_cuts`
    memory = torch.empty(count * sum(sizes), dtype=torch.float32, device=device)
    bounds, sums, passes, parts = memory.split([count * size for size in sizes])
    places = max(8, triton.next_power_of_2(2 * k))
    helping = min(4 * helpers(device), count * in_pass)
    with torch.cuda.device_of(logits):
        _nucleus_kernel[(count * chunks + helping,)](
            logits,
            None if noise.rows is None else noise.rows.contiguous(),
            tokens,
            keys,
            logprobs,
            bounds,
            parts,
            passes,
            sums,
            tickets(count + counters(count), device),
            vocab_size,
            logits.stride(0),
            k,
            **seed_arguments(noise.seed),
            temperature=within_fp32(filters.temperature),
            top_p=float(filters.top_p or 1.0),
            helping=helping,
            STREAM=int(stream),
            HAS_ROWS=noise.rows is not None,
            FILL=uniform_fill,
            HIDDEN=HIDDEN_BITS[logits.dtype],
            CHUNKS=chunks,
            PASS_CHUNKS=in_pass,
            PLACES=places,
            OPENED=min(16, places),
            INTERPRETED=not logits.is_cuda,
            num_warps=4,
            enable_fp_fusion=True,
            maxnreg=255,
        )
    return tokens, keys, logprobs


def launch_draw(
    logits: Tensor, k: int, filters: Filters, *, noise: Noise, replacement: bool, uniform_fill: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the children of a step's nodes, as `sampling.reference`: without replacement by `launch_tokens`."""
    if replacement:
        return launch_topk(logits, k, filters, noise=noise, stream=Stream.DRAFT, replacement=True)
    return launch_tokens(logits, k, filters, noise=noise, stream=Stream.DRAFT, uniform_fill=uniform_fill)
