"""Tokens per target forward of every method with an equal budget of nodes, and what planning expected of it.

    python bench/efficiency.py [--sizes 32 64] [--json bench/results/efficiency-cpu.json]

For T = 0, 0.6 and 1 and trees of 32 and 64 nodes: the pair's acceptance [depth, child] is measured along text that the
target writes (as `heavypath calibrate` does), trees are planned by it, and the decoder itself continues the prompts of
the demo in one batch. Verified is as the papers have it. SpecInfer and SpecTr get three sequences, and as many as
promise most. "expected" is expected_tokens(tree, acceptance), for trees that are planned in advance. The first token of
each text comes from the prompt's forward pass and is not counted.
"""

import argparse
from collections.abc import Callable

from common import argument_parser, environment, paper_verifier, quiet_demo_pair, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    SpeculativeDecoder,
    TokenTree,
    expected_tokens,
    sequoia_tree,
)
from heavypath.speculative.calibration import DEPTH, Extent, measure_way, ways_to_draft
from heavypath.speculative.decoding.growing import Growth
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import MeasuredAcceptance
from heavypath.speculative.trees.branching import branching_tree

DYNAMIC = [name for name, method in METHODS.items() if isinstance(method.tree_of(8), Growth)]


def shapes(
    method: str, size: int, measured: dict[int | None, MeasuredAcceptance]
) -> list[tuple[str, dict, int | None]]:
    """Rows of a method: name, options of the decoder, and how many sequences the measured acceptance is that of."""
    if None not in measured:
        counts = [count for count in measured if count is not None and count < size]
        lengths = {count: min(DEPTH, (size - 1) // count) for count in counts}
        trees = {count: TokenTree.independent(count, length) for count, length in lengths.items()}
        best = max(trees, key=lambda count: expected_tokens(trees[count], measured[count].rates()))
        trees = {count: trees[count] for count in {best, 3}}
        return [(f"{method}, {count} sequences", {"tree": tree}, count) for count, tree in trees.items()]
    rates = measured[None].rates()
    if method in DYNAMIC:
        options = {"tree_size": size, "max_depth": DEPTH}
        published = [("dyspec as published", options | {"confidence": "draft"}, None)] if method == "dyspec" else []
        return [(method, options, None), *published]
    if method == "chain":
        return [(method, {"tree": TokenTree.chain(min(size - 1, DEPTH))}, None)]
    tree = branching_tree(rates, size, DEPTH) if method == "rsd-c" else sequoia_tree(rates, size, DEPTH)
    return [(method, {"tree": tree}, None)]


def measure(arguments: argparse.Namespace, report: Callable[[str], object]) -> list[dict]:
    """A row for each temperature, size, method and shape."""
    target, draft, tokenizer = quiet_demo_pair()
    forward = LlamaForward(target, "target")
    source = as_draft(draft, forward, target)
    texts = demo_prompts()[: arguments.prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    rows = []
    for temperature in arguments.temperatures:
        filters, measured = Filters(temperature), {}
        for way in ways_to_draft(temperature, "cpu", "rejection"):
            report(f"T = {temperature:g}: acceptance, {way}")
            extent = Extent(tokens=arguments.tokens, sequences=2 * len(prompts))
            entry = measure_way(forward, source, prompts, way, filters, extent, seed=1)
            measured.setdefault(way.kind, {})[way.sequence_count] = entry
        decoded = {}  # at temperature 0 methods differ in their trees alone
        for size in arguments.sizes:
            for name in [name for name in LOSSLESS_METHODS if name != "autoregressive"]:
                own = measured[METHODS[name].kind(temperature)]
                for label, options, sequence_count in shapes(name, size, own):
                    report(f"T = {temperature:g}, {size} nodes: {label}")
                    tree = options.get("tree")
                    key = (tree or str(options), name if temperature > 0 or tree is None else "")
                    if key not in decoded:
                        decoder = SpeculativeDecoder(target, draft, name, verifier=paper_verifier(name), **options)
                        decoded[key] = decoder.generate(
                            **batch, max_new_tokens=arguments.tokens, temperature=temperature, seed=2, eos_token_id=None
                        ).stats
                    out = decoded[key]
                    rows.append(
                        {
                            "temperature": temperature, "size": size, "method": label,
                            "nodes": out.nodes / out.steps,
                            "block_efficiency": out.tokens_per_step,
                            "expected": None if tree is None else expected_tokens(tree, own[sequence_count].rates()),
                            "steps": out.steps,
                        }
                    )  # fmt: skip
    return rows


def tables(rows: list[dict]) -> list[Table]:
    """One for each temperature."""
    found = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        table = Table(Column("method", no_wrap=True), box=box.SIMPLE_HEAD, title=f"temperature {temperature:g}")
        sizes = list(dict.fromkeys(row["size"] for row in rows))
        for size in sizes:
            for heading in (f"{size} nodes", "expected", "ratio"):
                table.add_column(heading, justify="right")
        by_method = {}
        for row in rows:
            if row["temperature"] == temperature:
                kind = row["method"].split(",")[0]
                by_method.setdefault(kind, {}).setdefault(row["size"], []).append(row)
        for kind, by_size in by_method.items():
            cells = []
            for size in sizes:
                best = max(by_size[size], key=lambda row: row["block_efficiency"])
                expected = best["expected"]
                cells += [f"{best['block_efficiency']:.2f}"]
                cells += (
                    ["", ""] if expected is None else [f"{expected:.2f}", f"{best['block_efficiency'] / expected:.2f}"]
                )
            table.add_row(kind, *cells)
        found.append(table)
    return found


def main() -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each prompt")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64], help="nodes of the trees")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with Console(stderr=True).status("") as status:
        rows = measure(arguments, status.update)
    for table in tables(rows):
        console.print(table)
    console.print(f"{arguments.prompts} prompts x {arguments.tokens} tokens, demo pair, fp32 on a CPU")
    settings = {name: getattr(arguments, name) for name in ("prompts", "tokens", "sizes", "temperatures")}
    write_results(arguments.json, environment("cpu") | settings, rows=rows)


if __name__ == "__main__":
    main()
