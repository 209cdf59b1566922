"""The papers' own comparisons, cell by cell, on the shipped pair: `python bench/papers.py TABLE ...`.

    rsd-1        RSD's experiment 1 (Jeon et al. 2024, section 5): drafts of 2 to 5 levels, whatever they cost
    rsd-2        its experiment 2: drafts of the same number of nodes, 6 to 30
    robustness   Sequoia's figure 4 (Chen et al. 2024): the tree planned for T = 0.6 at other temperatures and top-p
    specinfer    SpecInfer's width and depth (Miao et al. 2023, section 6.3): k sequences of l tokens, k l at most 128
    dyspec       DySpec's trees, step by step (Xiong et al. 2024): nodes, levels and accepted nodes, with a threshold
    large        trees of 768 nodes, which Sequoia and DySpec take where the target's weights are read from host memory

For each cell the prompts are continued one by one. Printed are

    tokens       block efficiency: tokens per target forward, with its standard error over the prompts
    MBSU         memory-bound speed-up, tokens / (1 + L r): L levels, r = the draft's parameters / the target's (RSD)
    tokens/s     of the machine at hand; without any meaning for a GPU
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple, cast

from common import argument_parser, environment, made, quiet_demo_pair, token_ids, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table

from heavypath.speculative import SpeculativeDecoder, TokenTree, sequoia_tree
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.step import Stepped
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE

PAIRS = {2: [(2, 2), (3, 2)], 3: [(3, 3), (4, 3)], 4: [(5, 4), (7, 4)], 5: [(6, 5), (12, 5)]}
BUDGETS = {
    6: ([(2, 3), (3, 2)], [[2, 1, 1], [2, 2], [3, 1]]),
    10: ([(2, 5), (5, 2)], [[2, 1, 1, 1, 1], [2, 2, 1], [5, 1]]),
    14: ([(2, 7), (7, 2)], [[2, 1, 1, 1, 1, 1, 1], [2, 2, 2], [7, 1]]),
    21: ([(3, 7), (7, 3)], [[3, 1, 1, 1, 1, 1, 1], [3, 2, 2], [7, 1, 1]]),
    30: ([(5, 6), (6, 5)], [[2, 2, 2, 2], [5, 1, 1, 1, 1, 1], [6, 1, 1, 1, 1]]),
}
LEAST = 4  # prompts for a standard error


class Cell(NamedTuple):
    """One cell: where it stands in its table, and what is decoded.

    group, label: the heading of its rows, and its own row
    sampling:     options of `generate`
    """

    group: str
    label: str
    method: str
    options: Mapping[str, Any]
    sampling: Mapping[str, float]


class Measured(NamedTuple):
    """What a cell gave; of each step, the nodes that were drafted and those that were accepted."""

    nodes: float
    levels: int
    tokens: float
    standard_error: float
    mbsu: float
    tokens_per_second: float
    drafted: list[int]
    accepted: list[int]


class Observer:
    """Stands in the place of a decoder's runner, and counts what each step drafts and accepts."""

    def __init__(self, runner: StepRunner):
        self._runner = runner
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, *args: Any, **where: Any) -> Stepped:
        """Run a step."""
        stepped = self._runner.run(*args, **where)
        self.drafted.append(int((stepped.drafted.tokens[:, 1:] >= 0).sum()))
        self.accepted.append(int(stepped.verified.length))
        return stepped


def rsd_shapes(pairs: Sequence[tuple[int, int]], vectors: Sequence[list[int]]) -> Iterator[tuple[str, str, dict]]:
    """Label, method and options: k sequences of l tokens and beams of k by l, then trees by branching vectors."""
    for count, length in pairs:
        yield f"SpecTr ({count}, {length})", "spectr", {"tree": TokenTree.independent(count, length)}
    for vector in vectors:
        yield f"RSD-C {vector}", "rsd-c", {"branching": vector}
    for count, length in pairs:
        options = {"width": count, "max_depth": length, "tree_size": 1 + count * length}
        yield f"RSD-S ({count}, {length})", "rsd-s", options


def rsd_1(temperature: float) -> Iterator[Cell]:
    """Drafts of L levels, and the chain of L tokens."""
    for length, pairs in PAIRS.items():
        group = f"{length} levels"
        yield Cell(group, "SD", "chain", {"tree": TokenTree.chain(length)}, {"temperature": temperature})
        vectors = [[2] * length, *([count, *[1] * (length - 1)] for count, _ in pairs)]
        vectors += [[2, 1]] if length == 2 else []
        for label, method, options in rsd_shapes(pairs, [list(each) for each in dict.fromkeys(map(tuple, vectors))]):
            yield Cell(group, label, method, options, {"temperature": temperature})


def rsd_2(temperature: float) -> Iterator[Cell]:
    """Drafts of at most B nodes, and the chain of B tokens."""
    for budget, (pairs, vectors) in BUDGETS.items():
        group = f"{budget} nodes"
        yield Cell(group, "SD", "chain", {"tree": TokenTree.chain(budget)}, {"temperature": temperature})
        for label, method, options in rsd_shapes(pairs, vectors):
            yield Cell(group, label, method, options, {"temperature": temperature})


def robustness(temperature: float) -> Iterator[Cell]:
    """One fixed tree, planned for T = 0.6, verified as Sequoia, SpecInfer and top-k sampling do."""
    tree = sequoia_tree(DEFAULT_ACCEPTANCE, 64)
    samplings = [{"temperature": each} for each in (0.2, 0.4, 0.6, 0.8, 1.0)]
    samplings += [{"temperature": temperature, "top_p": each} for each in (0.8, 0.9)]
    for sampling in samplings:
        group = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        for method in ("sequoia", "specinfer", "top-k"):
            yield Cell(group, method, method, {"tree": tree}, sampling)


def specinfer(temperature: float) -> Iterator[Cell]:
    """k sequences of l tokens."""
    for width in (1, 2, 4, 8, 16):
        for length in (1, 2, 4, 8, 16):
            if width * length <= 128:
                options = {"tree": TokenTree.independent(width, length)}
                yield Cell(f"width {width}", f"depth {length}", "specinfer", options, {"temperature": temperature})


def dyspec(temperature: float) -> Iterator[Cell]:
    """Trees that stop growing where a slot is worth less than a threshold."""
    for threshold in (0.1, 0.03, 0.01, 0.003):
        options = {"tree_size": 768, "max_depth": 12, "threshold": threshold}
        yield Cell("at most 768 nodes", f"threshold {threshold:g}", "dyspec", options, {"temperature": temperature})


def large(temperature: float) -> Iterator[Cell]:
    """Trees of 768 nodes."""
    for each in (0.6, 1.0):
        group, sampling = f"T = {each:g}", {"temperature": each}
        yield Cell(group, "sequoia", "sequoia", {"tree": sequoia_tree(DEFAULT_ACCEPTANCE, 768, 18)}, sampling)
        yield Cell(group, "dyspec", "dyspec", {"tree_size": 768, "max_depth": 18}, sampling)
        yield Cell(group, "specinfer 48 x 16", "specinfer", {"tree": TokenTree.independent(48, 16)}, sampling)


TABLES: dict[str, Callable[[float], Iterator[Cell]]] = {
    "rsd-1": rsd_1, "rsd-2": rsd_2, "robustness": robustness, "specinfer": specinfer, "dyspec": dyspec, "large": large,
}  # fmt: skip


def measure(pair: DemoPair, cell: Cell, prompts: Sequence[Any], arguments: argparse.Namespace) -> Measured:
    """Continue the prompts one by one."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, cell.method, **cell.options)
    observer = Observer(decoder.runner)
    decoder.runner = cast(StepRunner, observer)
    runs = [
        decoder.generate(
            prompt, max_new_tokens=arguments.tokens, seed=arguments.seed + number, eos_token_id=None, **cell.sampling
        ).stats
        for number, prompt in enumerate(prompts)
    ]
    steps, tokens = sum(run.steps for run in runs), sum(run.new_tokens for run in runs)
    efficiency = tokens / steps
    error = math.nan
    if len(runs) >= LEAST:  # of a ratio of sums, by its residuals
        error = stdev(run.new_tokens - efficiency * run.steps for run in runs) * math.sqrt(len(runs)) / steps
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (pair.draft, pair.target)]
    levels = max(run.depth for run in runs)
    return Measured(
        nodes=sum(run.nodes for run in runs) / steps,
        levels=levels,
        tokens=efficiency,
        standard_error=error,
        mbsu=efficiency / (1 + levels * sizes[0] / sizes[1]),
        tokens_per_second=tokens / sum(run.total_seconds for run in runs),
        drafted=observer.drafted,
        accepted=observer.accepted,
    )


def table_of(name: str, rows: Sequence[tuple[Cell, Measured]]) -> Table:
    """A line for each cell; the most tokens of a group are bold."""
    table = Table(Column("", no_wrap=True), Column("", no_wrap=True), box=box.SIMPLE_HEAD, title=name)
    for heading in ("nodes", "levels", "tokens", "MBSU", "tokens/s"):
        table.add_column(heading, justify="right")
    before = ""
    for cell, found in rows:
        best = found.tokens == max(other.tokens for peer, other in rows if peer.group == cell.group)
        tokens = f"{found.tokens:.2f} ± {found.standard_error:.2f}"
        table.add_row(
            cell.group if cell.group != before else "", cell.label, f"{found.nodes:.1f}", str(found.levels),
            f"[bold]{tokens}[/]" if best else tokens, f"{found.mbsu:.2f}", f"{found.tokens_per_second:.0f}",
        )  # fmt: skip
        before = cell.group
    return table


def draw(results: Mapping[str, list[dict]], folder: Path) -> None:
    """Draw what was measured of robustness and dyspec."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if "robustness" in results:
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
        rows = results["robustness"]
        panels = {
            "temperature": [row for row in rows if "top_p" not in row],
            "top_p": [row for row in rows if "top_p" in row],
        }
        for panel, (name, chosen) in zip(axes, panels.items(), strict=True):
            for method in dict.fromkeys(row["method"] for row in chosen):
                line = [row for row in chosen if row["method"] == method]
                at, tokens, errors = ([row[key] for row in line] for key in (name, "tokens", "standard_error"))
                panel.errorbar(at, tokens, errors, marker="o", capsize=3, label=method)
            panel.set(xlabel=name.replace("_", "-"), ylim=(1, None))
            panel.grid(alpha=0.3)
        axes[0].set_ylabel("tokens per target forward")
        axes[0].legend()
        figure.suptitle("One tree of 64 nodes, planned for T = 0.6")
        figure.savefig(made(folder / "papers-robustness.png"), dpi=100)
        pyplot.close(figure)
    if "dyspec" in results:
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        for row in results["dyspec"]:
            axes.plot(sorted(row["drafted"], reverse=True), label=f"{row['label']}: {row['tokens']:.2f} tokens")
        axes.set(xlabel="steps, largest trees first", ylabel="drafted nodes", yscale="log")
        axes.set_title("DySpec's trees grow while a slot is worth more than a threshold", fontsize=11)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(made(folder / "papers-dyspec.png"), dpi=100)
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, plot="a folder for the figures of robustness and dyspec (needs matplotlib)")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    parser.add_argument("--temperature", type=float, default=0.6, help="where the paper does not vary it")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    names = arguments.tables or [*TABLES]
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"expected tables among {', '.join(TABLES)}, got {', '.join(unknown)}")
    if arguments.miniature:
        arguments.prompts, arguments.tokens = 1, 4
    pair, console = quiet_demo_pair(), Console(highlight=False, width=100)
    prompts = token_ids(pair.tokenizer, demo_prompts()[: arguments.prompts])
    results = {}
    for name in names:
        cells, rows = [*TABLES[name](arguments.temperature)], []
        with console.status("") as status:
            for number, cell in enumerate(cells, 1):
                status.update(f"{name}, {number} of {len(cells)}: {cell.group}, {cell.label}")
                rows.append((cell, measure(pair, cell, prompts, arguments)))
        console.print(table_of(name, rows))
        results[name] = [
            {"group": cell.group, "label": cell.label, "method": cell.method}
            | cell.sampling
            | {key: value for key, value in found._asdict().items() if name == "dyspec" or not isinstance(value, list)}
            for cell, found in rows
        ]
    settings = {name: getattr(arguments, name) for name in ("temperature", "prompts", "tokens", "seed")}
    write_results(arguments.json, environment("cpu") | settings, **results)
    if arguments.plot is not None:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
