"""Verify a tree by a rule for one node: the law of the token after it, given the tokens of all its children.

With P the target's distribution at a node, Q the draft's, and x_1, x_2, ... the tokens of its children in draw order, a
rule says

    the token after the node  ~  L(. | x_1, x_2, ...)           accepted is the child that carries it, if one does

and the walk goes on below that child, or ends with the token. It keeps the target's law iff

    sum over all draws of p(x_1, x_2, ...) L(v | x_1, x_2, ...)  =  P(v)            for every token v

Every verification that decides from the root down is such a rule; L = P is naive sampling. To verify a tree by a rule
is to verify it by a sample of the target, "target_sample" of `verification`, with L in the place of P. So a rule is a
few lines of PyTorch, and the walk around it is that of the methods here.

The condition is on one node. It asks of a tree that all children of a node are drawn before any node below them, and
that their number depends on no token. Static trees are drawn so. Trees that grow are not, and a rule has to be proved
for the way in which they grow. Independent draws may give children of equal tokens, which are followed together. The
rule is told of the children of the first of them, and the token may be found below any.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heavypath.kernels.filter_cuts import filter_cuts
from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.ordering import sibling_order
from heavypath.kernels.step_kernels import step_kernels

# L [..., V] of log P and log Q [..., V], natural logarithms, and the children's tokens LongTensor[..., K]: in draw
# order, -1 after the last one. Of a node without children, whose Q may be anything, L is not looked at.
NodeRule = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROUNDING = 1e-3  # what the sum of a law may differ from 1


def top_down(rule: NodeRule) -> Callable[..., Verified]:
    """A verifier of whole trees by a rule for one node, as `verifier` of SpeculativeDecoder takes it.

    rule: a function of (log_target, log_draft, children), fp32 [B, N, V] twice and LongTensor [B, N, K], which returns
        L [B, N, V], of all nodes at once. P and Q are after temperature and filters. On a GPU the rule is captured in
        a CUDA graph, so it may not ask the host for a value

    At temperature 0 the text is greedy, and the rule is not asked. The verifier raises TypeError or ValueError for an
    answer that is no L; on a GPU it looks at its shape alone. It raises ValueError for a draft at temperature 0 beside
    a target that samples, because such children are drawn from no Q.
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
        greedy, logits, filters = target_filters.temperature == 0, target_logits, target_filters
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
            logits, filters = law.log().where(inner, log_target).float(), Filters()
        method = "greedy" if greedy else "target_sample"
        given = VerifyInputs(nodes, logits, None, method, False, max_depth, filters, draft_filters, noise)
        return step_kernels(nodes.tokens.device).verify(given)

    verify.__name__ = name
    return verify


def children_of(nodes: Nodes) -> Tensor:
    """The tokens of each node's children by their ranks, LongTensor [B, N, N]; -1 where there is none."""
    tokens, parents, ranks = nodes
    ranks = sibling_order(parents) if ranks is None else ranks
    batch, count = tokens.shape
    nowhere = count * count
    place = (parents * count + ranks).where((parents >= 0) & (tokens >= 0), nowhere)
    children = tokens.new_full((batch, nowhere + 1), -1).scatter(1, place, tokens)
    return children[:, :nowhere].view(batch, count, count)


def _log_probs(logits: Tensor, filters: Filters) -> Tensor:
    """`filtered_logprobs` of logits [B, N, V] in fp32; on a GPU without asking the host."""
    on_gpu = choose_impl("top_down", "auto", logits) == "triton"
    cuts = filter_cuts(logits, filters) if on_gpu else None
    if cuts is not None:
        cut, end = (field.view(*logits.shape[:2], 1) for field in cuts)
        behind = torch.arange(logits.shape[-1], device=logits.device) >= end
        logits = logits.masked_fill((logits < cut) | ((logits == cut) & behind), -torch.inf)
    return filtered_logprobs(logits, Filters(filters.temperature) if on_gpu else filters).float()


def _check(name: str, law: Tensor, inner: Tensor, shape: torch.Size) -> None:
    """Raise TypeError or ValueError unless a rule returned laws: of nodes that have children, on a CPU."""
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
