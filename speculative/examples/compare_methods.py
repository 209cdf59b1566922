"""Compare all methods on prompts of your own: tokens per target forward, and speed beside transformers' generate."""

import argparse
from pathlib import Path

import rich
from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import load_demo_pair
from heavypath.speculative.comparison import as_table, compare
from heavypath.speculative.demo import demo_prompts

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="a text file with one prompt per line; default: two of the demo's")
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plot", type=Path, help="a PNG file to draw the table in")
    args = parser.parse_args()

    target, draft, tokenizer = load_demo_pair(device=args.device)
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    texts = args.prompts.read_text("utf-8").splitlines() if args.prompts else demo_prompts()[:2]
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(args.device) for text in texts if text]
    rows = compare(target, draft, prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    rich.print(as_table(rows))
    if args.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        labels = {"tokens_per_forward": "tokens per target forward", "ratio": "speed, with transformers' generate as 1"}
        for axes, (quantity, label) in zip(figure.subplots(1, 2, sharey=True), labels.items(), strict=True):
            axes.barh([row.method for row in rows[::-1]], [getattr(row, quantity) for row in rows[::-1]])
            axes.set_xlabel(label)
        figure.savefig(args.plot)
