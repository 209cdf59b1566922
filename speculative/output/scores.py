"""The logits that each new token was chosen by, in the form in which transformers' generate returns them.

The token after node i of a step's accepted path was chosen by the target's logits after node i. `logits` are those of
the model. `scores` are the logits after logits processors, such as repetition penalty and minimum length. When
sampling, `scores` are also divided by the temperature, and -inf for tokens that a filter removed.
"""

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped


class Chosen:
    """Collects, step by step, the target's logits by which each new token was chosen. batch: number of sequences."""

    def __init__(self, batch: int):
        self._raw: list[list[Tensor]] = [[] for _ in range(batch)]
        self._processed: list[list[Tensor]] = [[] for _ in range(batch)]

    def step(self, stepped: Stepped, before: Sequences, after: Sequences) -> None:
        """Add the logits of the tokens that one step emitted. before, after: the batch before and after the step."""
        for slot in (before.left > 0).nonzero()[:, 0].tolist():
            sequence = int(before.member[slot])
            emitted = int(after.produced[slot]) - int(before.produced[slot])
            path = stepped.verified.path[slot, :emitted]
            for kept, logits in ((self._raw, stepped.raw_logits), (self._processed, stepped.logits)):
                kept[sequence].append(logits[slot, path].float())

    def logits(self) -> tuple[Tensor, ...]:
        """The model's logits, fp32 [B, V], for each new token of the longest sequence; 0 after a sequence's end."""
        return _by_token(self._raw)

    def scores(self, filters: Filters) -> tuple[Tensor, ...]:
        """The logits after processors, temperature and filters, as `logits` returns them.

        Tokens that a filter removed have -inf; at temperature 0 only processors apply. filters: those of the target
        """
        scores = _by_token(self._processed)
        if filters.temperature == 0:
            return scores
        left_out = [filtered_logprobs(each, filters) == -torch.inf for each in scores]
        scaled = [each / filters.temperature for each in scores]
        return tuple(each.masked_fill(out, -torch.inf) for each, out in zip(scaled, left_out, strict=True))


def _by_token(sequences: list[list[Tensor]]) -> tuple[Tensor, ...]:
    rows = [torch.cat(pieces) for pieces in sequences]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, new, V]
    return padded.unbind(1)
