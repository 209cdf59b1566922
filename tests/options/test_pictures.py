"""The pictures of the READMEs: they are drawings of their own, and show what the package computes."""

import shutil
import xml.etree.ElementTree as ElementTree
from functools import cache

import numpy as np
import pytest
import torch
from bench_scripts import script

from heavypath.speculative.trees.tree import TokenTree

SVG = "{http://www.w3.org/2000/svg}"


def drawn(module, path):
    """The size of the drawing, its lines of text, and its file."""
    module.draw(path)
    root = ElementTree.parse(path).getroot()
    size = float(root.get("width")), float(root.get("height"))
    return size, [text.text for text in root.iter(f"{SVG}text")], path.read_text()


def test_the_picture_of_orders_counts_the_blocks_of_one_tree(tmp_path):
    _, texts, file = drawn(script("picture_order"), tmp_path / "order.svg")
    tree = script("common").random_tree(96)
    heavy = tree.reordered("heavy_path")[0]
    assert f"{tree.occupied_blocks(8)} of 78 blocks" in texts
    assert f"{heavy.occupied_blocks(8)} of 78 blocks" in texts
    assert len(file) < 40_000
    assert "http" not in file.replace("http://www.w3.org/2000/svg", "")


def test_the_picture_of_ranks_shows_the_trees_that_are_simulated(tmp_path, monkeypatch):
    ranks = script("picture_ranks")
    monkeypatch.setattr(ranks, "simulated", cache(ranks.simulated))
    (width, height), texts, _ = drawn(ranks, tmp_path / "ranks.svg")
    for draft in ranks.DRAFTS:
        assert f"drafted for by {draft}" in texts
        gains = [ranks.simulated(draft, count).best.gain for count in ranks.RANKS]
        assert all(0 < ranks.height_of(gain) <= ranks.TOP + ranks.HEIGHT for gain in gains)
        assert gains[0] > 1.5 * gains[3], "trees bring most where weights are read"
    assert str(len(ranks.simulated("llama-2-7b", 8).best.tree)) in texts
    assert ranks.place_of(64) < width
    assert ranks.height_of(1) < height


def test_runs_and_heavy_paths_by_hand():
    order = script("picture_order")
    assert order.runs(torch.tensor([True, True, False, True])) == [(0, 2), (3, 4)]
    assert order.runs(torch.tensor([False, True])) == [(1, 2)]
    # Node 2 has the larger subtree, though node 1 comes first.
    assert order.heavy_path(TokenTree([-1, 0, 0, 2, 3])) == [0, 2, 3, 4]


def test_the_picture_of_a_step_has_its_tokens_and_keeps_within_its_cards(tmp_path, monkeypatch):
    picture = script("picture_step")
    step = next(picture.steps_worth_showing())
    assert step.fates[step.path[1]] == "accepted"
    monkeypatch.setattr(picture, "steps_worth_showing", lambda: iter([step]))
    size, texts, file = drawn(picture, tmp_path / "step.svg")
    for token in [*step.tokens[1:], step.next_token]:
        assert picture.shown(token) in texts
    assert f"{len(step.path)} tokens from one forward pass. The last is the next root." in texts
    for x, _, width in picture.places(step, with_next=True):
        assert x - width / 2 >= 15
        assert x + width / 2 <= picture.CARD_WIDTH - 15
    assert size == (picture.WIDTH, 3 * picture.MARGIN + 2 * picture.CARD_HEIGHT)
    assert len(file) < 40_000


def test_without_chromium_the_command_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="trace: the picture of a trace needs Chromium"):
        script("pictures").main(["--plot", str(tmp_path), "--only", "trace"])
    with pytest.raises(SystemExit):
        script("pictures").main(["--plot", str(tmp_path / "no-such-folder")])


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    reason="no Chromium on the path",
)
def test_the_page_of_a_trace_is_cropped_to_what_is_drawn(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    script("pictures").main(["--plot", str(tmp_path), "--only", "trace"])
    path = tmp_path / "pictures-trace.png"
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_size < 200_000
    with image.open(path) as picture:
        rows = np.asarray(picture.convert("L"))
    assert rows[len(rows) * 9 // 10 :].min() < 150  # the legend is there, at the end
    assert rows[-8:].min() > 200
