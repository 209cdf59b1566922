"""Verify a drafted token tree so that what is emitted follows the target's distribution exactly.

At a node with target distribution P and draft distribution Q, let x_1, x_2, ... be its children in draw order,
F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0, and D_k the sum of Q over the children before x_k. Then

    accept x_k  iff  coin_k < max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * (1 - D_k) / Q(x_k)
    if rejected      l_{k+1} = l_k + F(l_k) / (1 - D_k)
    all rejected     recovered token ~ max(P - l Q, 0) / F(l)
    no children      bonus token ~ P

which is Sequoia's algorithm 2 (Chen et al. 2024) and RSD's recursive rejection sampling (Jeon et al. 2024) without
a residual distribution ever being stored; with D = 0 it is SpecInfer's multi-step speculative sampling (Miao et al.
2023), and with one child standard speculative sampling (Leviathan et al. 2023). What multiplies Q stays in the
log domain: log(1 - D_k) is a log-sum-exp over the tokens not yet drawn, so nothing cancels or underflows.

The other methods choose the token first, and accept the child that happens to carry it:

    race           argmax log P + G with the very Gumbels that drew the children (exponential races, ERSD)
    target_sample  a fresh sample of P (naive and top-k drafting)
    greedy         argmax P

The walk is vectorised over the batch. Siblings with equal tokens (drawn with replacement) have equal contexts, so
once their token is accepted the children of all of them are candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.noise import Stream, coins, exponential_noise, gumbel_noise

METHODS = ("without_replacement", "with_replacement", "race", "target_sample", "greedy")
_DRAFT_AWARE = ("without_replacement", "with_replacement")


class Verified(NamedTuple):
    """What one verification accepted.

    path:       LongTensor[B, max_depth + 1]; node 0, then the accepted nodes from parent to child, then -1
    length:     LongTensor[B], number of accepted drafted nodes
    next_token: LongTensor[B], the recovered or bonus token that follows them
    """

    path: Tensor
    length: Tensor
    next_token: Tensor


def verify_tree(
    tokens: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    *,
    method: str,
    ranks: Tensor | None = None,
    max_depth: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    draft_min_p: float | None = None,
    seed: int = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Verified:
    """Accept the longest lossless path of each sequence's drafted tree, and choose the token after it.

    tokens:        LongTensor[B, N]; the root's is already committed, -1 marks an absent node
    parents:       LongTensor[N] or [B, N], parents[0] = -1, parents[i] < i
    target_logits: [B, N, V]; [b, i] is the target's distribution after node i
    draft_logits:  [B, N, V], the distribution that node i's children were drawn from; leaves' rows are never read.
                   Needed by "without_replacement" and "with_replacement" where N > 1, else it may be None
    method:        "without_replacement" | "with_replacement" | "race" | "target_sample" | "greedy"
    ranks:         LongTensor shaped as parents: a node's place among its siblings in draw order (default: index order)
    max_depth:     edges of the deepest path considered (default: the tree's depth)
    temperature, top_k, top_p, min_p: the target's filters; draft_*: those the children were drawn with (default: the
                   target's). temperature 0 is for "greedy" only; draft_temperature 0 says the children are the
                   draft's top-k, each a point mass
    seed, rows:    LongTensor[B, N] >= 0 (default arange(B * N)) name the noise after each node. Coins, recovered and
                   bonus tokens use streams of their own, so children may have been drawn with the same (seed, rows);
                   a race needs that. Give fresh rows or seeds each step.

    Raises ValueError for bad shapes, dtypes or options, and on CPU for values out of range and NaN logits.
    """
    target_filters = Filters(temperature, top_k, top_p, min_p).check()
    draft_filters = target_filters.override(draft_temperature, draft_top_k, draft_top_p, draft_min_p).check("draft_")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if temperature == 0 and method != "greedy":
        raise ValueError(f"temperature 0 needs method 'greedy', got {method!r}")
    if impl not in ("auto", "torch"):
        raise ValueError(f"verify_tree has impl 'auto' or 'torch', got {impl!r}")

    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be a LongTensor [B, N] with N >= 1, got {tokens.dtype} {[*tokens.shape]}")
    batch, nodes = tokens.shape
    parents = _per_sequence("parents", parents, batch, nodes)
    _check_logits("target_logits", target_logits, batch, nodes)
    if method in _DRAFT_AWARE and nodes > 1:
        if draft_logits is None:
            raise ValueError(f"method {method!r} needs draft_logits, got None")
        _check_logits("draft_logits", draft_logits, batch, nodes)
        if draft_logits.shape != target_logits.shape:
            raise ValueError(
                f"draft_logits must have target_logits' shape {[*target_logits.shape]}, got {[*draft_logits.shape]}"
            )
    if rows is None:
        rows = torch.arange(batch * nodes, device=tokens.device).view(batch, nodes)
    if rows.shape != tokens.shape or rows.dtype != torch.long:
        raise ValueError(f"rows must be a LongTensor {[batch, nodes]}, got {rows.dtype} {[*rows.shape]}")
    ranks = sibling_order(parents) if ranks is None else _per_sequence("ranks", ranks, batch, nodes)
    if tokens.device.type == "cpu":
        _check_values(tokens, parents, ranks, rows, target_logits.shape[-1])
    depth = _depth(parents) if max_depth is None else max_depth
    if depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
    if batch == 0:
        return Verified(tokens.new_zeros(0, depth + 1), tokens.new_zeros(0), tokens.new_zeros(0))

    return _verify_reference(
        tokens, parents, ranks, target_logits, draft_logits, method, depth, target_filters, draft_filters, seed, rows
    )


def _per_sequence(name: str, value: Tensor, batch: int, nodes: int) -> Tensor:
    if value.dtype != torch.long or value.shape not in ((nodes,), (batch, nodes)):
        raise ValueError(
            f"{name} must be a LongTensor [{nodes}] or [{batch}, {nodes}], got {value.dtype} {[*value.shape]}"
        )
    return value.expand(batch, nodes)


def _check_logits(name: str, logits: Tensor, batch: int, nodes: int) -> None:
    if (
        not logits.is_floating_point()
        or logits.dim() != 3
        or logits.shape[:2] != (batch, nodes)
        or logits.shape[2] == 0
    ):
        raise ValueError(f"{name} must be floating point [{batch}, {nodes}, V], got {logits.dtype} {[*logits.shape]}")


def _check_values(tokens: Tensor, parents: Tensor, ranks: Tensor, rows: Tensor, vocab_size: int) -> None:
    if ((tokens < -1) | (tokens >= vocab_size)).any():
        raise ValueError(f"tokens must be in [-1, {vocab_size}), got {int(tokens.min())} .. {int(tokens.max())}")
    index = torch.arange(parents.shape[1])
    if (parents[:, 0] != -1).any() or ((parents[:, 1:] < 0) | (parents[:, 1:] >= index[1:])).any():
        raise ValueError(f"parents must hold -1 at node 0 and 0 <= parents[i] < i elsewhere, got {parents.tolist()}")
    siblings = (parents * parents.shape[1] + ranks)[:, 1:].sort(-1).values
    if ((ranks[:, 1:] < 0) | (ranks[:, 1:] >= len(index))).any() or (siblings.diff(dim=-1) == 0).any():
        raise ValueError(f"ranks must differ among siblings and be in [0, {len(index)}), got {ranks.tolist()}")
    if (rows < 0).any():
        raise ValueError(f"rows must be at least 0, got {int(rows.min())}")


def _depth(parents: Tensor) -> int:
    """Edges on the longest path from the root; parents LongTensor[B, N]."""
    depth, node = 0, torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    while (node := parents.gather(1, node.clamp(min=0)).where(node >= 0, -1)).ge(0).any():
        depth += 1
    return depth


def sibling_order(parents: Tensor) -> Tensor:
    """Each node's place among its siblings in index order; LongTensor[B, N] to LongTensor[B, N]."""
    families, order = parents.sort(dim=-1, stable=True)
    place = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    begins = families.diff(dim=-1, prepend=families[:, :1] - 1) != 0
    return torch.empty_like(parents).scatter_(1, order, place - place.where(begins, 0).cummax(-1).values)


def _verify_reference(
    tokens: Tensor,
    parents: Tensor,
    ranks: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    method: str,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    seed: int,
    rows: Tensor,
) -> Verified:
    batch, nodes = tokens.shape
    device, vocab_size = tokens.device, target_logits.shape[-1]
    draft_aware = method in _DRAFT_AWARE
    index = torch.arange(nodes, device=device)
    last = torch.zeros(batch, dtype=torch.long, device=device)  # last accepted node
    length, next_token = torch.zeros_like(last), torch.zeros_like(last)

    # Of the A sequences that have accepted a node at every level so far:
    sequence = torch.arange(batch, device=device)
    node = last  # the last accepted node: its distribution decides
    reached = (index == 0).repeat(batch, 1)  # it, and its siblings of equal token
    above = parents.clamp(min=0)
    present = (parents >= 0) & (tokens >= 0)
    drawn_order = ranks * nodes + index  # by rank, then by parent
    coin = coins(seed, rows.gather(1, above), ranks) if draft_aware else None
    state = [tokens, rows, above, present, drawn_order]
    for level in range(max_depth + 1):
        tokens_here, rows_here, above, present, drawn_order = state
        candidate = reached.gather(1, above) & present  # [A, N]
        count = candidate.sum(-1)
        width = int(count.max()) if level < max_depth else 0
        children = drawn_order.where(candidate, nodes * nodes).argsort(-1)[:, :width]  # [A, K]
        drawn = tokens_here.gather(1, children).where(index[:width] < count[:, None], -1)

        row = rows_here.gather(1, node[:, None])[:, 0]
        target_row = _decision_rows(target_logits, "target", sequence, node)
        if draft_aware:
            target_probs = filtered_logprobs(target_row, target_filters).exp()
            choice, weights = torch.full_like(node, -1), target_probs
            inner = (drawn >= 0).any(-1).nonzero()[:, 0]
            if len(inner):
                assert draft_logits is not None
                assert coin is not None
                first = above[inner].gather(1, children[inner, :1])[:, 0]  # of equal siblings, one with children
                chain_choice, chain_weights = _residual_chain(
                    target_probs[inner],
                    _decision_rows(draft_logits, "draft", sequence[inner], first),
                    draft_filters,
                    drawn[inner],
                    coin[sequence[inner, None], children[inner]],
                    replacement=method == "with_replacement",
                )
                choice = choice.index_copy(0, inner, chain_choice)
                weights = weights.index_copy(0, inner, chain_weights)
            stop = (choice < 0).nonzero()[:, 0]
            if len(stop):
                exponentials = exponential_noise(seed, Stream.TARGET, row[stop], vocab_size)
                next_token[sequence[stop]] = (exponentials / weights[stop]).argmin(-1)
        else:
            if method == "greedy":
                winner = target_row.argmax(-1)
            else:
                stream = Stream.DRAFT if method == "race" else Stream.TARGET
                gumbels = gumbel_noise(seed, stream, row, vocab_size)
                winner = (filtered_logprobs(target_row, target_filters) + gumbels).argmax(-1)
            hit = drawn == winner[:, None]
            choice = (hit.int().argmax(-1) if width else winner).where(hit.any(-1), -1)
            next_token[sequence] = winner

        accepted = (choice >= 0).nonzero()[:, 0]
        if not len(accepted):
            break
        if len(accepted) < len(choice):
            state = [field[accepted] for field in state]
            sequence, children, choice, candidate = (t[accepted] for t in (sequence, children, choice, candidate))
        child = children.gather(1, choice[:, None])
        node = child[:, 0]
        last[sequence] = node
        length[sequence] += 1
        reached = candidate & (state[0] == state[0].gather(1, child))

    path = torch.full((batch, max_depth + 1), -1, dtype=torch.long, device=device)
    path[:, 0] = 0
    for position in range(int(length.max()), 0, -1):  # from the last accepted node up to the root
        on_path = length >= position
        path[:, position] = last.where(on_path, -1)
        last = parents.gather(1, last[:, None])[:, 0].where(on_path, last)
    return Verified(path, length, next_token)


def _decision_rows(logits: Tensor, side: str, sequence: Tensor, node: Tensor) -> Tensor:
    """fp32 rows [A, V] of the given nodes, checked on CPU."""
    rows = logits[sequence, node].float()
    if rows.device.type == "cpu":
        largest = rows.amax(-1)
        bad = ~largest.isfinite()
        if bad.any():
            i = int(bad.nonzero()[0])
            raise ValueError(
                f"{side}_logits must have a finite maximum in every row that is used, "
                f"but [{int(sequence[i])}, {int(node[i])}] has {float(largest[i])}"
            )
    return rows


def _residual_chain(
    target_probs: Tensor, draft_logits: Tensor, draft_filters: Filters, drawn: Tensor, coins: Tensor, replacement: bool
) -> tuple[Tensor, Tensor]:
    """Try the children of one node per sequence in draw order, by the closed form above.

    target_probs [A, V] fp64, draft_logits [A, V] fp32, drawn LongTensor[A, K] with -1 last, coins [A, K]. Returns the
    place of the accepted child or -1, LongTensor[A], and the weights [A, V] that a recovered token is drawn by.

    Where the children so far have used up the draft's support, the next was drawn uniformly from the tokens left: the
    chain starts again with P and Q restricted to those. A child drawn at draft temperature 0 is the same with one
    token left, the child itself. A child that the draft could not have drawn is passed over like an absent one.
    """
    deterministic = draft_filters.temperature == 0
    if deterministic:
        draft = torch.full_like(target_probs, -torch.inf)
    else:
        draft = filtered_logprobs(draft_logits, draft_filters)
    undrawn = torch.ones_like(draft, dtype=torch.bool)
    target, residual, total = target_probs, target_probs, target_probs.sum(-1, keepdim=True)  # P, max(P - l Q, 0), F(l)
    log_lambda = torch.full_like(total, -torch.inf)
    log_mass = torch.zeros_like(total)  # log(1 - D)
    choice = torch.full_like(drawn[:, 0], -1)
    pending = drawn >= 0  # [A, K], children not yet tried
    drawn = drawn.clamp(min=0)

    for place in range(drawn.shape[1]):
        child, here = drawn[:, place : place + 1], pending[:, place : place + 1]
        if (place and not replacement) or deterministic:
            log_mass = draft.where(undrawn, -torch.inf).logsumexp(-1, keepdim=True)
            restart = here & (log_mass == -torch.inf)
            if restart.any():
                left = torch.zeros_like(undrawn).scatter(1, child, True) if deterministic else undrawn
                target = target.where(~restart | undrawn, 0)
                target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
                residual, total = target.where(restart, residual), target.sum(-1, keepdim=True).where(restart, total)
                uniform = -left.sum(-1, keepdim=True).double().log()
                draft = torch.where(restart, uniform.where(left, -torch.inf), draft)
                log_lambda, log_mass = log_lambda.where(~restart, -torch.inf), log_mass.where(~restart, 0)

        log_draft = draft.gather(1, child)
        here = here & (log_draft > -torch.inf)
        accept = coins[:, place : place + 1] < residual.gather(1, child) / total * (log_mass - log_draft).exp()
        rejected = here & ~accept
        accept = here & accept
        choice = choice.where(~accept[:, 0], place)
        pending = pending & ~accept
        if not pending.any():
            break
        if not rejected.any():
            continue
        undrawn = undrawn.scatter(1, child, undrawn.gather(1, child) & ~rejected)
        log_lambda = torch.logaddexp(log_lambda, total.log() - log_mass).where(rejected, log_lambda)
        residual = (target - (log_lambda + draft).exp()).clamp(min=0)
        total = residual.sum(-1, keepdim=True)

    return choice, residual.where(total > 0, target_probs)
