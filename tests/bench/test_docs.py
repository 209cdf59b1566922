"""The documentation's figures are measured: outside what cog writes, no page states one."""

import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = re.compile(r"<!-- \[\[\[cog.*?<!-- \[\[\[end\]\]\] -->", re.S)
NOT_PROSE = re.compile(
    r"<!--.*?-->|^```.*?^```$|^(?:    |\t).*?$|`[^`\n]*`|\]\([^)]*\)",  # comments, blocks, code, addresses of links
    re.S | re.M,
)
FIGURE = re.compile(
    r"\d[\d,.]*(?:\s*(?:%|x\b|×|us\b|µs\b|ms\b|s\b|[KMG]i?B/s)|\s+(?:times|fold|tokens?/s|tokens? per second|"
    r"percent|(?:milli|micro)?seconds?|minutes?|hours?|tokens? (?:a|per|each) step)\b)"
)
# Figures that we did not measure: limits of the design, settings of an experiment, assumptions, and what papers print.
DESIGN = {
    "docs/guides/larger-than-memory.md": {"2 GB/s"},
    "docs/guides/planning.md": {"3%"},
    "docs/papers.md": {"15%", "33%", "2%", "5.60 s", "0.537 s", "9.4 times", "2.1 times"},
    "docs/results.md": {"100 MB/s"},
    "docs/security.md": {"600 s", "10 s", "30 s", "5 s", "2 s"},
}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_measured_figure_stands_in_prose(page):
    """Such a figure would grow old unnoticed. A table, or a sentence of bench/tables.py, has it."""
    prose = NOT_PROSE.sub(" ", GENERATED.sub(" ", page.read_text(encoding="utf-8")))
    found = {each.group() for each in FIGURE.finditer(prose)}
    assert found == DESIGN.get(page.relative_to(ROOT).as_posix(), set())


@pytest.mark.parametrize("sentence", ["it is 1.4 times faster", "takes 3.5 ms", "36% more", "at 26.8 GB/s", "2.1x"])
def test_such_figures_are_found(sentence):
    assert FIGURE.search(NOT_PROSE.sub(" ", sentence))
    assert not FIGURE.search(NOT_PROSE.sub(" ", f"`{sentence}`"))


def test_who_cites_the_software_cites_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_imports_from_the_package_is_there(page):
    """Also in blocks that are not run, as of models that are not here."""
    for module, names in re.findall(r"^from (heavypath[.\w]*) import (\([^)]*\)|.*)$", page.read_text("utf-8"), re.M):
        for name in re.findall(r"\w+", names):
            assert hasattr(import_module(module), name), f"{module}.{name}"


NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h|sh|md|yml))`")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page):
    """By their whole path, or a folder's or file's name that is some file's here."""
    here = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    named = {each[1] for each in NAMED.finditer(page.read_text(encoding="utf-8"))}
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in here)}
    assert not missing
