"""Compare all methods on prompts of your own: tokens per target forward, and speed beside transformers' generate."""

import argparse
from pathlib import Path

import rich
from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import PromptLookup, compare, load_demo_pair
from heavypath.speculative.comparison import as_table, plot_ratios
from heavypath.speculative.demo import demo_prompts

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="a text file with one prompt per line; default: two of the demo's")
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lookup", action="store_true", help="also draft by prompt lookup, each method both ways")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plot", type=Path, help="a file to draw the ratios in, .png or .svg")
    args = parser.parse_args()

    target, draft, tokenizer = load_demo_pair(device=args.device)
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    drafts = {"model": draft, "lookup": PromptLookup()} if args.lookup else draft
    prompts = args.prompts or demo_prompts()[:2]
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    rows = compare(target, drafts, prompts, tokenizer=tokenizer, **options)
    rich.print(as_table(rows))
    if args.plot:
        plot_ratios(rows, args.plot)
