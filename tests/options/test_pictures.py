"""The pictures of docs/: they show what the package computes."""

import shutil
import xml.etree.ElementTree as ElementTree
from functools import cache

import pytest
from bench_scripts import script

from heavypath.speculative.trees.tree import TokenTree

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


def texts_of(draw, path):
    """The lines of text in a drawing."""
    draw(path)
    assert len(path.read_text()) < 80_000
    return ["".join(text.itertext()) for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")]


def test_the_picture_of_orders_counts_the_blocks_of_one_tree(tmp_path):
    texts = texts_of(script("pictures").draw_order, tmp_path / "order.svg")
    tree = script("common").random_tree(96)
    heavy = tree.reordered("heavy_path")[0]
    assert f"{tree.occupied_blocks(8)} of 78 blocks" in texts
    assert f"{heavy.occupied_blocks(8)} of 78 blocks" in texts


@pytest.mark.slow
def test_the_picture_of_ranks_shows_the_trees_that_are_simulated(tmp_path, monkeypatch):
    pictures = script("pictures")
    monkeypatch.setattr(pictures, "simulated", cache(pictures.simulated))
    monkeypatch.setattr(pictures, "RANKS", (1, 8))  # two of seven, which take a second each
    texts = texts_of(pictures.draw_ranks, tmp_path / "ranks.svg")
    for draft in pictures.DRAFTS:
        assert f"drafted for by {draft}" in texts
        gains = [pictures.simulated(draft, count).best.gain for count in pictures.RANKS]
        assert all(0 < gain < 5.5 for gain in gains), "below the words at the top"
        assert gains[0] > 1.5 * gains[1], "trees bring most where weights are read"
    assert str(len(pictures.simulated("llama-2-7b", 8).best.tree)) in texts


def test_a_heavy_path_by_hand():
    """Node 2 has the larger subtree, though node 1 comes first."""
    assert script("pictures").heavy_path(TokenTree([-1, 0, 0, 2, 3])) == [0, 2, 3, 4]


@pytest.mark.slow
def test_the_picture_of_a_step_has_its_tokens(tmp_path, monkeypatch):
    pictures = script("pictures")
    step = next(pictures.steps_worth_showing())
    assert step.fates[step.path[1]] == "accepted"
    monkeypatch.setattr(pictures, "steps_worth_showing", lambda: iter([step]))
    texts = texts_of(pictures.draw_step, tmp_path / "step.svg")
    for token in [*step.tokens[1:], step.next_token]:
        assert pictures.shown(token) in texts
    assert f"{len(step.path)} tokens from one forward pass. The last is the next root." in texts


def test_without_chromium_the_command_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="trace: the picture of a trace needs Chromium"):
        script("pictures").main(["--plot", str(tmp_path), "--only", "trace"])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        script("pictures").main(["--plot", str(tmp_path / "file")])
