"""Tokens per forward pass of the target, and tokens per second, with each kind of draft for the shipped target.

    python bench/drafts.py [--prompts 24] [--max-new-tokens 96] [--nodes 64] [--threads 2] [--json FILE]

One paired run: every draft and method decodes each prompt, one after the other. Tokens per forward are those of all
prompts together; `to model` is their ratio to those of the shipped draft model by the same method. Tokens per second
are medians over the prompts. Trees have `--nodes` nodes, root included.
"""

from statistics import median

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table

from heavypath.speculative import EarlyExit, PromptLookup, SpeculativeDecoder, load_demo_head
from heavypath.speculative.demo import demo_prompts

METHODS = ("chain", "sequoia", "dyspec", "ersd", "eagle-2")
CHAIN = 6  # nodes of a chain, whatever the trees have
MODEL = "model"


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0, 0.6 and 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft, tokenizer = quiet_demo_pair(arguments.device)
    drafts = {MODEL: draft, "head": load_demo_head(target), "prompt lookup": PromptLookup(), "early exit": EarlyExit(2)}
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts], arguments.device)
    methods, temperatures = METHODS, arguments.temperature or (0.0, 0.6, 1.0)
    if arguments.miniature:
        methods, temperatures, prompts = ("sequoia",), (0.6,), prompts[:1]
    decoders = {
        (name, method): SpeculativeDecoder(
            target, each, method, tree_size=min(arguments.nodes, CHAIN) if method == "chain" else arguments.nodes
        )
        for method in methods
        for name, each in drafts.items()
    }
    facts = environment(arguments.device) | {name: getattr(arguments, name) for name in ("max_new_tokens", "nodes")}
    facts["prompts"] = len(prompts)
    console, results = Console(highlight=False), []
    with until_stopped():
        for temperature in temperatures:
            counts = {key: [0, 0] for key in decoders}  # new tokens, forwards
            speeds = {key: [] for key in decoders}
            for prompt in track(prompts, f"temperature {temperature:g}", console=console, transient=True):
                for key, decoder in decoders.items():
                    out = decoder.generate(prompt, arguments.max_new_tokens, temperature=temperature, seed=1)
                    counts[key][0] += out.stats.new_tokens
                    counts[key][1] += out.stats.steps
                    speeds[key].append(out.stats.tokens_per_second)
            table = Table("method", "draft", "tokens per forward", "to model", "tokens/s")
            for (name, method), (tokens, forwards) in counts.items():
                reached, of_model = tokens / forwards, counts[MODEL, method][0] / counts[MODEL, method][1]
                speed = median(speeds[name, method])
                table.add_row(method, name, f"{reached:.2f}", f"{reached / of_model:.2f}", f"{speed:.0f}")
                row = {"temperature": temperature, "method": method, "draft": name, "tokens_per_forward": reached}
                results.append(row | {"to_model": reached / of_model, "tokens_per_second": speed})
            console.print(f"temperature {temperature:g}")
            console.print(table)
            write_results(arguments.json, facts, rows=results)


if __name__ == "__main__":
    main()
