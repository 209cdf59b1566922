"""Logits processors of OpenAI's API that transformers lacks: frequency and presence penalties, and a bias.

Let count(t) be the number of times that token t is among the new tokens. The logit x_t becomes

    x_t + bias_t - frequency * count(t) - presence * [count(t) > 0]

which is OpenAI's formula. The prompt is not counted.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class TextPenalties:
    """Lowers the logits of tokens that the output has already.

    frequency: subtracted for each time that the token is in the output
    presence: subtracted once if the token is in the output
    prompt_length: number of tokens of the prompt, which are not counted
    """

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self._frequency = frequency
        self._presence = presence
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] minus the penalties. input_ids: LongTensor[R, T'], the sequences before them."""
        new = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TokenBias:
    """Adds a constant to the logits of some tokens. bias: token -> the constant."""

    def __init__(self, bias: Mapping[int, float]):
        self._tokens = torch.tensor([*bias], device="cpu")
        self._bias = torch.tensor([*bias.values()], device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] plus the bias."""
        tokens = self._tokens.to(scores.device)
        bias = self._bias.to(scores)
        return scores.index_add(1, tokens, bias.expand(len(scores), -1))
