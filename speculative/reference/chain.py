"""Speculative decoding with a chain of drafted tokens.

Algorithm 1 of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
P_i is the target's distribution of the i-th new token, and Q_i the draft's. One step:

    1. Draft:   x_i ~ Q_i for i = 1, ..., k, one after the other.
    2. Score:   one forward pass of the target on prefix, x_1, ..., x_k gives P_1, ..., P_k+1.
    3. Accept:  x_i with probability min(1, P_i(x_i) / Q_i(x_i)), for i = 1, ..., k, until one is rejected.
    4. Sample:  if x_i was rejected, one more token ~ norm(max(P_i - Q_i, 0)), the residual distribution.
                If all were accepted, one more token ~ P_k+1.

Each new token follows P exactly (appendix A.1). Token x is drafted and accepted with probability
Q(x) min(1, P(x) / Q(x)) = min(P(x), Q(x)). A rejection has probability 1 - sum min(P, Q) = sum max(P - Q, 0), by which
`norm` divides. So x is sampled after a rejection with probability max(P(x) - Q(x), 0). Together that is P(x).
"""

from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.noise import Stream, coins, gumbel_noise

ROWS_PER_STEP = 4096  # rows of random numbers; a step uses one for each of its nodes
LEAST_TEMPERATURE = 1e-30  # instead of 0: the most likely token has all the probability


@torch.no_grad()
def chain_decode(
    target: Any,
    draft: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    draft_length: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Continue a prompt LongTensor[1, T] to LongTensor[1, T + max_new_tokens]; temperature 0 is greedy.

    target, draft: model(ids).logits is [1, T, V]; both models have one vocabulary. draft_length: k.
    """
    prefix = input_ids[0]
    end = len(prefix) + max_new_tokens
    while len(prefix) < end:
        k = min(draft_length, end - len(prefix) - 1)  # the step ends with one more token
        first_row = ROWS_PER_STEP * (len(prefix) - 1)  # random numbers after i drafted tokens are in row first_row + i

        # 1. Draft.
        sequence = prefix
        draft_probs = []
        for i in range(k):
            logits = with_temperature(draft(sequence[None]).logits[0, -1], temperature)  # [V]
            draft_probs.append(torch.softmax(logits, -1))
            token = sample(logits, seed, Stream.DRAFT, first_row + i)
            sequence = torch.cat([sequence, token])
        drafted = sequence[len(prefix) :]  # [k]

        # 2. Score.
        logits = with_temperature(target(sequence[None]).logits[0, len(prefix) - 1 :], temperature)  # [k + 1, V]
        target_probs = torch.softmax(logits, -1)

        # 3. Accept.
        accepted = 0
        next_probs = target_probs[k]
        for i, token in enumerate(drafted):
            if uniform(seed, first_row + i) >= target_probs[i, token] / draft_probs[i][token]:
                next_probs = residual(target_probs[i], draft_probs[i])
                break
            accepted += 1

        # 4. Sample.
        next_token = sample(next_probs.log(), seed, Stream.TARGET, first_row + accepted)
        prefix = torch.cat([prefix, drafted[:accepted], next_token])
    return prefix[None]


def with_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits [..., V] after temperature, in fp64."""
    return logits.double() / max(temperature, LEAST_TEMPERATURE)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(P - Q, 0)), [V]."""
    difference = (target_probs - draft_probs).clamp(min=0)
    if not difference.any():  # P and Q differ by rounding alone
        return target_probs
    return difference / difference.sum()


def sample(logits: Tensor, seed: int, use: Stream, row: int, count: int = 1) -> Tensor:
    """Draw `count` tokens from softmax(logits [V]) without replacement: LongTensor[count], in draw order.

    They have the largest sums of logit and Gumbel noise (Gumbel top-k; Kool et al. 2019, arXiv 1903.06059).
    """
    noise = gumbel_noise(seed, use, torch.tensor([row], device=logits.device), len(logits))[0]  # [V]
    return (logits + noise).topk(count).indices


def uniform(seed: int, row: int, sibling: int = 0) -> float:
    """A random number in [0, 1) for a drafted token, by the row of its parent and its index among siblings."""
    rows, siblings = torch.tensor([[row], [sibling]], device="cpu").numpy()
    return coins(seed, rows, siblings).item()
