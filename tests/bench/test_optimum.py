"""The linear programme of bench/optimum.py: no verifier beats it, and block verification meets it on chains."""

import importlib
import sys
from pathlib import Path

import pytest
import verification_oracle as oracle

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def optimum():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        yield importlib.import_module("optimum")


@pytest.mark.parametrize("shape", ["chain of 2", "two children", "two sequences of 2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_lossless_verifier_beats_the_programme(optimum, shape, seed):
    language = oracle.Language(3, seed, zeros=0.2)
    most = optimum.optimum(language, optimum.SHAPES[shape])
    tokens = {name: optimum.accepted(name, language, optimum.SHAPES[shape]) for name in optimum.VERIFIERS}
    assert max(tokens.values()) <= most + 1e-9
    assert min(tokens.values()) == pytest.approx(tokens["rejection"])
    if shape == "chain of 2":
        assert tokens["traversal"] == pytest.approx(most)


def test_with_one_child_the_optimum_is_the_overlap(optimum):
    language = oracle.Language(4, 3)
    overlap = sum(map(min, language.target(()), language.draft(())))
    assert optimum.optimum(language, [-1, 0]) == pytest.approx(1 + float(overlap))


def test_the_script_prints_a_row_for_each_tree(optimum, capsys, tmp_path):
    optimum.main(["--laws", "1", "--json", str(tmp_path / "new" / "optimum.json")])
    printed = capsys.readouterr().out
    assert all(shape in printed for shape in optimum.SHAPES)
    assert "chain of 2" in (tmp_path / "new" / "optimum.json").read_text()
