"""Generate training text with the target: a draft should learn on the target's output, which it sees in decoding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from heavypath.speculative.training.documents import Document, with_answer
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import TrainingProgress

ROWS_AT_ONCE = 32
Generate = Callable[..., Any]  # the method of a SpeculativeDecoder


def write_texts(
    target: PreTrainedModel,
    generate: Generate,
    prompts: list[Tensor],
    new_tokens: int,
    seed: int,
    say: Callable[[str], object],
) -> list[Document]:
    """Each prompt with the target's output after it, which is its answer.

    generate: the `generate` of a decoder that does plain decoding with the target
    prompts: int32 [m] each
    new_tokens: the most new tokens
    say: called with lines of progress, and with the number of prompts that are left out

    Three quarters of the prompts are sampled at temperature 1, the rest at 0.6, whose output is more like that of
    greedy decoding. An output ends with the first end-of-sequence token of the target's generation config. Prompts that
    leave no room for new_tokens within the target's positions are left out.
    """
    room = target.config.get_text_config(decoder=True).max_position_embeddings
    fitting = sorted((prompt for prompt in prompts if len(prompt) + new_tokens <= room), key=len)
    if len(fitting) < len(prompts):
        reason = f"of more than {room} positions with {new_tokens} new tokens"
        say(f"left out {len(prompts) - len(fitting)} of {len(prompts)} prompts {reason}")
    parts = RowsAtATime(ROWS_AT_ONCE, "lower the length of rows", say)
    groups = torch.arange(len(fitting), device="cpu").split(ROWS_AT_ONCE)
    progress = TrainingProgress(len(groups), ROWS_AT_ONCE * new_tokens, say)
    written: list[Document] = []
    for number, group in enumerate(groups):
        temperature = 0.6 if number % 4 == 3 else 1.0

        def write(chosen: Tensor, temperature: float = temperature) -> list[Document]:
            given = [fitting[index] for index in chosen.tolist()]
            ids, mask = (padded.to(target.device) for padded in _padded(given))
            options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": seed}
            numbers = chosen.to(target.device)
            out = generate(ids, new_tokens, temperature, attention_mask=mask, sequence_ids=numbers, **options)
            texts = _texts(out.sequences.cpu(), given, target.generation_config)
            return [with_answer(prompt, text) for prompt, text in zip(given, texts, strict=True)]

        written += [document for documents in parts.run(group, write) for document in documents]
        if progress.is_due(number + 1):
            progress.report(number + 1, "writing the target's text")
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
    """Prompts and outputs without padding and without tokens after the end, int32 [n] each.

    sequences: LongTensor[R, T + new], the padded prompts and the outputs
    """
    width = max(map(len, prompts))
    ends = None if config is None else config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device="cpu").flatten()
    unended = (torch.isin(sequences[:, width:], ends).cumsum(1) == 0).sum(1)
    sizes = (width + unended + 1).clamp(max=sequences.shape[1])
    found = zip(sequences, prompts, sizes.tolist(), strict=True)
    return [text[width - len(prompt) : size].int() for text, prompt, size in found]
