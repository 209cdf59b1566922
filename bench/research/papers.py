"""The papers' own comparisons, cell by cell and by every verifier, on the shipped pair.

    python bench/research/papers.py [TABLE ...] [--json bench/results/papers-cpu.json] [--plot bench/results]
    python bench/research/papers.py --results bench/results/papers-cpu.json [--plot bench/results]

    rsd-1        RSD's experiment 1 (Jeon et al. 2024, section 5): drafts of 2 to 5 levels, whatever they cost
    rsd-2        its experiment 2: drafts of the same number of nodes, 6 to 30
    robustness   Sequoia's figure 4 (Chen et al. 2024): the tree planned for T = 0.6 at other temperatures and top-p
    specinfer    SpecInfer by width and depth (Sequoia's tables 5 and 6): k sequences of l tokens, k l at most 128
    dyspec       DySpec's trees, step by step (Xiong et al. 2024): nodes, levels and accepted nodes, with a threshold
    large        trees of 768 nodes, which Sequoia and DySpec take where the target's weights are read from host memory

    sequoia-..., dyspec-..., ersd-..., rsd-...     parts, one for each figure and table of a paper that is repeated:
                 see PARTS in the files of these names, and docs/papers.md, which has a row for each (book.py)

"dyspec as published" takes a token's draft probability for its chance of being accepted, as the paper does
(confidence="draft"); "dyspec, measured confidence" takes chances that were counted on the shipped pair.

For each cell all prompts are continued as one batch, once with each verifier that the method takes. Printed are

    own          block efficiency: tokens per target forward, with its standard error (batches.py), by the rule of the
                 method's paper: recursive rejection, but K-SEQ for SpecTr and a sample of the target for top-k
    held, ...    the same by VERIFIERS of speculative/methods.py; "-" where the method does not take it
    nodes        of a step's tree, the root included; the median, which for a fixed tree is its size
    MBSU         memory-bound speed-up, tokens / (1 + L r): L levels, r = the draft's parameters / the target's (RSD)
    tokens/s     the first prompts one by one, on the machine at hand; without any meaning for a GPU. "-" by --timed 0

MBSU and tokens/s are of the method's own rule. The last step of a text is cut short, by any verifier, which makes all
tokens per forward a little low, those of large trees most. --json is written after each cell; --results prints the
tables of such a file, and draws its figures, and measures nothing.
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import dyspec
import ersd
import rsd
import sequoia
import survey
from common import (
    argument_parser,
    environment,
    made,
    options_of,
    processor,
    quiet_demo_pair,
    show,
    until_stopped,
    write_results,
    written,
)
from papers_cells import TABLES, Cell
from papers_setting import Setting
from papers_shown import OWN, draw, lines_of
from rich.console import Console

from heavypath.speculative import METHODS
from heavypath.speculative.demo import DemoPair, demo_prompts

PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    **sequoia.PARTS, **dyspec.PARTS, **ersd.PARTS, **rsd.PARTS, **survey.PARTS,
}  # fmt: skip


def measure(setting: Setting, cell: Cell, *, tokens: int, timed: int, steps: bool) -> dict[str, Any]:
    """The row of a cell: all prompts with each verifier, and the first `timed` ones alone by the method's own rule.

    steps: whether the row has the nodes below the root that each step of each text drafts and accepts
    """
    own = setting.decode(cell.method, tokens=tokens, **cell.sampling, **cell.options)
    found = {OWN: own}
    for verifier in METHODS[cell.method].verifiers:
        if verifier != "rejection":  # which is such a method's own rule
            asked = {"tokens": tokens, "verifier": verifier, **cell.sampling, **cell.options}
            found[verifier] = setting.decode(cell.method, **asked)
    row = {"group": cell.group, "label": cell.label, "method": cell.method, **cell.sampling}
    row |= {"nodes": own.row["nodes"], "levels": own.row["levels"], "verification": own.stats.verification}
    row["tokens"] = {name: each.row["tokens"] for name, each in found.items()}
    row["standard_error"] = {name: each.row["error"] for name, each in found.items()}
    row |= {"mbsu": own.row["mbsu"], "tokens_per_second": speed_alone(setting, cell, tokens, timed)}
    return row | ({"drafted": own.steps.drafted, "accepted": own.steps.accepted} if steps else {})


def speed_alone(setting: Setting, cell: Cell, tokens: int, count: int) -> float | None:
    """Tokens a second of the first prompts, one by one; None where it is of none."""
    decoder = setting.decoder(cell.method, **cell.options)
    alone = [
        decoder.generate(prompt, tokens, seed=setting.seed + number, eos_token_id=None, **cell.sampling).stats
        for number, prompt in enumerate(setting.texts.prompts[:count])
    ]
    if not alone:
        return None
    return round(sum(run.new_tokens for run in alone) / sum(run.total_seconds for run in alone), 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, plot="a folder for the figures, one for each table but large (needs matplotlib)")
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"{', '.join([*TABLES, *PARTS])} (default: all tables)"
    )
    parser.add_argument("--temperature", type=float, default=0.6, help="where the paper does not vary it")
    parser.add_argument("--prompts", type=int, help="default: 16, 8 for large, and all for parts")
    parser.add_argument(
        "--tokens", type=int, help="after each prompt; default: 64, 48 for large; at most so many in a part"
    )
    parser.add_argument("--timed", type=int, default=3, help="prompts that are also decoded one by one, for tokens/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="what --json has written, to be shown")
    arguments = options_of(parser, argv, prompts=2, tokens=4, timed=1)
    if arguments.results is not None:
        results = json.loads(arguments.results.read_text())
        parts = {name: found for name, found in results.items() if name in PARTS}
        results = {name: rows for name, rows in results.items() if name in TABLES}
        for name, rows in results.items():
            show(lines_of(rows), title=name)
        if arguments.plot is not None:
            draw(results, arguments.plot, parts)
        return
    names = arguments.tables or [*TABLES]
    if unknown := [name for name in names if name not in TABLES and name not in PARTS]:
        parser.error(f"expected tables or parts among {', '.join([*TABLES, *PARTS])}, got {', '.join(unknown)}")
    least = {"prompts": 2, "tokens": 1, "timed": 0}  # two prompts, for a standard error
    for name, given in ((name, getattr(arguments, name)) for name in least):
        if given is not None and given < least[name]:
            parser.error(f"--{name} must be at least {least[name]}, got {given}")
    pair = quiet_demo_pair()
    with until_stopped():
        run_parts([name for name in names if name in PARTS], pair, arguments)
        results = run_tables([name for name in names if name in TABLES], pair, arguments)
    if arguments.plot is not None:
        draw(results, arguments.plot)


def run_parts(names: Sequence[str], pair: DemoPair, arguments: Namespace) -> None:
    """Run parts; each takes its place in the file of results as soon as it is done."""
    cut, tokens = arguments.prompts, arguments.tokens
    setting = Setting(pair, demo_prompts()[:cut], small=arguments.miniature, seed=arguments.seed, tokens=tokens)
    options = f" --prompts {cut}" * (cut is not None) + f" --tokens {tokens}" * (tokens is not None)
    for name in names:
        begin = time.process_time()
        found = PARTS[name](setting)
        facts = {
            "command": f"python bench/research/papers.py {name}{options}",
            "seconds": round(time.process_time() - begin, 1), "device": processor(), "date": date.today().isoformat(),
            "prompts": len(setting.prompts), "seed": setting.seed,
        }  # fmt: skip
        show(found["rows"], title=f"{name}, {facts['seconds']:.0f} s of the processor")
        if arguments.json is not None:
            made(arguments.json).write_text(written(written_before(arguments.json) | {name: facts | found}))


def written_before(path: Path | None) -> dict[str, Any]:
    """What the file of results has, which is the environment alone where there is none."""
    if path is None or not path.exists():
        return {"environment": environment("cpu")}
    return json.loads(path.read_text(encoding="utf-8"))


def run_tables(names: Sequence[str], pair: DemoPair, arguments: Namespace) -> dict[str, list[dict]]:
    """Run tables, cell by cell; what is measured is written and printed if the run is stopped, too."""
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("temperature", "timed", "seed")}
    results: dict[str, list[dict]] = {}
    parts = {name: each for name, each in written_before(arguments.json).items() if name in PARTS}
    for name in names:
        prompts = arguments.prompts or (8 if name == "large" else 16)
        tokens = arguments.tokens or (48 if name == "large" else 64)
        settings[name] = {"prompts": prompts, "tokens": tokens}
        setting = Setting(pair, demo_prompts()[:prompts], small=arguments.miniature, seed=arguments.seed)
        rows = results[name] = []
        try:
            cells = [*TABLES[name](arguments.temperature)][: 3 if arguments.miniature else None]
            with Console().status("") as status:
                for number, cell in enumerate(cells, 1):
                    status.update(f"{name}, {number} of {len(cells)}: {cell.group}, {cell.label}")
                    rows.append(measure(setting, cell, tokens=tokens, timed=arguments.timed, steps=name == "dyspec"))
                    write_results(arguments.json, environment("cpu") | settings, **results, **parts)
        finally:
            show(lines_of(rows), title=name)
    return results


if __name__ == "__main__":
    main()
