"""Text that the target writes itself: what a draft meets when the target decodes."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.training.memory import Parts
from heavypath.speculative.training.optimization import Progress

ROWS_AT_ONCE = 32


def write_texts(
    target: PreTrainedModel, prompts: list[Tensor], new_tokens: int, seed: int, say: Callable[[str], object]
) -> list[Tensor]:
    """Each prompt, int32 [m], with what the target writes behind it, at most new_tokens: int32 [n].

    Three quarters are sampled at temperature 1, the rest at 0.6, where text is more like that of greedy decoding. A
    text ends with the first token that ends texts, by the target's generation config. Prompts that leave no room for
    the new tokens within the target's positions are left out, which `say` is told.
    """
    room = target.config.get_text_config(decoder=True).max_position_embeddings
    fitting = sorted((prompt for prompt in prompts if len(prompt) + new_tokens <= room), key=len)
    if len(fitting) < len(prompts):
        said = f"of more than {room} positions with {new_tokens} new tokens"
        say(f"left out {len(prompts) - len(fitting)} of {len(prompts)} prompts {said}")
    decoder = SpeculativeDecoder(target, method="autoregressive")
    parts = Parts(ROWS_AT_ONCE, "lower the length of rows", say)
    groups = torch.arange(len(fitting)).split(ROWS_AT_ONCE)
    progress = Progress(len(groups), ROWS_AT_ONCE * new_tokens, say)
    written: list[Tensor] = []
    for number, group in enumerate(groups):
        temperature = 0.6 if number % 4 == 3 else 1.0

        def write(chosen: Tensor, temperature: float = temperature) -> list[Tensor]:
            given = [fitting[index] for index in chosen.tolist()]
            return _continued(decoder, given, new_tokens, temperature, seed, chosen)

        written += [text for texts in parts.run(group, write) for text in texts]
        if progress.is_due(number + 1):
            progress.report(number + 1, "text of the target's own")
    return written


def _continued(
    decoder: SpeculativeDecoder,
    prompts: list[Tensor],
    new_tokens: int,
    temperature: float,
    seed: int,
    sequence_ids: Tensor,
) -> list[Tensor]:
    target, width = decoder.target, max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    out = decoder.generate(
        ids.to(target.device),
        new_tokens,
        temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        seed=seed,
        attention_mask=mask.to(target.device),
        sequence_ids=sequence_ids.to(target.device),
    )
    config = target.generation_config
    ends = None if config is None else config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long).flatten()
    texts = out.sequences.cpu()
    unended = (torch.isin(texts[:, width:], ends).cumsum(1) == 0).sum(1)
    sizes = (width + unended + 1).clamp(max=texts.shape[1])
    found = zip(texts, prompts, sizes.tolist(), strict=True)
    return [text[width - len(prompt) : size].int() for text, prompt, size in found]
