"""The common part of trained heads as drafts: a module of their own, which reads the target's hidden states."""

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

    Of a step's first feed it gives the logits after the root alone, [B, 1, V].

    config:      of the module, with a `model_type`
    layers:      that its cached rows went through

    Raises ValueError for a module of another device or dtype than the target's, and for one in training mode.
    """

    reads_target = True
    is_foreign = False
    is_head = True
    drafts_at_once = False  # whether one pass gives the laws of all levels
    ranks = None  # each rank has the whole module
    rope_limit: int | None = None
    has_dynamic_rope = False
    config: Any
    layers: int

    def __init__(self, model: nn.Module, target: Forward):
        self.model, self.target = model, target
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        if self.device != target.device:
            raise ValueError(f"target and draft must be on one device, got {target.device} and {self.device}")
        if self.dtype != target.dtype:
            raise ValueError(
                f"target and head must have one dtype, got {target.dtype} and {self.dtype}; use head.to(dtype)"
            )
        if model.training:
            raise ValueError("draft is in training mode; call draft.eval() first")
        self._structure, self._values = structure_of(model), WeightValues(model)

    @property
    def forward(self) -> "TappedDraft":  # pyright: ignore[reportIncompatibleVariableOverride]
        """Itself."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that nobody quantised to integers."""
        return next(one.dtype for one in self.model.parameters() if one.is_floating_point())

    @property
    def target_lm_head(self) -> Any:
        """The target's own, for heads that have none."""
        return self.target.model.get_output_embeddings()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters with their names."""
        return self.model.named_parameters()

    def check_weights(self) -> None:
        """Raise ValueError if a weight is NaN or infinite."""
        check_finite(self.name, self.weights())

    def is_current(self) -> bool:
        """True if the module's parts are those that it had when it was taken."""
        return structure_of(self.model) == self._structure

    def state(self) -> int:
        """A number that is another one after a change of the module, or of its weights' values."""
        return hash((*self._structure.function, self._values.state(), self.target.state()))

    @abstractmethod
    def level_weights(self) -> list[Tensor]:
        """The weights that drafting a level of a tree reads, the target's lm_head among them where it is taken."""

    def pass_weights(self) -> list[Tensor]:
        """The weights that are read once a step, by a draft of all levels in one pass; none of another one."""
        return []

    @abstractmethod
    def taps(self, cache: Any) -> Taps:
        """The hidden states that are read of the target's passes, to be kept in a cache."""

    @abstractmethod
    def prefill(self, tokens: Tensor, cache: Any, starts: Sequence[int] | None = None) -> None:
        """Take in right-padded texts LongTensor[B, T], which the target has read; starts: as of `Forward.prefill`."""

    def usual_acceptance(self, temperature: float) -> Usual:
        """Heads know the target's own features: more of their tokens are accepted than of a small model's."""
        return TRAINED_HEAD

    @abstractmethod
    def unsure_rows(self, levels: int) -> int:
        """The most of a text's last rows that may not have been computed, after steps that draft so many levels."""
