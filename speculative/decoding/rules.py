"""The rules of a step: how children are drawn, and by which rule they are accepted.

What decides is a method of `heavypath.kernels.verification.verify_tree`, or a `Verifier` in its place.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.native.recording import refuse
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.changes import LogitChange

OWN = "own"  # the verification by a user's verifier, or by the draft's
VALUE_TEMPERATURE = 0.6  # of the draft's probabilities as values, where its tokens are drawn at temperature 0 (DySpec)


class Verifier(Protocol):
    """Decides which drafted nodes are accepted, and which token follows them.

    The verifier alone makes the output follow the target's distribution. With any tree, the token after each accepted
    one must be a sample of the target's filtered distribution there. `verify_tree` has the built-in rules,
    `docs/examples/own_verifier.py` of the repository is one in plain PyTorch, and `top_down` makes one of a rule for
    one node.
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

    draw:              how children are drawn, see `Method`; "top_k" for a draft at temperature 0
    verification:      a `method` of `verify_tree`, or what `verifier` does: "typical" or "own"
    target_filters, draft_filters: how both models are sampled
    fill:              whether children are drawn uniformly once the draft's support is used up
    value_temperature: temperature of the probabilities by which growing trees choose their nodes, where the draft's
                       own temperature is 0
    changes:           what is done to logits before tokens are drawn from them, or verified by them
    verifier:          a function that verifies instead of `verify_tree`; None for that
    """

    draw: str
    verification: str
    target_filters: Filters
    draft_filters: Filters
    fill: bool = False
    value_temperature: float = VALUE_TEMPERATURE
    changes: tuple[LogitChange, ...] = ()
    verifier: Verifier | None = None

    @property
    def replacement(self) -> bool:
        """True if siblings are independent draws, so that several of them may carry the same token."""
        return self.draw == "with_replacement"

    @property
    def drawing_filters(self) -> Filters:
        """The filters that children are drawn with: at temperature 0 they are the draft's likeliest tokens."""
        return self.draft_filters._replace(temperature=0.0) if self.draw == "top_k" else self.draft_filters

    @property
    def law_changed_by(self) -> str:
        """Why the output does not have the target's distribution, in words; "" if it has."""
        return getattr(self.verifier, "law_changed_by", "")

    def verify(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, max_depth: int, noise: Noise
    ) -> Verified:
        """The accepted nodes and the next token of trees drawn by these rules; by `verifier`, or else `verify_tree`.

        Arguments and result as in `Verifier`; the filters are those of the rules.
        """
        of_target = self.target_filters
        of_draft = self.draft_filters
        if self.verifier is None:
            return step_kernels(nodes.tokens.device).verify(
                VerifyInputs(
                    nodes=nodes,
                    target_logits=target_logits,
                    draft_logits=draft_logits,
                    method=self.verification,
                    replacement=self.replacement,
                    max_depth=max_depth,
                    target_filters=of_target,
                    draft_filters=of_draft,
                    noise=noise,
                )
            )
        refuse("a verifier in Python")  # a recording would not call it again
        return self.verifier(
            nodes,
            target_logits,
            draft_logits,
            max_depth=max_depth,
            target_filters=of_target,
            draft_filters=of_draft,
            noise=noise,
        )
