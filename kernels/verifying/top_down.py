"""Verify a tree by a user's rule for one node: the distribution of the next token, given the tokens of its children.

With P the target's distribution at a node, Q the draft's, and x_1, x_2, ... the tokens of its children in draw order, a
rule defines

    the token after the node  ~  L(. | x_1, x_2, ...)           a child with this token is accepted, if there is one

and the walk continues below that child, or ends with the token. The rule is lossless iff

    sum over all draws of p(x_1, x_2, ...) L(v | x_1, x_2, ...)  =  P(v)            for every token v

Every verification that decides from the root down is such a rule; L = P is naive sampling. The tree is then verified
by method "target_sample" of `verification`, with L in place of P. So a rule is a few lines of PyTorch, and the walk is
shared with the built-in methods.

The condition is about one node. It requires that all children of a node are drawn before any node below them, and that
their number depends on no token. Static trees are drawn so. Trees that grow are not, and a rule must be proved for the
way in which they grow. Independent draws may give children of equal tokens, which are followed together. The rule gets
the children of the first of them, but the walk may find the token below any of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs, sibling_order
from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels

# (log P, log Q, children) -> L: natural logarithms [..., V], and children LongTensor[..., K]: tokens in draw order, -1
# after the last one. At nodes without children Q may be anything, and L is ignored.
NodeRule = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROUNDING = 1e-3  # allowed difference of the sum of L from 1


def top_down(rule: NodeRule) -> Callable[..., Verified]:
    """Return a verifier of trees by a rule for one node; pass it as `verifier` to SpeculativeDecoder.

    rule: a function of (log_target, log_draft, children), fp32 [B, N, V] twice and LongTensor [B, N, K], which returns
        L [B, N, V] of all nodes in one call. P and Q are after temperature and filters. On a GPU the rule is captured
        in a CUDA graph, so it must not synchronise with the host

    The rule must be lossless for the way in which the method draws children, which is not checked. At temperature 0
    decoding is greedy, and the rule is not called. The verifier raises TypeError or ValueError if the
    rule returns no distributions; on a GPU it checks only their shape. It raises ValueError for a draft at temperature
    0 if the target samples, because such children are drawn from no Q.
    """
    name = getattr(rule, "__name__", type(rule).__name__)

    def verify(
        nodes: Nodes,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        *,
        max_depth: int,
        target_filters: Filters,
        draft_filters: Filters,
        noise: Noise,
    ) -> Verified:
        greedy = target_filters.temperature == 0
        logits = target_logits
        filters = target_filters
        if not greedy and draft_logits is not None:
            if draft_filters.temperature == 0:
                raise ValueError(
                    f"rule {name!r} weighs children by the law that they were drawn from, and at draft temperature 0 "
                    "they are the draft's likeliest tokens; give draft_temperature > 0"
                )
            children = children_of(nodes)
            log_target = _log_probs(target_logits, target_filters)
            law = rule(log_target, _log_probs(draft_logits, draft_filters), children)
            inner = (children >= 0).any(-1, keepdim=True)
            _check(name, law, inner, log_target.shape)
            logits = law.log().where(inner, log_target).float()
            filters = Filters()
        method = "greedy" if greedy else "target_sample"
        inputs = VerifyInputs(
            nodes=nodes,
            target_logits=logits,
            draft_logits=None,
            method=method,
            replacement=False,
            max_depth=max_depth,
            target_filters=filters,
            draft_filters=draft_filters,
            noise=noise,
        )
        return step_kernels(nodes.tokens.device).verify(inputs)

    verify.__name__ = name
    return verify


def children_of(nodes: Nodes) -> Tensor:
    """Return the tokens of each node's children by rank, LongTensor [B, N, N]; -1 if there is no such child."""
    tokens, parents, ranks = nodes
    ranks = sibling_order(parents) if ranks is None else ranks
    batch, count = tokens.shape
    nowhere = count * count
    place = (parents * count + ranks).where((parents >= 0) & (tokens >= 0), nowhere)
    children = tokens.new_full((batch, nowhere + 1), -1).scatter(1, place, tokens)
    return children[:, :nowhere].view(batch, count, count)


def _log_probs(logits: Tensor, filters: Filters) -> Tensor:
    """Return `filtered_logprobs` of logits [B, N, V] in fp32; on a GPU without host synchronisation."""
    on_gpu = choose_impl("top_down", "auto", logits) == "triton"
    cuts = filter_cuts(logits, filters) if on_gpu else None
    if cuts is not None:
        cut, end = (field.view(*logits.shape[:2], 1) for field in cuts)
        behind = torch.arange(logits.shape[-1], device=logits.device) >= end
        logits = logits.masked_fill((logits < cut) | ((logits == cut) & behind), -torch.inf)
    return filtered_logprobs(logits, Filters(filters.temperature) if on_gpu else filters).float()


def _check(name: str, law: Tensor, inner: Tensor, shape: torch.Size) -> None:
    """Raise TypeError or ValueError unless a rule returned distributions; values only on a CPU, at inner nodes."""
    if not isinstance(law, Tensor):
        raise TypeError(f"rule {name!r} must return a tensor of probabilities {[*shape]}, got {type(law).__name__}")
    if law.shape != shape or not law.is_floating_point():
        raise ValueError(f"rule {name!r} must return probabilities {[*shape]}, got {law.dtype} {[*law.shape]}")
    if law.device.type == "cpu":
        least, total = (each.where(inner[..., 0], whole) for each, whole in ((law.amin(-1), 0), (law.sum(-1), 1)))
        if not ((least >= 0) & ((total - 1).abs() < _ROUNDING)).all():
            raise ValueError(
                f"rule {name!r} must return probabilities >= 0 that sum to 1 at each node with children, "
                f"got a least of {float(least.min())} and sums of {float(total.min())} .. {float(total.max())}"
            )
