"""Decode one prompt with different drafts. With method "ersd" a seed gives the same text, whatever the draft."""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import EarlyExit, PromptLookup, Retrieval, SpeculativeDecoder, load_demo_head, load_demo_pair

PROMPT = "def min(a, b):\n    if a < b:\n        return a\n    return b\n\ndef max(a, b):"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--layers", type=int, default=2, help="of the target, for the early exit")
    parser.add_argument("--texts", nargs="+", default=[argparse.__file__], help="files or folders, for the retrieval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    shipped, draft, tokenizer = load_demo_pair(device=args.device)
    target, drafts = shipped, dict[str, Any]({"trained head": load_demo_head(shipped)})
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer, drafts = AutoTokenizer.from_pretrained(args.models[0]), {}
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
    drafts |= {"draft model": draft, "prompt lookup": PromptLookup(), "early exit": EarlyExit(args.layers)}
    drafts["retrieval"] = Retrieval([Path(file) for file in args.texts], tokenizer)
    decoders = {name: SpeculativeDecoder(target, each, "ersd", tree_size=5) for name, each in drafts.items()}
    decoders["no draft"] = SpeculativeDecoder(target, None, "autoregressive")
    different = set()
    for name, decoder in decoders.items():
        out = decoder.generate(prompt, max_new_tokens=64, temperature=0.6, seed=args.seed)
        different.add(tokenizer.decode(out.sequences[0]))
        print(f"{name:<16}{out.stats.tokens_per_step:.2f} tokens per step")
    print(f"different texts: {len(different)}", *different, sep="\n\n")
