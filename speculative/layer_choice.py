"""Choose the target's layers that draft best for it: remove one layer after another, each time the least important one.

With Q the distribution of a draft of layers S, and P the target's, a drafted token is accepted with probability
alpha(S) = E[sum_v min(P, Q)]. A pass over S reads a share c(S) of the target's weights. If only reading weights takes
time, a chain of g drafts gives

    speedup(S, g) = (1 - alpha^(g + 1)) / ((1 - alpha) (1 + g c))        (Leviathan et al. 2023, theorem 3.8)

The overlap is measured on what the target generates after the user's prompts.

Source: Zhang et al. 2024, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding".
    It also removes layers, but searches by Bayesian optimisation: fewer trials, with a less certain result.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.kinds import draft_parameter_count, parameter_count
from heavypath.speculative.drafts.model import EarlyExit
from heavypath.speculative.models.forward import Forward, chain_mask
from heavypath.speculative.models.forward_of import forward_of

LONGEST_CHAIN = 16


class LayerChoice(NamedTuple):
    """Layers of a target that can be used as its draft, and how fast that is expected to be.

    layers: indices of the layers, for `EarlyExit`
    overlap: probability that a drafted token is accepted, at the requested temperature
    share: share of the target's weights that a pass over the layers reads
    drafts: number of drafted tokens a step with which decoding is fastest
    speedup: how many times as fast as plain decoding this is, if only reading weights takes time; 1 if no draft pays
    """

    layers: tuple[int, ...]
    overlap: float
    share: float
    drafts: int
    speedup: float


def choose_layers(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    on_progress: Callable[[str], object] | None = None,
) -> list[LayerChoice]:
    """Find the layers that draft best for a target: the best choice for each number of layers, fastest first.

        best, *others = choose_layers(target, prompts)
        SpeculativeDecoder(target, EarlyExit(best.layers))

    prompts: LongTensors [1, T], similar to those to be decoded; a target of n layers runs about n^2 / 2 times over each
    tokens: number of tokens that the target generates after each prompt, on which the overlap is measured
    temperature: above 0; for generating, and for both distributions
    on_progress: called with a line of text that says what is being done

    Raises ValueError or TypeError for prompts, settings and targets that do not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}; greedy text has no overlap to go by")
    if tokens < 1 or not prompts:
        raise ValueError(f"expected at least one prompt and one token, got {len(prompts)} and {tokens}")
    report = on_progress or (lambda line: None)
    whole = forward_of(target, "target")
    every = tuple(range(whole.layers))
    writer = SpeculativeDecoder(target, None, "autoregressive")
    texts: list[Tensor] = []
    for index, prompt in enumerate(prompts, 1):
        report(f"the target writes text {index} of {len(prompts)}")
        texts.append(writer.generate(prompt, tokens, temperature, seed=seed + index, eos_token_id=None).sequences)
    lengths = [prompt.shape[1] for prompt in prompts]
    distributions = [
        _distributions(whole, text, length, temperature) for text, length in zip(texts, lengths, strict=True)
    ]

    def choice(layers: tuple[int, ...]) -> LayerChoice:
        forward = forward_of(target, "draft", layers=layers)
        overlaps = [
            torch.minimum(of_whole, _distributions(forward, text, length, temperature)).sum(-1).mean()
            for of_whole, text, length in zip(distributions, texts, lengths, strict=True)
        ]
        overlap = float(torch.stack(overlaps).mean())
        share = draft_parameter_count(EarlyExit(layers), target) / parameter_count(target)
        return LayerChoice(layers, overlap, share, *_best_chain(overlap, share))

    kept = every
    best = list[LayerChoice]()
    while len(kept) > 1:
        report(f"which of {len(kept)} layers is missed least")
        one_less = [choice(tuple(layer for layer in kept if layer != left_out)) for left_out in kept]
        best.append(max(one_less, key=lambda each: each.overlap))
        kept = best[-1].layers
    return sorted(best, key=lambda each: -each.speedup)


def _best_chain(overlap: float, share: float) -> tuple[int, float]:
    """The number of drafted tokens a step with which decoding is fastest, and its speed-up; see `LayerChoice`."""
    speedups = {
        drafts: sum(overlap**depth for depth in range(drafts + 1)) / (1 + drafts * share)
        for drafts in range(LONGEST_CHAIN + 1)
    }
    drafts = max(speedups, key=lambda drafts: speedups[drafts])
    return drafts, speedups[drafts]


@torch.inference_mode()
def _distributions(forward: Forward, text: Tensor, length: int, temperature: float) -> Tensor:
    """The distributions of the tokens of a sequence LongTensor[1, T] from index `length` on, fp32 [T - length, V]."""
    count = text.shape[1] - 1
    cache = forward.new_cache(1, count)
    start = torch.zeros((), dtype=torch.long, device=text.device)
    if length > 1:
        forward.prefill(text[:, : length - 1], cache)
    places = torch.arange(length - 1, count, device=text.device)[None]
    mask = chain_mask(start + length - 1, places.shape[1], visible_rows=count)
    logits = forward(text[:, length - 1 : -1], places, places, cache, mask)
    return (logits[0].float() / temperature).softmax(-1)
