"""Choose a target's layers that draft best for it: one after another is left out, always the one that is missed least.

With Q the law of the draft of layers S, and P the target's, a drafted token is accepted with probability
alpha(S) = E[sum_v min(P, Q)]. A pass over S reads a share c(S) of the target's weights. So a chain of g drafts gives

    speedup(S, g) = (1 - alpha^(g + 1)) / ((1 - alpha) (1 + g c))        (Leviathan et al. 2023, theorem 3.8)

where only weights take time. The overlap is measured on texts that the target writes after the user's prompts.

Source: Zhang et al. 2024, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
which leaves out layers, too, and searches for them by Bayesian optimisation: fewer trials, for less sure an answer.
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
    """Layers of a target as its draft.

    layers:  to be given to `EarlyExit`
    overlap: probability that a drafted token is accepted, at the temperature asked for
    share:   of the target's weights that a pass reads
    drafts:  length of the chain that pays most
    speedup: over plain decoding, with that chain, if reading weights is all that takes time; 1 where no chain pays
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
    """For each number of layers below the target's own, those that were left; the first has the most speed.

        best, *others = choose_layers(target, prompts)
        SpeculativeDecoder(target, EarlyExit(best.layers))

    prompts: LongTensors [1, T], like those to be continued; a target of n layers is run n^2 / 2 times over each
    tokens: that the target writes after each prompt, which are looked at
    temperature: above 0, of the text and of both laws
    on_progress: called with a line of text that says what is going on

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
    laws = [_laws(whole, text, length, temperature) for text, length in zip(texts, lengths, strict=True)]

    def choice(layers: tuple[int, ...]) -> LayerChoice:
        forward = forward_of(target, "draft", layers=layers)
        overlaps = [
            torch.minimum(law, _laws(forward, text, length, temperature)).sum(-1).mean()
            for law, text, length in zip(laws, texts, lengths, strict=True)
        ]
        overlap = float(torch.stack(overlaps).mean())
        share = draft_parameter_count(EarlyExit(layers), target) / parameter_count(target)
        return LayerChoice(layers, overlap, share, *_best_chain(overlap, share))

    kept, best = every, list[LayerChoice]()
    while len(kept) > 1:
        report(f"which of {len(kept)} layers is missed least")
        one_less = [choice(tuple(layer for layer in kept if layer != left_out)) for left_out in kept]
        best.append(max(one_less, key=lambda each: each.overlap))
        kept = best[-1].layers
    return sorted(best, key=lambda each: -each.speedup)


def _best_chain(overlap: float, share: float) -> tuple[int, float]:
    """The length that pays most, and the speedup."""
    speedups = {
        drafts: sum(overlap**depth for depth in range(drafts + 1)) / (1 + drafts * share)
        for drafts in range(LONGEST_CHAIN + 1)
    }
    drafts = max(speedups, key=lambda drafts: speedups[drafts])
    return drafts, speedups[drafts]


@torch.inference_mode()
def _laws(forward: Forward, text: Tensor, length: int, temperature: float) -> Tensor:
    """The law of each token of a text LongTensor[1, T] from token `length` on, fp32 [T - length, V]."""
    count = text.shape[1] - 1
    cache = forward.new_cache(1, count)
    start = torch.zeros((), dtype=torch.long, device=text.device)
    if length > 1:
        forward.prefill(text[:, : length - 1], cache)
    places = torch.arange(length - 1, count, device=text.device)[None]
    mask = chain_mask(start + length - 1, places.shape[1], visible_rows=count)
    logits = forward(text[:, length - 1 : -1], places, places, cache, mask)
    return (logits[0].float() / temperature).softmax(-1)
