"""Trees as deep and wide as pay: by Sequoia's published acceptance, by a walk, and by what verifiers accept."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from profile_cases import REJECTION, constant_llama, counts, greedy_counts, profile_of, way_of
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import LOSSLESS_METHODS, METHODS, SpeculativeDecoder, TokenTree, expected_tokens, gains
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.gains import jobs_of, measure_gains
from heavypath.speculative.methods import LARGE
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import MethodGain, Profile
from heavypath.speculative.trees.tails import DEPTH
from heavypath.speculative.walking import NODES, Extent, as_measured, walk

# Chen et al. 2024, appendix E: Llama-3-70B-Instruct drafted for by Llama-3-8B-Instruct, CNN daily news.
PUBLISHED = [
    0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016, 0.0014,
    0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003,
    0.0002, 0.0004, 0.0001,
]  # fmt: skip
OPTIMUM = {64: 5.92, 128: 6.61, 256: 7.29, 768: 8.37}
PROMPTS = [torch.tensor([1, 2]), torch.tensor([0])]
P_LOGITS, Q_LOGITS = [1.0, 0.2, -0.5, 0.0], [0.3, 0.9, -0.2, -1.0]


@pytest.mark.parametrize("size", OPTIMUM)
def test_plans_by_the_published_acceptance_reach_the_optimum(size):
    """Of a profile that has counted it, and of a decoder that is given it."""
    entry = counts([[round(10_000 * rate) for rate in PUBLISHED]] * 9, reached=10_000)
    planned = profile_of(entry, step={1: 0.01, size: 0.01}, level=0.0).plan("sequoia", Filters(1.0)).plan
    assert len(planned.tree) == size
    assert planned.tree.depth > 8
    assert expected_tokens(planned.tree, PUBLISHED) == pytest.approx(OPTIMUM[size], abs=0.01)
    if size < 768:  # which takes a second
        given = METHODS["sequoia"].tree_of(size, acceptance=PUBLISHED)
        assert expected_tokens(given, PUBLISHED) == pytest.approx(OPTIMUM[size], abs=0.01)


def test_large_trees_of_a_size_are_deep_and_wide_and_small_ones_as_they_were():
    small, large = (METHODS["sequoia"].tree_of(size) for size in (LARGE, 256))
    assert (small.depth, int(small.ranks.max())) == (6, 7)
    assert (large.depth, len(large)) == (12, 256)
    assert int(large.ranks.max()) > 15


def test_levels_and_children_that_were_not_counted_follow_the_laws():
    entry = counts([[500, 100, 50], [400, 100, 50]])
    rates = entry.rates()
    assert rates.shape[0] == DEPTH
    assert (rates.diff(dim=1) <= 0).all()
    assert rates[2].tolist() == rates[-1].tolist(), "as all depths"
    assert float(rates[0, 3]) > 0
    few = counts([[500, 9, 0]], reached=1000).rates()
    assert float(few[0, 1]) == pytest.approx(float(few[0, 1:3].mean()), rel=1)


def test_a_walk_along_a_tree_counts_what_its_ranks_say():
    target = LlamaForward(constant_llama(P_LOGITS))
    draft, tree = as_draft(constant_llama(Q_LOGITS), target, None), TokenTree([-1, 0, 0, 1, 1, 3])
    extent = Extent(tokens=30, sequences=20, depth=tree.depth + 1, children=3, tree=tree)
    found = walk(target, draft, [torch.tensor([1, 2])], REJECTION, Filters(0.8), extent, seed=1)
    child = {(int(p), int(r)): node for node, (p, r) in enumerate(zip(tree.parents, tree.ranks, strict=True)) if node}
    accepted, reached = torch.zeros_like(found.accepted), torch.zeros_like(found.reached)
    for text in found.ranks[0].tolist():
        node = 0
        for rank in text:
            depth = int(tree.depths[node])
            reached[depth] += 1
            if rank >= 0:
                accepted[depth, rank] += 1
            node = child.get((node, rank), 0)
    assert torch.equal(accepted, found.accepted)
    assert torch.equal(reached, found.reached)
    entry = as_measured(REJECTION, Filters(0.8), found)
    entry.check()
    assert entry.counts.texts == found.ranks[0].tolist()
    assert entry.counts.tokens(tree) == pytest.approx(
        expected_tokens(tree, entry.rates()), abs=5 * entry.counts.tokens_error(tree)
    )


def test_a_profile_promises_what_greedy_decoding_brings():
    """Token by token: the ranks of a text tell each step of any tree."""
    target, draft = tiny_llama(1, vocab_size=12), tiny_llama(3, vocab_size=12, layers=1)
    forward, prompt = LlamaForward(target), torch.tensor([3, 1, 4])
    way, extent = way_of(METHODS["sequoia"], 0.0), Extent.of_trees(60, 1, None)
    counted = walk(forward, as_draft(draft, forward, target), [prompt], way, Filters(0.0), extent, seed=0)
    entry = as_measured(way, Filters(0.0), counted)
    for tree in (TokenTree.chain(3), TokenTree.k_ary(3, 2), TokenTree.independent(4, 1)):
        out = SpeculativeDecoder(target, draft, "top-k", tree=tree).generate(prompt[None], 60, temperature=0.0)
        steps, place = 0, 0
        child = {(int(p), int(r)): n for n, (p, r) in enumerate(zip(tree.parents, tree.ranks, strict=True)) if n}
        while place < 60:
            node, steps = 0, steps + 1
            while place < 60 and (node := child.get((node, entry.counts.texts[0][place]), 0)):
                place += 1
            place += 1
        assert out.stats.steps == steps


def gains_of(pair, profile, methods=LOSSLESS_METHODS, prompts=PROMPTS, positions=512, report=lambda line: None):
    jobs = [*jobs_of(*pair, profile, methods)]
    return measure_gains(jobs, prompts, positions=positions, until=math.inf, seed=2, report=report)


def test_the_gain_of_traversal_is_that_of_the_law(monkeypatch):
    """Of a chain it is block verification: node i is accepted with the chance w_i = min(1, w_{i-1} P / Q)."""
    p, q = (filtered_logprobs(torch.tensor([x]), Filters(1.0))[0].exp().tolist() for x in (P_LOGITS, Q_LOGITS))
    way = REJECTION._replace(verification="traversal")
    profile = replace(
        profile_of(counts([[600, 100]], way=way), step={1: 0.01, 4: 0.01}, level=0.0), verifier="traversal"
    )
    assert profile.plan("chain", Filters(1.0)).plan.tree == TokenTree.chain(3)
    exact = by_rejection = 0.0
    for drawn in product(range(4), repeat=3):
        weight, chance, drafted = 1.0, 1.0, np.prod([q[token] for token in drawn])
        for token in drawn:
            weight, chance = min(1.0, weight * p[token] / q[token]), chance * min(1.0, p[token] / q[token])
            exact, by_rejection = exact + drafted * weight, by_rejection + drafted * chance
    monkeypatch.setattr(gains, "ROUNDS_OF_GAINS", 4)
    (gain,) = gains_of((constant_llama(P_LOGITS), constant_llama(Q_LOGITS)), profile, ["chain"])
    assert exact / by_rejection > 1.03
    assert gain.error < 0.1
    assert gain.factor == pytest.approx(exact / by_rejection, abs=5 * gain.error)
    with_gain = replace(profile, gains=(gain,)).plan("chain", Filters(1.0))
    assert with_gain.plan.expected_tokens - 1 == pytest.approx(
        gain.factor * (profile.plan("chain", Filters(1.0)).plan.expected_tokens - 1)
    )


def test_gains_are_measured_within_the_positions_of_the_models(monkeypatch):
    """A tiny model has 64 positions: a prompt of 50 leaves 12 tokens before a step, and one of 62 none."""
    monkeypatch.setattr(gains, "ROUNDS_OF_GAINS", 1)
    way = REJECTION._replace(verification="traversal")
    counted = counts([[600, 100]], way=way)
    profile = replace(profile_of(counted, step={1: 0.01, 4: 0.01}, level=0.0), verifier="traversal")
    pair = tiny_llama(1, vocab_size=4), tiny_llama(3, vocab_size=4)
    assert len(gains_of(pair, profile, prompts=[torch.arange(50) % 4], positions=64)) > 0
    assert gains_of(pair, profile, prompts=[torch.arange(62) % 4], positions=64) == ()


def test_the_gain_of_a_grown_tree_counts_whole_steps_of_texts_as_long_as_those_counted():
    """Chains of three that are always accepted: four tokens a step, though a text of 30 ends within its eighth."""
    model, always = constant_llama(P_LOGITS), [[1000.0, 500.0, 300.0, 1000.0, 500.0], [0.0] * 5]
    entry = replace(counts([[1000, 0]]), moments=always, texts=["0 " * 29 + "0"])
    profile = profile_of(entry, step={1: 0.01, 4: 0.01}, level=0.0)
    (gain,) = gains_of((model, model), profile, ["dyspec"])
    assert (gain.nodes, gain.factor, gain.error) == (4, pytest.approx(1), pytest.approx(0, abs=1e-9))
    assert replace(profile, gains=(gain,)).plan("dyspec", Filters(1.0)).plan.expected_tokens == pytest.approx(4)


def test_a_greedy_text_is_decoded_once_for_a_gain(monkeypatch):
    """By dyspec for each of 17 prompts: 16 in the first visit, and one in the second, however large the error is."""
    monkeypatch.setattr(gains, "SURE", -1)
    entry, lines = greedy_counts([[600, 100]], [1000]), []
    profile = profile_of(replace(entry, moments=[[0.0] * 5] * 2), step={1: 0.01, 4: 0.01}, level=0.0)
    pair = constant_llama(P_LOGITS), constant_llama(Q_LOGITS)
    gains_of(pair, profile, ["dyspec"], [torch.tensor([0])] * 17, report=lines.append)
    assert [line.split(", ")[-1] for line in lines] == ["round 1", "round 2"]


def test_a_profile_keeps_its_gains_and_refuses_others(tmp_path):
    profile = replace(profile_of(counts([[1, 0]])), gains=(MethodGain("chain", Filters(1.0), 4, 1.1, 0.02),))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    for wrong in (
        MethodGain("no method", Filters(1.0), 4, 1.1, 0.02),
        MethodGain("chain", Filters(1.0), 4, -1.0, 0.02),
    ):
        replace(profile, gains=(wrong,)).save(tmp_path / "profile.json")
        with pytest.raises(ValueError, match="is no profile that"):
            Profile.load(tmp_path / "profile.json")
    entry = replace(counts([[1, 0]]), texts=["0 1 x"])
    profile_of(entry).save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match="texts must be ranks"):
        Profile.load(tmp_path / "profile.json")


def test_the_tree_that_is_walked_along_has_the_levels_that_the_draft_has():
    assert Extent.of_trees(10, 2, None).tree.depth > 6
    assert len(Extent.of_trees(10, 2, 2).tree) == NODES
    assert Extent.of_trees(10, 2, 2).tree.depth == 2
