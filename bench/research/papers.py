"""The papers' own comparisons, cell by cell and by every verifier, on the shipped pair.

    python bench/research/papers.py [TABLE ...] [--json bench/results/papers-cpu.json] [--plot bench/results]
    python bench/research/papers.py --results bench/results/papers-cpu.json [--plot bench/results]

    rsd-1        RSD's experiment 1 (Jeon et al. 2024, section 5): drafts of 2 to 5 levels, whatever they cost
    rsd-2        its experiment 2: drafts of the same number of nodes, 6 to 30
    robustness   Sequoia's figure 4 (Chen et al. 2024): the tree planned for T = 0.6 at other temperatures and top-p
    specinfer    SpecInfer by width and depth (Sequoia's tables 5 and 6): k sequences of l tokens, k l at most 128
    dyspec       DySpec's trees, step by step (Xiong et al. 2024): nodes, levels and accepted nodes, with a threshold
    large        trees of 768 nodes, which Sequoia and DySpec take where the target's weights are read from host memory

"dyspec as published" takes a token's draft probability for its chance of being accepted, as the paper does
(confidence="draft"); "dyspec, measured confidence" is what the method has here by default.

For each cell all prompts are continued as one batch, once with each verifier that the method takes. Printed are

    own          block efficiency: tokens per target forward, with its standard error (batches.py), by the rule of the
                 method's paper: recursive rejection, but K-SEQ for SpecTr and a sample of the target for top-k
    held, ...    the same by VERIFIERS of speculative/methods.py; "-" where the method does not take it
    nodes        of a step's tree, the root included; the median, which for a fixed tree is its size
    MBSU         memory-bound speed-up, tokens / (1 + L r): L levels, r = the draft's parameters / the target's (RSD)
    tokens/s     the first prompts one by one, on the machine at hand; without any meaning for a GPU. "-" by --timed 0

MBSU and tokens/s are of the method's own rule. The last step of a text is cut short, by any verifier, which makes all
tokens per forward a little low, those of large trees most. --json is written after each cell; --results prints the
tables of such a file in Markdown, and draws its figures, and measures nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import beside  # noqa: F401
import torch
from batches import Estimate, Texts, batch_of, tokens_per_forward
from common import (
    argument_parser,
    environment,
    paper_verifier,
    quiet_demo_pair,
    token_ids,
    until_stopped,
    write_results,
)
from papers_shown import OWN, draw, print_markdown, table_of
from rich import box
from rich.console import Console

from heavypath.speculative import METHODS, SpeculativeDecoder, TokenTree, sequoia_tree
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
NAMES = {"temperature": "T =", "top_p": "top-p"}
WIDE = 128  # nodes of a level, where trees of up to 768 grow; half as long to draft as the default of 384
DYSPEC: dict[str, dict] = {"dyspec as published": {"confidence": "draft"}, "dyspec, measured confidence": {}}


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
    """What a cell gave; all but `efficiency` by the method's own rule, whose name is `verification`.

    nodes:             the median of the steps' trees, the root included: those of the last steps have fewer levels
    efficiency:        tokens per target forward by verifier, OWN first
    drafted, accepted: nodes below the root, of each step of each text
    """

    nodes: float
    levels: int
    verification: str
    efficiency: dict[str, Estimate]
    mbsu: float
    tokens_per_second: float | None  # None where no prompt was timed
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
        self.drafted += (stepped.drafted.tokens[:, 1:] >= 0).sum(1).tolist()
        self.accepted += stepped.verified.length.tolist()
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
        group = ", ".join(f"{NAMES[name]} {value:g}" for name, value in sampling.items())
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
    """Trees of at most 768 nodes that stop growing where a slot is worth less than a threshold."""
    for group, values in DYSPEC.items():
        for threshold in (0.1, 0.03, 0.01, 0.003):
            options = {"tree_size": 768, "max_depth": 12, "width": WIDE, "threshold": threshold, **values}
            yield Cell(group, f"threshold {threshold:g}", "dyspec", options, {"temperature": temperature})


def large(temperature: float) -> Iterator[Cell]:
    """Trees of 768 nodes."""
    for each in (0.6, 1.0):
        group, sampling = f"T = {each:g}", {"temperature": each}
        yield Cell(group, "sequoia", "sequoia", {"tree": sequoia_tree(DEFAULT_ACCEPTANCE, 768, 18)}, sampling)
        for label, values in DYSPEC.items():
            yield Cell(group, label, "dyspec", {"tree_size": 768, "max_depth": 18, "width": WIDE, **values}, sampling)
        yield Cell(group, "specinfer 48 x 16", "specinfer", {"tree": TokenTree.independent(48, 16)}, sampling)


TABLES: dict[str, Callable[[float], Iterator[Cell]]] = {
    "rsd-1": rsd_1, "rsd-2": rsd_2, "robustness": robustness, "specinfer": specinfer, "dyspec": dyspec, "large": large,
}  # fmt: skip


def measure(pair: DemoPair, cell: Cell, texts: Texts, *, tokens: int, timed: int, seed: int) -> Measured:
    """Continue all prompts with each verifier, then the first `timed` ones one by one by the method's own rule."""

    def decoder_with(verifier: str | None) -> SpeculativeDecoder:
        return SpeculativeDecoder(pair.target, pair.draft, cell.method, verifier=verifier, **cell.options)

    options = {"max_new_tokens": tokens, "seed": seed, **cell.sampling}
    own = decoder_with(paper_verifier(cell.method))
    alone = [
        own.generate(prompt, eos_token_id=None, **options | {"seed": seed + number}).stats
        for number, prompt in enumerate(texts.prompts[:timed])
    ]
    observer = Observer(own.runner)
    own.runner = cast(StepRunner, observer)
    stats = own.generate(texts.tokens, **texts.options, **options).stats
    efficiency = {OWN: tokens_per_forward(stats)}
    for verifier in METHODS[cell.method].verifiers:
        if verifier != "rejection":  # which is such a method's own rule
            other = decoder_with(verifier).generate(texts.tokens, **texts.options, **options).stats
            efficiency[verifier] = tokens_per_forward(other)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (pair.draft, pair.target)]
    return Measured(
        nodes=1 + median(observer.drafted),
        levels=stats.depth,
        verification=stats.verification,
        efficiency=efficiency,
        mbsu=efficiency[OWN].value / (1 + stats.depth * sizes[0] / sizes[1]),
        tokens_per_second=sum(run.new_tokens for run in alone) / sum(run.total_seconds for run in alone)
        if alone
        else None,
        drafted=observer.drafted,
        accepted=observer.accepted,
    )


def as_row(cell: Cell, found: Measured, *, steps: bool) -> dict[str, Any]:
    """What is written about a cell. steps: whether to list the nodes of each step."""
    row = {"group": cell.group, "label": cell.label, "method": cell.method, **cell.sampling}
    row |= {"nodes": found.nodes, "levels": found.levels, "verification": found.verification}
    row["tokens"] = {name: round(each.value, 4) for name, each in found.efficiency.items()}
    row["standard_error"] = {name: round(each.standard_error, 4) for name, each in found.efficiency.items()}
    speed = found.tokens_per_second
    row |= {"mbsu": round(found.mbsu, 4), "tokens_per_second": None if speed is None else round(speed, 1)}
    return row | ({"drafted": found.drafted, "accepted": found.accepted} if steps else {})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, plot="a folder for the figures, one for each table but large (needs matplotlib)")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    parser.add_argument("--temperature", type=float, default=0.6, help="where the paper does not vary it")
    parser.add_argument("--prompts", type=int, help="default: 16, and 8 for large")
    parser.add_argument("--tokens", type=int, help="after each prompt; default: 64, and 48 for large")
    parser.add_argument("--timed", type=int, default=3, help="prompts that are also decoded one by one, for tokens/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="what --json has written, to be shown")
    arguments = parser.parse_args(argv)
    if arguments.results is not None:
        results = json.loads(arguments.results.read_text())
        results.pop("environment")
        print_markdown(results)
        if arguments.plot is not None:
            draw(results, arguments.plot)
        return
    names = arguments.tables or [*TABLES]
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"expected tables among {', '.join(TABLES)}, got {', '.join(unknown)}")
    if arguments.miniature:
        arguments.prompts, arguments.tokens, arguments.timed = 2, 4, 1
    least = {"prompts": 2, "tokens": 1, "timed": 0}  # two prompts, for a standard error
    for name, given in ((name, getattr(arguments, name)) for name in least):
        if given is not None and given < least[name]:
            parser.error(f"--{name} must be at least {least[name]}, got {given}")
    torch.set_num_threads(arguments.threads)
    pair, console = quiet_demo_pair(), Console(highlight=False, width=140)
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("temperature", "timed", "seed")}
    results: dict[str, list[dict]] = {}
    with until_stopped():
        for name in names:
            prompts = arguments.prompts or (8 if name == "large" else 16)
            tokens = arguments.tokens or (48 if name == "large" else 64)
            settings[name] = {"prompts": prompts, "tokens": tokens}
            texts = batch_of(token_ids(pair.tokenizer, demo_prompts()[:prompts]))
            rows = results[name] = []
            try:
                cells = [*TABLES[name](arguments.temperature)][: 3 if arguments.miniature else None]
                with console.status("") as status:
                    for number, cell in enumerate(cells, 1):
                        status.update(f"{name}, {number} of {len(cells)}: {cell.group}, {cell.label}")
                        found = measure(pair, cell, texts, tokens=tokens, timed=arguments.timed, seed=arguments.seed)
                        rows.append(as_row(cell, found, steps=name == "dyspec"))
                        write_results(arguments.json, environment("cpu") | settings, **results)
            finally:
                console.print(table_of(name, rows, box.SIMPLE_HEAD))
    if arguments.plot is not None:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
