"""A target as a teacher of rows of text: hidden states for a head to read, and the distribution after each token.

A distribution is kept as the last hidden state, which is V / H times smaller, and made from it a piece at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

Logits = Callable[[Tensor], Tensor]  # of last hidden states [R, N, H]: [R, N, V]


class Taught(NamedTuple):
    """Rows of text, and what the target says about them.

    tokens: integers [R, L]
    taps:   [R, L, T, H], the hidden states that a head reads, by transformers' numbers. Number i is the input of layer
            i; the last one, with as many layers before it, is after the final norm
    hidden: [R, L, H], the last of them, from which P of the next token is made
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor


class Teacher:
    """A target, and the numbers of the hidden states that are read of it.

    Raises ValueError for numbers that the target does not have.
    """

    def __init__(self, target: PreTrainedModel, taps: tuple[int, ...] = ()):
        self.target, self.taps, self._layers = target, taps, layers_of(target) if taps else nn.ModuleList()
        if taps and not 0 <= min(taps) <= max(taps) <= len(self._layers):
            raise ValueError(
                f"the head reads the hidden states {[*taps]}, the target has 0 .. {len(self._layers)}; give taps= "
                "that it has"
            )

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Taught:
        """Of rows of tokens, integers [R, L]."""
        tokens = tokens.to(self.target.device, torch.long)
        states: dict[int, Tensor] = {}

        def keep(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                states[number] = given[0] if given else named["hidden_states"]

            return hook

        # transformers' own output_hidden_states keeps those of all layers, and leaves its hooks in the model.
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
        """The target's logits [R, N, V] of its last hidden states [R, N, H]."""
        return logits_behind(self.target, hidden)


def logits_behind(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """A causal language model's logits [R, N, V] of its last hidden states [R, N, H].

    That is its own forward pass without its layers. The lm_head alone would not do: Gemma caps logits after it, Cohere
    and Granite scale them, and no module does that.
    """
    layers = model.base_model
    layers.forward = lambda *_, **__: _LastHidden(last_hidden_state=hidden)
    try:
        return model(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del layers.forward


class _LastHidden(BaseModelOutputWithPast):
    """A last hidden state; whatever else models look for in such an output is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder; ValueError if they cannot be told from its other modules."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [each for each in model.base_model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    if not found:
        raise ValueError(
            f"the target of type {model.config.model_type!r} has no list of its {count} layers, whose hidden states a "
            "head reads; train a plain draft for it"
        )
    return found[0]
