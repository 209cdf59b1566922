"""Tokens per forward pass of the target, and tokens per second, with each kind of draft for the shipped target.

    python bench/drafts.py [--prompts 24] [--max-new-tokens 96] [--nodes 64] [--method dyspec] [--json FILE]

One paired run: every draft and method decodes each prompt, one after the other. Tokens per forward are those of all
prompts together; `to model` is their ratio to those of the shipped draft model by the same method. `overlap` is how
often the first token that is drafted after a root is accepted; a step for which a draft has nothing counts as one where
it is not. Tokens per second are medians over the prompts. Trees have `--nodes` nodes, root included, and are verified
as in the methods' papers. The corpus to retrieve from is the text that the shipped models were trained on; the prompts
are of files that were held out.
"""

from statistics import median
from typing import Any

import torch
from common import (
    argument_parser,
    environment,
    paper_verifier,
    quiet_demo_pair,
    token_ids,
    until_stopped,
    write_results,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from heavypath.speculative import (
    Cascade,
    EarlyExit,
    Lookahead,
    Mixture,
    PromptLookup,
    Retrieval,
    SpeculativeDecoder,
    load_demo_head,
)
from heavypath.speculative.demo import DemoPair, corpus, demo_prompts

METHODS = ("chain", "sequoia", "dyspec", "eagle-2")
CHAIN = 6  # nodes of a chain, whatever the trees have
MODEL = "model"


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0, 0.6 and 1")
    parser.add_argument("--method", action="append", help=f"default: {', '.join(METHODS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft, tokenizer = quiet_demo_pair(arguments.device)
    drafts = drafts_of(DemoPair(target, draft, tokenizer), few_texts=arguments.miniature)
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts], arguments.device)
    methods, temperatures = arguments.method or METHODS, arguments.temperature or (0.0, 0.6, 1.0)
    if arguments.miniature:
        methods, temperatures, prompts = ("sequoia",), (0.6,), prompts[:1]
    decoders = {
        (name, method): SpeculativeDecoder(
            target,
            each,
            method,
            tree_size=min(arguments.nodes, CHAIN) if method == "chain" else arguments.nodes,
            verifier=paper_verifier(method),
        )
        for method in methods
        for name, each in drafts.items()
    }
    facts = environment(arguments.device) | {name: getattr(arguments, name) for name in ("max_new_tokens", "nodes")}
    facts["prompts"] = len(prompts)
    console, results = Console(highlight=False), []
    with until_stopped():
        for temperature in temperatures:
            counts = {key: [0, 0, 0] for key in decoders}  # new tokens, forwards, accepted first tokens
            speeds = {key: [] for key in decoders}
            for prompt in track(prompts, f"temperature {temperature:g}", console=console, transient=True):
                for key, decoder in decoders.items():
                    out = decoder.generate(prompt, arguments.max_new_tokens, temperature=temperature, seed=1)
                    counts[key][0] += out.stats.new_tokens
                    counts[key][1] += out.stats.steps
                    counts[key][2] += int(out.stats.accepted[:1].sum())
                    speeds[key].append(out.stats.tokens_per_second)
            table = Table("method", "draft", "overlap", "tokens per forward", "to model", "tokens/s")
            for (name, method), (tokens, forwards, firsts) in counts.items():
                reached, of_model = tokens / forwards, counts[MODEL, method][0] / counts[MODEL, method][1]
                speed = median(speeds[name, method])
                overlap = firsts / forwards if method == "chain" else None
                first = "" if overlap is None else f"{overlap:.2f}"
                table.add_row(method, name, first, f"{reached:.2f}", f"{reached / of_model:.2f}", f"{speed:.0f}")
                row = {"temperature": temperature, "method": method, "draft": name, "tokens_per_forward": reached}
                row["overlap"] = overlap
                results.append(row | {"to_model": reached / of_model, "tokens_per_second": speed})
            console.print(f"temperature {temperature:g}")
            console.print(table)
            write_results(arguments.json, facts, rows=results)


def drafts_of(pair: DemoPair, few_texts: bool) -> dict[str, Any]:
    """Each kind of draft, by its name."""
    texts = [source.text for source in corpus.read_corpus() if not source.held_out][: 5 if few_texts else None]
    head, lookup, retrieval = load_demo_head(pair.target), PromptLookup(), Retrieval(texts, pair.tokenizer)
    return {
        MODEL: pair.draft,
        "head": head,
        "prompt lookup": lookup,
        "lookahead": Lookahead(),
        "retrieval": retrieval,
        "early exit of 2": EarlyExit(2),
        "head, prompt lookup": Mixture([head, lookup]),
        "head, retrieval": Mixture([head, retrieval]),
        "head above retrieval": Cascade([head, retrieval], levels=[2, 4]),
    }


if __name__ == "__main__":
    main()
