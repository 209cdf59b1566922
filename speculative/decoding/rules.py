"""The rules of a step: how children are drawn, and by which rule they are accepted.

`Verifier` is what decides. The built-in ones are the methods of `heavypath.kernels.verification.verify_tree`; a user's
own one is any callable with the same arguments, and what it returns is checked here.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Laws, Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.verification import DRAFT_AWARE, verify_unchecked
from heavypath.kernels.verifying.rule import Rule
from heavypath.speculative.drafts.changes import LogitChange

OWN = "own"  # the name of a user's verification, beside the methods of `verify_tree`


class Verifier(Protocol):
    """Decides which drafted nodes are accepted, and which token follows them.

    The verifier alone makes the text follow the target's law. With any tree, the token after each accepted one must be
    a sample of the target's filtered distribution there. `verify_tree` has the built-in rules,
    `heavypath.speculative.examples.own_verifier` is one in plain PyTorch, and `top_down` makes one of a rule for one
    node.
    """

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
        """Walk down each sequence's tree from its root, node 0, along the children that are accepted.

        nodes:         tokens, parents and ranks, LongTensors [B, N]. A token of -1 marks an absent node, whose parent
                       means nothing. Ranks are the order in which siblings were drawn
        target_logits: fp32 [B, N, V], the target's after each node
        draft_logits:  fp32 [B, N, V], those that each node's children were drawn from, undefined after leaves; None
                       where nothing was drafted: a text's last token has a tree of its root alone
        max_depth:     levels of the tree below the root
        target_filters, draft_filters: temperature, top_k, top_p and min_p of both. The target's temperature is 0 for
                       greedy text; a draft's temperature of 0 says that children are its likeliest tokens
        noise:         seed LongTensor [] and rows LongTensor [B, N] >= 0, names of random numbers for
                       `heavypath.kernels.noise`. Each row is used for one node of one step, so that a seed gives the
                       same text in any batch. Children were drawn with (seed, row, Stream.DRAFT) of their parent

        Returns `Verified`: path LongTensor[B, max_depth + 1] with 0, then the accepted nodes from parent to child, then
        -1; length LongTensor[B], how many were accepted; next_token LongTensor[B], the token after the last of them.

        On a GPU it is captured in a CUDA graph, as a `Draft` is.
        """
        ...


@dataclass(frozen=True)
class Rules:
    """The rules by which a step draws and verifies.

    replacement:       whether children are independent draws; else they are successive draws without replacement
    fill:              whether children are drawn uniformly once the draft's support is used up
    verification:      the `method` of `verify_tree`, or the name of what `verifier` does
    target_filters, draft_filters: how both models are sampled
    drawing_filters:   the draft's filters, but with temperature 0 where children are the draft's likeliest tokens
    value_temperature: temperature of the probabilities by which growing trees choose their nodes, where the draft's
                       own temperature is 0
    changes:           what is done to logits before anything is drawn from them, or verified by them
    verifier:          what verifies, where no method of `verify_tree` does
    """

    replacement: bool
    fill: bool
    verification: str
    target_filters: Filters
    draft_filters: Filters
    drawing_filters: Filters
    value_temperature: float
    changes: tuple[LogitChange, ...] = ()
    verifier: Verifier | None = None

    @property
    def law_changed_by(self) -> str:
        """The reason why the text has another law than the target's, in words; "" for none."""
        return getattr(self.verifier, "law_changed_by", "")

    @property
    def rule(self) -> Rule:
        """The rule of `verify_tree`, where it is one of its methods that verifies."""
        return Rule.of_draws(self.verification, self.replacement)

    def verify(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | Laws | None, max_depth: int, noise: Noise
    ) -> Verified:
        """The accepted nodes of trees that were drawn by these rules; arguments as of `Verifier`.

        draft_logits may be `Laws` for the built-in verifiers.
        """
        options: dict[str, Any] = {"target_filters": self.target_filters, "draft_filters": self.draft_filters}
        options |= {"max_depth": max_depth, "noise": noise}
        if self.verifier is not None:
            assert not isinstance(draft_logits, Laws)
            return self.verifier(nodes, target_logits, draft_logits, **options)
        draft_logits = draft_logits if self.verification in DRAFT_AWARE else None
        return verify_unchecked(nodes, target_logits, draft_logits, rule=self.rule, **options)
