"""Text that the target writes itself: what a draft meets when the target decodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import TrainingProgress

ROWS_AT_ONCE = 32
Generate = Callable[..., Any]  # that of a SpeculativeDecoder


def write_texts(
    target: PreTrainedModel,
    generate: Generate,
    prompts: list[Tensor],
    new_tokens: int,
    seed: int,
    say: Callable[[str], object],
) -> list[Tensor]:
    """Each prompt, int32 [m], with what the target writes after it, at most new_tokens: int32 [n].

    generate: of the target by plain decoding

    Three quarters are sampled at temperature 1, the rest at 0.6, where text is more like that of greedy decoding. A
    text ends with the first token that ends texts, by the target's generation config. Prompts that leave no room for
    the new tokens within the target's positions are left out, which `say` is told.
    """
    room = target.config.get_text_config(decoder=True).max_position_embeddings
    fitting = sorted((prompt for prompt in prompts if len(prompt) + new_tokens <= room), key=len)
    if len(fitting) < len(prompts):
        said = f"of more than {room} positions with {new_tokens} new tokens"
        say(f"left out {len(prompts) - len(fitting)} of {len(prompts)} prompts {said}")
    parts = RowsAtATime(ROWS_AT_ONCE, "lower the length of rows", say)
    groups = torch.arange(len(fitting), device="cpu").split(ROWS_AT_ONCE)
    progress = TrainingProgress(len(groups), ROWS_AT_ONCE * new_tokens, say)
    written: list[Tensor] = []
    for number, group in enumerate(groups):
        temperature = 0.6 if number % 4 == 3 else 1.0

        def write(chosen: Tensor, temperature: float = temperature) -> list[Tensor]:
            given = [fitting[index] for index in chosen.tolist()]
            ids, mask = (padded.to(target.device) for padded in _padded(given))
            options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": seed}
            numbers = chosen.to(target.device)
            out = generate(ids, new_tokens, temperature, attention_mask=mask, sequence_ids=numbers, **options)
            return _texts(out.sequences.cpu(), given, target.generation_config)

        written += [text for texts in parts.run(group, write) for text in texts]
        if progress.is_due(number + 1):
            progress.report(number + 1, "text of the target's own")
    return written


def _padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The prompts and their mask, LongTensor[R, T] each, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.stack([pad(prompt.long(), (width - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack(
        [pad(torch.ones(len(prompt), dtype=torch.long, device="cpu"), (width - len(prompt), 0)) for prompt in prompts]
    )
    return ids, mask


def _texts(sequences: Tensor, prompts: list[Tensor], config: GenerationConfig | None) -> list[Tensor]:
    """The texts without padding, int32 [n], of padded prompts and what follows them, LongTensor[R, T + new]."""
    width = max(map(len, prompts))
    ends = None if config is None else config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device="cpu").flatten()
    unended = (torch.isin(sequences[:, width:], ends).cumsum(1) == 0).sum(1)
    sizes = (width + unended + 1).clamp(max=sequences.shape[1])
    found = zip(sequences, prompts, sizes.tolist(), strict=True)
    return [text[width - len(prompt) : size].int() for text, prompt, size in found]
