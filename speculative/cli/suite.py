"""What `heavypath compare --suite` prints and writes: ways to decode, by kind of work."""

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from heavypath.speculative.cli.info import current_load, installation, machine
from heavypath.speculative.cli.options import print_json
from heavypath.speculative.cli.progress import progress
from heavypath.speculative.loading import Pair
from heavypath.speculative.suite.measure import compare_suite
from heavypath.speculative.suite.page import suite_page
from heavypath.speculative.suite.prompts import Suite
from heavypath.speculative.suite.results import SuiteResults
from heavypath.speculative.suite.table import notes_on, table_at


def compare_kinds(
    pair: Pair, draft: Any, suite: Suite, given: dict[str, Any], save: Path | None, page: Path | None, *, as_json: bool
) -> None:
    """Compare by `compare_suite`, print the tables or one JSON object, and write the files.

    given: further arguments of `compare_suite`
    save, page: files for the figures and for the page with plots. Both are written after each kind and temperature
    """
    facts = _facts(pair)

    def write(results: SuiteResults) -> None:
        if save is not None:
            save.write_text(as_lines(results.as_json(facts)), encoding="utf-8")
        if page is not None:
            page.write_text(suite_page(results, facts), encoding="utf-8")

    with progress("comparing", quiet=as_json) as report:
        results = compare_suite(
            pair.target, draft, pair.tokenizer, suite=suite, on_progress=report, on_results=write, **given
        )
    write(results)
    if as_json:
        print_json(results.as_json(facts))
        return
    console = Console(highlight=False)
    for temperature in results.settings["temperatures"]:
        console.print(table_at(results, temperature))
    where = f"{facts['device']} with {facts['threads']} CPU thread{'' if facts['threads'] == 1 else 's'}"
    for note in [f"On {where}.", *notes_on(results)]:
        console.print(note, style="dim", markup=False)


def _facts(pair: Pair) -> dict[str, Any]:
    """The machine, the versions, the command and the date."""
    here = installation(pair.target.device)
    if pair.target.device.type == "cpu":
        here["device"] = machine(current_load())["processor"]
    here["command"] = command_of(sys.argv[1:])
    here["date"] = date.today().isoformat()
    return here


def command_of(arguments: Sequence[str]) -> str:
    """The command line that measures the same again: without the names of files to write."""
    kept = ["heavypath"]
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--save", "--page"):
            next(rest, None)
        elif not argument.startswith(("--save=", "--page=")):
            kept.append(argument)
    return shlex.join(kept)


def as_lines(content: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    others = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "rows"
    )
    return f'{{\n{others},\n "rows": [\n{rows}\n ]\n}}\n'
