"""The papers' tables: their cells, and one of them by hand."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.demo import DemoPair

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def papers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        yield importlib.import_module("papers")


@pytest.fixture(scope="module")
def shown(papers):
    return sys.modules["papers_shown"]


def shape_of(cell):
    """Nodes and levels of a cell's tree."""
    options = cell.options
    if "tree_size" in options:
        return options["tree_size"], options["max_depth"]
    tree = TokenTree.from_branching(options["branching"]) if "branching" in options else options["tree"]
    return len(tree), tree.depth


def test_a_budgets_trees_have_at_most_so_many_nodes_below_the_root(papers):
    cells = [*papers.rsd_2(0.6)]
    assert all(shape_of(cell)[0] - 1 <= int(cell.group.split()[0]) for cell in cells)
    assert len(cells) == 5 * 8


def test_drafts_of_one_length_have_so_many_levels(papers):
    cells = [*papers.rsd_1(0.6)]
    assert all(shape_of(cell)[1] == int(cell.group.split()[0]) or cell.label == "RSD-C [2, 1]" for cell in cells)
    labels = {(cell.group, cell.label) for cell in cells}
    assert ("4 levels", "SpecTr (7, 4)") in labels
    assert ("2 levels", "RSD-C [2, 1]") in labels
    assert ("5 levels", "RSD-C [12, 1, 1, 1, 1]") in labels


@pytest.mark.parametrize("table", ["rsd_1", "rsd_2", "robustness", "specinfer", "dyspec", "large"])
def test_the_decoder_takes_every_cell(papers, table):
    pair = tiny_llama(1), tiny_llama(2)
    for cell in getattr(papers, table)(0.6):
        SpeculativeDecoder(*pair, cell.method, **cell.options)


@pytest.mark.parametrize("table", ["dyspec", "large"])
def test_dyspec_stands_there_as_published_and_as_it_is_here(papers, table):
    """The same trees by the paper's values, the draft's probabilities, and by the decoder's default."""
    found = {}
    for cell in getattr(papers, table)(0.6):
        if cell.method == "dyspec":
            options = dict(cell.options)
            values = options.pop("confidence", "default")
            name = cell.group if table == "dyspec" else cell.label
            found.setdefault((name, values), []).append((options, dict(cell.sampling)))
    assert [*found] == [("dyspec as published", "draft"), ("dyspec, measured confidence", "default")]
    assert len({str(cells) for cells in found.values()}) == 1


def test_a_cells_figures_by_hand(papers):
    """The target drafts for itself: every token is accepted, and a chain of two gives three a step."""
    target = tiny_llama(1)
    cell = papers.Cell("", "", "chain", {"tree": TokenTree.chain(2)}, {"temperature": 0.0})
    texts = papers.batch_of([target.dummy_inputs["input_ids"][:1] % 7] * 2)
    found = papers.measure(DemoPair(target, target, None), cell, texts, tokens=9, timed=1, seed=0)
    assert [*found.efficiency] == ["own", "held", "traversal", "held_traversal"]
    assert all(each == (3, 0) for each in found.efficiency.values())
    assert found.mbsu == 1  # 3 / (1 + 2): the draft is as large as the target
    assert (found.nodes, found.levels) == (3, 2)
    assert found.drafted == found.accepted == [2] * 6  # three steps of each text
    assert found.tokens_per_second > 0


def test_a_busy_machine_gives_tokens_per_forward_without_times(papers, tmp_path, monkeypatch, capsys):
    cell = papers.Cell("", "a chain", "chain", {"tree": TokenTree.chain(2)}, {"temperature": 0.6})
    monkeypatch.setitem(papers.TABLES, "rsd-1", lambda temperature: iter([cell]))
    options = ["--prompts", "2", "--tokens", "4", "--timed", "0"]
    papers.main(["rsd-1", *options, "--json", str(tmp_path / "papers.json")])
    (row,) = json.loads((tmp_path / "papers.json").read_text())["rsd-1"]
    assert row["tokens_per_second"] is None
    assert row["tokens"]["own"] > 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "a chain" in line]
    assert line.split()[-1] == "-"


def test_each_verifier_has_its_own_column(papers, monkeypatch):
    """One that never accepts gives a token a step, and the others three."""
    asked = []

    def decoder(target, draft, method, *, verifier, **options):
        asked.append((method, verifier))
        if verifier == "held":
            return SpeculativeDecoder(target, draft, "autoregressive")
        return SpeculativeDecoder(target, draft, "chain", **options)

    monkeypatch.setattr(papers, "SpeculativeDecoder", decoder)
    target = tiny_llama(1)
    cell = papers.Cell("", "", "rsd-s", {"tree": TokenTree.chain(2)}, {"temperature": 0.0})
    texts = papers.batch_of([target.dummy_inputs["input_ids"][:1] % 7])
    found = papers.measure(DemoPair(target, target, None), cell, texts, tokens=9, timed=1, seed=0)
    assert asked == [("rsd-s", "rejection"), ("rsd-s", "held"), ("rsd-s", "traversal")]  # held traversal is refused
    assert {name: each.value for name, each in found.efficiency.items()} == {"own": 3, "held": 1, "traversal": 3}


def test_the_script_writes_a_table_and_draws_it(papers, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    options = {"tree_size": 8, "threshold": 0.01}
    cells = [papers.Cell("small", f"threshold {each}", "dyspec", options, {"temperature": 0.6}) for each in (0.01, 0.1)]
    monkeypatch.setitem(papers.TABLES, "dyspec", lambda temperature: iter(cells))
    path = tmp_path / "new" / "papers.json"
    papers.main(["dyspec", "--miniature", "--json", str(path), "--plot", str(tmp_path)])
    rows = json.loads(path.read_text())["dyspec"]
    assert [row["label"] for row in rows] == ["threshold 0.01", "threshold 0.1"]
    assert all(sum(row["accepted"]) <= sum(row["drafted"]) for row in rows)
    assert all([*row["tokens"]] == ["own", "held", "traversal"] for row in rows)
    assert "threshold 0.01" in capsys.readouterr().out
    assert (tmp_path / "papers-dyspec.png").exists()


@pytest.mark.parametrize("wrong", [["rsd-3"], ["--prompts", "1"], ["--tokens", "0"], ["--timed", "-1"]])
def test_what_cannot_be_measured_is_refused(papers, wrong, capsys):
    with pytest.raises(SystemExit):
        papers.main(wrong)
    assert "error: " in capsys.readouterr().err


def test_what_is_measured_is_kept_when_the_script_is_stopped(papers, tmp_path, monkeypatch, capsys):
    measure, left = papers.measure, [2]

    def stopped(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(papers, "measure", stopped)
    papers.main(["rsd-1", "rsd-2", "--miniature", "--json", str(tmp_path / "papers.json")])
    written = json.loads((tmp_path / "papers.json").read_text())
    assert [row["label"] for row in written["rsd-1"]] == ["SD", "SpecTr (2, 2)"]
    assert "rsd-2" not in written
    printed = capsys.readouterr().out
    assert "SpecTr (2, 2)" in printed
    assert "stopped before the end" in printed


def row(group, label, method="sequoia", **tokens):
    errors = dict.fromkeys(tokens, 0.125)
    return {"group": group, "label": label, "method": method, "nodes": 3, "levels": 2, "temperature": 0.6} | {
        "tokens": tokens, "standard_error": errors, "mbsu": 1.5, "tokens_per_second": 50.0, "drafted": [3, 1],
    }  # fmt: skip


def test_a_table_in_markdown(shown, tmp_path, capsys):
    """A winner is bold where it is above all others of its group by two errors, 2 sqrt(2) / 8 = 0.354."""
    rows = [row("2 levels", "SD", own=2.0, held=2.0), row("2 levels", "RSD-C [2, 1]", own=1.625, held=2.34)]
    rows.append(row("3 levels", "SpecTr (2, 3)", own=1.0))
    (tmp_path / "papers.json").write_text(json.dumps({"environment": {}, "rsd-1": rows}))
    shown.main([str(tmp_path / "papers.json")])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines[0] == ["", "", "nodes", "levels", "own", "held", "traversal", "held traversal", "MBSU", "tokens/s"]
    assert lines[2] == ["2 levels", "SD", "3", "2", "**2.00 ± 0.12**", "2.00 ± 0.12", "-", "-", "1.50", "50"]
    assert lines[3] == ["", "RSD-C [2, 1]", "3", "2", "1.62 ± 0.12", "2.34 ± 0.12", "-", "-", "1.50", "50"]
    assert lines[4][:5] == ["3 levels", "SpecTr (2, 3)", "3", "2", "1.00 ± 0.12"], "nothing to be compared with"


def test_no_winner_is_bold_whose_lead_over_any_other_is_within_the_noise(shown):
    first, second, third = (row("", each, own=value) for each, value in (("a", 3.0), ("b", 2.5), ("c", 2.4)))
    assert shown.is_more(first, second, "own")
    assert not shown.is_more(second, third, "own")
    assert shown.best_of([first, second, third], "own") is first
    third["standard_error"]["own"] = 0.5  # it may well be the best one
    assert shown.best_of([first, second, third], "own") is None
    assert shown.best_of([first, row("", "d", own=3.0)], "own") is None, "a tie"
    assert shown.best_of([first, row("", "d", held=1.0)], "own") is None, "the only one"


def test_the_readmes_tables_are_those_of_the_file_of_results(shown, capsys):
    """Figure by figure, bold ones included."""
    shown.main([str(BENCH / "results" / "papers-cpu.json")])

    def lines(text):
        split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
        return [cells for cells in split if set("".join(cells)) - set("-: ")]

    readme = (BENCH / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## The papers' comparisons\n")[1].split("\n## ")[0]
    assert lines(section) == lines(capsys.readouterr().out)


def test_every_table_that_has_a_figure_is_drawn_from_its_first_row_on(papers, shown, tmp_path):
    pytest.importorskip("matplotlib")
    results = {
        name: [row(cell.group, cell.label, cell.method, own=2.0, held_traversal=2.5) | dict(cell.sampling)]
        for name in shown.FIGURES
        for cell in list(papers.TABLES[name](0.6))[:1]
    }
    shown.draw(results, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"papers-{name}.png" for name in shown.FIGURES}
