"""Tokens per second of every method against transformers' generate and assisted generation, on the demo pair.

    python bench/decoding.py [--prompts 24] [--max-new-tokens 128] [--threads 1] [--out bench/results/decoding-cpu.json]

One paired run: on each prompt all methods decode one after the other, and a ratio is taken within a prompt. What is
printed and written is the median of the ratios and their range, at temperature 0 and 0.6.
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console

from heavypath.speculative import load_demo_pair
from heavypath.speculative.comparison import as_table, compare
from heavypath.speculative.demo import demo_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tree-size", type=int, default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    target, draft, tokenizer = load_demo_pair(device=arguments.device)
    prompts = [
        tokenizer(text, return_tensors="pt").input_ids.to(arguments.device)
        for text in demo_prompts()[: arguments.prompts]
    ]
    console = Console(highlight=False)
    options = {} if arguments.tree_size is None else {"tree_size": arguments.tree_size}
    results = {}
    for temperature in (0.0, 0.6):
        with console.status("") as status:
            rows = compare(
                target,
                draft,
                prompts,
                max_new_tokens=arguments.max_new_tokens,
                temperature=temperature,
                on_progress=lambda line, status=status: status.update(line),
                **options,
            )
        console.print(f"temperature {temperature}")
        console.print(as_table(rows))
        results[str(temperature)] = [asdict(row) for row in rows]
    if arguments.out is not None:
        facts = {
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else processor(),
            "threads": arguments.threads,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "prompts": len(prompts),
            "max_new_tokens": arguments.max_new_tokens,
        }
        arguments.out.write_text(json.dumps({"environment": facts, "temperature": results}, indent=1) + "\n")


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
