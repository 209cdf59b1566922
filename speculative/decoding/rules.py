"""The rules of a step: how children are drawn, and by which rule they are accepted.

`Verifier` is what decides. The built-in ones are the methods of `heavypath.kernels.verification.verify_tree`; a user's
own one is any callable with the same arguments, and what it returns is checked here.
"""

import inspect
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Laws, Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.typical.acceptance import Typical, typical_unchecked
from heavypath.kernels.verification import DRAFT_AWARE, verify_unchecked
from heavypath.kernels.verifying.rule import Rule
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.models.host import host_can_read

OWN = "own"  # the name of a user's verification, beside the methods of `verify_tree`


class Verifier(Protocol):
    """Decides which drafted nodes are accepted, and which token follows them.

    It is the verifier alone that makes the text follow the target's law: whatever the tree, the token after each
    accepted one must be a sample of the target's filtered distribution there. `verify_tree` has the built-in rules,
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


class OwnVerifier:
    """A user's own verifier, whose answers are checked: shapes always, and on a CPU that the path is one.

    Raises TypeError for something that cannot be called so. Raises TypeError or ValueError for an answer that is none.
    """

    def __init__(self, verifier: Verifier):
        self.name = getattr(verifier, "__name__", type(verifier).__name__)
        self._verifier = verifier
        expected = (
            "verifier must be None, for the method's own, a name, or a callable of your own as Verifier describes it"
        )
        if not callable(verifier) or isinstance(verifier, type):
            given = f"the class {self.name}" if isinstance(verifier, type) else type(verifier).__name__
            raise TypeError(f"{expected}; got {given}")
        names = [*inspect.signature(Verifier.__call__).parameters][1:]
        try:
            inspect.signature(verifier).bind(*names[:3], **dict.fromkeys(names[3:]))
        except TypeError as error:
            call = f"({', '.join(names[:3])}, *, {', '.join(names[3:])})"
            raise TypeError(f"verifier {self.name!r} must be callable as {self.name}{call}: {error}") from None

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
        """What the verifier returns, given logits in fp32, of whatever dtype the models are."""
        nodes = nodes.per_sequence()
        answer = self._verifier(
            nodes,
            target_logits.float(),
            None if draft_logits is None else draft_logits.float(),
            max_depth=max_depth,
            target_filters=target_filters,
            draft_filters=draft_filters,
            noise=noise,
        )
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise TypeError(
                f"verifier {self.name!r} must return Verified(path, length, next_token), got {type(answer).__name__}"
            )
        path, length, next_token = answer
        verified, batch = Verified(path, length, next_token), len(nodes.tokens)
        for field, value, shape in zip(
            Verified._fields, answer, ((batch, max_depth + 1), (batch,), (batch,)), strict=True
        ):
            like = nodes.tokens.device
            if not isinstance(value, Tensor):
                raise TypeError(f"verifier {self.name!r} must return tensors, got {field} {type(value).__name__}")
            if value.shape != shape or value.dtype != torch.long or value.device != like:
                raise ValueError(
                    f"verifier {self.name!r} must return {field} as a LongTensor {[*shape]} on {like}, "
                    f"got {value.dtype} {[*value.shape]} on {value.device}"
                )
        if host_can_read(nodes.tokens.device):
            self._check_values(nodes, verified, target_logits.shape[-1])
        return verified

    def _check_values(self, nodes: Nodes, verified: Verified, vocab_size: int) -> None:
        path, length, next_token = verified
        place = torch.arange(path.shape[1])
        above, node = path[:, :-1], path[:, 1:].clamp(min=0)
        there = (node < nodes.tokens.shape[1]) & (length[:, None] >= place[1:])
        node = node.where(there, 0)
        drafted = (nodes.parents.gather(1, node) == above) & (nodes.tokens.gather(1, node) >= 0)
        right = (path[:, 0] == 0) & ((path[:, 1:] >= 0) == there).all(1) & (drafted | ~there).all(1)
        right &= (length >= 0) & (length < path.shape[1])
        if not right.all():
            slot = int(right.int().argmin())
            raise ValueError(
                f"verifier {self.name!r} must return paths of 0, then `length` drafted nodes from parent to child, "
                f"then -1; got path {path[slot].tolist()} of length {int(length[slot])} in a tree with parents "
                f"{nodes.parents[slot].tolist()} and tokens {nodes.tokens[slot].tolist()}"
            )
        if ((next_token < 0) | (next_token >= vocab_size)).any():
            raise ValueError(
                f"verifier {self.name!r} must return next_token in 0 .. {vocab_size - 1}, got {next_token.tolist()}"
            )


@dataclass(frozen=True)
class Rules:
    """How a step draws and verifies.

    replacement:       whether children are independent draws; else they are successive draws without replacement
    fill:              whether children are drawn uniformly once the draft's support is used up
    verification:      the `method` of `verify_tree`, "typical" or OWN
    target_filters, draft_filters: how both models are sampled
    drawing_filters:   the draft's filters, but with temperature 0 where children are the draft's likeliest tokens
    value_temperature: temperature of the probabilities by which growing trees choose their nodes, where the draft's
                       own temperature is 0
    changes:           what is done to logits before anything is drawn from them, or verified by them
    own_verifier:      what verifies where verification is OWN, else None
    typical:           the limits where verification is "typical", else anything
    """

    replacement: bool
    fill: bool
    verification: str
    target_filters: Filters
    draft_filters: Filters
    drawing_filters: Filters
    value_temperature: float
    changes: tuple[LogitChange, ...] = ()
    own_verifier: OwnVerifier | None = None
    typical: Typical | None = None

    @property
    def law_changed_by(self) -> str:
        """What gives the text another law than the target's, in words; "" for nothing."""
        if self.verification != "typical" or self.typical is None:
            return ""
        return f"typical acceptance, epsilon {self.typical.epsilon:g}, delta {self.typical.delta:g}"

    @property
    def rule(self) -> Rule:
        """The rule of `verify_tree`, where it is one of its methods that verifies."""
        return Rule.of_draws(self.verification, self.replacement)

    def verify(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | Laws | None, max_depth: int, noise: Noise
    ) -> Verified:
        """What is accepted of trees that were drawn by these rules; arguments as of `Verifier`.

        draft_logits may be `Laws` for the built-in verifiers.
        """
        if self.verification == "typical":
            assert self.typical is not None
            filters = self.target_filters
            return typical_unchecked(
                nodes, target_logits, typical=self.typical, max_depth=max_depth, filters=filters, noise=noise
            )
        if self.own_verifier is not None:
            assert not isinstance(draft_logits, Laws)
            return self.own_verifier(
                nodes,
                target_logits,
                draft_logits,
                max_depth=max_depth,
                target_filters=self.target_filters,
                draft_filters=self.draft_filters,
                noise=noise,
            )
        return verify_unchecked(
            nodes,
            target_logits,
            draft_logits if self.verification in DRAFT_AWARE else None,
            rule=self.rule,
            max_depth=max_depth,
            target_filters=self.target_filters,
            draft_filters=self.draft_filters,
            noise=noise,
        )
