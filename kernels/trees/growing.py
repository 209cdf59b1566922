"""Grow trees by a level: choose the best slots below the nodes just drafted, by values that ignore the slot's token.

A slot of a tree is a place for one more child of a node. With Q the draft's distribution after a node, x_1, x_2, ...
its children in draw order, R_k = 1 - Q(x_1) - ... - Q(x_{k-1}) and c_k the probability that x_k is accepted after x_1
.. x_{k-1} were rejected, let

    worth(root) = 1,    worth(child x_k) = worth(node) (1 - c_1) ... (1 - c_{k-1}) c_k
    value(slot k below a node) = worth(node) (1 - c_1) ... (1 - c_{k-1}) e_k

    DySpec (Xiong et al. 2024, algorithm 1)    c_k = Q(x_k) / R_k,                   e_k = 1
    by measured confidence                     c_k = base_k + slope_k Q(x_k) / R_k,  e_k = E[c_k | x_1 .. x_{k-1}]
                                                   = base_k + slope_k sum_v Q(v)^2 / R_k^2 over v not drawn yet

DySpec's products telescope: a slot has the value worth(node) R_k. By "node" a slot's value is the worth of the child
drawn there, which is allowed only for deterministic drafts. Each slot gets the least of three values: its own, that of
its parent's slot, and that of the sibling before it. So the best slots of all levels form a tree. A level has the
`width` best slots below the nodes of the level above, by falling value, then sibling index, then parent. By "beam" it
is the next level of a stochastic beam search (`sampling.stochastic_beam`): the largest keys, ties to the lower parent.

The Triton kernels are in `growing_kernel`, the CPU kernels in `native.growth`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.sampling import TopK, conditioned
from heavypath.kernels.trees.levels import NodeInputs
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots, host


class SlotArrays(NamedTuple):
    """`Slots` on the host."""

    parents: np.ndarray
    ranks: np.ndarray
    depths: np.ndarray
    tokens: np.ndarray
    values: np.ndarray
    worths: np.ndarray
    keys: np.ndarray


def grow(
    slots: Slots, above: Level, draws: TopK, logits: Tensor, roots: Roots, policy: Policy
) -> tuple[Level, NodeInputs]:
    """Fill the slots of the level below `above`, in place; if `above` is the root, slot 0 as well.

    Returns the level, and its nodes as input of the draft.

    above:  a level of n nodes
    draws:  [B, n, K], tokens drawn for the children of each node, without replacement
    logits: [B, n, V], fp32, fp16 or bf16, from which the tokens were drawn

    The level has `policy.slots_below(draws)` slots; some may stay empty. `StepKernels.grow` is this function, its
    Triton kernels (one or two launches without host synchronisation), or its C++. Nothing is checked, except that the
    latter two raise ValueError for slots that are not contiguous.
    """
    count = policy.slots_below(draws)
    if above.first == 0:
        beam = policy.by == "beam"
        for field, root in zip(slots, (-1, 0, 0, roots.tokens, torch.inf, 0 if beam else 1, 0), strict=True):
            field[:, 0] = root
    own = slice(above.first, above.end)
    choose = _next_of_beam if policy.by == "beam" else _best_slots
    chosen = choose(draws, logits, Slots(*(field[:, own] for field in slots)), policy, count)
    depth = above.depth + 1
    there = (chosen.values > 0) & (chosen.values >= policy.threshold) & (depth < host(roots.left))[:, None]
    parents = above.first + chosen.parents
    tokens = np.where(there, chosen.tokens, -1)
    fields = chosen._replace(parents=parents, tokens=tokens, values=np.where(there, chosen.values, 0))
    for field, new in zip(slots, fields, strict=True):
        field[:, above.end : above.end + count] = torch.from_numpy(new)

    places = np.arange(above.end, above.end + count)
    mask = np.empty((len(tokens), count, above.end + count), bool)
    mask[..., : above.end] = np.take_along_axis(host(above.mask), chosen.parents[..., None], 1)
    mask[..., above.end :] = np.eye(count, dtype=bool)
    token, parent, seen = (torch.from_numpy(each).to(logits.device) for each in (tokens, parents, mask))
    place = torch.from_numpy(places).to(logits.device)
    depths = torch.full_like(place, depth)
    noise_rows = roots.noise_rows[:, None] + place
    inputs = NodeInputs.of(roots.lengths, token, depths, place, parent, noise_rows)
    return Level(above.end, count, depth, seen), inputs


def values(probs: np.ndarray, squares: np.ndarray | None, lines: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the slots below a node of worth 1, and the worths of the children there; fp64 [..., K].

    probs:   fp64 [..., K], Q of the children in draw order, 0 for an absent one
    squares: fp64 [..., 1], the sum of Q(v)^2 over all tokens; only with a confidence, else None
    lines:   fp64 [2, >= K], as in `Policy`
    """
    before = _after_the_first(0, probs)
    remaining = np.maximum(1 - before.cumsum(-1), 0)  # R_k
    if lines is None:
        return remaining, np.minimum(probs, remaining)  # only by rounding could a probability exceed the remaining mass
    assert squares is not None
    base, slope = lines[:, : probs.shape[-1]]
    left = np.where(remaining > 0, remaining, 1)
    accept = base + slope * np.minimum(probs / left, 1)
    expected = base + slope * ((squares - (before**2).cumsum(-1)) / left**2).clip(0, 1)
    reached = _after_the_first(1, (1 - accept).cumprod(-1))
    return np.where(remaining > 0, reached * expected, 0), reached * accept


def _after_the_first(first: float, rows: np.ndarray) -> np.ndarray:
    """Shift rows [..., K] by one column, with `first` in column 0."""
    moved = np.empty_like(rows)
    moved[..., 0], moved[..., 1:] = first, rows[..., :-1]
    return moved


def sum_of_squares(logits: Tensor, temperature: float) -> Tensor:
    """Return the sum over tokens of squared probabilities, fp64 [..., 1], for logits [..., V] at a temperature."""
    scores = logits.float() / temperature
    total = scores.logsumexp(-1, keepdim=True).double()
    return ((2 * scores).logsumexp(-1, keepdim=True).double() - 2 * total).exp().nan_to_num()


def logprobs_at(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities of tokens [B, n, K] for logits [B, n, V] at a temperature; -inf for token -1."""
    scores = logits.float() / temperature
    logprobs = scores.gather(-1, tokens.clamp(min=0)) - scores.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(tokens < 0, -torch.inf)


def _best_slots(draws: TopK, logits: Tensor, above: Slots, policy: Policy, count: int) -> SlotArrays:
    """Return the `count` best slots below the n nodes `above`; their parents are indices into these nodes."""
    tokens = host(draws.tokens)
    lines = None if policy.lines is None else host(policy.lines)
    logprobs = draws.logprobs if policy.noisy else logprobs_at(logits, draws.tokens, policy.temperature)
    squares = None if lines is None else host(sum_of_squares(logits, policy.temperature))
    value, worth = values(np.exp(host(logprobs).astype(np.float64)), squares, lines)
    if policy.by == "node":
        value = worth
    node = host(above.worths)[..., None]
    value = np.minimum.accumulate(np.where(tokens < 0, 0, node * value), -1)
    value = np.minimum(value, host(above.values)[..., None])
    # By falling value, then sibling index, then parent.
    fields = (field.swapaxes(1, 2).reshape(len(tokens), -1) for field in (value, node * worth, tokens))  # [B, K * n]
    value, worth, tokens_by_rank = fields
    order = np.argsort(-value, axis=1, kind="stable")[:, :count]
    value, worth, chosen = (np.take_along_axis(field, order, 1) for field in (value, worth, tokens_by_rank))
    ranks, parents = np.divmod(order, tokens.shape[1])
    return SlotArrays(parents, ranks, _one_deeper(above, parents), chosen, value, worth, worth)


def _next_of_beam(draws: TopK, logits: Tensor, above: Slots, policy: Policy, count: int) -> SlotArrays:
    """Return the `count` slots of largest keys. Siblings are in draw order; a rank counts the siblings before."""
    beam = conditioned(draws, above.worths, above.keys, count, noisy=policy.noisy)
    parent = np.maximum(host(beam.parent), 0)
    tokens = host(beam.tokens)
    rank = np.tril(parent[:, :, None] == parent[:, None, :], -1).sum(-1)
    there = (tokens >= 0).astype(np.float64)
    return SlotArrays(parent, rank, _one_deeper(above, parent), tokens, there, host(beam.logprobs), host(beam.keys))


def _one_deeper(above: Slots, like: np.ndarray) -> np.ndarray:
    """Return the depths [B, n] of children of nodes that all have one depth."""
    return np.repeat(host(above.depths[:, :1]) + 1, like.shape[1], 1)
