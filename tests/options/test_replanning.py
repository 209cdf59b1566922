"""Trees that change while a text is decoded: the choice by hand, the law of the text, and what drafts must be told."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from head_cases import head_of
from played_steps import PADDING, PROMPTS, Tape
from profile_cases import ACCEPTED, WAYS, counts, greedy_counts, profile_of
from tiny_models import tiny_llama
from tree_policies import Scripted

from heavypath.kernels.filtering import Filters
from heavypath.speculative import LOSSLESS_METHODS, Cascade, SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.tree_by_profile import EVERY, HALF_LIFE, WEIGHT, BestShape, Shapes, ValuedShape
from heavypath.speculative.trees.planning import expected_tokens

COSTS = {1: 0.01, 4: 0.012, 16: 0.02}
CHAIN, WIDE = TokenTree.chain(3), TokenTree.k_ary(3, 1)


def profile(target=None, draft=None, accepted=ACCEPTED):
    """A made-up profile, of a pair if there is one."""
    greedy = [greedy_counts(accepted, [1000] * 4, count) for count in (None, 3)]
    found = profile_of(*(counts(accepted, way=way) for way in WAYS), *greedy, step=COSTS)
    if target is None:
        return found
    return replace(found, target=describe(target), draft=describe(draft), verifier=None)


def replanner(rates, *shapes):
    shapes = shapes or (ValuedShape(CHAIN, CHAIN, {1: 1.3}), ValuedShape(WIDE, WIDE, {1: 1.0}))
    plan = StepPlan(None, NO_DRAFT, shapes[0].tree, None, tuple(shape.tree for shape in shapes))
    chooser = BestShape(plan, Shapes(shapes, torch.tensor(rates, dtype=torch.float64)))
    return chooser, lambda counts: chooser(1, EVERY, counts)


def counted(offered, accepted):
    """What `commit` counts, for trees of three levels and three children."""
    table = torch.zeros(2, 3, 3, dtype=torch.long)
    table[0, :, 0], table[1, :, 0] = torch.tensor(offered), torch.tensor(accepted)
    return table.flatten(1)


def test_the_profiles_own_best_tree_comes_first_and_each_shape_drafts():
    for method in LOSSLESS_METHODS:
        if method != "autoregressive":
            shapes = Shapes.of(profile(), method, Filters(1.0), None)
            assert shapes.trees[0] == profile().tree_for(method, Filters(1.0))
            assert min(shape.planned.depth for shape in shapes.shapes) >= 1
            assert len(set(shapes.trees)) == len(shapes.trees)
    sizes = [len(tree) for tree in Shapes.of(profile(), "sequoia", Filters(1.0), None).trees]
    assert min(sizes) < sizes[0] < max(sizes)
    assert max(tree.depth for tree in Shapes.of(profile(), "sequoia", Filters(1.0), 2).trees) == 2
    hopeless = profile(accepted=[[1, 1, 1]] * 4)
    assert Shapes.of(hopeless, "sequoia", Filters(1.0), None).trees == (TokenTree.chain(1),)


def test_the_acceptance_of_a_text_by_hand():
    chooser, chosen = replanner([[0.5, 0.1], [0.4, 0.1]])
    table = counted([20, 10, 0], [10, 6, 0])
    table[0, 1], table[1, 1] = 20, 3  # second children of the root, of which 10 were tried
    chosen(table)
    scale = (19 + WEIGHT) / (20 * 0.5 + 10 * 0.1 / 0.5 + 10 * 0.4 + WEIGHT)
    first = (10 + WEIGHT * scale * 0.5) / (20 + WEIGHT)
    rates = chooser.rates()
    assert float(rates[0, 0]) == pytest.approx(first)
    assert float(rates[0, 1]) == pytest.approx((1 - first) * (3 + WEIGHT * scale * 0.2) / (10 + WEIGHT))
    assert float(rates[1, 0]) == pytest.approx((6 + WEIGHT * scale * 0.4) / (10 + WEIGHT))
    assert float(rates[2].sum()) == 0  # the profile knows no third level
    chooser, chosen = replanner([[0.6, 0.3, 0.1]] * 3)
    chosen(counted([400, 0, 0], [400, 0, 0]))
    assert float(chooser.rates().sum(1).max()) <= 1 + 1e-12


def test_the_shape_of_most_speed_is_drafted_and_counts_fade():
    _, chosen = replanner([[0.4, 0.2, 0.1]] * 3)
    by_profile = expected_tokens(CHAIN, [0.4]) / 1.3, expected_tokens(WIDE, [0.4, 0.2, 0.1])
    assert by_profile[0] < by_profile[1]
    sure = counted([100, 95, 90], [95, 90, 85])
    assert chosen(sure) == CHAIN, "nearly all is accepted, three levels deep"
    for _ in range(8 * HALF_LIFE // EVERY):
        tree = chosen(sure)  # nothing new is counted
    assert tree == WIDE, "what was counted long ago is forgotten"
    assert chosen(sure + counted([60, 0, 0], [0, 0, 0])) == WIDE


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "specinfer"])
def test_fewer_steps_are_taken_where_more_is_accepted_than_the_profile_says(method):
    """The draft is the target, which the profile does not know of: larger trees than planned pay."""
    target, prompt = tiny_llama(1), torch.tensor([[3, 1, 4, 1, 5]])
    fixed = SpeculativeDecoder(target, target, method, profile=profile(target, target))
    decoder = SpeculativeDecoder(target, target, method, profile=profile(target, target), replan=True)
    out, other = (each.generate(prompt, max_new_tokens=50, temperature=0.0) for each in (decoder, fixed))
    assert out.stats.steps < other.stats.steps
    step, tree = out.stats.replans[0]
    assert step == EVERY
    assert tree in str(out.stats)


def schedule(deep, shallow, delay):
    """A deep tree twice, and then shallow and deep ones in turn.

    delay: 1 where the host sees each step only after the next one, and chooses for the step behind that
    """
    steps = count(2 + delay)

    def next_tree():
        step = next(steps)
        return shallow if step > 2 and step % 2 else deep

    return Scripted([deep, shallow], next_tree)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "cascade", "model"])
def test_drafts_are_told_what_deeper_trees_before_have_accepted(kind, as_on_a_gpu):
    """On a GPU the host does not know how much is new, and the step before may have drafted more levels than this."""
    target, model, other = (tiny_llama(seed, layers=1, hidden_size=32, num_attention_heads=2) for seed in (1, 2, 6))
    draft = {
        "head": head_of(target, taps=(0, 1), head_dim=16),
        "cascade": Cascade([model, other], levels=[1, 2]),
        "model": model,
    }[kind]
    deep, shallow = TokenTree.chain(3), TokenTree.chain(1)

    def decoded(delay):
        decoder = SpeculativeDecoder(target, draft, "sequoia", tree=deep)
        decoder.trees = schedule(deep, shallow, delay)
        options = {"attention_mask": PADDING, "max_new_tokens": 16, "pad_token_id": 0, "temperature": 4.0, "seed": 4}
        return decoder.generate(PROMPTS, **options)

    expected = decoded(0)
    assert expected.stats.accepted[2].sum() > 0, "no deep tree was accepted to its end"
    as_on_a_gpu()
    out = decoded(1)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 2


def test_replan_needs_a_profile_and_a_draft():
    target = tiny_llama(1)
    with pytest.raises(ValueError, match="replan needs a profile"):
        SpeculativeDecoder(target, target, "chain", replan=True)
    with pytest.raises(ValueError, match="'autoregressive' drafts nothing"):
        SpeculativeDecoder(target, None, "autoregressive", profile=profile(target, target), replan=True)
