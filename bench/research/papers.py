"""The papers' own comparisons on the shipped pair, and some on larger ones, for docs/papers.md.

    python bench/research/papers.py PART ... [--json bench/results/papers-cpu.json]
    python bench/research/papers.py PART ... --pair gemma [--json bench/results/papers-gemma-cpu.json]
    python bench/research/papers.py --results bench/results/papers-cpu.json --plot docs/images

A part repeats a figure, a table or a claim of a paper: see PARTS in sequoia.py, dyspec.py, ersd.py, rsd.py, llamas.py,
survey.py.
book.py says what the paper claims of each, and by which rule the results are judged.

Trees are compared after recorded contexts, by expected tokens that are exact over coins (exact.py); where a part
decodes, by tokens per forward pass of the target. Standard errors take prompts as the independent units (batches.py).
--json is written after each part, with the machine, the versions, the prompts and the seed.
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
import llamas
import offloading
import rejection
import rsd
import sequoia
import survey
from common import argument_parser, environment, made, options_of, processor, quiet_demo_pair, show, written
from papers_figure import draw
from papers_setting import WRITTEN, Setting
from real.pairs import PAIRS, RECORDED, real_pair

from heavypath.speculative.demo import demo_prompts

PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    **sequoia.PARTS, **dyspec.PARTS, **ersd.PARTS, **rsd.PARTS, **survey.PARTS,
    **llamas.PARTS, **rejection.PARTS, **offloading.PARTS,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, plot="a folder for the figures of --results (needs matplotlib)")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--pair", choices=PAIRS, help="see bench/real/pairs.py; default: the shipped pair")
    parser.add_argument("--prompts", type=int, help="at least 2; default: all")
    parser.add_argument("--tokens", type=int, help="the most that a part decodes after each prompt")
    parser.add_argument("--contexts", type=int, help="the most that a part evaluates trees at in each recorded text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="what --json has written, to be drawn")
    arguments = options_of(parser, argv, prompts=2, tokens=4, contexts=2)
    if arguments.results is not None:
        if arguments.plot is None:
            parser.error("--results needs --plot, a folder for the figure")
        draw(json.loads(arguments.results.read_text(encoding="utf-8")), arguments.plot)
        return
    names = arguments.parts or [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"expected parts among {', '.join(PARTS)}, got {', '.join(unknown)}")
    for name, least in (("prompts", 2), ("tokens", 1), ("contexts", 1)):  # two prompts, for a standard error
        if (given := getattr(arguments, name)) is not None and given < least:
            parser.error(f"--{name} must be at least {least}, got {given}")
    run(names, arguments)


def run(names: Sequence[str], arguments: Namespace) -> None:
    """Run parts; each takes its place in the file of results as soon as it is done."""
    limits = {name: getattr(arguments, name) for name in ("pair", "prompts", "tokens", "contexts")}
    real = arguments.pair is not None
    pair, prompts = real_pair(arguments.pair) if real else (quiet_demo_pair(), demo_prompts())
    setting = Setting(
        pair, prompts[: arguments.prompts], small=arguments.miniature, seed=arguments.seed,
        tokens=arguments.tokens, contexts=arguments.contexts, written=RECORDED if real else WRITTEN,
    )  # fmt: skip
    options = "".join(f" --{name} {value}" for name, value in limits.items() if value is not None)
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
            known = before(arguments.json) | {name: facts | found}
            if real:  # the shipped pair's prompts are in the package
                setting.recorded["prompts"] = [prompt[0].tolist() for prompt in setting.texts.prompts]
                known["contexts"] = known.get("contexts", {}) | setting.recorded
            made(arguments.json).write_text(written(known))


def before(path: Path) -> dict[str, Any]:
    """What the file of results has, which is the environment alone if there is none."""
    if not path.exists():
        return {"environment": environment("cpu")}
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
