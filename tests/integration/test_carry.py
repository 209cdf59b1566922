"""Kernels that are compiled for a GPU elsewhere: a process that finds them compiles nothing."""

import pytest
from fresh_python import BENCH, python

pytestmark = pytest.mark.integration
CASE = "gate fp"  # of two types


def made(folder, case=CASE):
    """What the command says of a folder."""
    run = python(str(BENCH / "carry.py"), "make", str(folder), "--case", case)
    assert run.returncode == 0, run.stderr
    return run.stdout.partition(";")[0]


def test_a_cache_that_was_carried_is_all_that_a_process_needs(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    assert made(here) == "2 kernels compiled, 0 were there"
    assert {path.suffix for path in here.rglob("*") if path.is_file()} == {".cubin", ".json"}
    here.rename(there)
    placed = python(str(BENCH / "carry.py"), "place", str(there))
    assert placed.returncode == 0, placed.stderr
    assert made(there) == "0 kernels compiled, 2 were there"


def test_what_is_not_there_is_named(tmp_path):
    missing = python(str(BENCH / "carry.py"), "place", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "is no folder; `make` makes one" in missing.stderr
    unknown = python(str(BENCH / "carry.py"), "make", str(tmp_path), "--case", "nonsense")
    assert unknown.returncode == 1
    assert "no case has 'nonsense' in its name" in unknown.stderr
