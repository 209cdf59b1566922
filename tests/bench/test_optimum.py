"""The linear programme of bench/optimum.py: no verifier beats it, and block verification meets it on chains."""

import pytest
import verification_oracle as oracle
from bench_scripts import script


@pytest.mark.parametrize("shape", ["chain of 2", "two children", "two sequences of 2"])
def test_no_lossless_verifier_beats_the_linear_programme_which_traversal_meets_on_chains(shape):
    optimum, language = script("optimum"), oracle.Language(3, 1, zeros=0.2)
    most = optimum.optimum(language, optimum.SHAPES[shape])
    tokens = {name: optimum.accepted(name, language, optimum.SHAPES[shape]) for name in optimum.VERIFIERS}
    assert max(tokens.values()) <= most + 1e-9
    assert min(tokens.values()) == pytest.approx(tokens["rejection"])
    assert shape != "chain of 2" or tokens["traversal"] == pytest.approx(most)
    overlap = sum(map(min, language.target(()), language.draft(())))
    assert optimum.optimum(language, [-1, 0]) == pytest.approx(1 + float(overlap)), "with one child it is the overlap"
