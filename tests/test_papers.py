"""The papers' tables: their cells, and one of them by hand."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from test_decoder import tiny_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.demo import DemoPair

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def papers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        yield importlib.import_module("papers")


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


def test_a_cells_figures_by_hand(papers):
    """The target drafts for itself: every token is accepted, and a chain of two gives three a step."""
    target = tiny_llama(1)
    cell = papers.Cell("", "", "chain", {"tree": TokenTree.chain(2)}, {"temperature": 0.0})
    prompts = [target.dummy_inputs["input_ids"][:1] % 7]
    found = papers.measure(DemoPair(target, target, None), cell, prompts, Namespace(tokens=9, seed=0))
    assert found.tokens == 3
    assert found.mbsu == 1  # 3 / (1 + 2): the draft is as large as the target
    assert (found.drafted, found.accepted) == ([2, 2, 2], [2, 2, 2])


def test_the_script_writes_a_table(papers, tmp_path, capsys):
    papers.main(["dyspec", "--miniature", "--json", str(tmp_path / "new" / "papers.json")])
    rows = json.loads((tmp_path / "new" / "papers.json").read_text())["dyspec"]
    assert len(rows) == len([*papers.dyspec(0.6)])
    assert all(sum(row["accepted"]) <= sum(row["drafted"]) for row in rows)
    assert "threshold 0.01" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        papers.main(["rsd-3"])
