"""`TappedDraft`, the base class of trained heads: modules that read the target's hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.models.forward import Forward, Taps, check_finite
from heavypath.speculative.models.structure import WeightValues, structure_of
from heavypath.speculative.trees.tails import TRAINED_HEAD, Usual


class TappedDraft(Draft, ABC):
    """A trained module as a draft for the target whose hidden states it reads.

    For a step's first feed it returns only the logits after the root, [B, 1, V].

    config: of the module, with a `model_type`
    layers: number of the module's layers with a cache

    Raises ValueError for a module on another device or of another dtype than the target, and for one in training mode.
    """

    reads_target = True
    is_foreign = False
    is_head = True
    drafts_at_once = False  # whether one pass gives the distributions of all levels
    ranks = None  # each rank has the whole module
    rope_limit: int | None = None
    has_dynamic_rope = False
    config: Any
    layers: int

    def __init__(self, model: nn.Module, target: Forward):
        self.model = model
        self.target = target
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        if self.device != target.device:
            raise ValueError(f"target and draft must be on one device, got {target.device} and {self.device}")
        if self.dtype != target.dtype:
            raise ValueError(
                f"target and head must have one dtype, got {target.dtype} and {self.dtype}; use head.to(dtype)"
            )
        if model.training:
            raise ValueError("draft is in training mode; call draft.eval() first")
        self._structure = structure_of(model)
        self._values = WeightValues(model)

    @property
    def forward(self) -> "TappedDraft":  # pyright: ignore[reportIncompatibleVariableOverride]
        """The draft itself: it has those attributes of a `Forward` that callers of `Draft.forward` read."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the floating-point weights; quantised integer weights are ignored."""
        return next(one.dtype for one in self.model.parameters() if one.is_floating_point())

    @property
    def target_lm_head(self) -> Any:
        """The target's lm_head, for heads without their own."""
        return self.target.model.get_output_embeddings()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters with their names."""
        return self.model.named_parameters()

    def check_weights(self) -> None:
        """Raise ValueError if a weight is NaN or infinite."""
        check_finite(self.name, self.weights())

    def is_current(self) -> bool:
        """Whether the module consists of the same parts as when this draft was made."""
        return structure_of(self.model) == self._structure

    def state(self) -> int:
        """A hash that changes when the module, its weights' values or the target change."""
        return hash((*self._structure.function, self._values.state(), self.target.state()))

    @abstractmethod
    def level_weights(self) -> list[Tensor]:
        """The weights that drafting one level reads, including the target's lm_head if it is used."""

    def pass_weights(self) -> list[Tensor]:
        """The weights that one pass reads in each step, if it drafts all levels; an empty list for other heads."""
        return []

    @abstractmethod
    def taps(self, cache: Any) -> Taps:
        """A request for hidden states of the target's passes, which stores in the cache what drafting needs of them."""

    @abstractmethod
    def prefill(self, tokens: Tensor, cache: Any, starts: Sequence[int] | None = None) -> None:
        """Read right-padded sequences LongTensor[B, T] after the target has; starts: as in `Forward.prefill`."""

    def usual_acceptance(self, temperature: float) -> Usual:
        """How often its tokens are accepted, as `distil` measured; else how often those of heads usually are.

        That is more often than a small model's, as heads read features.
        """
        measured = getattr(self.config, "acceptance", None)
        if measured is None:
            return TRAINED_HEAD
        greedy, sampled = measured
        return TRAINED_HEAD._replace(first=greedy if temperature == 0 else sampled)

    @abstractmethod
    def unsure_rows(self, levels: int) -> int:
        """An upper bound for how many of a sequence's last cache rows may be missing after steps of `levels` levels."""
