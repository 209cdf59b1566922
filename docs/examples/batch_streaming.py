"""Decode several prompts at once, and show each text as it grows."""

import argparse
from functools import partial

from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import SpeculativeDecoder, TextStream, load_demo_pair

PROMPTS = ["def read_lines(path):", "class Stack:\n    def push(self, item):", "import os\n\ndef find("]


def show(number: int, piece: str) -> None:
    """Print a piece of the text of prompt `number`."""
    if piece:
        print(f"[{number}] {piece!r}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair(device=args.device)
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0], padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(args.prompts, return_tensors="pt", padding=True).to(args.device)
    out = SpeculativeDecoder(target, draft).generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=48,
        streamer=[TextStream(tokenizer, partial(show, number)) for number in range(len(args.prompts))],
    )
    print(out.stats)
