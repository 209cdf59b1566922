"""Make drafts for SmolLM2-135M-Instruct of text that the model wrote: the texts themselves, and an EAGLE-3 head.

    python bench/real/train.py build/smollm2                                # goes on where it was interrupted
    python bench/real/train.py build/smollm2 --answers 1680 --conversations 1520 --only-texts         # smollm2-texts

Two kinds of texts, each saved in parts, which are not written again:

    answers/         the model's answers to the prompts of bench/real/prompts.py
    conversations/   prompts that the model wrote itself, after the beginning of a user's message, and its answers
                     (Xu et al. 2024, "Magpie"). They are more varied, and bring more of the vocabulary

`texts.safetensors` and `head/` are the results: `--draft retrieval:FILE` and `--draft FOLDER`. The model is the one of
`heavypath demo --model smollm2`. The head in docs/results.md learnt from such texts in two stages, first from the
answers alone: bench/results/smollm2-head.json.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prompts import prompts
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heavypath.speculative import (
    DistilSettings,
    Retrieval,
    SpeculativeDecoder,
    distil,
    load_target,
    most_frequent,
    new_head,
)
from heavypath.speculative.files.published import published_model
from heavypath.speculative.training.documents import Document, with_answer
from heavypath.speculative.training.optimization import save_whole, say_now

NEW_TOKENS, PROMPT_TOKENS = 176, 72
TEMPERATURES = (0.7, 0.0, 1.0)  # of the parts' answers in turn; prompts are sampled at temperature 1


class Writer:
    """Continues prompts, each a list of tokens, by plain decoding."""

    def __init__(self, target: Any):
        self._generate = SpeculativeDecoder(target, method="autoregressive").generate
        self._ends = torch.tensor(target.generation_config.eos_token_id).flatten()

    def __call__(self, given: Sequence[list[int]], new_tokens: int, temperature: float, first: int) -> list[Tensor]:
        """The prompts with their continuations, up to the first end token. first: number of the first prompt"""
        reversed_ = [torch.tensor(tokens[::-1]) for tokens in given]  # so that padding is on the left
        ids = pad_sequence(reversed_, batch_first=True).flip(1)
        mask = pad_sequence([torch.ones_like(tokens) for tokens in reversed_], batch_first=True).flip(1)
        rows = torch.arange(first, first + len(given))
        filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        out = self._generate(
            ids, new_tokens, temperature, attention_mask=mask, sequence_ids=rows, seed=1, **filters
        ).sequences
        new = out[:, ids.shape[1] :]
        before_end = (torch.isin(new, self._ends).cumsum(1) == 0).sum(1).tolist()
        return [
            torch.cat([row[-new.shape[1] - len(tokens) : -new.shape[1]], own[: count + 1]]).int()
            for row, own, tokens, count in zip(out, new, given, before_end, strict=True)
        ]


def around_a_message(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens before a user's first message, and those between it and the answer."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "X"}], tokenize=False, add_generation_prompt=True)
    before, after = (tokenizer(part)["input_ids"] for part in text.split("X"))
    return before, after


def answers(write: Writer, tokenizer: Any, number: int, size: int) -> list[Tensor]:
    """Prompts of `prompts.py` with their answers: part number `number` of `size` prompts."""
    first = number * size
    given = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in prompts(first + size)[first:]
    ]
    return write(given, NEW_TOKENS, TEMPERATURES[number % len(TEMPERATURES)], first)


def conversations(write: Writer, tokenizer: Any, number: int, size: int) -> list[Tensor]:
    """Prompts of the model itself with their answers, `size` a part. Messages without an end are left out."""
    before, after = around_a_message(tokenizer)
    first = 10**6 + number * size
    messages = [row.tolist() for row in write([before] * size, PROMPT_TOKENS, 1.0, first)]
    given = [tokens[:-1] + after for tokens in messages if tokens[-1] == after[0]]
    return write(given, NEW_TOKENS, TEMPERATURES[number % len(TEMPERATURES)], first + 10**6)


def written(folder: Path, parts: int, make: Callable[[int], list[Tensor]], after: list[int]) -> list[Document]:
    """The texts of all parts; those that are not in the folder are written now. after: tokens before each answer"""
    folder.mkdir(parents=True, exist_ok=True)
    documents = []
    for number in range(parts):
        file = folder / f"{number:04}.pt"
        if not file.exists():
            save_whole(make(number), file)
            say_now(f"{folder.name}: {number + 1} of {parts} parts written")
        documents += [document_of(text, torch.tensor(after)) for text in torch.load(file, weights_only=True)]
    return documents


def document_of(text: Tensor, after: Tensor) -> Document:
    """The document of a text whose answer begins after the first place with the tokens `after`."""
    is_there = (text.unfold(0, len(after), 1) == after).all(1)
    return with_answer(text[: int(is_there.int().argmax()) + len(after)], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=int, default=1000, help="prompts of prompts.py")
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--part", type=int, default=40, help="texts that are written together")
    parser.add_argument("--bf16", action="store_true", help="write the texts in bf16, which AMX multiplies fast")
    parser.add_argument("--only-texts", action="store_true", help="train no head")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--depths", type=int, default=3)
    given = parser.parse_args()
    target, tokenizer = load_target(published_model("smollm2"))
    write = Writer(load_target(published_model("smollm2"))[0].bfloat16() if given.bf16 else target)
    size = given.part
    kinds = {"answers": (given.answers, answers), "conversations": (given.conversations, conversations)}
    _, after = around_a_message(tokenizer)
    documents = []
    for name, (count, make) in kinds.items():
        parts = count // size
        documents += written(given.folder / name, parts, partial(make, write, tokenizer, size=size), after)
    Retrieval([document.tokens for document in documents], tokenizer).save(given.folder / "texts.safetensors")
    if given.only_texts:
        return
    head = given.folder / "head"
    settings = DistilSettings(
        epochs=given.epochs, length=256, tokens_per_step=2048, depths=given.depths, written=0.0, checkpoint_steps=50
    )
    tokens = most_frequent(documents, given.vocabulary, target.config.vocab_size)
    torch.manual_seed(0)
    resume = (head / "training" / "rows.pt").exists()
    distil(new_head(target, tokens), target, documents, head, settings, tokenizer=tokenizer, resume=resume)


if __name__ == "__main__":
    main()
