"""Find the cuts of top-k, top-p and min-p in rows of logits: a threshold and an index that define the kept tokens.

    kept  iff  x > cut, or x = cut and token < end

For top-k the cut is the largest number that at least k logits reach. For top-p it is the largest number such that the
logits that reach it have at least p of the mass; of the tokens at the cut only the first ones are kept, until the mass
is p. For min-p it is the least number whose score is not below log(min_p). `filtering` has the reference.

No row is sorted. Logits are mapped to integers of the same order, called keys, with as many bits as their dtype has,
and the cut is searched among the keys. Each pass sums the weights of a row's tokens (exp(score), or 1 for top-k) above
several thresholds. The search continues between two adjacent thresholds. The first thresholds are evenly spaced numbers
below the largest logit, where the cut is most likely; later ones are evenly spaced keys. In bf16 three passes are
usual, and seven the most.

The programs of a launch share each pass (see `sharing`). The terms of a sum, and their order, depend only on the row.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import (
    GREATEST,
    HIDDEN_BITS,
    LEAST,
    LOWEST,
    Filters,
    score,
    softmax_scale,
    sum_of_products,
    within_fp32,
)
from heavypath.kernels.language import tl, triton
from heavypath.kernels.sharing import (
    LOOKS,
    OVER,
    counters,
    find_open,
    finish_chunks,
    helpers,
    leave,
    open_pass,
    take_chunk,
    wait_for_all,
)
from heavypath.kernels.tickets import is_last, tickets

LANES = tl.constexpr(128)  # threads of a program; each holds eight adjacent tokens of a tile
TILES = tl.constexpr(4)
CHUNK = tl.constexpr(4 * 8 * 128)  # tokens
THRESHOLDS = tl.constexpr(8)  # of a pass
PASS = tl.constexpr(12)  # fp32 numbers that are stored for a pass, in whole vectors
_BRANCHES = tl.constexpr(256)  # of the search for min-p's cut, which reads no logits


class Cuts(NamedTuple):
    """The cuts of rows of logits: token is kept iff x > cut, or x = cut and token < end.

    cut: fp32, one for each row; NaN for a row that has no distribution, of which all tokens are kept
    end: int32, one for each row
    """

    cut: Tensor
    end: Tensor


@triton.jit
def filtered(x, token, cut, end):
    """Return logits x of tokens, with -inf for tokens that the filters drop. NaN stays."""
    return tl.where((x < cut) | ((x == cut) & (token >= end)), float("-inf"), x)


@triton.jit
def key_of(x, HIDDEN: tl.constexpr):
    """Map fp32 x to int64 keys of the same order; -0.0 and 0.0 have the same key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> HIDDEN).to(tl.int64)


@triton.jit
def number_of(key, HIDDEN: tl.constexpr):
    """Return the fp32 number with this key."""
    bits = (key << HIDDEN).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << HIDDEN) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tile(row_ptr, start, V):
    """Load the logits of a tile, [LANES, 8]."""
    token = start + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _reaching(x, weight, thresholds_ptr):
    """Return each token's weight for the thresholds that it reaches, 0 for the others: [LANES, 8, THRESHOLDS]."""
    above = ()
    for i in tl.static_range(THRESHOLDS):
        above += ((x >= tl.load(thresholds_ptr + i, cache_modifier=".cg")).to(tl.float32) * weight,)
    # Each join adds an axis of size 2, one bit of a threshold's index; the innermost join is the highest bit.
    even = tl.join(tl.join(above[0], above[4]), tl.join(above[2], above[6]))
    odd = tl.join(tl.join(above[1], above[5]), tl.join(above[3], above[7]))
    return tl.reshape(tl.join(even, odd), [LANES, 8, THRESHOLDS])


# A launch's memory for a row's passes:
#     memory = (counters_ptr, rows, passes_ptr, sums_ptr)
# passes_ptr, fp32 [rows, PASS], has for each row the largest logit, the factor of (logit - largest) in exp2, and the
# thresholds of the current pass, the least one first. sums_ptr, fp32 [rows, CHUNKS, THRESHOLDS], has the results.


@triton.jit
def _work(memory, row, row_ptr, V, CHUNKS: tl.constexpr):
    """Take chunks of a row's open pass until none is left, and store their sums."""
    counters_ptr, rows, passes_ptr, sums_ptr = memory
    passes_ptr += row * PASS
    sums_ptr += row.to(tl.int64) * CHUNKS * THRESHOLDS
    count = tl.full([], 0, tl.int32)
    chunk = take_chunk(counters_ptr, row)
    while chunk >= 0:
        largest = tl.load(passes_ptr, cache_modifier=".cg")
        scale = tl.load(passes_ptr + 1, cache_modifier=".cg")
        least = tl.load(passes_ptr + 2, cache_modifier=".cg")  # after the first pass few chunks reach it
        tiles = ()
        highest = tl.full([LANES, 8], float("-inf"), tl.float32)
        for tile in tl.static_range(TILES):
            tiles += (_tile(row_ptr, chunk * CHUNK + tile * LANES * 8, V),)
            highest = tl.maximum(highest, tiles[tile])
        found = tl.zeros([THRESHOLDS], tl.float32)
        if tl.max(highest) >= least:
            sums = tl.full([LANES, 8, THRESHOLDS], 0.0, tl.float32)
            for tile in tl.static_range(TILES):
                x = tiles[tile]
                sums += _reaching(x, tl.exp2(tl.maximum((x - largest) * scale, -1000.0)), passes_ptr + 2)
            found = tl.sum(tl.sum(sums, 1), 0)
        tl.store(sums_ptr + chunk * THRESHOLDS + tl.arange(0, THRESHOLDS), found)
        count += 1
        chunk = take_chunk(counters_ptr, row)
    if count > 0:
        finish_chunks(counters_ptr, rows, row, count)


@triton.jit
def help_rows(memory, helper, logits_ptr, N, batch_stride, row_stride, V, CHUNKS: tl.constexpr):
    """Take part in passes over rows [B, N, V] until all rows are done. helper: this program's number among helpers."""
    counters_ptr, rows, _, _ = memory
    look = tl.full([], 0, tl.int32)
    while look < LOOKS:
        row = find_open(counters_ptr, rows, helper % rows)
        look = tl.where(row == OVER, LOOKS, look + 1)
        if row >= 0:
            row_ptr = logits_ptr + (row // N).to(tl.int64) * batch_stride + (row % N).to(tl.int64) * row_stride
            _work(memory, row, row_ptr, V, CHUNKS)


@triton.jit
def sums_of_pass(memory, row, row_ptr, V, thresholds, largest, scale, CHUNKS: tl.constexpr):
    """Lead a pass; return each chunk's sums over the tokens that reach each threshold, [>= CHUNKS, THRESHOLDS]."""
    counters_ptr, rows, passes_ptr, sums_ptr = memory
    place = tl.arange(0, THRESHOLDS)
    pass_ptr = passes_ptr + row * PASS
    tl.store(pass_ptr, largest)
    tl.store(pass_ptr + 1, scale)
    tl.store(pass_ptr + 2 + place, thresholds)
    open_pass(counters_ptr, row, CHUNKS)
    _work(memory, row, row_ptr, V, CHUNKS)
    wait_for_all(counters_ptr, rows, row, CHUNKS)
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))[:, None]
    part = sums_ptr + (row.to(tl.int64) * CHUNKS + chunk) * THRESHOLDS + place[None, :]
    return tl.load(part, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")


@triton.jit
def _search(
    memory, row, row_ptr, V, low, guess, largest, scale, count, fraction, CHUNKS: tl.constexpr, HIDDEN: tl.constexpr
):
    """Find the largest key, not below `low`, that enough tokens reach, by weight. Tokens below `low` do not count.

    Enough is min(count, the weight of all tokens) if count > 0, else the fraction of the weight of all tokens. The
    weight of a token is 2^((x - largest) scale).

    Returns the key, the weight of the tokens above it, the weight of the tokens that reach it, and the enough weight.
    """
    place = tl.arange(0, THRESHOLDS)
    high = key_of(largest, HIDDEN) + 1  # no token reaches it
    above = tl.full([], 0.0, tl.float32)
    reached = tl.full([], float("inf"), tl.float32)
    enough = tl.full([], 0.0, tl.float32)
    even = tl.maximum(place - 1, 0).to(tl.float32) / (THRESHOLDS - 2)
    keys = tl.where(place == 0, low, key_of(guess * (1 - even) + largest * even, HIDDEN))
    first = high > low
    while first | (high - low > 1):
        keys = tl.maximum(tl.minimum(keys, high - 1), low)
        sums = tl.sum(sums_of_pass(memory, row, row_ptr, V, number_of(keys, HIDDEN), largest, scale, CHUNKS), 0)
        if first:
            every = tl.max(sums)
            enough = tl.where(count > 0, tl.minimum(count, every), every * fraction)
            first = high < low
        is_enough = sums >= enough
        above = tl.maximum(above, tl.max(tl.where(is_enough, 0.0, sums)))
        reached = tl.minimum(reached, tl.min(tl.where(is_enough, sums, float("inf"))))
        low = tl.maximum(low, tl.max(tl.where(is_enough, keys, low)))
        high = tl.minimum(high, tl.min(tl.where(is_enough, high, keys)))
        keys = low + place * ((high - low + THRESHOLDS - 1) // THRESHOLDS)
    return low, above, reached, enough


@triton.jit
def needed_ties(weight, above, reached, enough):
    """Return how many of the tokens at top-p's cut, each of this weight, are kept; 0: all. Sums are as in `_search`."""
    needed = tl.maximum(tl.ceil((enough - above) / weight), 1.0)
    return tl.where((reached - above) / weight > needed + 0.5, needed, 0.0)


@triton.jit
def end_of_ties(memory, row, row_ptr, V, cut_key, needed, largest, CHUNKS: tl.constexpr, HIDDEN: tl.constexpr):
    """Return the index after the needed-th of the tokens at the cut."""
    place = tl.arange(0, THRESHOLDS)
    counts = sums_of_pass(memory, row, row_ptr, V, number_of(cut_key + place, HIDDEN), largest, 0.0, CHUNKS)
    ties = tl.sum(tl.where(place[None, :] == 0, counts, tl.where(place[None, :] == 1, -counts, 0.0)), 1)
    before = tl.cumsum(ties) - ties
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    here = (before < needed) & (needed <= before + ties)
    which = tl.max(tl.where(here, chunk, -1))
    rank = needed - tl.sum(tl.where(here, before, 0.0))
    token = which * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + token, mask=(token >= 0) & (token < V), other=float("-inf")).to(tl.float32)
    tie = tl.where(x == number_of(cut_key, HIDDEN), 1.0, 0.0)
    return tl.min(tl.where((tie > 0) & (tl.cumsum(tie) == rank), token + 1, V))


@triton.jit
def _least_score(largest, temperature, log_min_p):
    """Return the least number whose score is at least log_min_p."""
    base = key_of(tl.full([], float("-inf"), tl.float32), 0)  # its score is too low
    for step in tl.static_range(4):
        key = base + (tl.arange(0, _BRANCHES).to(tl.int64) << (24 - 8 * step))
        x = number_of(tl.minimum(key, key_of(largest, 0)), 0)
        too_low = tl.sum((score(x, largest, temperature) < log_min_p).to(tl.int32))
        base += (too_low - 1).to(tl.int64) << (24 - 8 * step)
    return number_of(base + 1, 0)


@triton.jit
def in_fp32(temperature):
    """`filtering.within_fp32` in a kernel, for an fp64 number; 0 stays, and stands for the largest logit alone."""
    within = tl.minimum(tl.maximum(temperature, LEAST), GREATEST)
    return tl.where(temperature > 0, within, 0.0).to(tl.float32)


@triton.jit
def _settings(settings_ptr, V):
    """Load a sequence's temperature, top_k, top_p and log(min_p), as in a launch with one setting for all."""
    top_k = tl.load(settings_ptr + 1)
    min_p = tl.load(settings_ptr + 3)
    return (
        in_fp32(tl.load(settings_ptr)),
        tl.where((top_k < 1) | (top_k > V), V, top_k).to(tl.int32),
        tl.load(settings_ptr + 2).to(tl.float32),
        tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-300)), float("-inf")).to(tl.float32),
    )


@triton.jit
def _lead(
    memory,
    row,
    row_ptr,
    parts_ptr,
    V,
    temperature,
    top_k,
    top_p,
    log_min_p,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return the cut, the end and the largest logit of a row, after all programs have stored their parts."""
    scale = softmax_scale(tl.maximum(temperature, LEAST))
    chunk = tl.arange(0, triton.next_power_of_2(CHUNKS))
    part_ptr = parts_ptr + row.to(tl.int64) * 2 * CHUNKS + chunk
    parts = tl.load(part_ptr, mask=chunk < CHUNKS, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(part_ptr + CHUNKS, mask=chunk < CHUNKS, other=0.0, cache_modifier=".cg")
    largest = tl.max(parts)
    total = sum_of_products(totals, tl.exp2((parts - largest) * scale))
    cut = tl.full([], float("nan"), tl.float32)
    end = V + tl.full([], 0, tl.int32)
    if total > 0:  # false for a row of only -inf, and for one with NaN or +inf
        cut = tl.full([], LOWEST, tl.float32)
        low = key_of(tl.full([], LOWEST, tl.float32), HIDDEN)
        needed = tl.full([], 0.0, tl.float32)  # how many of the tokens at the cut are kept; 0: all
        if HAS_TOP_K:  # noqa: SIM102, the first condition is for compilation, the second for the run
            if top_k < V:
                # The chunks' largest logits show the range of the row's large logits. Chunks of only -inf do not count.
                spread = largest - tl.min(tl.where(parts > LOWEST, parts, largest))
                guess = tl.maximum(largest - 2 * tl.maximum(spread, 8 / scale), LOWEST)
                low, _, _, _ = _search(
                    memory, row, row_ptr, V, low, guess, largest, 0.0, top_k.to(tl.float32), 0.0, CHUNKS, HIDDEN
                )
                cut = number_of(low, HIDDEN)
        if HAS_TOP_P:
            if top_p < 1:
                # V tokens of weight (1 - p) total / V would have 1 - p of the mass, so the cut is at least this weight.
                least = tl.log2((1 - top_p) * total) - tl.log2(end.to(tl.float32))
                guess = tl.maximum(largest + least / scale, LOWEST)
                low, above, reached, enough = _search(
                    memory, row, row_ptr, V, low, guess, largest, scale, 0.0, top_p, CHUNKS, HIDDEN
                )
                cut = number_of(low, HIDDEN)
                needed = needed_ties(tl.exp2((cut - largest) * scale), above, reached, enough)
            if HAS_GREEDY:
                is_greedy = temperature == 0
                low = tl.where(is_greedy, key_of(largest, HIDDEN), low)
                cut = tl.where(is_greedy, largest, cut)
                needed = tl.where(is_greedy, 1.0, needed)
            if needed > 0:
                end = end_of_ties(memory, row, row_ptr, V, low, needed, largest, CHUNKS, HIDDEN)
        if log_min_p > float("-inf"):
            least_cut = _least_score(largest, temperature, log_min_p)
            end = tl.where(least_cut > cut, V, end)
            cut = tl.maximum(least_cut, cut)
    return cut, end, tl.where(total >= 0, largest, float("nan"))


@triton.jit(do_not_specialize=["N", "temperature", "top_k", "top_p", "log_min_p", "helping"])
def _cuts_kernel(
    logits_ptr,  # [B, N, V]
    cut_ptr,  # [B, N]
    end_ptr,  # [B, N]
    largest_ptr,  # [B, N] if BY_SEQUENCE
    settings_ptr,  # [B, 4] if BY_SEQUENCE, instead of the four numbers below
    parts_ptr,  # [B, N, 2, CHUNKS], each chunk's largest logit and sum of exponentials
    passes_ptr,
    sums_ptr,
    tickets_ptr,  # [B, N], followed by the counters of `sharing`
    N,
    V,
    batch_stride,
    row_stride,
    settings_stride,
    temperature,
    top_k,
    top_p,
    log_min_p,
    helping,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    rows = (tl.num_programs(0) - helping) // CHUNKS
    memory = (tickets_ptr + rows, rows, passes_ptr, sums_ptr)
    program = tl.program_id(0)
    if program < rows * CHUNKS:
        row = program // CHUNKS
        chunk = program % CHUNKS
        row_ptr = logits_ptr + (row // N).to(tl.int64) * batch_stride + (row % N).to(tl.int64) * row_stride
        if BY_SEQUENCE:
            temperature, top_k, top_p, log_min_p = _settings(settings_ptr + row // N * settings_stride, V)
            if temperature == 0:  # only the largest logit
                top_k = V
                top_p = tl.full([], 1.0, tl.float32)
                log_min_p = tl.full([], float("-inf"), tl.float32)
        scale = softmax_scale(tl.maximum(temperature, LEAST))
        largest = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        for tile in tl.static_range(TILES):
            x = _tile(row_ptr, chunk * CHUNK + tile * LANES * 8, V)
            higher = tl.maximum(largest, tl.max(x, 1))
            total = total * tl.exp2((largest - higher) * scale) + tl.sum(tl.exp2((x - higher[:, None]) * scale), 1)
            largest = higher
        highest = tl.max(largest)
        part_ptr = parts_ptr + row.to(tl.int64) * 2 * CHUNKS + chunk
        tl.store(part_ptr, highest)
        tl.store(part_ptr + CHUNKS, sum_of_products(total, tl.exp2((largest - highest) * scale)))
        if is_last(tickets_ptr + row, CHUNKS):
            cut, end, largest_of_row = _lead(
                memory,
                row,
                row_ptr,
                parts_ptr,
                V,
                temperature,
                top_k,
                top_p,
                log_min_p,
                HAS_TOP_K,
                HAS_TOP_P,
                BY_SEQUENCE,
                HIDDEN,
                CHUNKS,
            )
            tl.store(cut_ptr + row, cut)
            tl.store(end_ptr + row, end)
            if BY_SEQUENCE:
                tl.store(largest_ptr + row, largest_of_row)
            leave(tickets_ptr + rows, rows, helping)
    elif HAS_TOP_K or HAS_TOP_P:
        help_rows(memory, program - rows * CHUNKS, logits_ptr, N, batch_stride, row_stride, V, CHUNKS)
        leave(tickets_ptr + rows, rows, helping)


def filter_cuts(logits: Tensor, filters: Filters) -> Cuts | None:
    """Return the cuts [B * N] of rows of logits [B, N, V]; None if the filters keep all tokens.

    The temperature must be above 0.
    """
    vocab_size = logits.shape[-1]
    if not filters.drop(vocab_size):
        return None
    top_k = min(int(filters.top_k or vocab_size), vocab_size)
    top_p = 1.0 if filters.top_p is None else float(filters.top_p)
    log_min_p = math.log(filters.min_p) if filters.min_p else -math.inf
    cuts, _ = _launched(logits, None, within_fp32(filters.temperature), top_k, top_p, log_min_p)
    return cuts


def cuts_by_sequence(logits: Tensor, settings: Tensor) -> tuple[Cuts, Tensor]:
    """Find the cuts [B * N] of rows of logits [B, N, V], with each sequence's filters.

    settings: fp64 [B, 4], temperature, top_k, top_p and min_p, as in `sequence_scores`. Temperature 0 keeps only the
              largest logit, the first of equal ones. They are read when the kernel runs

    Returns the cuts, and the rows' largest logits fp32 [B * N], NaN for a row with NaN or +inf.
    """
    return _launched(logits, settings, 1.0, 1, 0.0, 0.0)


def _launched(
    logits: Tensor, settings: Tensor | None, temperature: float, top_k: int, top_p: float, log_min_p: float
) -> tuple[Cuts, Tensor]:
    """Launch the kernel: cuts and largest logits of all rows; settings, if given, replace the four numbers."""
    batch, count, vocab_size = logits.shape
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    rows = batch * count
    device = logits.device
    chunks = triton.cdiv(vocab_size, CHUNK.value)
    cuts = Cuts(*(torch.empty(rows, dtype=kind, device=device) for kind in (torch.float32, torch.int32)))
    largest = cuts.cut if settings is None else torch.empty_like(cuts.cut)
    if rows == 0:
        return cuts, largest
    sizes = [rows * chunks * THRESHOLDS.value, rows * PASS.value, rows * 2 * chunks]  # each begins at a whole vector
    sums, passes, parts = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    by_k = settings is not None or top_k < vocab_size
    by_p = settings is not None or top_p < 1
    helping = min(4 * helpers(device), rows * chunks) if by_k or by_p else 0  # min-p's cut needs no pass
    with torch.cuda.device_of(logits):
        _cuts_kernel[(rows * chunks + helping,)](
            logits_ptr=logits,
            cut_ptr=cuts.cut,
            end_ptr=cuts.end,
            largest_ptr=largest,
            settings_ptr=settings,
            parts_ptr=parts,
            passes_ptr=passes,
            sums_ptr=sums,
            tickets_ptr=tickets(rows + counters(rows), device),
            N=count,
            V=vocab_size,
            batch_stride=logits.stride(0),
            row_stride=logits.stride(1),
            settings_stride=0 if settings is None else settings.stride(0),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            log_min_p=log_min_p,
            helping=helping,
            HAS_TOP_K=by_k,
            HAS_TOP_P=by_p,
            BY_SEQUENCE=settings is not None,
            HIDDEN=HIDDEN_BITS[logits.dtype],
            CHUNKS=chunks,
            num_warps=LANES.value // 32,
            enable_fp_fusion=True,
            maxnreg=255,
        )
    return cuts, largest
