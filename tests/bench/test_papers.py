"""The papers' comparisons: their shapes and constants by hand, and the standard errors that they have over prompts."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from bench_scripts import script
from tiny_models import tiny_llama

from heavypath.speculative import PromptLookup, SpeculativeDecoder, TokenTree, expected_tokens


def stats(tokens, steps):
    return SimpleNamespace(tokens_of=torch.tensor(tokens), steps_of=torch.tensor(steps))


def test_tokens_per_forward_and_gains_with_their_errors_by_hand():
    """15 tokens in 6 steps; without one prompt 2 or 3, each 0.5 from their mean: sqrt(1 / 2 (0.25 + 0.25))."""
    batches = script("batches")
    assert batches.tokens_per_forward(stats([9, 6], [3, 3])) == pytest.approx((2.5, 0.5))
    # The same prompts twice: a prompt's seeds are one unit.
    assert batches.tokens_per_forward(stats([4, 5, 2, 4], [1, 2, 1, 2]), seeds=2) == pytest.approx((2.5, 0.5))
    found = batches.tokens_per_forward(stats([3, 1, 4, 4], [1, 1, 1, 1]))
    assert found == pytest.approx((3, 2**0.5 / 2)), "the usual standard error of a mean"
    assert math.isnan(batches.tokens_per_forward(stats([9], [3]))[1]), "of one prompt there is none"
    # Half as many tokens again after each prompt: the gain is 50%, and sure.
    assert batches.gain(stats([9, 6], [3, 3]), stats([6, 4], [3, 3])) == pytest.approx((0.5, 0))
    assert batches.gain(stats([9, 6], [3, 3]), stats([6, 6], [3, 3])) == pytest.approx((0.25, 0.25))


def test_the_constants_of_sequoia_and_what_they_imply():
    """Table 1, C4 at T = 0: 5.08 tokens at 4.04 times the speed leave 1.257 tokens' time, 10 levels take 0.207."""
    sequoia, published = script("sequoia"), script("published")
    (nodes, levels), speedup, tokens = published.TABLE_1["C4, T = 0"]
    assert (nodes, round(tokens / speedup - levels * published.LEVEL, 3)) == (128, 1.051)
    assert sequoia.sequences([0.5, 0.4], 3).depth == 1  # 1.9 tokens, where a chain of two has 1.75
    assert sequoia.sequences([0.9, 0.01], 5).depth == 4
    assert sequoia.falling(torch.tensor([0.1, 0.5])) == pytest.approx([0.5, 0.1])


def test_tokens_of_sequences_and_the_law_that_is_fitted_to_their_speed_ups():
    """Half of the first children, and 3/4 of the first two: two chains of two have 1 + 3/4 (1 + 1/2) tokens."""
    llamas, published = script("llamas"), script("published")
    assert llamas.tokens_of(0.5, 1.0, 2, 2) == pytest.approx(2.125)
    assert expected_tokens(TokenTree.independent(2, 2), llamas.vector_of(0.5, 1.0)) == pytest.approx(2.125)
    sweep = {width: dict.fromkeys((1, 4, 16), 0.0) for width in (1, 4)}
    for width, depth, _, time in llamas.cells(sweep):
        sweep[width][depth] = llamas.tokens_of(0.7, 0.4, width, depth) / time
    assert llamas.fitted(sweep) == pytest.approx((0.7, 0.4, 0))
    assert len([*llamas.cells(published.TABLE_5)]) == len([*llamas.cells(published.TABLE_6)]) == 30
    assert all(len(rows) == 6 for rows in published.TABLES_3_4.values())


def test_a_chain_predicts_longer_ones_by_one_rate():
    predicted = script("llamas").predicted
    assert predicted(sum(0.5**level for level in range(9)), 2) == pytest.approx(1.75)


def test_the_best_k_ary_tree_by_hand():
    """Of at most 7 nodes: 2-ary with 3 levels has 1 + 0.8 + 0.64 tokens, 6-ary with 2 levels 1 + 0.95."""
    vector = [0.6, 0.2, 0.1, 0.05]
    assert script("sequoia").best_k_ary(vector, 7) == (2, pytest.approx(2.44))
    assert script("sequoia").best_k_ary(vector, 6) == (4, pytest.approx(1.95))


def test_two_children_of_a_bernoulli_law_by_hand():
    """P = (0.3, 0.7), Q = (0.7, 0.3): the optimum misses 0.49 - 0.3, and rounds leave F(1.4) = 0.7 - 1.4 * 0.3."""
    rows = script("rsd").bernoulli(None)["rows"]
    row = next(row for row in rows if (row["p"], row["q"]) == (0.3, 0.7))
    assert (row["optimal"], row["multi-round"], row["recursive"]) == (0.81, 0.72, 1.0)
    assert all(row["multi-round"] <= row["K-SEQ"] + 1e-3 <= row["optimal"] + 2e-3 for row in rows)


def test_a_lemma_with_a_fixed_parameter_is_a_bound_and_its_best_parameter_is_the_libraries():
    ersd, law = script("ersd"), [0.5, 0.25, 0.15, 0.1]
    for size in (3, 9, 30):
        best = ersd.expected_tokens(ersd.greedy_tree(law, size), law)
        each = [ersd.fixed(law, size, parts) for parts in range(1, 200)]
        assert best <= ersd.tree_bounds(law, size).merged == pytest.approx(min(each), rel=1e-3)


def test_shapes_have_the_levels_and_nodes_of_their_groups():
    """As in RSD's appendix C.3: every draft of a group has as many levels, or at most as many nodes."""
    rsd = script("rsd")
    deep, large = [*rsd.of_equal_depth()], [*rsd.of_equal_size()]
    assert all(shape.levels == int(shape.group.split()[0]) for shape in deep)
    assert len(large) == 5 * 8
    labels = {(shape.group, f"{shape.family} {shape.size}") for shape in [*deep, *large]}
    assert {("4 levels", "SpecTr (7, 4)"), ("2 levels", "RSD-C [2, 1]"), ("30 nodes", "RSD-S (6, 5)")} <= labels
    target = tiny_llama(1, layers=1)
    for shape in large:
        tree = SpeculativeDecoder(target, PromptLookup(), shape.method, **shape.options).tree
        assert len(tree) - 1 <= int(shape.group.split()[0])


@pytest.mark.slow
def test_every_part_runs_in_miniature_and_takes_its_place_in_the_file(tmp_path):
    papers, path = script("papers"), tmp_path / "papers.json"
    path.write_text(json.dumps({"environment": {}}))
    papers.main([*papers.PARTS, "--miniature", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written.keys() == {"environment", *papers.PARTS}
    assert all(written[name]["rows"] and written[name]["seconds"] >= 0 for name in papers.PARTS)
    assert "nan" not in path.read_text().lower()


@pytest.mark.parametrize(("options", "message"), [
    (["sequoia-growing"], "expected parts among"),
    (["rsd-bernoulli", "--prompts", "1"], "--prompts must be at least 2, got 1"),
    (["--results", "x.json"], "--results needs --plot"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script("papers").main(options)
    assert message in capsys.readouterr().err
