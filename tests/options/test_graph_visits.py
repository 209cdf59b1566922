"""Costs of steps that are CUDA graphs, which do not tell their phases."""

import time
from types import SimpleNamespace

import pytest
import torch
from played_steps import Tape
from tiny_models import small_llama

from heavypath.speculative.costs.timing import Timed
from heavypath.speculative.trees.tree import ROOT
from heavypath.speculative.visits import CountedSteps, GraphVisits

PROMPTS = [torch.tensor([3, 1, 4, 1])]


class Fixed(GraphVisits):
    """A step takes 1 second, 0.25 for each level, and 0.125 for each node; to capture it takes 100 more."""

    def __init__(self, *given):
        super().__init__(*given)
        self._made = SimpleNamespace(tree=ROOT, runner=SimpleNamespace(run=lambda plan, workspace: None))
        CountedSteps(self._made)
        self.decoded = []

    def _decoder(self, size):
        return self._made

    def _decoded(self, decoder, round_, tokens):
        tree, runs = decoder.tree, 5  # one of them behind the end of the text
        for _ in range(runs):
            decoder.runner.run(None, None)
        seconds = runs * (1 + tree.depth / 4 + len(tree) / 8) + 100 * (tree not in self.decoded)
        self.decoded.append(tree)
        return SimpleNamespace(seconds={"prefill": 50.0, "host": 3.0, "step": seconds})


@pytest.mark.parametrize("levels", [1, 3, 5, 8])
def test_a_level_costs_what_deeper_trees_of_as_many_nodes_take_longer(levels):
    visits = Fixed(None, None, PROMPTS, levels)
    level = 0.25 if levels >= 4 else 0.25 + 0.125  # where trees of no level have fewer nodes
    for round_ in range(2):
        assert visits(1, round_) == Timed(1 + 1 / 8)
        for size in (2, 9):
            depth = visits._tree(size).depth
            assert visits(size, round_) == pytest.approx((1 + size / 8 + depth * (0.25 - level), level))
    trees = {*visits.decoded}
    assert len(visits.decoded) > 2 * len(trees), "each is decoded once more at first"


@pytest.mark.slow
def test_one_decoder_visits_all_trees_by_graphs(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    monkeypatch.setattr("heavypath.speculative.visits._clock_of_gpu", time.perf_counter)
    visits = GraphVisits(small_llama(1), small_llama(2), PROMPTS, 1)
    visits.graphs = True
    monkeypatch.setattr(type(visits.target), "device", SimpleNamespace(type="cuda"))
    for size in (1, 3):
        timed = visits(size, 0)
        assert timed.step != 0
        assert (timed.level is None) == (size == 1)
    assert Tape.replays > 10
    assert len(visits._decoders) == 1
