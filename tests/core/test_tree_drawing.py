"""Drawings of trees are XML that shows each node once, where and as large as it should be."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from tree_cases import trees

from heavypath.speculative import TokenTree
from heavypath.speculative.trees.drawing import tree_svg
from heavypath.speculative.trees.planning import greedy_tree, node_probabilities

SVG = "{http://www.w3.org/2000/svg}"
ACCEPTANCE = [0.6, 0.15, 0.05, 0.02]


def drawn(svg: str) -> tuple[ElementTree.Element, list[tuple[float, float, float]]]:
    """The parsed drawing, and (x, y, radius) of its circles."""
    root = ElementTree.fromstring(svg)
    circles = root.iter(f"{SVG}circle")
    return root, [(float(one.get("cx", "")), float(one.get("cy", "")), float(one.get("r", ""))) for one in circles]


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


PLANNED = {f"planned, {size}": greedy_tree(ACCEPTANCE, size) for size in (1, 2, 8, 64, 256)}
CASES = [(tree, False, False) for tree in [*trees(60).values(), *PLANNED.values()]]
CASES += [(tree, labelled, True) for tree in PLANNED.values() for labelled in (False, True)]


@pytest.mark.parametrize(("tree", "is_labelled", "is_weighed"), CASES)
def test_every_node_is_drawn_once_on_its_level_and_overlaps_none(tree, is_labelled, is_weighed):
    labels = ["token" * (node % 4) for node in range(len(tree))] if is_labelled else None
    root, circles = drawn(tree_svg(tree, labels, node_probabilities(tree, ACCEPTANCE) if is_weighed else None))
    assert len(circles) == len(tree)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    levels = sorted({x for x, _, _ in circles})
    assert [levels.index(x) for x, _, _ in circles] == tree.depths.tolist()
    for level in levels:
        column = sorted((y, r, bool(labels and labels[node])) for node, (x, y, r) in enumerate(circles) if x == level)
        for (y_above, r_above, _), (y, r, labelled) in pairwise(column):
            assert y - r - (y_above + r_above) > (3.9 + 10 if labelled else 3.9)  # a line of text is 10 high
    for x, y, r in circles:
        assert r <= x <= width - r
        assert r <= y <= height - r


def test_siblings_are_in_draw_order_around_their_parent():
    tree = TokenTree([-1, 0, 0, 0, 2, 2], [0, 2, 0, 1, 1, 0])
    _, circles = drawn(tree_svg(tree))
    ys = [y for _, y, _ in circles]
    assert ys[2] < ys[3] < ys[1]
    assert ys[5] < ys[4]
    assert ys[0] == pytest.approx((ys[1] + ys[2]) / 2, abs=0.01)
    assert ys[2] == pytest.approx((ys[4] + ys[5]) / 2, abs=0.01)


def test_area_is_probability_and_the_caption_their_sum():
    tree = TokenTree([-1, 0, 0, 1])
    root, circles = drawn(tree_svg(tree, probabilities=[1.0, 0.5, 0.1, 0.25]))
    areas = [math.pi * r**2 for _, _, r in circles]
    assert [area / areas[0] for area in areas] == pytest.approx([1, 0.5, 0.1, 0.25], rel=0.01)
    assert "1.85 tokens expected a step · 4 nodes, depth 2" in words(root)
    assert len({one.get("fill") for one in root.iter(f"{SVG}circle")}) == 4
    said = [one.findtext(f"{SVG}title") for one in root.iter(f"{SVG}circle")]
    assert said[2] == "node 2, rank 1, accepted with probability 0.1"
    assert "4 nodes, depth 2" in words(drawn(tree_svg(tree))[0])


def test_what_has_no_size_takes_no_place():
    """A probability too small for an area is drawn all the same, and an empty label not at all."""
    _, circles = drawn(tree_svg(TokenTree.chain(2), probabilities=torch.tensor([1.0, 1e-9, 0.0])))
    assert circles[1][2] == circles[2][2] > 1
    assert tree_svg(TokenTree.chain(2), ["", "", ""]) == tree_svg(TokenTree.chain(2))


def test_text_is_escaped():
    labels = ['<a href="x">', "&amp; ' \"", "\x00\x1b\n\ud800", "]]> <!-- 木 🌳"]
    root, circles = drawn(tree_svg(TokenTree.chain(3), labels))
    assert len(circles) == 4
    for label in (labels[0], labels[1], r"\x00\x1b\n\ud…"):
        assert label in words(root)
    said = [one.findtext(f"{SVG}title") or "" for one in root.iter(f"{SVG}circle")]
    assert said[2].endswith(r"\x00\x1b\n\ud800")
    assert said[3].endswith(labels[3])


@pytest.mark.parametrize(("given", "message"), [
    ({"labels": ["a"]}, "labels must hold one for each of 3 nodes, got 1"),
    ({"probabilities": [1.0, 0.5]}, "probabilities must hold one for each of 3 nodes, got 2"),
    ({"probabilities": [1.0, 0.5, float("nan")]}, r"probabilities must lie in \[0, 1\]"),
    ({"probabilities": [1.0, 1.5, 0.5]}, r"probabilities must lie in \[0, 1\]"),
])  # fmt: skip
def test_bad_drawings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        tree_svg(TokenTree.chain(2), **given)
