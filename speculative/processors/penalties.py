"""Processors that OpenAI's API has and transformers has not: penalties of the new text, and a bias of tokens.

With count(t) = how often token t is among the new tokens, the logit x_t becomes

    x_t + bias_t - frequency * count(t) - presence * [count(t) > 0]

which is OpenAI's formula. The prompt is not counted.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class TextPenalties:
    """Penalties of tokens that the text after its prompt has already. prompt_length: tokens of the prompt."""

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self._frequency, self._presence, self._prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] after the texts LongTensor[R, T'], less the penalties."""
        new = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TokenBias:
    """Adds to the logits of some tokens. bias: by their numbers."""

    def __init__(self, bias: Mapping[int, float]):
        self._tokens, self._bias = torch.tensor([*bias], device="cpu"), torch.tensor([*bias.values()], device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] with the bias."""
        tokens, bias = self._tokens.to(scores.device), self._bias.to(scores)
        return scores.index_add(1, tokens, bias.expand(len(scores), -1))
