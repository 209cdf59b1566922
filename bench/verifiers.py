"""Tokens per forward pass of the target by each verifier, from trees of the same shape, and what verifying them takes.

    python bench/verifiers.py [--prompts 24] [--seeds 2] [--max-new-tokens 96] [--temperature 1] [--tree "chain 8"]
                              [--verifier held] [--timed 4] [--json FILE]

All prompts under all seeds are one batch, which is decoded with each verifier that the method of a tree takes
(`VERIFIERS` in speculative/methods.py). Tokens per forward are those of all texts together. The gain is over recursive
rejection, and its standard error a jackknife over the prompts: texts differ between verifiers, prompts do not. Then the
first few prompts are decoded one at a time, by turns: the milliseconds of a step's verification, and tokens per second
over rejection's, are medians over them.
"""

import math
from collections.abc import Sequence
from statistics import median

import torch
from batches import Texts, batch_of, gain
from common import argument_parser, clock_of, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table

from heavypath.speculative import METHODS, SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.methods import VERIFIERS

REJECTION = "rejection"
TREES = {  # the method, and the decoder's options
    "chain 8": ("chain", {"tree": TokenTree.chain(8)}),
    "sequoia 16": ("sequoia", {"tree_size": 16}),
    "sequoia 64": ("sequoia", {"tree_size": 64, "max_depth": 8}),
    "dyspec 64": ("dyspec", {"tree_size": 64}),
    "rsd-c 64": ("rsd-c", {"tree_size": 64}),
    "rsd-s 64": ("rsd-s", {"tree_size": 64}),
    "specinfer 4 x 8": ("specinfer", {"tree": TokenTree.independent(4, 8)}),
}
TREES |= {
    method: (method, {}) for method, row in METHODS.items() if row.verifiers
}  # as the decoder has them by default


def measured(decoders: dict[str, SpeculativeDecoder], texts: Texts, temperature: float, arguments) -> list[dict]:
    """A row for each verifier of one tree at one temperature."""
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": temperature}
    stats = {
        name: decoder.generate(texts.tokens, **texts.options, **options).stats for name, decoder in decoders.items()
    }
    alone: dict[str, list[Statistics]] = {name: [] for name in decoders}
    for prompt in texts.prompts[: arguments.timed]:
        for name, decoder in decoders.items():
            alone[name].append(decoder.generate(prompt, eos_token_id=None, **options).stats)
    rows = []
    for name, one in stats.items():
        more, error = gain(one, stats[REJECTION], texts.seeds)
        speed = [
            mine.tokens_per_second / other.tokens_per_second
            for mine, other in zip(alone[name], alone[REJECTION], strict=True)
        ]
        milliseconds = [1e3 * each.seconds.get("verification", math.nan) / each.steps for each in alone[name]]
        rows.append(
            {"verifier": name, "temperature": temperature, "tokens_per_forward": one.tokens_per_step, "gain": more}
            | {"gain_error": error, "verification_milliseconds": median(milliseconds), "speed": median(speed)}
        )
    return rows


def as_table(rows: Sequence[dict]) -> Table:
    table = Table("tree", "T", "verifier", "tokens/forward", "gain", "verification, ms", "tokens/s")
    for row in rows:
        ours = row["verifier"] != REJECTION
        table.add_row(
            row["tree"], f"{row['temperature']:g}", row["verifier"], f"{row['tokens_per_forward']:.3f}",
            f"{row['gain']:+.1%} ({row['gain_error']:.1%})" if ours else "", f"{row['verification_milliseconds']:.2f}",
            f"{row['speed']:.2f}" if ours else "",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--timed", type=int, default=4, help="prompts that are decoded alone, for the times")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0.6 and 1")
    parser.add_argument("--tree", choices=TREES, action="append", help="repeat it for several; default: all")
    parser.add_argument("--verifier", choices=VERIFIERS, action="append", help="beside rejection; default: all")
    arguments = parser.parse_args()
    if arguments.miniature:
        arguments.prompts, arguments.seeds, arguments.max_new_tokens, arguments.timed = 2, 1, 4, 1
        arguments.tree, arguments.temperature = arguments.tree or ["sequoia 16"], [1.0]
    torch.set_num_threads(arguments.threads)
    target, draft, tokenizer = quiet_demo_pair(arguments.device)
    texts = batch_of(token_ids(tokenizer, demo_prompts()[: arguments.prompts], arguments.device), arguments.seeds)
    wanted = [REJECTION, *(name for name in arguments.verifier or VERIFIERS if name != REJECTION)]
    cases = [(tree, each) for tree in arguments.tree or TREES for each in arguments.temperature or (0.6, 1.0)]
    settings = {name: getattr(arguments, name) for name in ("prompts", "seeds", "max_new_tokens", "timed")}
    console, rows = Console(stderr=True), []
    with until_stopped():
        for tree, temperature in track(cases, "verifiers", console=console):
            method, options = TREES[tree]
            decoders = {}
            for name in wanted:
                if name in METHODS[method].verifiers:
                    decoders[name] = SpeculativeDecoder(target, draft, method, verifier=name, **options)
                    decoders[name].clock = clock_of(arguments.device)
            rows += [{"tree": tree} | row for row in measured(decoders, texts, temperature, arguments)]
            write_results(arguments.json, environment(arguments.device) | settings, rows=rows)
    Console(width=120).print(as_table(rows))


if __name__ == "__main__":
    main()
