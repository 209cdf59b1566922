"""How often the target accepts each child the draft proposes: the acceptance vector that tree planning takes.

At one position let P be the target's distribution, Q the draft's and x_1, x_2, ... the draft's children in the order
drawn, without replacement. With F(l) = sum_v max(P(v) - l Q(v), 0), l_1 = 0 and R_k the mass of Q outside the k - 1
children before x_k, sequential rejection (Sequoia, algorithm 2; recursive rejection sampling, RSD) accepts x_k with

    c_k = min(1, max(P(x_k) - l_k Q(x_k), 0) / F(l_k) * R_k / Q(x_k)),        l_{k+1} = l_k + F(l_k) / R_k,

so child k is the accepted one with probability c_k * prod_{j<k} (1 - c_j): no coin has to be thrown.
"""

import torch
from transformers import PreTrainedModel

ELEMENTS_PER_FORWARD = 2**26  # logits held at once, of each model
ELEMENTS_PER_CHUNK = 2**22  # fp64 probabilities worked on at once


@torch.no_grad()
def measure_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    temperature: float,
    children: int = 8,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> torch.Tensor:
    """Probability that child j is the one accepted, all earlier ones rejected: float64 [children], on the CPU.

    Both models read input_ids [B, T] (no padding) and every position counts once. Element j is the mean over the
    B * T positions of the probability above: exact over the verifier's coins, one draw of the children per position
    (Gumbel-top-k, noise from `seed`). The vector sums to the probability that any child is accepted. At temperature 0
    the children are the draft's largest logits and the accepted one is the target's argmax. Children beyond the
    support that top_k or top_p leave are absent and count as never accepted.

    Raises ValueError for input_ids of another shape, a negative temperature, or children outside 1 .. vocabulary.
    """
    vocabulary = target.config.vocab_size
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"expected input_ids [B, T] with at least one token, got shape {tuple(input_ids.shape)}")
    if temperature < 0:
        raise ValueError(f"expected temperature >= 0, got {temperature}")
    if not 1 <= children <= vocabulary:
        raise ValueError(f"expected children in 1 .. {vocabulary} (the vocabulary), got {children}")

    total = torch.zeros(children, dtype=torch.float64)
    generator = torch.Generator(input_ids.device).manual_seed(seed)
    sequences = max(1, ELEMENTS_PER_FORWARD // (input_ids.shape[1] * vocabulary))
    for ids in input_ids.split(sequences):
        target_rows, draft_rows = (
            model(input_ids=ids, use_cache=False).logits.flatten(0, 1).split(max(1, ELEMENTS_PER_CHUNK // vocabulary))
            for model in (target, draft)
        )  # chunks of [rows, V]
        for target_logits, draft_logits in zip(target_rows, draft_rows, strict=True):
            if temperature == 0:
                accepted = greedy_acceptance(target_logits, draft_logits, children)
            else:
                target_probs = filtered_probs(target_logits, temperature, top_k, top_p)
                draft_probs = filtered_probs(draft_logits, temperature, top_k, top_p)
                tokens = draw_children(draft_probs, children, generator)
                accepted = chain_acceptance(target_probs, draft_probs, tokens)
            total += accepted.sum(0).cpu()
    return total / input_ids.numel()


def chain_acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Probability that each child is the one accepted, [R, K], for rows [R, V] and children [R, K] in draw order."""
    multiplier = target_probs.new_zeros(len(tokens), 1)  # l_k
    reached = target_probs.new_ones(len(tokens), 1)  # prod (1 - c_j)
    undrawn_probs = draft_probs.clone()  # Q outside the children drawn so far
    accepted = []
    for token in tokens.split(1, dim=1):  # [R, 1]
        residual_sum = (target_probs - multiplier * draft_probs).clamp_min(0).sum(1, keepdim=True)  # F(l_k)
        undrawn = undrawn_probs.sum(1, keepdim=True)  # R_k
        draft_prob = draft_probs.gather(1, token)
        residual = (target_probs.gather(1, token) - multiplier * draft_prob).clamp_min(0)
        coin = (residual / residual_sum * undrawn / draft_prob).clamp_max(1)
        coin = torch.where((draft_prob > 0) & (residual > 0), coin, 0)
        accepted.append(reached * coin)
        reached = reached * (1 - coin)
        multiplier = multiplier + torch.where(undrawn > 0, residual_sum / undrawn, 0)
        undrawn_probs = undrawn_probs.scatter(1, token, 0)
    return torch.cat(accepted, dim=1)


def greedy_acceptance(target_logits: torch.Tensor, draft_logits: torch.Tensor, children: int) -> torch.Tensor:
    """1 where the draft's j-th largest logit is the target's argmax, else 0: float64 [R, children]."""
    tokens = draft_logits.topk(children, dim=-1).indices
    return (tokens == target_logits.argmax(-1, keepdim=True)).double()


def draw_children(draft_probs: torch.Tensor, children: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens [R, children] drawn without replacement from rows [R, V]: the largest log Q + Gumbel, in order."""
    races = torch.empty_like(draft_probs).exponential_(generator=generator)
    return (draft_probs / races).topk(children, dim=-1).indices


def filtered_probs(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Probabilities in fp64 after temperature, top-k and top-p, in Hugging Face's order: [R, V]."""
    logits = logits.double() / temperature
    if top_k:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p is not None and top_p < 1:
        ascending, order = logits.sort(dim=-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
    return logits.softmax(-1)
