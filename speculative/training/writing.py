"""Text that the target writes itself: what a draft meets when the target decodes."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.training.memory import Parts
from heavypath.speculative.training.optimization import Progress

ROWS_AT_ONCE = 64


def write_texts(
    target: PreTrainedModel, prompts: list[Tensor], new_tokens: int, seed: int, say: Callable[[str], object]
) -> list[Tensor]:
    """Each prompt, int32 [m], with what the target writes behind it, at most new_tokens: int32 [n].

    Three quarters are sampled at temperature 1, the rest at 0.6, where text is more like that of greedy decoding.
    Prompts that leave no room for new tokens within the target's positions are left out, which `say` is told.
    """
    room = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fitting = [prompt for prompt in prompts if room is None or len(prompt) + new_tokens <= room]
    if len(fitting) < len(prompts):
        said = f"of more than {room} positions with {new_tokens} new tokens"
        say(f"left out {len(prompts) - len(fitting)} of {len(prompts)} prompts {said}")
    fitting.sort(key=len)
    groups = [fitting[start : start + ROWS_AT_ONCE] for start in range(0, len(fitting), ROWS_AT_ONCE)]
    parts = Parts(ROWS_AT_ONCE, "lower the length of rows", say)
    progress = Progress(len(groups), ROWS_AT_ONCE * new_tokens, say)
    written: list[Tensor] = []
    device = target.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for index, group in enumerate(groups):
            torch.manual_seed(seed + index)
            width = max(map(len, group))
            padded = torch.full((len(group), width), -1)
            for row, prompt in enumerate(group):
                padded[row, width - len(prompt) :] = prompt
            temperature = 0.6 if index % 4 == 3 else 1.0

            def go_on(part: Tensor, temperature: float = temperature) -> list[Tensor]:
                return continued(target, part, new_tokens, temperature)

            written += [text for texts in parts.run(padded, go_on) for text in texts]
            if progress.is_due(index + 1):
                progress.report(index + 1, "text of the target's own")
    return written


@torch.no_grad()
def continued(target: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: float) -> list[Tensor]:
    """Left-padded prompts [R, T], -1 where there is none, with what the target samples behind: int32 [n] each.

    A text ends with the first token behind its prompt that ends texts, by the target's generation config.
    """
    given = prompts.to(target.device, torch.long)
    texts: Tensor = target.generate(  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        given.clamp(min=0),
        attention_mask=(given >= 0).long(),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        pad_token_id=0,
        max_new_tokens=new_tokens,
    )
    config = target.generation_config
    ends = None if config is None else config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device=texts.device).flatten()
    width = prompts.shape[1]
    ended = torch.isin(texts[:, width:], ends).int().cumsum(1)  # [R, new_tokens]
    sizes = width + 1 + (ended == 0).sum(1).clamp(max=texts.shape[1] - width - 1)
    starts = (given < 0).sum(1)
    found = [text[start:size] for text, start, size in zip(texts.cpu(), starts.tolist(), sizes.tolist(), strict=True)]
    return [text.to(torch.int32) for text in found]
