"""Repetition penalty and min_new_tokens: change the target's logits along each path of a tree.

With text(i) = the prompt, the new tokens so far, and the drafted ones from the root down to node i, the logits x after
node i become

    repetition penalty    x_t / penalty if x_t > 0, else x_t * penalty,   for every token t of text(i)
    min_new_tokens        -inf,   for every end-of-sequence token t, where text(i) has fewer new tokens

before temperature and filters. transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019, "CTRL", sec. 4.1)
and MinNewTokensLengthLogitsProcessor do the same for one sequence. Left padding does not count. The draft's logits are
not changed: verification is exact for any draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.speculative.decoding.drafted import Drafted
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.changes import LogitChange

_LEAST_PENALTY = 1e-30  # logits up to 1e8 stay finite in fp32 when they are divided by it
_MOST_PENALTY = 1e30


@dataclass(frozen=True)
class Processing(LogitChange):
    """Repetition penalty and min_new_tokens, applied to the target's logits.

    min_new_tokens: 0 if no token ends a sequence
    """

    repetition_penalty: float
    min_new_tokens: int

    @classmethod
    def of(cls, repetition_penalty: float, min_new_tokens: int, eos: Sequence[int], vocab_size: int) -> "Processing":
        """Return a checked `Processing`; ValueError if no logit would stay finite. eos: the end-of-sequence tokens."""
        if not _LEAST_PENALTY <= repetition_penalty <= _MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty must be in {_LEAST_PENALTY} .. {_MOST_PENALTY}, with which logits stay finite, "
                f"got {repetition_penalty!r}"
            )
        if min_new_tokens > 0 and len({*eos}) == vocab_size:
            raise ValueError(
                f"with min_new_tokens={min_new_tokens}, eos_token_id must leave a token to begin with, got all "
                f"{vocab_size} tokens of the vocabulary; give fewer of them, or leave out min_new_tokens"
            )
        return cls(repetition_penalty, min_new_tokens)

    def before_verifying(self, logits: Tensor, drafted: Drafted, state: Sequences) -> Tensor:
        """Return the target's logits [B, N, V] after each node, with penalty and minimum applied.

        They are fp32 if there is a penalty, which is a product; else of the given dtype, since every dtype has -inf.
        """
        if self.repetition_penalty != 1:
            path = _paths(drafted)
            logits = logits.float()
            found = self._penalised(logits.gather(-1, path))
            logits = self._penalised(logits).where(state.seen[:, None], logits)
            logits.scatter_(-1, path, found)  # a token that is on the path twice is penalised once
        if self.min_new_tokens > 0:
            early = state.produced[:, None] + drafted.depths < self.min_new_tokens  # [B, N]
            stops = logits[..., state.stops].masked_fill(early[..., None], -torch.inf)
            logits = logits.index_copy(-1, state.stops, stops)
        return logits

    def _penalised(self, logits: Tensor) -> Tensor:
        return torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)


def _paths(drafted: Drafted) -> Tensor:
    """Return the tokens from the root down to each node i, LongTensor[B, N, N], in row i.

    Column j of row i is node j's token if node j is node i or its ancestor, else the root's token.
    """
    node = torch.arange(drafted.tokens.shape[1], device=drafted.tokens.device)
    above = (node <= node[:, None]) & (node[:, None] < drafted.subtree_end[..., None, :])  # [N, N] or [B, N, N]
    there = above & (drafted.tokens >= 0)[:, None, :]
    return drafted.tokens[:, None, :].where(there, drafted.tokens[:, :1, None])
