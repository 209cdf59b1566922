"""What the figures of the theory show, by cases that a person can check, and the command itself."""

import json
import math

import pytest
import torch
from bench_scripts import script

from heavypath.speculative.trees.tree import TokenTree

theory, figures, races = script("theory"), script("theory_figures"), script("races")
TARGET, DRAFT = [0.05, 0.5, 0.15, 0.3], [0.4, 0.25, 0.3, 0.05]
DRAWS = 40_000
MARGIN = 5.1 * 0.5 / DRAWS**0.5  # a mean of DRAWS values in [0, 1] is further off less than once in a million
HALVES = [0.5, 0.25]
COMMAND = ["--prompts=2", "--new-tokens=3", "--draws=1", "--races=16", "--points=2", "--nodes=8", "--decoded-nodes=2"]


def laws(*pairs):
    return theory.Laws(*(torch.tensor(each, dtype=torch.float64) for each in zip(*pairs, strict=True)))


def test_places_of_races_are_counted():
    places = theory.race_places(laws(*[(TARGET, DRAFT)] * DRAWS), draws=1, seed=2)
    assert places.sum(1).tolist() == [1] * DRAWS
    mean = places.mean(0)
    assert float(mean[0]) == pytest.approx(
        float(races.race_acceptance(*map(torch.tensor, (TARGET, DRAFT)))), abs=MARGIN
    )
    # Of two tokens, the target's is the first or the second: together 0.5 + 0.2 of the time.
    two = theory.race_places(laws(*[([0.5, 0.5], [0.8, 0.2])] * DRAWS), draws=1, seed=3).mean(0)
    assert two.tolist() == pytest.approx([0.7, 0.3], abs=MARGIN)


def test_shapes_by_hand():
    shapes = theory.growth(HALVES, [2, 4, 8])
    # 0.5; then 0.25 below it and beside it; then 0.125 three times, below 0.25 or beside what is below 0.5; 0.0625.
    assert shapes["best tree"] == {2: 1.5, 4: 2.0, 8: 2.4375}
    assert shapes["chain"] == {2: 1.5, 4: 1.875, 8: 1 + sum(0.5**depth for depth in range(1, 8))}
    assert shapes["binary"] == {3: 1.75, 7: 1 + 0.75 + 0.75**2}
    assert shapes["4-ary"] == {5: 1.75}  # children 3 and 4 are never accepted
    # Two sequences of three nodes: 1 + 0.75 (1 + 0.5 + 0.25).
    assert shapes["k sequences"][8] == 1 + 0.75 * 1.75
    assert len(theory.best_sequences(HALVES, 8)) == 7
    assert shapes["batch"] == {2: 1.5}  # acceptance is known of two children, and size 4 has three
    # Two tokens, then three children, of which the third is never accepted: 1 + 0.5 + 0.25 (1 + 0.5 + 0.25).
    assert shapes["<1, 1, 3, 1, ...>"] == {8: 1 + 0.5 + 0.25 * 1.75}
    assert theory.marginals({2: 1.5, 4: 2.0, 16: 3.0}) == {4: 0.5, 16: 0.5}  # one doubling, and two
    assert theory.growth([0.5, 0.25, 0.1], [2, 4])["batch"] == {2: 1.5, 4: pytest.approx(1.85)}


def test_sequences_saturate_and_trees_do_not():
    law, sizes = [0.6 * 0.4**child for child in range(30)], [64, 128, 256, 512]
    shapes, limits = theory.growth(law, [16, *sizes]), theory.limits(law, 31, sizes)
    steps = [shapes["best tree"][2 * size] - shapes["best tree"][size] for size in sizes[:-1]]
    assert steps == pytest.approx([limits["slope"][128] - limits["slope"][64]] * 3, rel=0.05)
    for name, cap in theory.caps(law).items():
        assert max(shapes[name].values()) < cap + 1e-9, name
        assert theory.marginals(shapes[name]).get(512, 0) < 0.05, name
    for name in ("paper", "leaves", "merged", "renewal", "moments"):
        assert all(limits[name][size] > shapes["best tree"][size] for size in sizes), name


def test_acceptance_by_draft_probability_by_hand():
    low, high = theory.by_draft_probability(laws(([0.6, 0.4], [0.3, 0.7]), ([0.1, 0.9], [0.4, 0.6])), 2)
    # Below a half are 0.3, always accepted, and 0.4, accepted a quarter of the time; above, 0.7 at 4/7 and 0.6.
    found = (low["draft"], low["acceptance"], low["low"], low["high"], low["share"])
    assert found == pytest.approx(((0.3 * 0.3 + 0.4 * 0.4) / 0.7, (0.3 + 0.1) / 0.7, 0.25, 1, 0.35))
    assert (high["acceptance"], high["low"], high["high"]) == pytest.approx(((0.4 + 0.6) / 1.3, 4 / 7, 1))


def test_blocks_by_hand():
    assert theory.tree_blocks(TokenTree.chain(63)) == {"insertion": 3, "depth_first": 3, "heavy_path": 3}
    assert [figures.prefix_blocks(*shape) for shape in ((32, 32), (33, 65), (64, 0))] == [1, 6, 0]
    # Two chains of 63 that grow in turn: every block down to the diagonal. One after the other, the second's rows see
    # the root's block and their own.
    twins = TokenTree([-1, 0, 0, *range(1, 125)])
    assert theory.tree_blocks(twins) == {"insertion": 10, "depth_first": 8, "heavy_path": 8}


def test_entropies_by_hand():
    result = theory.entropies(laws(([0.5, 0.5], [0.8, 0.2]), ([0.5, 0.5], [0.5, 0.5])), 2, draws=DRAWS, seed=0)
    assert result["divergence"] == pytest.approx([0.5 * math.log2(0.5 / 0.8) + 0.5 * math.log2(0.5 / 0.2), 0])
    place = -0.7 * math.log2(0.7) - 0.3 * math.log2(0.3)
    assert result["place"] == pytest.approx([place, 0], abs=0.02)
    assert result["index"][1] == pytest.approx(0)
    assert result["divergence"][0] < result["index"][0] < result["finer"][0] < result["upper"][0]


def test_the_command_prints_its_tables(tmp_path, capsys):
    theory.main([*COMMAND, "--json", str(tmp_path / "theory.json")])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "theory.json").read_text())
    assert f"{written['growth']['shapes']['best tree']['8']:.3g}" in printed
    assert f"{written['races']['1.0']['mean']['race']:.3g}" in printed
    assert [row["nodes"] for row in written["decoding"]["chain"]] == [2]
    assert written["environment"]["prompts"] == 2


@pytest.mark.slow
def test_the_command_draws_its_figures(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    theory.main([*COMMAND, "--plot", str(tmp_path)])
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 6
    for path in pictures:
        picture = image.imread(path)[..., :3]
        assert (picture.max(-1) - picture.min(-1) > 0.3).mean() > 0.0005, path.name  # colour


@pytest.mark.parametrize("wrong", ["--prompts=1", "--temperatures=0", "--plot=pyproject.toml"])
def test_what_cannot_be_shown_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        theory.main([wrong])
    assert "error: " in capsys.readouterr().err
