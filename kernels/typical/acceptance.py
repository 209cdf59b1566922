"""Typical acceptance: keep drafted tokens that the target finds likely enough. The text gets another law by it.

With P the target's distribution after a node, behind temperature and filters, a child with the token x is accepted iff
the node is and

    P(x) > min(epsilon, delta exp(-H(P)))        H(P) = -sum_v P(v) log P(v)

(Cai et al. 2024, "Medusa", arXiv 2401.10774, sec. 2.3.1). So less is asked of a token where the target itself is
unsure. Where several paths of accepted nodes are the longest, the likeliest of them is taken, as in Medusa's code. The
token behind its end is a draw from P there; the paper takes the likeliest.

It looks at no draft: a likely token that is always drafted is always accepted, one that is never drafted comes by the
last draw alone. `heavypath.kernels.verification` has the rules that keep the target's law.

On a GPU one launch weighs all nodes at once, one looks for the longest path, and one draws the token behind it
(`kernel`).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import HIDDEN_BITS, Filters, filtered_scores
from heavypath.kernels.implementation import check_can_launch, choose_impl
from heavypath.kernels.nodes import Nodes, Verified, check_logits, check_values, paths_to, per_sequence, tree_depth
from heavypath.kernels.noise import Noise, Stream, check_seed, gumbels
from heavypath.kernels.typical.kernel import launch_typical
from heavypath.kernels.verifying.distributions import best_token, log_probs, readable, used_rows


class Typical(NamedTuple):
    """How likely a token must be: more than epsilon, or less where the target is unsure, by delta."""

    epsilon: float = 0.09
    delta: float = 0.3

    def check(self) -> "Typical":
        """Raise ValueError for a value outside its range; returns self."""
        for name, value in self._asdict().items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        return self

    @property
    def logs(self) -> tuple[float, float]:
        """log2 of both."""
        epsilon, delta = (math.log2(value) if value > 0 else -math.inf for value in self)
        return epsilon, delta


def accept_typical(
    tokens: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    *,
    epsilon: float = Typical().epsilon,
    delta: float = Typical().delta,
    max_depth: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Verified:
    """The longest path of nodes that are likely enough in each sequence's tree, and a draw from P behind it.

    tokens, parents, target_logits, max_depth, seed, rows, impl: as of `verify_tree`. The draw behind node i is by noise
        row rows[b, i]. On a GPU it is three launches beside copies of a few rows, and two more for filters
    epsilon, delta: of the rule above, both in [0, 1]
    temperature, top_k, top_p, min_p: what P is behind; temperature > 0, since greedy text has no law to change

    Raises ValueError for bad shapes, dtypes or options, and on CPU for values out of range and for rows of logits that
    are read and no distribution; on a GPU next_token is -1 behind such a row, whose children are not accepted.
    """
    typical, filters = Typical(epsilon, delta).check(), Filters(temperature, top_k, top_p, min_p).check()
    if temperature == 0:
        raise ValueError("typical acceptance needs temperature > 0; greedy text is verify_tree(..., method='greedy')")
    impl = choose_impl("accept_typical", impl, tokens)
    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be a LongTensor [B, N] with N >= 1, got {tokens.dtype} {[*tokens.shape]}")
    batch, nodes = tokens.shape
    parents = per_sequence("parents", parents, batch, nodes)
    check_logits("target_logits", target_logits, batch, nodes)
    if rows is not None and (rows.shape != tokens.shape or rows.dtype != torch.long):
        raise ValueError(f"rows must be a LongTensor {[batch, nodes]}, got {rows.dtype} {[*rows.shape]}")
    for name, value in (("parents", parents), ("target_logits", target_logits), ("rows", rows)):
        if value is not None and value.device != tokens.device:
            raise ValueError(f"{name} must be on the device of tokens, {tokens.device}, got {value.device}")
    check_seed(seed, tokens.device)
    if impl == "triton":
        if target_logits.dtype not in HIDDEN_BITS:
            raise ValueError(f"impl 'triton' takes fp32, fp16 or bf16, got {target_logits.dtype}; take impl 'torch'")
        check_can_launch(tokens)
    if tokens.device.type == "cpu":
        check_values(tokens, parents, None, rows, target_logits.shape[-1])
    depth = tree_depth(parents) if max_depth is None else max_depth
    if depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
    if batch == 0:
        return Verified(tokens.new_zeros(0, depth + 1), tokens.new_zeros(0), tokens.new_zeros(0))
    run = _launch if impl == "triton" else _reference
    return run(Nodes(tokens, parents, None), target_logits, typical, depth, filters, Noise(seed, rows))


def typical_unchecked(
    nodes: Nodes, target_logits: Tensor, *, typical: Typical, max_depth: int, filters: Filters, noise: Noise
) -> Verified:
    """`accept_typical` without its checks; impl is "auto". Ranks are not looked at."""
    run = _launch if choose_impl("typical_unchecked", "auto", nodes.tokens) == "triton" else _reference
    return run(nodes.per_sequence(), target_logits, typical, max_depth, filters, noise)


@np.errstate(all="ignore")
def _reference(
    nodes: Nodes, target_logits: Tensor, typical: Typical, max_depth: int, filters: Filters, noise: Noise
) -> Verified:
    """Accept level by level, for all sequences at once; logarithms are to base 2."""
    token, parent = nodes.tokens.cpu().numpy(), nodes.parents.cpu().numpy()
    batch, count = token.shape
    every, index = np.arange(batch), np.arange(count)
    above, there = np.maximum(parent, 0), (parent >= 0) & (parent < index) & (token >= 0)
    logits, checked = readable(target_logits), nodes.tokens.device.type == "cpu"
    log_epsilon, log_delta = typical.logs

    last, length = np.zeros((2, batch), dtype=np.int64)
    reached = np.broadcast_to(index == 0, token.shape)  # accepted nodes of this level
    likely = np.zeros(token.shape, dtype=np.float32)  # log P of the paths to them
    for level in range(max_depth):
        sequence, child = (there & reached[every[:, None], above]).nonzero()
        if not len(child):
            break
        node, of_child = np.unique(sequence * count + above[sequence, child], return_inverse=True)
        log_p = log_probs(*used_rows(logits, "target", node // count, node % count, checked), filters)
        entropy = -(np.exp2(log_p) * np.where(log_p > -np.inf, log_p, 0)).sum(-1)
        of_token = log_p[of_child, token[sequence, child]]
        accepted = of_token > np.minimum(log_epsilon, log_delta - entropy)[of_child]
        sequence, child, of_token = sequence[accepted], child[accepted], of_token[accepted]
        below = np.full(token.shape, -np.inf, dtype=np.float32)
        below[sequence, child] = likely[sequence, above[sequence, child]] + of_token
        reached, likely = below > -np.inf, below
        longer = reached.any(1)
        last, length = np.where(longer, below.argmax(1), last), np.where(longer, level + 1, length)

    row = every * count + last if noise.rows is None else noise.rows.cpu().numpy()[every, last]
    keys = filtered_scores(*used_rows(logits, "target", every, last, checked), filters)
    keys += gumbels(int(noise.seed), Stream.TARGET, row, keys.shape[-1])
    next_token = best_token(keys)
    path = paths_to(last, length, parent, max_depth)
    return Verified(*(torch.from_numpy(field).to(nodes.tokens.device) for field in (path, length, next_token)))


def _launch(
    nodes: Nodes, target_logits: Tensor, typical: Typical, max_depth: int, filters: Filters, noise: Noise
) -> Verified:
    """As `_reference`, by kernels."""
    parents = nodes.parents if nodes.parents.stride(1) == 1 else nodes.parents.contiguous()
    target = target_logits if target_logits.stride(2) == 1 else target_logits.contiguous()
    rows = None if noise.rows is None else noise.rows.contiguous()
    return launch_typical(
        Nodes(nodes.tokens.contiguous(), parents, None),
        target,
        typical.logs,
        max_depth=max_depth,
        filters=filters,
        noise=Noise(noise.seed, rows),
    )
