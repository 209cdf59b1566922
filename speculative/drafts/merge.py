"""Several drafts side by side, each of which drafts paths of its own: SpecInfer's merged trees.

Child j of the root is drawn by draft j mod D, as its draw number j // D, and all below that child by the same draft. So
children of the root have different distributions, and each is weighed against its own, as SpecInfer's multi-step
speculative sampling does. What a mixture draws from the average of its parts is here drawn from each of them.

Let x_1, x_2, ... be the root's children in draw order, x_k drawn from Q_k, and P the target's distribution:

    accept x_k  with probability  a_k = min(1, P_k(x_k) / Q_k(x_k))        P_1 = P
    if rejected                   P_{k+1} = norm(max(P_k - Q_k, 0))
    all rejected                  the next token is drawn from the last P_k

(Miao et al. 2023, algorithm 2). The a_k depend on no coins. So one draw decides: child k is accepted with probability
a_k prod_{j<k} (1 - a_j). The target's row after the root is then put down as what was decided, and the verification of
the method, which knows one distribution after each node, goes on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.sampling import draw_unchecked
from heavypath.kernels.sequence_scores import filtered_scores
from heavypath.kernels.verification import DRAFT_AWARE, verify_unchecked
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


@dataclass(frozen=True)
class Merge(Draftable):
    """A draft out of several, which draft sequences beside each other; for methods with static trees.

        SpeculativeDecoder(target, Merge([draft, PromptLookup()]), "specinfer", width=2)    # a sequence of each

    Where the root of a tree has fewer children than there are drafts, the last ones draft nothing. At temperature 0 the
    children are the likeliest tokens of the first draft, of the second, and so on, then the second likeliest of the
    first. Where a method draws with replacement, two drafts that begin alike go on by the distributions of one of them,
    and both subtrees are candidates where their token is accepted.

    drafts: whatever SpeculativeDecoder takes as a draft, but no other Merge

    Source: Miao et al. 2023, "SpecInfer", section 3, merge-based speculation.
    """

    drafts: Sequence[Any]

    def __post_init__(self) -> None:
        check_drafts("Merge", self.drafts)


class MergeDraft(CompositeDraft):
    """`Merge` at work. Each draft is given all nodes, so that it knows every path that may be accepted."""

    def __init__(self, parts: list[Draft], device: torch.device):
        super().__init__(parts, device)
        self.laws = len(parts)

    def __call__(self, feed: Feed, cache: CompositeCache) -> Tensor:
        """The logits after each node by the draft that drafts there, fp32 [B, n, V].

        Of a step's first feed those of all drafts after the root alone, [B, D, V].
        """
        after = -1 if feed.news else 0
        every = zip(self.drafts, cache.parts, strict=True)
        said = torch.stack([part(feed, own)[:, after:].float() for part, own in every], 1)  # [B, D, n, V]
        if feed.branches is None:
            return said[:, :, -1]
        return said[:, feed.branches % self.laws, torch.arange(said.shape[2], device=said.device)]

    def rules(self, rules: Any) -> Any:
        """The same, where no child is weighed against what it was drawn from; else the root's are by a verifier.

        Raises ValueError for a verifier of the user's own, which is told one distribution after each node.
        """
        if rules.verification == "own":
            raise ValueError(
                "a verifier of your own is told one distribution after each node, and a Merge has "
                f"{self.laws} after the root; leave the verifier out, or take Mixture for Merge"
            )
        if rules.verification not in DRAFT_AWARE:
            return rules
        verifier = MergeVerifier(rules.verification, rules.replacement, self.laws)
        return replace(rules, verification="own", verifier=verifier)

    @property
    def why_not_measured(self) -> str:
        """See `Draft`."""
        return f"of a Merge each of the root's first {self.laws} children has an acceptance of its own"


@dataclass(frozen=True)
class MergeVerifier:
    """A `Verifier` of trees of several drafts: the root's children each by its own, all below by a verification.

    verification, replacement: as of `VerifyInputs`; drafts: D

    It is plain PyTorch, besides filters, draws and the verification, and on a GPU never asks the host.
    """

    verification: str
    replacement: bool
    drafts: int

    def __call__(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, *, max_depth: int,
        target_filters: Filters, draft_filters: Filters, noise: Noise,
    ) -> Verified:  # fmt: skip
        """See `Verifier`. draft_logits: [B, N + D - 1, V], at the end those of all drafts but the first after the root.

        Draws at temperature 0 are point masses, and need no distribution.
        """
        nodes, count = nodes.per_sequence(), nodes.tokens.shape[1]
        target, of_nodes = target_logits, None if draft_logits is None else draft_logits[:, :count]
        if draft_logits is not None and draft_filters.temperature > 0:
            laws = torch.cat([draft_logits[:, :1], draft_logits[:, count:]], 1)
            target, target_filters = filtered_scores(target, target_filters), Filters()
            shares, left = self.decided(nodes, target[:, 0], filtered_scores(laws, draft_filters), max_depth)
            # The last node in depth-first order is a leaf, below which nothing was drawn by its row of noise.
            assert noise.rows is not None
            last = Noise(noise.seed, noise.rows[:, -1].contiguous())
            choice = draw_unchecked(shares.log().float(), 1, filters=Filters(), noise=last).tokens  # [B, 1]
            nodes, target, of_nodes = self._as_decided(nodes, choice - 1, left, target, of_nodes)
        return verify_unchecked(VerifyInputs(
            nodes, target, of_nodes, self.verification, self.replacement, max_depth, target_filters, draft_filters,
            noise,
        ))  # fmt: skip

    def decided(self, nodes: Nodes, target: Tensor, laws: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
        """The probabilities that none of the root's K children is accepted, and that each is, fp64 [B, K + 1].

        And P_{K+1}, which the next token is drawn from if none is, fp64 [B, V].

        nodes: per sequence; target: scores [B, V] whose softmax is P; laws: scores [B, D, V] likewise
        A child that was drawn where its draft had no more support was drawn without it: it is a point mass.
        """
        below_root = nodes.parents == 0
        # On a GPU the host does not know how many there are, but the deepest path has a single one.
        most = int(below_root.sum(1).max()) if host_can_read(target.device) else nodes.tokens.shape[1] - max_depth
        left, own = target.double().softmax(-1), laws.double().softmax(-1).unbind(1)
        own, rest = [*own], torch.ones_like(left[:, :1])
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
            total = remaining.sum(1, keepdim=True)  # 0 where it differs from nothing by rounding alone
            left = torch.where(there & (total > 0), remaining / total, left)
            if not self.replacement:  # the draft's next draw is another token
                own[rank % self.drafts] = own[rank % self.drafts] * (1 - one * there)
        return torch.cat([rest, *shares], 1), left

    def _as_decided(
        self, nodes: Nodes, rank: Tensor, left: Tensor, target: Tensor, draft: Tensor | None
    ) -> tuple[Nodes, Tensor, Tensor | None]:
        """Nodes and logits of a verification that accepts the child of this rank; for -1 none, and draws from `left`.

        Of independent draws those of equal token stay: what is below them was drawn from the same distributions.
        """
        assert draft is not None
        child, accepted = _child(nodes, rank)
        token = nodes.tokens.gather(1, child)
        stays = torch.arange(nodes.tokens.shape[1], device=token.device) == child
        if self.replacement:
            stays = nodes.tokens == token
        tokens = nodes.tokens.where((nodes.parents != 0) | (stays & accepted), -1)
        certain = torch.full_like(target[:, 0], -torch.inf).scatter(1, token.clamp(min=0), 0)
        target, draft = target.clone(), draft.clone()
        target[:, 0] = certain.where(accepted, left.log().float())
        draft[:, 0] = certain
        return nodes._replace(tokens=tokens), target, draft


def _child(nodes: Nodes, rank: int | Tensor) -> tuple[Tensor, Tensor]:
    """The root's child of this rank, and whether it is there: [B, 1] each. nodes: per sequence; rank: or [B, 1]."""
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
