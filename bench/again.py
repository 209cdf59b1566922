"""Measure figures of the documentation again: each file of results by the command that it names.

    python bench/again.py efficiency drafts-kinds verifiers verifiers-default peers
    make docs-tables    # then writes them into the pages

Names are those of files in bench/results/, without "-cpu.json". A file takes the results as they come; a command that
fails ends the run. Times need an idle machine; tokens per forward pass do not.
"""

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from common import ROOT

RESULTS = ROOT / "bench" / "results"


def commands(names: Sequence[str]) -> list[list[str]]:
    """The command of each file, which writes it. Raises ValueError for a file that does not name one."""
    found = []
    for name in names:
        path = RESULTS / f"{name}-cpu.json"
        known = sorted(each.name.removesuffix("-cpu.json") for each in RESULTS.glob("*-cpu.json"))
        if name not in known:
            raise ValueError(f"expected names of {', '.join(known)}, got {name}")
        words = shlex.split(json.loads(path.read_text(encoding="utf-8"))["environment"].get("command", ""))
        if words[:1] == ["heavypath"]:
            found.append([sys.executable, "-m", "heavypath.speculative", *words[1:], "--save", str(path)])
            continue
        if words[:1] != ["python"]:
            raise ValueError(f"{path.name} names no command of Python or heavypath, got {shlex.join(words)!r}")
        found.append([sys.executable, *words[1:], "--benchmark-json" if "pytest" in words else "--json", str(path)])
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    try:
        found = commands(parser.parse_args().names)
    except ValueError as error:
        parser.error(str(error))
    for command in found:
        print(shlex.join(command), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
