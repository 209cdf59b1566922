"""Tokens per second of every method against transformers' generate and assisted generation, with the shipped pair.

    python bench/decoding.py [--prompts 24] [--max-new-tokens 128] [--threads 2] [--json FILE]

One paired run: all methods decode each prompt, one after the other, and a ratio is taken within a prompt. What is
printed is the median of these ratios and their quartiles, at temperature 0 and 0.6; the file has every ratio, too.
"""

from dataclasses import asdict

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console

from heavypath.speculative import LOSSLESS_METHODS
from heavypath.speculative.comparison import as_table, compare
from heavypath.speculative.demo import demo_prompts


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tree-size", type=int, help="nodes of the trees (default: what the decoder takes here)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    target, draft, tokenizer = quiet_demo_pair(arguments.device)
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts], arguments.device)
    console = Console(highlight=False)
    options = {} if arguments.tree_size is None else {"tree_size": arguments.tree_size}
    methods, temperatures = (("sequoia",), (0.6,)) if arguments.miniature else (LOSSLESS_METHODS, (0.0, 0.6))
    facts = environment(arguments.device) | {"prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens}
    results = {}
    with until_stopped():
        for temperature in temperatures:
            with console.status("") as status:
                rows = compare(
                    target,
                    draft,
                    prompts,
                    methods=methods,
                    max_new_tokens=arguments.max_new_tokens,
                    temperature=temperature,
                    on_progress=lambda line, status=status: status.update(line),
                    **options,
                )
            console.print(f"temperature {temperature}")
            console.print(as_table(rows))
            results[str(temperature)] = [asdict(row) for row in rows]
            write_results(arguments.json, facts, temperature=results)


if __name__ == "__main__":
    main()
