"""The Triton kernels of `growing`, which has the formulas and the reference, and their launcher.

There are two kernels, each one launch per level. The first computes sums over rows of logits; it is needed for values
by confidence, or at another temperature than the draws'. In the second a program for each sequence computes the values
below each node, in draw order. The n rows of values fall; the program takes the best of their n heads, `width` times.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
from torch import Tensor

from heavypath.kernels.filtering import LOG2E, LOWEST
from heavypath.kernels.implementation import in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.sampling import TopK
from heavypath.kernels.trees.levels import NodeInputs
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

_CHUNK = tl.constexpr(4096)  # tokens of a row that a program sums up
_SUMS = tl.constexpr(3)  # largest logit, sum of exponentials, and of their squares


@triton.jit(do_not_specialize=["nodes", "temperature"])
def _sums_kernel(
    logits_ptr,  # [B, nodes, V]
    sums_ptr,  # [B * nodes, CHUNKS, _SUMS]
    nodes,
    V,
    batch_stride,
    row_stride,
    temperature,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store each chunk's largest logit, and sums of exponentials and of their squares, relative to it."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row // nodes * batch_stride + row % nodes * row_stride
    x = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
    largest = tl.maximum(tl.max(x), LOWEST)
    weight = tl.exp2((x - largest) * (LOG2E / temperature))
    sums_ptr += tl.program_id(0).to(tl.int64) * _SUMS
    tl.store(sums_ptr, largest)
    tl.store(sums_ptr + 1, tl.sum(weight))
    tl.store(sums_ptr + 2, tl.sum(weight * weight))


@triton.jit
def _row_of(sums_ptr, there, temperature, CHUNKS: tl.constexpr):
    """Combine a row's chunks: largest logit, sum of exponentials, and sum of squared probabilities in fp64."""
    largest = tl.where(there, LOWEST, 0.0).to(tl.float32)
    for chunk in range(CHUNKS):
        largest = tl.maximum(largest, tl.load(sums_ptr + chunk * _SUMS, mask=there, other=LOWEST))
    total = tl.zeros_like(largest).to(tl.float64)
    squares = tl.zeros_like(largest).to(tl.float64)
    for chunk in range(CHUNKS):
        part_ptr = sums_ptr + chunk * _SUMS
        factor = tl.exp2((tl.load(part_ptr, mask=there, other=LOWEST) - largest) * (LOG2E / temperature))
        total += (tl.load(part_ptr + 1, mask=there, other=0.0) * factor).to(tl.float64)
        squares += (tl.load(part_ptr + 2, mask=there, other=0.0) * factor * factor).to(tl.float64)
    # From a row of only -inf, or with NaN or +inf in it, nothing is drawn. Its total is 0 or NaN, and not used.
    return largest, total, tl.where(total > 0, squares / (total * total), 0.0)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 for fp64 numbers, exact near 0 (Kahan)."""
    power = tl.exp(x)
    log = tl.log(power)
    return tl.where(power == 1.0, x, (power - 1.0) * (x / tl.where(log == 0.0, 1.0, log)))


@triton.jit
def _log1p(x):
    """Return log(1 + x) for fp64 numbers, exact near 0 (Kahan)."""
    one_more = 1.0 + x
    rest = one_more - 1.0
    return tl.where(rest == 0.0, x, tl.log(one_more) * (x / tl.where(rest == 0.0, 1.0, rest)))


@triton.jit
def _conditioned(gap, key, parent_key):
    """`sampling.conditioned` for one child: its key, given that the largest key of its siblings is parent_key.

    gap: the child's key minus the largest of its siblings, at most 0; key: log-probability of the path to the parent
    plus the draw's key
    """
    below = tl.where(gap < 0, gap, -1.0)
    near = below > -0.6931471805599453
    log_of_rest = tl.where(
        near, tl.log(-_expm1(tl.where(near, below, -0.5))), _log1p(-tl.exp(tl.where(near, -1.0, below)))
    )
    z = parent_key - key + log_of_rest
    lower = parent_key - tl.maximum(z, 0.0) - _log1p(tl.exp(-tl.abs(z)))
    return tl.where(gap < 0, lower, parent_key)


@triton.jit
def _offer_children(
    tokens_ptr, keys_ptr, logprobs_ptr, offers_ptr, worths_ptr, there, phi, parent_key, K, NOISY: tl.constexpr
):
    """Store keys and path log-probabilities of a beam's children. Pointers are to the first draw of each parent."""
    alive = there & (phi > float("-inf"))
    phi = tl.where(alive, phi, 0.0)
    parent_key = tl.where(alive, parent_key, 0.0)
    alive &= tl.load(tokens_ptr, mask=alive, other=-1) >= 0
    largest = tl.load(keys_ptr, mask=alive, other=0.0)
    for k in range(K):
        drawn = alive & (tl.load(tokens_ptr + k, mask=alive, other=-1) >= 0)
        key = tl.load(keys_ptr + k, mask=drawn, other=0.0)
        logprob = phi + tl.load(logprobs_ptr + k, mask=drawn, other=0.0).to(tl.float64)
        offer = logprob
        if NOISY:
            gap = tl.where(drawn, key - largest, 0.0).to(tl.float64)
            offer = _conditioned(gap, phi + key.to(tl.float64), parent_key)
        tl.store(offers_ptr + k, tl.where(drawn, offer, float("-inf")), mask=there)
        tl.store(worths_ptr + k, tl.where(drawn, logprob, float("-inf")), mask=there)


@triton.jit
def _offer_slots(
    tokens_ptr,
    logprobs_ptr,
    logits_ptr,
    sums_ptr,
    lines_ptr,
    offers_ptr,
    worths_ptr,
    there,
    node,
    slot,
    K,
    temperature,
    BY_NODE: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    HAS_LINES: tl.constexpr,
    LINES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store each rank's slot value below each node, at most that of the rank before, and the child's worth.

    node, slot: worths of the nodes, values of their slots. Pointers are to the first draw, or the row, of each node.
    """
    largest = tl.zeros_like(node)
    total = tl.zeros_like(node)
    squares = tl.zeros_like(node)
    if FROM_LOGITS or HAS_LINES:
        largest, total, squares = _row_of(sums_ptr, there, temperature, CHUNKS)
    drawn = tl.zeros_like(node)  # of the siblings before
    drawn_squares = tl.zeros_like(node)  # of the siblings before
    reached = tl.zeros_like(node) + 1.0
    least = slot
    for k in range(K):
        token = tl.load(tokens_ptr + k, mask=there, other=-1)
        present = there & (token >= 0)
        if FROM_LOGITS:
            x = tl.load(logits_ptr + token, mask=present, other=0.0).to(tl.float32)
            logprob = ((x - largest) / temperature).to(tl.float64) - tl.log(total)
        else:
            logprob = tl.load(logprobs_ptr + k, mask=present, other=0.0).to(tl.float64)
        prob = tl.where(present, tl.exp(tl.where(present, logprob, 0.0)), 0.0)
        remaining = tl.maximum(1.0 - drawn, 0.0)
        if HAS_LINES:
            base = tl.load(lines_ptr + k)
            slope = tl.load(lines_ptr + LINES + k)
            left = tl.where(remaining > 0, remaining, 1.0)
            share = tl.where(remaining > 0, tl.minimum(prob / left, 1.0), tl.where(prob > 0, 1.0, 0.0))
            accept = base + slope * share
            again = tl.minimum(tl.maximum((squares - drawn_squares) / (left * left), 0.0), 1.0)
            value = tl.where(remaining > 0, reached * (base + slope * again), 0.0)
            worth = reached * accept
            reached *= 1.0 - accept
            drawn_squares += prob * prob
        else:
            value = remaining
            worth = tl.minimum(prob, remaining)
        drawn += prob
        if BY_NODE:
            value = worth
        least = tl.minimum(least, tl.where(present, node * value, 0.0))
        tl.store(offers_ptr + k, least, mask=there)
        tl.store(worths_ptr + k, node * worth, mask=there)


@triton.jit
def _best_heads(offers_ptr, there, n, K, W, lane, place, BEAM: tl.constexpr):
    """Merge the falling rows [n, K] at offers_ptr: return parent, rank and value of the W best, best first."""
    none = float("-inf") if BEAM else -1.0
    head = tl.load(offers_ptr + lane * K, mask=there, other=none)
    rank = tl.zeros_like(lane)
    picked = tl.zeros_like(place)
    best = tl.zeros_like(place).to(tl.float64)
    for i in range(W):
        most = tl.max(head, 0)
        code = lane * K + rank if BEAM else rank * n + lane
        pick = tl.min(tl.where(head == most, code, 1 << 30), 0)
        picked = tl.where(place == i, pick, picked)
        best = tl.where(place == i, most, best)
        parent, then = (pick // K, pick % K + 1) if BEAM else (pick % n, pick // n + 1)
        following = tl.load(offers_ptr + parent * K + then, mask=(then < K) & (most > none), other=none)  # if any left
        head = tl.where(lane == parent, following, head)
        rank = tl.where(lane == parent, then, rank)
    if BEAM:
        picked = tl.where(best > float("-inf"), picked, 0)
        return picked // K, picked % K, best
    return picked % n, picked // n, best


@triton.jit(do_not_specialize=["first", "n", "K", "W", "S", "depth", "batch_stride", "row_stride", "temperature"])
def _grow_kernel(
    drawn_tokens_ptr,  # [B, n, K], as the next two
    drawn_keys_ptr,
    drawn_logprobs_ptr,
    logits_ptr,  # [B, n, V], read if FROM_LOGITS
    sums_ptr,  # [B * n, CHUNKS, _SUMS], if FROM_LOGITS or HAS_LINES
    lines_ptr,  # [2, LINES], if HAS_LINES
    root_tokens_ptr,  # [B], as the next three
    lengths_ptr,
    root_rows_ptr,
    left_ptr,
    parents_ptr,  # [B, S], as the next six
    ranks_ptr,
    depths_ptr,
    tokens_ptr,
    values_ptr,
    worths_ptr,
    keys_ptr,
    mask_above_ptr,  # [B, n, first + n], bytes; unless FIRST
    offers_ptr,  # [B, n, K], memory that no other program uses, as the next one
    offered_worths_ptr,
    mask_ptr,  # [B, W, first + n + W], bytes
    fed_tokens_ptr,  # [B, W], as all below
    positions_ptr,
    cache_rows_ptr,
    parent_rows_ptr,
    noise_rows_ptr,
    first,
    n,
    K,
    W,
    S,
    depth,
    batch_stride,
    row_stride,
    temperature,
    BEAM: tl.constexpr,
    BY_NODE: tl.constexpr,
    NOISY: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    HAS_LINES: tl.constexpr,
    LINES: tl.constexpr,
    FIRST: tl.constexpr,
    THRESHOLD: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # n, rounded up to a power of two
    BLOCK_W: tl.constexpr,  # W, likewise
    BLOCK: tl.constexpr,  # of the mask
):
    """Each program does one sequence. Its threads exchange values through memory, with barriers in between."""
    sequence = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_W)
    there = lane < n
    end = first + n
    row = sequence * n + lane
    slot_of = sequence * S + first + lane
    if FIRST:
        node = tl.where(there, 0.0 if BEAM else 1.0, 0.0).to(tl.float64)
        slot = tl.where(there, float("inf"), 0.0).to(tl.float64)
        parent_key = tl.zeros_like(node)
        tl.store(parents_ptr + slot_of, tl.full([BLOCK_N], -1, tl.int64), mask=there)
        tl.store(ranks_ptr + slot_of, tl.zeros([BLOCK_N], tl.int64), mask=there)
        tl.store(depths_ptr + slot_of, tl.zeros([BLOCK_N], tl.int64), mask=there)
        tl.store(tokens_ptr + slot_of, tl.load(root_tokens_ptr + sequence + lane, mask=there), mask=there)
        tl.store(values_ptr + slot_of, slot, mask=there)
        tl.store(worths_ptr + slot_of, node, mask=there)
        tl.store(keys_ptr + slot_of, parent_key, mask=there)
    else:
        node = tl.load(worths_ptr + slot_of, mask=there, other=0.0)
        slot = tl.load(values_ptr + slot_of, mask=there, other=0.0)
        parent_key = tl.load(keys_ptr + slot_of, mask=there, other=0.0)

    at = row * K
    if BEAM:
        _offer_children(
            drawn_tokens_ptr + at,
            drawn_keys_ptr + at,
            drawn_logprobs_ptr + at,
            offers_ptr + at,
            offered_worths_ptr + at,
            there,
            node,
            parent_key,
            K,
            NOISY,
        )
    else:
        if FROM_LOGITS or HAS_LINES:
            sums_ptr += row * CHUNKS * _SUMS
        _offer_slots(
            drawn_tokens_ptr + at,
            drawn_logprobs_ptr + at,
            logits_ptr + sequence * batch_stride + lane * row_stride,
            sums_ptr,
            lines_ptr,
            offers_ptr + at,
            offered_worths_ptr + at,
            there,
            node,
            slot,
            K,
            temperature,
            BY_NODE,
            FROM_LOGITS,
            HAS_LINES,
            LINES,
            CHUNKS,
        )
    tl.debug_barrier()
    own = sequence * n * K
    parent, rank, best = _best_heads(offers_ptr + own, there, n, K, W, lane, place, BEAM)

    here = place < W
    at = own + parent * K + rank
    token = tl.load(drawn_tokens_ptr + at, mask=here, other=-1)
    worth = tl.load(offered_worths_ptr + at, mask=here, other=0.0)
    value = best
    if BEAM:
        token = tl.where(best > float("-inf"), token, -1)
        worth = tl.where(best > float("-inf"), worth, float("-inf"))
        value = tl.where(token >= 0, 1.0, 0.0).to(tl.float64)
    keep = (value > 0) & (value >= tl.full([], THRESHOLD, tl.float64)) & (depth < tl.load(left_ptr + sequence))
    token = tl.where(keep, token, -1)
    out = sequence * S + end + place
    tl.store(parents_ptr + out, (first + parent).to(tl.int64), mask=here)
    tl.store(ranks_ptr + out, rank.to(tl.int64), mask=here)
    tl.store(depths_ptr + out, tl.zeros([BLOCK_W], tl.int64) + depth, mask=here)
    tl.store(tokens_ptr + out, token, mask=here)
    tl.store(values_ptr + out, tl.where(keep, value, 0.0), mask=here)
    tl.store(worths_ptr + out, worth, mask=here)
    tl.store(keys_ptr + out, best, mask=here)

    length = tl.load(lengths_ptr + sequence)
    out = sequence * W + place
    tl.store(fed_tokens_ptr + out, tl.maximum(token, 0), mask=here)
    tl.store(positions_ptr + out, tl.zeros([BLOCK_W], tl.int64) + length + depth, mask=here)
    tl.store(cache_rows_ptr + out, length + end + place, mask=here)
    tl.store(parent_rows_ptr + out, length + first + parent, mask=here)
    tl.store(noise_rows_ptr + out, tl.load(root_rows_ptr + sequence) + end + place, mask=here)

    tl.debug_barrier()
    columns = end + W
    for start in range(0, W * columns, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        exists = entry < W * columns
        i = entry // columns
        column = entry % columns
        inherits = exists & (column < end)
        of = tl.load(parents_ptr + sequence * S + end + i, mask=inherits, other=0, volatile=True) - first
        if FIRST:
            above = inherits.to(tl.int8)  # all see the root
        else:
            above = tl.load(mask_above_ptr + (sequence * n + of) * end + column, mask=inherits, other=0)
        tl.store(mask_ptr + sequence * W * columns + entry, tl.where(column == end + i, 1, above), mask=exists)


def _sums(logits: Tensor, temperature: float) -> Tensor:
    """Return the sums of `_sums_kernel`, fp32 [B * n, chunks, 3], of logits [B, n, V]."""
    batch, nodes, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK.value)
    sums = torch.empty(batch * nodes, chunks, _SUMS.value, dtype=torch.float32, device=logits.device)
    _sums_kernel[(batch * nodes * chunks,)](
        logits_ptr=logits,
        sums_ptr=sums,
        nodes=nodes,
        V=vocab_size,
        batch_stride=logits.stride(0),
        row_stride=logits.stride(1),
        temperature=temperature,
        CHUNKS=chunks,
        BLOCK=_CHUNK.value,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return sums


def grow(
    slots: Slots, above: Level, draws: TopK, logits: Tensor, roots: Roots, policy: Policy
) -> tuple[Level, NodeInputs]:
    """Fill the next level, as `growing.grow` does."""
    slots.check_contiguous()
    batch, parents, most = draws.tokens.shape
    count = policy.slots_below(draws)
    device = logits.device
    beam = policy.by == "beam"
    from_logits = not beam and not policy.noisy
    lines = None if beam or policy.lines is None else policy.lines.contiguous()
    logits = in_rows(logits)
    drawn_tokens, drawn_keys, drawn_logprobs = (each.contiguous() for each in draws)
    root_tokens, lengths, noise_rows, left = (each.contiguous() for each in roots)
    inputs = NodeInputs(*(torch.empty(batch, count, dtype=torch.long, device=device) for _ in NodeInputs._fields))
    mask = torch.empty(batch, count, above.end + count, dtype=torch.bool, device=device)
    offers, worths = torch.empty(2, batch, parents, most, dtype=torch.float64, device=device)
    warps = max(1, min(16, triton.next_power_of_2(max(parents, count)) // 64))
    with torch.cuda.device_of(logits):
        sums = _sums(logits, policy.temperature) if from_logits or lines is not None else None
        _grow_kernel[(batch,)](
            drawn_tokens_ptr=drawn_tokens,
            drawn_keys_ptr=drawn_keys,
            drawn_logprobs_ptr=drawn_logprobs,
            logits_ptr=logits,
            sums_ptr=sums,
            lines_ptr=lines,
            root_tokens_ptr=root_tokens,
            lengths_ptr=lengths,
            root_rows_ptr=noise_rows,
            left_ptr=left,
            parents_ptr=slots.parents,
            ranks_ptr=slots.ranks,
            depths_ptr=slots.depths,
            tokens_ptr=slots.tokens,
            values_ptr=slots.values,
            worths_ptr=slots.worths,
            keys_ptr=slots.keys,
            mask_above_ptr=above.mask.contiguous().view(torch.int8),
            offers_ptr=offers,
            offered_worths_ptr=worths,
            mask_ptr=mask.view(torch.int8),
            fed_tokens_ptr=inputs.tokens,
            positions_ptr=inputs.positions,
            cache_rows_ptr=inputs.cache_rows,
            parent_rows_ptr=inputs.parent_rows,
            noise_rows_ptr=inputs.noise_rows,
            first=above.first,
            n=parents,
            K=most,
            W=count,
            S=slots.tokens.shape[1],
            depth=above.depth + 1,
            batch_stride=logits.stride(0),
            row_stride=logits.stride(1),
            temperature=policy.temperature,
            BEAM=beam,
            BY_NODE=policy.by == "node",
            NOISY=policy.noisy,
            FROM_LOGITS=from_logits,
            HAS_LINES=lines is not None,
            LINES=0 if lines is None else lines.shape[1],
            FIRST=above.first == 0,
            THRESHOLD=policy.threshold,
            CHUNKS=0 if sums is None else sums.shape[1],
            BLOCK_N=triton.next_power_of_2(parents),
            BLOCK_W=triton.next_power_of_2(count),
            BLOCK=256 * warps,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return Level(above.end, count, above.depth + 1, mask), inputs
