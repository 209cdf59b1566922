"""The papers' tables: their cells, one of them by hand, and the standard errors that they have over prompts."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from bench_scripts import BENCH, script
from tiny_models import tiny_llama

from heavypath.speculative import PromptLookup, SpeculativeDecoder
from heavypath.speculative.demo import DemoPair


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


@pytest.mark.slow
def test_trees_have_the_nodes_and_levels_of_their_groups_and_the_decoder_takes_them():
    """And DySpec's are the same by the paper's values, the draft's probabilities, and by measured chances."""
    target, labels, grown = tiny_llama(1, layers=1), {"rsd-1": set(), "rsd-2": set()}, {}
    for name, table in script("papers").TABLES.items():
        for cell in table(0.6):
            options, size = dict(cell.options), int(cell.group.split()[0]) if name in labels else 0
            tree = SpeculativeDecoder(target, PromptLookup(), cell.method, **options).tree
            if name in labels:
                labels[name].add((size, cell.label))
                assert len(tree) - 1 <= size if name == "rsd-2" else tree.depth == size
            if cell.method == "dyspec":
                values = options.pop("confidence")
                grown.setdefault(values, []).append(str((name, options, cell.sampling)))
    assert grown["draft"] == grown[script("papers_setting").MEASURED]
    assert len(labels["rsd-2"]) == 5 * 8
    assert {(4, "SpecTr (7, 4)"), (2, "RSD-C [2, 1]"), (5, "RSD-C [12, 1, 1, 1, 1]")} <= labels["rsd-1"]


def test_a_cells_figures_by_hand_with_a_column_for_each_verifier(monkeypatch):
    """The target drafts for itself, a chain of two gives three tokens a step; and one verifier never accepts."""
    papers, target, asked = script("papers"), tiny_llama(1), []

    def decoder(target, draft, method, *, verifier, **options):
        asked.append((method, verifier))
        if verifier == "held":
            return SpeculativeDecoder(target, draft, "autoregressive")
        return SpeculativeDecoder(target, draft, "chain", **options)

    monkeypatch.setattr(script("papers_setting"), "SpeculativeDecoder", decoder)
    setting = papers.Setting(DemoPair(target, target, None), [], small=False)
    setting.texts = script("batches").batch_of([target.dummy_inputs["input_ids"][:1] % 7] * 2)
    cell = papers.Cell("", "", "rsd-s", {"tree_size": 3}, {"temperature": 0.0})
    found = papers.measure(setting, cell, tokens=9, timed=1, steps=True)
    methods = [("rsd-s", "rejection"), ("rsd-s", "held"), ("rsd-s", "traversal")]  # held traversal is refused
    assert asked == [*methods, ("rsd-s", "rejection")], "the last one for the prompts alone"
    assert found["tokens"] == {"own": 3, "held": 1, "traversal": 3}
    assert found["standard_error"] == {"own": 0, "held": 0, "traversal": 0}
    assert found["mbsu"] == 1  # 3 / (1 + 2): the draft is as large as the target
    assert (found["nodes"], found["levels"]) == (3, 2)
    assert found["drafted"] == found["accepted"] == [2] * 6  # three steps of each text
    assert found["tokens_per_second"] > 0


@pytest.mark.slow
def test_what_is_measured_is_kept_when_the_script_is_stopped(tmp_path, monkeypatch, capsys):
    """On a busy machine, too, where --timed 0 gives tokens per forward without times."""
    papers, left = script("papers"), [2]
    measure, path = papers.measure, tmp_path / "new" / "papers.json"

    def stopped(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(papers, "measure", stopped)
    papers.main(["dyspec", "rsd-2", "--prompts", "2", "--tokens", "3", "--timed", "0", "--json", str(path)])
    written = json.loads(path.read_text())
    assert [row["label"] for row in written["dyspec"]] == ["threshold 0.1", "threshold 0.03"]
    assert all(sum(row["accepted"]) <= sum(row["drafted"]) for row in written["dyspec"])
    assert {row["tokens_per_second"] for row in written["dyspec"]} == {None}
    assert "rsd-2" not in written
    printed = capsys.readouterr().out
    assert [line.split()[-1] for line in printed.splitlines() if "threshold 0.03" in line] == ["-"]
    assert "stopped before the end" in printed


def row(group, label, method="sequoia", **tokens):
    errors = dict.fromkeys(tokens, 0.125)
    return {"group": group, "label": label, "method": method, "nodes": 3, "levels": 2, "temperature": 0.6} | {
        "tokens": tokens, "standard_error": errors, "mbsu": 1.5, "tokens_per_second": 50.0, "drafted": [3, 1],
    }  # fmt: skip


def test_a_table_of_what_was_measured_before(tmp_path, capsys):
    """A winner has a star where it is above all others of its group by two errors, 2 sqrt(2) / 8 = 0.354."""
    rows = [row("2 levels", "SD", own=2.0, held=2.0), row("2 levels", "RSD-C [2, 1]", own=1.625, held=2.34)]
    rows += [row("3 levels", "SpecTr (2, 3)", own=1.0)]
    (tmp_path / "papers.json").write_text(json.dumps({"environment": {}, "rsd-1": rows}))
    script("papers").main(["--results", str(tmp_path / "papers.json")])
    said = capsys.readouterr().out.splitlines()
    name, heads, *lines = (re.split(r"\s{2,}", line.strip()) for line in said if line)
    assert name == ["rsd-1"]
    assert heads == [
        "group",
        "label",
        "nodes",
        "levels",
        "own",
        "held",
        "traversal",
        "held traversal",
        "MBSU",
        "tokens/s",
    ]
    assert lines[0] == ["2 levels", "SD", "3", "2", "2.00 ± 0.12*", "2.00 ± 0.12", "-", "-", "1.50", "50"]
    assert lines[1] == ["2 levels", "RSD-C [2, 1]", "3", "2", "1.62 ± 0.12", "2.34 ± 0.12", "-", "-", "1.50", "50"]
    assert lines[2][:5] == ["3 levels", "SpecTr (2, 3)", "3", "2", "1.00 ± 0.12"], "nothing to be compared with"


def test_the_book_has_a_file_and_a_command_for_each_line_or_says_why_not():
    """Its commands are of parts that there are, and its files have them; at most ten lines are without a result."""
    book, papers = script("book"), script("papers")
    missing = [line for line in book.LINES if line.ours is None]
    assert len(missing) <= 10
    assert all(len(line.reason.split()) > 3 and not line.source for line in missing)
    for line, cells in zip(book.LINES, book.rows(), strict=True):
        if line.ours is not None:
            name, found = book.found_in(line.source)
            script_name, *part = found["command"].removeprefix("python bench/research/").split()
            assert (book.RESULTS / name).exists()
            assert (BENCH / "research" / script_name).exists()
            runs = {*papers.PARTS, *papers.TABLES}
            assert part[:1] == ([line.source] if line.source in runs else []), line.place
            assert "nan" not in cells[3]
    named = " ".join(f"{line.source} {line.reason}" for line in book.LINES)
    assert [part for part in papers.PARTS if part not in named] == [], "parts that no line shows"
    assert len({(line.paper, line.place) for line in book.LINES}) == len(book.LINES)


@pytest.mark.parametrize(("effects", "verdict"), [
    ([(1, 0.4), (2, 0)], "shown"),
    ([(1, 0.6), (-1, 0.6)], "not shown"),
    ([(-1, 0.4), (1, 0.6)], "contradicted"),
    ([(1, 0.4), (1, 0.6)], "in 1 of 2"),
    ([(1, 0.4), (-1, 0.4), (0, 0)], "in 1 of 3, against it in 1"),
])  # fmt: skip
def test_an_effect_is_shown_by_what_is_above_two_errors(effects, verdict):
    assert script("book_effects").verdict(effects) == verdict


def test_the_constants_of_sequoia_and_what_they_imply():
    """Table 1, C4 at T = 0: 5.08 tokens at 4.04 times the speed leave 1.257 tokens' time, 10 levels take 0.207."""
    sequoia = script("sequoia")
    (nodes, levels), speedup, tokens = sequoia.TABLE_1["C4, T = 0"]
    assert (nodes, round(tokens / speedup - levels * sequoia.DRAFT_MS / sequoia.TARGET_MS, 3)) == (128, 1.051)
    assert sequoia.sequences([0.5, 0.4], 3).depth == 1  # 1.9 tokens, where a chain of two has 1.75
    assert sequoia.sequences([0.9, 0.01], 5).depth == 4
    assert sequoia.falling(torch.tensor([0.1, 0.5])) == pytest.approx([0.5, 0.1])


def test_two_children_of_a_bernoulli_law_by_hand():
    """P = (0.3, 0.7), Q = (0.7, 0.3): the optimum misses 0.49 - 0.3, and rounds leave F(1.4) = 0.7 - 1.4 * 0.3."""
    rows = script("rsd").bernoulli(None)["rows"]
    row = next(row for row in rows if (row["p"], row["q"]) == (0.3, 0.7))
    assert (row["optimal"], row["multi-round"], row["recursive"]) == (0.81, 0.72, 1.0)
    assert all(row["multi-round"] <= row["K-SEQ"] + 1e-3 <= row["optimal"] + 2e-3 for row in rows)


def test_a_prompt_finds_what_its_file_has_behind_it(monkeypatch):
    """The indentation that a method lost as a prompt is lost behind it, too."""
    rsd = script("rsd")
    text = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    monkeypatch.setattr(rsd, "read_corpus", lambda: [SimpleNamespace(text=text, held_out=True)])
    found = rsd.continuations(["def f(self):", "def h():"])
    assert found == ["\n    return 1\n\ndef g(self):\n    return 2\n", None]


def test_a_difference_between_two_ways_is_of_the_same_prompts():
    """One token a step more after each prompt: the prompts' own difference does not count."""
    found = script("papers_setting").difference(stats([12, 4], [3, 2]), stats([9, 2], [3, 2]))
    assert found == pytest.approx([1, 0])


def test_a_lemma_with_a_fixed_parameter_is_a_bound_and_its_best_parameter_is_the_libraries():
    ersd, law = script("ersd"), [0.5, 0.25, 0.15, 0.1]
    for size in (3, 9, 30):
        best = ersd.expected_tokens(ersd.greedy_tree(law, size), law)
        each = [ersd.fixed(law, size, parts) for parts in range(1, 200)]
        assert best <= ersd.tree_bounds(law, size).merged == pytest.approx(min(each), rel=1e-3)


@pytest.mark.slow
def test_every_part_runs_in_miniature_and_takes_its_place_in_the_file(tmp_path):
    papers, path = script("papers"), tmp_path / "papers.json"
    path.write_text(json.dumps({"environment": {}, "rsd-1": []}))
    papers.main([*papers.PARTS, "--miniature", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written.keys() == {"environment", "rsd-1", *papers.PARTS}
    assert all(written[name]["rows"] and written[name]["seconds"] >= 0 for name in papers.PARTS)
