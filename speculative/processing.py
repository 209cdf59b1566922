"""Repetition penalty and a minimum of new tokens: the target's logits, changed along each path of a tree.

With text(i) = the prompt, the new tokens so far, and the drafted ones from the root down to node i, the logits x after
node i become

    repetition penalty    x_t / penalty if x_t > 0, else x_t * penalty,   for every token t of text(i)
    min_new_tokens        -inf,   for every end-of-sequence token t, where text(i) has fewer new tokens

before temperature and filters: what transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019, "CTRL",
sec. 4.1) and MinNewTokensLengthLogitsProcessor do to one text. Left padding is no text. The draft's logits stay as they
were drawn from: verification is exact for any draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.speculative.drafting import Drafted
from heavypath.speculative.sequences import Sequences


@dataclass(frozen=True)
class Processing:
    """What is done to the target's logits.

    prompt: LongTensor[B, T], right-padded; lengths: LongTensor[B], tokens of each
    stops:  LongTensor[any], end-of-sequence tokens
    """

    repetition_penalty: float
    min_new_tokens: int
    prompt: Tensor
    lengths: Tensor
    stops: Tensor

    def __call__(self, logits: Tensor, drafted: Drafted, sequences: Sequences) -> Tensor:
        """fp32 logits [B, N, V] after each node, which are changed in place, as they are to be sampled."""
        if self.repetition_penalty != 1:
            text = self._texts(drafted, sequences)
            found = logits.gather(-1, text)
            penalised = torch.where(found < 0, found * self.repetition_penalty, found / self.repetition_penalty)
            logits.scatter_(-1, text, penalised)  # a token found twice is written twice, not penalised twice
        if self.min_new_tokens > 0:
            early = sequences.produced[:, None] + drafted.depths < self.min_new_tokens  # [B, N]
            logits[..., self.stops] = logits[..., self.stops].masked_fill(early[..., None], -torch.inf)
        return logits

    def _texts(self, drafted: Drafted, sequences: Sequences) -> Tensor:
        """The tokens of each node's text, LongTensor[B, N, M], filled up with the root, which all of them have."""
        root, nodes = sequences.root, drafted.tokens.shape[1]
        new = sequences.output[:, : int(sequences.produced.max())]
        committed = torch.cat([self.prompt, new], 1)
        place = torch.arange(committed.shape[1], device=root.device)
        begin = self.prompt.shape[1]  # of the new tokens
        there = torch.where(
            place < begin, place < self.lengths[:, None], place - begin < sequences.produced[:, None]
        )  # [B, M]
        committed = committed.where(there, root[:, None])

        node = torch.arange(nodes, device=root.device)
        above = (node <= node[:, None]) & (node[:, None] < drafted.subtree_end[..., None, :])  # [N, N] or [B, N, N]
        path = drafted.tokens[:, None, :].where(above & (drafted.tokens >= 0)[:, None, :], root[:, None, None])
        return torch.cat([committed[:, None].expand(-1, nodes, -1), path], 2)
