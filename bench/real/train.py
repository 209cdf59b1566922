"""Train the EAGLE-3 head of SmolLM2-135M-Instruct on the model's own answers to the prompts of bench/real/prompts.py.

    python bench/real/train.py build/smollm2          # goes on where it was interrupted

The folder gets `answers/` (a file for each PART prompts), and `head/`, which `--draft` takes. The model is the one of
`heavypath demo --model smollm2`.
"""

import argparse
import sys
from pathlib import Path

import torch
from prompts import prompts

from heavypath.speculative import DistilSettings, SpeculativeDecoder, distil, load_target, most_frequent, new_head
from heavypath.speculative.files.published import published_model
from heavypath.speculative.training.documents import Document
from heavypath.speculative.training.optimization import save_whole, say_now

PART = 40
NEW_TOKENS = 176
TEMPERATURES = (0.7, 0.0, 1.0, 0.7)  # of the parts in turn
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 1}
NO_PROMPT = torch.zeros(0, dtype=torch.int32)


def write_answers(target, tokenizer, folder: Path, count: int) -> list[Document]:
    """The prompts with their answers as documents. Parts that are in the folder are not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.padding_side = "left"
    generate = SpeculativeDecoder(target, method="autoregressive").generate
    every = prompts(count)
    documents = []
    for number, first in enumerate(range(0, count, PART)):
        file = folder / f"{first:05}.pt"
        if not file.exists():
            inputs = tokenizer.apply_chat_template(
                every[first : first + PART], add_generation_prompt=True, padding=True, return_tensors="pt",
                return_dict=True,
            )  # fmt: skip
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            rows = torch.arange(first, first + len(inputs.input_ids))
            out = generate(
                inputs.input_ids, NEW_TOKENS, temperature, attention_mask=inputs.attention_mask, sequence_ids=rows,
                **PLAIN,
            )  # fmt: skip
            width = inputs.input_ids.shape[1]
            ends = torch.isin(out.sequences[:, width:], torch.tensor(target.generation_config.eos_token_id))
            lengths = ((ends.cumsum(1) - ends.long()) == 0).sum(1)  # the first end included
            padding = (inputs.attention_mask == 0).sum(1)
            texts = [
                row[left : width + length].int()
                for row, left, length in zip(out.sequences, padding.tolist(), lengths.tolist(), strict=True)
            ]
            save_whole(texts, file)
            say_now(f"answered {first + len(texts)} of {count} prompts")
        documents += [Document(text, NO_PROMPT) for text in torch.load(file, weights_only=True)]
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=1200)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--depths", type=int, default=3)
    given = parser.parse_args()
    target, tokenizer = load_target(published_model("smollm2"))
    documents = write_answers(target, tokenizer, given.folder / "answers", given.prompts)
    head = given.folder / "head"
    settings = DistilSettings(
        epochs=given.epochs, length=256, tokens_per_step=2048, depths=given.depths, written=0.0, checkpoint_steps=50
    )
    tokens = most_frequent(documents, given.vocabulary, target.config.vocab_size)
    torch.manual_seed(0)
    record = distil(
        new_head(target, tokens), target, documents, head, settings, tokenizer=tokenizer,
        resume=(head / "training" / "rows.pt").exists(),
    )  # fmt: skip
    print(record["held_out"], file=sys.stderr)


if __name__ == "__main__":
    main()
