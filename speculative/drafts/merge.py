"""Several drafts, each of which drafts its own paths: SpecInfer's merged trees.

Child j of the root is drawn by draft j mod D, as its draw number j // D, and all nodes below that child by the same
draft. So the root's children have different distributions, and each is verified with its own, by SpecInfer's multi-step
speculative sampling. A `Mixture` draws from the average of its parts; a merge draws from each of them.

Let x_1, x_2, ... be the root's children in draw order, x_k drawn from Q_k, and P the target's distribution:

    accept x_k  with probability  a_k = min(1, P_k(x_k) / Q_k(x_k))        P_1 = P
    if rejected                   P_{k+1} = norm(max(P_k - Q_k, 0))
    all rejected                  the next token is drawn from the last P_k

(Miao et al. 2023, algorithm 2). The a_k do not depend on random numbers, so a single draw decides: child k is accepted
with probability a_k prod_{j<k} (1 - a_j). The target's distribution after the root is then replaced by that decision,
and the method's verification, which supports one distribution per node, verifies the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import DRAFT_AWARE, Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.sequence_scores import filtered_scores
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.composite import (
    CompositeCache,
    CompositeDraft,
    check_drafts,
    describe_parts,
    parts_for,
)
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.models.forward import Forward, host_can_read
from heavypath.speculative.trees.tree import NODE_BITS


@dataclass(frozen=True)
class Merge(Draftable):
    """A draft made of several, each of which drafts its own sequences; for methods with static trees.

        SpeculativeDecoder(target, Merge([draft, PromptLookup()]), "specinfer", width=2)    # a sequence of each

    If a tree's root has fewer children than there are drafts, the last drafts draft nothing. At temperature 0 the
    root's children are the likeliest token of the first draft, that of the second, and so on, then the second likeliest
    of the first. If a method draws with replacement and two drafts begin with the same token, both subtrees are drawn
    from the distributions of one of them, and both are candidates when the token is accepted.

    drafts: anything that SpeculativeDecoder takes as a draft, except another Merge

    Source: Miao et al. 2023, "SpecInfer", section 3, merge-based speculation.
    """

    drafts: Sequence[Any]

    def __post_init__(self) -> None:
        check_drafts("Merge", self.drafts)


class MergeDraft(CompositeDraft):
    """The `Draft` of `Merge`: below each child of the root, logits of the draft that drew it.

    Each draft reads all nodes, so that its cache has every path that may be accepted.
    """

    def __init__(self, parts: list[Draft], device: torch.device):
        super().__init__(parts, device)
        self.root_distributions = len(parts)

    def __call__(self, feed: Feed, cache: CompositeCache) -> Tensor:
        """The logits after each node by the draft that drafts there, fp32 [B, n, V].

        For a step's first feed, the logits of all drafts after the root, [B, D, V].
        """
        after = -1 if feed.news else 0
        every = zip(self.drafts, cache.parts, strict=True)
        logits = torch.stack([part(feed, own)[:, after:].float() for part, own in every], 1)  # [B, D, n, V]
        if feed.branches is None:
            return logits[:, :, -1]
        return logits[:, feed.branches % self.root_distributions, torch.arange(logits.shape[2], device=logits.device)]

    def rules(self, rules: Any) -> Any:
        """The method's rules, with a `MergeVerifier` if the method's verification uses the draft's distributions.

        Raises ValueError for a user's own verifier, which supports one distribution per node.
        """
        if rules.verification == "own":
            raise ValueError(
                "a user's verifier gets one draft distribution for each node, and a Merge has "
                f"{self.root_distributions} at the root; pass no verifier, or use Mixture instead of Merge"
            )
        if rules.verification not in DRAFT_AWARE:
            return rules
        verifier = MergeVerifier(rules.verification, rules.replacement, self.root_distributions)
        return replace(rules, verification="own", verifier=verifier)

    @property
    def why_not_measured(self) -> str:
        """Why its acceptance cannot be measured token by token, in words."""
        return f"in a Merge the root's first {self.root_distributions} children are drawn from different drafts"


@dataclass(frozen=True)
class MergeVerifier:
    """A `Verifier` for trees of several drafts: the root's children by their own distributions, all others by a
    verification.

    verification: the rule for all other nodes, a `method` of `verify_tree`
    replacement: whether siblings are independent draws
    drafts: D, the number of drafts

    It is plain PyTorch, except for filters, draws and the verification, and does not synchronise with a GPU.
    """

    verification: str
    replacement: bool
    drafts: int

    def __call__(
        self,
        nodes: Nodes,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        *,
        max_depth: int,
        target_filters: Filters,
        draft_filters: Filters,
        noise: Noise,
    ) -> Verified:
        """The accepted nodes and the next token of each tree. Arguments and result are as in `Verifier`, except

        draft_logits: [B, N + D - 1, V]; the last D - 1 rows are those after the root by drafts 2 .. D

        If the draft's temperature is 0, children are verified as point masses, and no distribution is needed.
        """
        nodes, count, kernels = nodes.per_sequence(), nodes.tokens.shape[1], step_kernels(nodes.tokens.device)
        target = target_logits
        of_nodes = None if draft_logits is None else draft_logits[:, :count]
        if draft_logits is not None and draft_filters.temperature > 0:
            distributions = torch.cat([draft_logits[:, :1], draft_logits[:, count:]], 1)
            target = filtered_scores(target, target_filters)
            target_filters = Filters()
            shares, left = self.decided(nodes, target[:, 0], filtered_scores(distributions, draft_filters), max_depth)
            # A root has 2**NODE_BITS noise rows, more than a tree has nodes, so its last row is no node's. The row of
            # the tree's last node would be another one where the tree is cut, near the end of a text.
            assert noise.rows is not None
            last = Noise(noise.seed, noise.rows[:, 0] + (1 << NODE_BITS) - 1)
            logits = shares.log().float()
            choice, *_ = kernels.draw(logits, 1, Filters(), noise=last, replacement=False, uniform_fill=False)  # [B, 1]
            nodes, target, of_nodes = self._as_decided(nodes, choice - 1, left, target, of_nodes)
        return kernels.verify(
            VerifyInputs(
                nodes=nodes,
                target_logits=target,
                draft_logits=of_nodes,
                method=self.verification,
                replacement=self.replacement,
                max_depth=max_depth,
                target_filters=target_filters,
                draft_filters=draft_filters,
                noise=noise,
            )
        )

    def decided(self, nodes: Nodes, target: Tensor, distributions: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
        """The probabilities of what happens at the root, fp64 [B, K + 1]: none of its K children is accepted, or each.

        The second result is P_{K+1}, from which the next token is drawn if none is accepted, fp64 [B, V].

        nodes: with fields [B, N]
        max_depth: levels of the trees; on a GPU it bounds K
        target: scores [B, V] whose softmax is P
        distributions: scores [B, D, V] whose softmax are the drafts' distributions

        A child drawn after its draft's support was used up was not drawn from that distribution: it counts as a point
        mass.
        """
        below_root = nodes.parents == 0
        # On a GPU the host cannot read the number of children. A bound: the deepest path contains only one of them.
        most = int(below_root.sum(1).max()) if host_can_read(target.device) else nodes.tokens.shape[1] - max_depth
        left = target.double().softmax(-1)
        own = distributions.double().softmax(-1).unbind(1)
        own = [*own]
        rest = torch.ones_like(left[:, :1])
        shares = []
        for rank in range(most):
            child, there = _child(nodes, rank)
            token = nodes.tokens.gather(1, child).clamp(min=0)
            one = torch.zeros_like(left).scatter(1, token, 1)
            q = own[rank % self.drafts]
            q = torch.where(q.gather(1, token) > 0, q / q.sum(1, keepdim=True), one)
            chance = (left.gather(1, token) / q.gather(1, token)).clamp(max=1).where(there, 0)
            shares.append(rest * chance)
            rest = rest * (1 - chance)
            remaining = (left - q).clamp(min=0)
            total = remaining.sum(1, keepdim=True)  # can be 0 by rounding
            left = torch.where(there & (total > 0), remaining / total, left)
            if not self.replacement:  # the draft's next draw is another token
                own[rank % self.drafts] = own[rank % self.drafts] * (1 - one * there)
        return torch.cat([rest, *shares], 1), left

    def _as_decided(
        self, nodes: Nodes, rank: Tensor, left: Tensor, target: Tensor, draft: Tensor | None
    ) -> tuple[Nodes, Tensor, Tensor | None]:
        """Nodes, target's and draft's logits with which a verification accepts exactly the root's child of this rank.

        rank: LongTensor[B, 1], -1 for none; then the next token is drawn from `left`, fp64 [B, V]

        For independent draws, other children with the same token are kept, too: their children were drawn from the same
        distributions.
        """
        assert draft is not None
        child, accepted = _child(nodes, rank)
        token = nodes.tokens.gather(1, child)
        stays = torch.arange(nodes.tokens.shape[1], device=token.device) == child
        if self.replacement:
            stays = nodes.tokens == token
        tokens = nodes.tokens.where((nodes.parents != 0) | (stays & accepted), -1)
        certain = torch.full_like(target[:, 0], -torch.inf).scatter(1, token.clamp(min=0), 0)
        target = target.clone()
        draft = draft.clone()
        target[:, 0] = certain.where(accepted, left.log().float())
        draft[:, 0] = certain
        return nodes._replace(tokens=tokens), target, draft


def _child(nodes: Nodes, rank: int | Tensor) -> tuple[Tensor, Tensor]:
    """The number of the root's child of this rank and whether it exists, [B, 1] each. rank: an int or [B, 1]."""
    assert nodes.ranks is not None
    found = (nodes.parents == 0) & (nodes.ranks == rank) & (nodes.tokens >= 0)
    return found.int().argmax(1, keepdim=True), found.any(1, keepdim=True)


@as_draft.register
def _(given: Merge, target: Forward, model: PreTrainedModel) -> Draft:
    return MergeDraft(parts_for(given.drafts, "Merge", target, model), target.device)


@describe.register
def _(given: Merge) -> str:
    return describe_parts(given, None)


@draft_parameter_count.register
def _(given: Merge, target: PreTrainedModel) -> int:
    return sum(draft_parameter_count(part, target) for part in given.drafts)
