"""The probability that the target accepts each child that the draft proposes: the acceptance vector for tree planning.

At one position let P be the target's distribution, Q the draft's, and x_1, x_2, ... the draft's children, drawn in this
order without replacement. Let F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0, and R_k the mass of Q outside the k - 1
children before x_k. Recursive rejection (Sequoia's algorithm 2, RSD's recursive rejection sampling) accepts x_k with
probability

    c_k = min(1, max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * R_k / Q(x_k)),        l_{k+1} = l_k + F(l_k) / R_k,

so child k is the accepted one with probability c_k * prod_{j<k} (1 - c_j). This is computed, not sampled.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk

ELEMENTS_PER_FORWARD = 2**26  # most logits of each model in memory at once
ELEMENTS_PER_CHUNK = 2**22  # most fp64 probabilities computed at once


@torch.no_grad()
def measure_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: Tensor,
    *,
    temperature: float,
    children: int = 8,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Measure the probability that child j is accepted and all earlier ones rejected: float64 [children] on the CPU.

    Both models read input_ids [B, T], without padding. Element j is the mean over all B * T positions, with one draw of
    the children at each, without replacement. The sum of the vector is the probability that any child is accepted. At
    temperature 0 the children are the draft's likeliest tokens, and the target's likeliest token is accepted. If top_k
    or top_p leave fewer tokens than children, the missing children are never accepted.

    temperature, top_k, top_p: how both models are sampled
    children: how many children are drawn at each position

    Raises ValueError for input_ids of another shape, for filters out of range, for children outside 1 .. vocabulary,
    and for logits that are no distribution (NaN or +inf).
    """
    filters = Filters(temperature, top_k, top_p).check()
    vocabulary = target.config.vocab_size
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"expected input_ids [B, T] with at least one token, got shape {tuple(input_ids.shape)}")
    if not 1 <= children <= vocabulary:
        raise ValueError(f"expected children in 1 .. {vocabulary} (the vocabulary), got {children}")

    total = torch.zeros(children, dtype=torch.float64, device="cpu")
    positions = 0
    rows_at_once = max(1, ELEMENTS_PER_CHUNK // vocabulary)
    sequences = max(1, ELEMENTS_PER_FORWARD // (input_ids.shape[1] * vocabulary))
    for ids in input_ids.split(sequences):
        target_chunks, draft_chunks = (
            model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float().split(rows_at_once)
            for model in (target, draft)
        )  # [R, V]
        for target_logits, draft_logits in zip(target_chunks, draft_chunks, strict=True):
            for name, logits in (("target", target_logits), ("draft", draft_logits)):
                if not (sound := logits.amax(-1).isfinite()).all():
                    place = positions + int((~sound).nonzero()[0, 0])
                    raise ValueError(f"the {name}'s logits after position {place} of input_ids are no distribution")
            noise_rows = torch.arange(positions, positions + len(target_logits), device=target_logits.device)
            drawn = gumbel_topk(draft_logits, children, **filters._asdict(), seed=seed, rows=noise_rows)
            tokens = drawn.tokens  # [R, K]
            if temperature == 0:
                accepted = (tokens == target_logits.argmax(-1, keepdim=True)).double()
            else:
                target_probs, draft_probs = (
                    filtered_logprobs(logits, filters).exp() for logits in (target_logits, draft_logits)
                )
                accepted = chain_acceptance(target_probs, draft_probs, tokens)
            total += accepted.sum(0).cpu()
            positions += len(target_logits)
    return total / positions


def chain_acceptance(target_probs: Tensor, draft_probs: Tensor, drawn: Tensor) -> Tensor:
    """The probability that each child is the accepted one by recursive rejection, [R, K], for R positions.

    target_probs, draft_probs: [R, V], P and Q at each position
    drawn: LongTensor[R, K], the children in draw order, -1 for an absent one
    """
    multiplier = target_probs.new_zeros(len(drawn), 1)  # l_k
    reached = target_probs.new_ones(len(drawn), 1)  # prod (1 - c_j)
    undrawn_probs = draft_probs.clone()  # Q outside the children drawn so far
    accepted = []
    for column in drawn.split(1, dim=1):  # [R, 1]
        token = column.clamp(min=0)
        residual_sum = (target_probs - multiplier * draft_probs).clamp_min(0).sum(1, keepdim=True)  # F(l_k)
        undrawn = undrawn_probs.sum(1, keepdim=True)  # R_k
        draft_prob = draft_probs.gather(1, token)
        residual = (target_probs.gather(1, token) - multiplier * draft_prob).clamp_min(0)
        chance = (residual / residual_sum * undrawn / draft_prob).clamp_max(1)  # c_k
        chance = torch.where((column >= 0) & (draft_prob > 0) & (residual > 0), chance, 0)
        accepted.append(reached * chance)
        reached = reached * (1 - chance)
        multiplier = multiplier + torch.where(undrawn > 0, residual_sum / undrawn, 0)
        undrawn_probs = undrawn_probs.scatter(1, token, 0)
    return torch.cat(accepted, dim=1)
