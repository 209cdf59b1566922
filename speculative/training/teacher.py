"""The target as a teacher: computes the hidden states that a head reads, and the distribution after each token.

A distribution is stored as the last hidden state, which is V / H times smaller. Logits are computed from it when they
are needed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

Logits = Callable[[Tensor], Tensor]  # last hidden states [R, N, H] -> logits [R, N, V]


class Taught(NamedTuple):
    """Rows, and the target's hidden states for them.

    tokens: integers [R, L]
    taps:   [R, L, T, H], the hidden states that a head reads
    hidden: [R, L, H], the last hidden state, from which the logits of the next token are computed
    sums:   [R, L], log sum exp of these logits, where it was kept; else None
    predicts: bool [R, L], whether the draft learns to predict the token after each token; None for all
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    sums: Tensor | None = None
    predicts: Tensor | None = None


class Teacher:
    """Computes a target's hidden states.

    taps: numbers of the hidden states to return, as in transformers: number i is the input of layer i, and the last one
        (the number of layers) is the output of the final norm

    Raises ValueError for hidden states that the target does not have, and for a target whose layers are not found.
    """

    def __init__(self, target: PreTrainedModel, taps: tuple[int, ...] = ()):
        self.target = target
        self.taps = taps
        self._layers = layers_of(target) if taps else nn.ModuleList()
        if taps and not 0 <= min(taps) <= max(taps) <= len(self._layers):
            raise ValueError(
                f"the head reads the hidden states {[*taps]}, the target has 0 .. {len(self._layers)}; give taps= "
                "that it has"
            )

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Taught:
        """The hidden states for rows of tokens, integers [R, L]."""
        tokens = tokens.to(self.target.device, torch.long)
        states: dict[int, Tensor] = {}

        def keep(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                states[number] = given[0] if given else named["hidden_states"]

            return hook

        # transformers' output_hidden_states would keep the states of all layers, and leaves its hooks in the model.
        inner = {tap for tap in self.taps if tap < len(self._layers)}
        hooks = [self._layers[tap].register_forward_pre_hook(keep(tap), with_kwargs=True) for tap in inner]
        try:
            hidden = self.target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        states[len(self._layers)] = hidden
        read = [states[tap] for tap in self.taps]
        return Taught(tokens, torch.stack(read, 2) if read else hidden.new_empty(*hidden.shape[:2], 0, 0), hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [R, N, V] for its last hidden states [R, N, H]."""
        return logits_behind(self.target, hidden)


def logits_behind(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """A causal language model's logits [R, N, V] for its last hidden states [R, N, H].

    Runs the model's own forward pass without the layers. The lm_head alone is not enough: Gemma caps logits after it,
    and Cohere and Granite scale them, outside of any module.
    """
    layers = model.base_model
    layers.forward = lambda *_, **__: _LastHidden(last_hidden_state=hidden)
    try:
        return model(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del layers.forward


class _LastHidden(BaseModelOutputWithPast):
    """Stands for the output of a model's layers: it has a last hidden state, and None for all other attributes."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of layers in a decoder-only model. Raises ValueError if no list has one module for each layer."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [each for each in model.base_model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    if not found:
        raise ValueError(
            f"the target of type {model.config.model_type!r} has no list of its {count} layers, whose hidden states a "
            "head reads; train a plain draft for it"
        )
    return found[0]
