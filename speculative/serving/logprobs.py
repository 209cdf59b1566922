"""Log-probabilities of tokens under the target: log softmax of its logits, before any processor or filter.

For new tokens the steps that produce them have the logits. A prompt takes a second pass, since prefill computes no
logits.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, as_long, chain_mask


class TokenLogprob(NamedTuple):
    """The natural log-probability of one token of a sequence under the target.

    logprob:   None for the first token of a prompt, which nothing precedes
    likeliest: pairs (id, log-probability) of the likeliest tokens at this position, the likeliest first
    """

    token: int
    logprob: float | None
    likeliest: list[tuple[int, float]]


def logprobs_of(logits: Tensor, tokens: Sequence[int], likeliest: int) -> list[TokenLogprob]:
    """The log-probabilities of n tokens.

    logits:    float [n, V], the logits from which each token was chosen
    likeliest: how many of the likeliest tokens to list at each position
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(likeliest, logits.shape[-1]))
    pairs = [[*zip(*each, strict=True)] for each in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(token, logprob, pair) for token, logprob, pair in zip(tokens, own, pairs, strict=True)]


class ReadLogits(LogitChange):
    """Keeps the target's logits of one step, so that log-probabilities of the new tokens can be computed after it.

    It changes nothing. It must come before all other changes of logits, to get them unchanged.
    """

    def __init__(self) -> None:
        self._logits = self._path = torch.empty(0, device="cpu")

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """Keep the target's logits of a step, [B, N, V], and return them unchanged."""
        self._logits = logits
        return logits

    def after_verifying(self, verified: Verified) -> None:
        """Keep the accepted paths of a step, by which `of_slot` finds the logits."""
        self._path = verified.path

    def of_slot(self, slot: int, count: int) -> Tensor:
        """The target's logits [count, V] from which the first `count` tokens of a slot's last step were chosen."""
        return self._logits[slot, self._path[slot, :count]]


def prompt_logprobs(
    target: Forward, cache: KeyValueCache, prompt: Tensor, likeliest: int, piece: int
) -> Iterator[list[TokenLogprob]]:
    """Run the target over a prompt again; yields its tokens' log-probabilities, at most `piece` in each list.

    The first list has the first token alone, without a log-probability.

    cache:     the target's cache of one sequence with the prompt's rows, which are written again
    prompt:    LongTensor[1, T]
    likeliest: how many of the likeliest tokens to list at each position
    """
    tokens = prompt[0].tolist()
    limit = target.rope_limit
    yield [TokenLogprob(tokens[0], None, [])]
    for begin in range(0, len(tokens) - 1, piece):
        end = min(begin + piece, len(tokens) - 1)
        piece_of = prompt[:, begin:end]
        rows = torch.arange(begin, end, device=prompt.device)[None]
        positions = rows
        if limit is not None and end <= limit < len(tokens):
            piece_of, positions, rows = as_long(piece_of, rows, limit)
        mask = chain_mask(rows[:, 0], rows.shape[1], visible_rows=begin + rows.shape[1])
        logits = target(piece_of, positions, rows, cache, mask)
        yield logprobs_of(logits[0, : end - begin], tokens[begin + 1 : end + 1], likeliest)
