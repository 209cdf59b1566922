"""Device functions on a drafted tree, for the verification kernels: nodes, ranks, equal contexts, coins, and paths."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Mapping
from typing import Any

from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import within_fp32
from heavypath.kernels.implementation import in_rows
from heavypath.kernels.language import tl, triton
from heavypath.kernels.nodes import Nodes, VerifyInputs
from heavypath.kernels.noise import Noise, Stream, philox_words, seed_arguments, seed_words
from heavypath.kernels.verifying.distributions import LANES, NONE

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))


@triton.jit
def nodes_of(tokens_ptr, parents_ptr, index, N, V):
    """Load a tree's parents and tokens, -1 beyond its N nodes; and which nodes are drafted, not the root or absent."""
    parent = tl.load(parents_ptr + index, mask=index < N, other=-1).to(tl.int32)
    token = tl.load(tokens_ptr + index, mask=index < N, other=-1).to(tl.int32)
    return parent, token, (parent >= 0) & (parent < index) & (token >= 0) & (token < V)


@triton.jit
def ranks_of(parent, index, parents_ptr, ranks_ptr, begin, N, HAS_RANKS: tl.constexpr):
    """Return each node's rank among its siblings: loaded from ranks_ptr + begin if HAS_RANKS, else by index order."""
    if HAS_RANKS:
        rank = tl.load(ranks_ptr + begin + index, mask=index < N, other=0).to(tl.int32)
    else:
        rank = tl.zeros_like(index)
        for other in range(N):
            rank += tl.where((parent == tl.load(parents_ptr + other)) & (index > other), 1, 0)
    return rank


@triton.jit
def equal_contexts(parent, token, node, parents_ptr, tokens_ptr):
    """Whether the tokens on the path from the root to each `parent` are those on the path to `node`."""
    same = parent == node
    equal = parent >= 0
    while node > 0:
        there = equal & (parent > 0)
        their = tl.load(tokens_ptr + parent, mask=there, other=-1)
        equal = same | (there & (their == tl.load(tokens_ptr + node)) & (their >= 0))
        parent = tl.load(parents_ptr + parent, mask=there, other=-1).to(tl.int32)
        node = tl.load(parents_ptr + node).to(tl.int32)
    return equal & (parent == node)


@triton.jit
def first_of_token(token, index, order, N):
    """Which children have a token that no earlier one has. order: of each child, NONE for other nodes."""
    first = order < NONE
    next_order = tl.min(order)
    while next_order < NONE:
        its_token = tl.sum(tl.where(index == next_order % N, token, 0))
        first &= (token != its_token) | (order <= next_order)
        next_order = tl.min(tl.where(first & (order > next_order), order, NONE))
    return first


@triton.jit
def coins_of(rank, noise_row, seed_ptr, seed_low, seed_high):
    """Return each child's coin, a uniform random number from its rank and its parent's noise row."""
    c0 = (rank // 4).to(tl.uint32)
    c1 = noise_row.to(tl.uint32)
    c2 = (noise_row >> 32).to(tl.uint32)
    seed_low, seed_high = seed_words(seed_ptr, seed_low, seed_high)
    w0, w1, w2, w3 = philox_words(seed_low, seed_high, c0, c1, c2, tl.full([], _ACCEPT, tl.uint32))
    word = rank % 4
    word = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return (word >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def store_path(path_ptr, length_ptr, parents_ptr, last, length, max_depth, PATH: tl.constexpr):
    """Store the path of `length` edges to node `last`, and the length. PATH: max_depth + 1, up to a power of two."""
    place = tl.arange(0, PATH)
    path = tl.where(place == 0, 0, -1)
    node = last
    position = length
    while position > 0:
        path = tl.where(place == position, node, path)
        node = tl.load(parents_ptr + node).to(tl.int32)
        position -= 1
    tl.store(path_ptr + place, path, mask=place <= max_depth)
    tl.store(length_ptr, length)


def laid_out(inputs: VerifyInputs) -> VerifyInputs:
    """Return the same inputs, with copies of tensors that kernels cannot read.

    Tokens and noise.rows are then contiguous LongTensors [B, N]; all others are contiguous in the last axis.
    """
    tokens, parents, ranks = inputs.nodes.per_sequence()
    seed, rows = inputs.noise
    draft = inputs.draft_logits
    return inputs._replace(
        nodes=Nodes(tokens.contiguous(), in_rows(parents), None if ranks is None else in_rows(ranks)),
        target_logits=in_rows(inputs.target_logits),
        draft_logits=None if draft is None else in_rows(draft),
        noise=Noise(seed, None if rows is None else rows.contiguous()),
    )


def tree_arguments(inputs: VerifyInputs) -> dict[str, Any]:
    """Return the kernels' arguments for inputs from `laid_out`, by parameter name."""
    tokens, parents, ranks = inputs.nodes
    seed, rows = inputs.noise
    target = inputs.target_logits
    draft = target if inputs.draft_logits is None else inputs.draft_logits
    return {
        "tokens_ptr": tokens,
        "parents_ptr": parents,
        "ranks_ptr": ranks,
        "noise_rows_ptr": rows,
        "target_ptr": target,
        "draft_ptr": draft,
        "N": tokens.shape[1],
        "V": target.shape[-1],
        "parents_stride": parents.stride(0),
        "ranks_stride": 0 if ranks is None else ranks.stride(0),
        "target_batch_stride": target.stride(0),
        "target_stride": target.stride(1),
        "draft_batch_stride": draft.stride(0),
        "draft_stride": draft.stride(1),
        **seed_arguments(seed),
        "temperature": within_fp32(inputs.target_filters.temperature),
        "draft_temperature": within_fp32(inputs.draft_filters.temperature),
        "HAS_RANKS": ranks is not None,
        "HAS_NOISE_ROWS": rows is not None,
        "BLOCK": max(16, triton.next_power_of_2(tokens.shape[1])),
        "num_warps": LANES.value // 32,
        "enable_fp_fusion": True,
        "maxnreg": 255,  # without maxnreg ptxas spills
    }


def cut_arguments(inputs: VerifyInputs, both: bool = True) -> dict[str, Any]:
    """Compute the cuts of filters, a launch for each side that has any; return the kernels' arguments by name.

    both: whether to filter the draft's rows, too
    """
    draft = inputs.draft_logits
    cuts = filter_cuts(inputs.target_logits, inputs.target_filters)
    draft_cuts = filter_cuts(draft, inputs.draft_filters) if both and draft is not None else None
    return {
        "cut_ptr": None if cuts is None else cuts.cut,
        "end_ptr": None if cuts is None else cuts.end,
        "draft_cut_ptr": None if draft_cuts is None else draft_cuts.cut,
        "draft_end_ptr": None if draft_cuts is None else draft_cuts.end,
        "FILTERED": cuts is not None,
        "DRAFT_FILTERED": draft_cuts is not None,
    }


def launch(kernel: Any, programs: int, shared: Mapping[str, Any], **own: Any) -> None:
    """Launch a kernel with `own` arguments, and those of the shared arguments and options that the kernel has."""
    options = {"num_warps", "enable_fp_fusion", "maxnreg"}
    known = {name: shared[name] for name in shared if name in options or name in kernel.arg_names}
    kernel[(programs,)](**known | own)
