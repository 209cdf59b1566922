"""Trees that follow the batch: no text is another one for them, drafts that rested know the text, costs choose well."""

from dataclasses import replace

import pytest
import torch
from gpu_hardware import H100
from head_cases import head_of
from played_steps import PADDING, PROMPTS
from profile_cases import counts, greedy_counts, profile_of
from tiny_models import tiny_llama
from tree_policies import Scripted, at_random

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    EarlyExit,
    Merge,
    PromptLookup,
    Recall,
    SpeculativeDecoder,
    TokenTree,
    expected_tokens,
    load_demo_head,
)
from heavypath.speculative.costs.estimates import estimates
from heavypath.speculative.costs.gpu_step import estimated_costs
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.roofline import Device
from heavypath.speculative.costs.table import BATCHES, Costs, standing_for
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import Profile
from heavypath.speculative.tree_by_profile import EVERY, BestShape, Shapes
from heavypath.speculative.tree_choice import tree_by_estimates, usual_acceptance
from heavypath.speculative.tree_policy import trees_up_to
from heavypath.speculative.trees.growth import Growth

ROOT, CHAIN, STAR, WIDE = TokenTree([-1]), TokenTree.chain(3), TokenTree.k_ary(2, 1), TokenTree([-1, 0, 1, 1, 0])
IDS = torch.tensor([4, 0, 7])
FAST = Device(3.35e12, 989e12, 62e12)


def continued(decoder, new=24, **options):
    options = {"attention_mask": PADDING, "sequence_ids": IDS, "max_new_tokens": new, "pad_token_id": 0} | options
    return decoder.generate(PROMPTS, **options)


@pytest.mark.parametrize("kind", ["model", "early exit", "lookup", "head"])
def test_no_text_is_another_one_for_trees_that_change_at_random(kind):
    """In a ragged batch that closes up, since texts end at token 6; drafts that can catch up rest at times."""
    target = tiny_llama(1, layers=3)
    draft = {
        "model": tiny_llama(2, layers=1), "early exit": EarlyExit(1), "lookup": PromptLookup(),
        "head": head_of(target, taps=(0, 1)),
    }[kind]  # fmt: skip
    options = {"temperature": 0.9, "eos_token_id": 6}
    decoder = SpeculativeDecoder(target, draft, "ersd")
    trees = [*([ROOT] if kind in ("model", "early exit") else []), TokenTree.chain(1), CHAIN, STAR, WIDE]
    decoder.trees = at_random(trees)
    plain = SpeculativeDecoder(target, None, "autoregressive")
    for seed in range(3):
        out = continued(decoder, seed=seed, **options)
        assert torch.equal(out.sequences, continued(plain, seed=seed, **options).sequences)
        assert len({*decoder.trees.chosen}) >= 3
        assert out.stats.replans


@pytest.mark.parametrize("method", ["dyspec", "eagle-2"])
def test_trees_that_grow_change_with_static_ones_and_the_text_stays(method):
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, tiny_llama(2, layers=1), method)
    by = decoder.tree.by
    decoder.trees = at_random([ROOT, Growth(by, 5, 2, 3), Growth(by, 3, 2, 2), Growth(by, 2, 1, 1)])
    expected = continued(SpeculativeDecoder(target, None, "autoregressive"), temperature=0.0, eos_token_id=6)
    assert torch.equal(continued(decoder, temperature=0.0, eos_token_id=6).sequences, expected.sequences)


def accepts_everything(stats):
    return torch.equal(stats.accepted[:, 0], stats.offered[:, 0]) and int(stats.offered.sum()) > 5


@pytest.mark.parametrize("first", [ROOT, CHAIN])
def test_a_draft_that_rested_knows_the_text_before_it_drafts_again(first, monkeypatch):
    """The draft is the target, and both win their races: a row that it lacks would show in what is accepted."""
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, target, "ersd")
    decoder.trees = at_random([first, ROOT, CHAIN])
    stats = [continued(decoder, 40, temperature=1.5, eos_token_id=None, seed=seed).stats for seed in range(3)]
    assert all(map(accepts_everything, stats))
    monkeypatch.setattr(Workspace, "_catch_up", lambda *_: None)
    stats = [continued(decoder, 40, temperature=1.5, eos_token_id=None, seed=seed).stats for seed in range(3)]
    assert not any(map(accepts_everything, stats)), "without the rows less would be accepted"
    turns = list(zip([first, *decoder.trees.chosen], decoder.trees.chosen, strict=False))
    assert sum(before == ROOT != after for before, after in turns) >= 2


@pytest.mark.parametrize("first", [ROOT, CHAIN], ids=["from the first step on", "at the end"])
def test_a_cache_of_texts_does_not_claim_rows_of_a_draft_that_rested(first):
    target, draft = tiny_llama(1), tiny_llama(1)  # another model of equal weights
    resting = SpeculativeDecoder(target, draft, "ersd")
    resting.trees = Scripted([first, CHAIN, ROOT], lambda: ROOT)
    before = continued(resting, 16, temperature=1.5, eos_token_id=None)
    decoder = SpeculativeDecoder(target, draft, "ersd", tree=CHAIN)
    for row, mask in zip(before.sequences, PADDING, strict=True):
        prompt = row[int((mask == 0).sum()) :][None]
        after = decoder.generate(prompt, 12, temperature=1.5, eos_token_id=None, past=before.cache)
        assert after.stats.reused_tokens > 0
        assert accepts_everything(after.stats)


def test_trees_follow_the_batch_where_texts_do_not_depend_on_them(demo_pair):
    target, draft, _ = demo_pair
    for method in ("sequoia", "dyspec", "ersd", "typical-lossy"):
        decoder = SpeculativeDecoder(target, draft, method)
        follows = [len(decoder.trees.by_batch(Filters(temperature), 64).trees) > 1 for temperature in (0.0, 1.0)]
        assert follows == [True, method == "ersd"]
        fixed = SpeculativeDecoder(target, draft, method, tree_size=5)
        assert fixed.trees.by_batch(Filters(0.0), 64).trees == (fixed.tree,)
    own = SpeculativeDecoder(target, draft, "sequoia", verifier=lambda *_, **__: None)
    assert len(own.trees.by_batch(Filters(0.0), 64).trees) == 1, "a verifier of one's own may depend on trees"
    replaced = SpeculativeDecoder(target, draft, "sequoia")
    replaced.tree = CHAIN
    assert replaced.trees.by_batch(Filters(0.0), 64).trees == (CHAIN,)


def test_a_tree_may_be_replaced_by_one_in_any_order_of_nodes(tiny_pair):
    prompt = torch.tensor([[3, 1, 4]])
    by_level = TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
    given, replaced = SpeculativeDecoder(*tiny_pair, tree=by_level), SpeculativeDecoder(*tiny_pair)
    replaced.tree = by_level
    outs = [each.generate(prompt, 20, temperature=0.9) for each in (given, replaced)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[1].stats.tree == "6 nodes, 3 levels, set later"


def test_trees_of_the_shipped_pair_on_a_cpu(demo_pair):
    """Five nodes for one sequence, chains of two and one for up to four, and plain decoding beyond."""
    target, draft, _ = demo_pair
    decoder = SpeculativeDecoder(target, draft)
    trees = [decoder.tree_for(Filters(0.0), batch) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert [(len(tree), tree.depth) for tree in trees] == [(5, 3), (3, 2), (2, 1), *[(1, 0)] * 4]
    assert decoder.tree_for(Filters(0.0)) == decoder.tree_for(Filters(0.6)) == decoder.tree


def test_texts_written_before_are_followed_longer_at_low_temperatures(demo_pair):
    decoder = SpeculativeDecoder(demo_pair[0], Recall())
    levels = [decoder.tree_for(Filters(temperature)).depth for temperature in (0.6, 0.79, 0.8, 1.0, 0.6)]
    assert levels == [3, 3, 1, 1, 3], "whatever was asked before"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kind", ["model", "head", "lookup", "recall"])
def test_no_default_tree_promises_less_than_a_chain_of_at_most_its_size(kind, temperature, threads, demo_pair):
    """A chain is a tree, so a planner that knows rates and costs does not find a worse one. By the same estimates."""
    target = demo_pair[0]
    drafts = {"model": demo_pair[1], "head": load_demo_head(target), "lookup": PromptLookup(), "recall": Recall()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for method in ("sequoia", "ersd", "rsd-c", "chain", "naive"):
            decoder = SpeculativeDecoder(target, drafts[kind], method)
            tree, draft = decoder.tree_for(Filters(temperature)), decoder._draft
            rates = torch.from_numpy(usual_acceptance(method, draft, temperature).rates())
            costs = estimates(decoder._target, draft.models)

            def speedup(tree, rates=rates, costs=costs):
                return expected_tokens(tree, rates) * costs.step[1] / costs.step_seconds(len(tree), tree.depth)

            chains = [speedup(TokenTree.chain(levels)) for levels in range(1, 9)]
            assert speedup(tree) >= max(chains[: len(tree) - 1])
            assert speedup(tree) >= max(chains) * 0.999, "nor than longer ones"
    finally:
        torch.set_num_threads(before)


def test_sampled_texts_stay_in_batches_that_gain_and_by_races_in_all(demo_pair):
    """The tree of one sequence is kept where it gains; else it is a smaller one, or none, for the whole text."""
    target, draft, tokenizer = demo_pair
    prompts = tokenizer([f"def read_{name}(" for name in "abcdefgh"], return_tensors="pt").input_ids
    for method in ("sequoia", "ersd"):
        decoder = SpeculativeDecoder(target, draft, method)
        sizes = [len(decoder.tree_for(Filters(0.6), batch)) for batch in (1, 2, 4, 8)]
        assert sizes == ([5, 5, 2, 1] if method == "sequoia" else [5, 3, 2, 1])
        asked = {"temperature": 0.6, "eos_token_id": None, "pad_token_id": 0}
        alone = decoder.generate(prompts[1:2], 12, sequence_ids=torch.tensor([1]), **asked).sequences[0]
        for batch in (2, 4, 8):
            same = torch.equal(alone, decoder.generate(prompts[:batch], 12, **asked).sequences[1])
            assert same == (method == "ersd" or batch == 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_batch_has_a_larger_tree_than_a_smaller_one(device, demo_pair, monkeypatch):
    target, draft = map(LlamaForward, demo_pair[:2])
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
        monkeypatch.setattr(LlamaForward, "device", property(lambda self: torch.device("cuda", 0)))
    draft = ModelDraft(draft, target.vocab_size)
    for method in LOSSLESS_METHODS:
        if method != "autoregressive":
            sizes = [len(tree_by_estimates(method, target, draft, batch)) for batch in BATCHES]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] > sizes[-1] == 1


def test_a_batch_that_closes_up_gets_larger_trees_again(demo_pair):
    target, draft, tokenizer = demo_pair
    prompts = tokenizer([f"def read_{name}(" for name in "abcdefgh"], return_tensors="pt").input_ids

    def ends(ids, scores):
        row = int((prompts == ids[0, : prompts.shape[1]]).all(1).nonzero()[0, 0])
        return ids.shape[1] - prompts.shape[1] >= (3, 6, 9, 12, 15, 18, 21, 40)[row]

    options = {"temperature": 0.6, "eos_token_id": None, "pad_token_id": 0, "stopping_criteria": [ends]}
    out = SpeculativeDecoder(target, draft, "ersd").generate(prompts, 40, **options)
    sizes = [int(tree.split()[0]) for tree in [out.stats.tree, *(tree for _, tree in out.stats.replans)]]
    assert sizes == [1, 2, 5]
    assert out.stats.tree == "1 node, no draft, by costs estimated for 8 sequences"


def test_a_batch_that_is_decoded_without_drafts_is_not_said_to_have_a_bad_draft(demo_pair, caplog):
    out = SpeculativeDecoder(*demo_pair[:2]).generate(torch.full((32, 3), 7), 3, temperature=0.0, eos_token_id=None)
    assert out.stats.tree == "1 node, no draft, by costs estimated for 32 sequences"
    assert out.stats.steps == 32 * 3
    assert "does not pay" not in caplog.text


def test_a_toy_that_drafts_is_not_said_to_draft_nothing(tiny_pair, caplog):
    """Its steps are the host's time, so that its trees follow no estimate."""
    out = SpeculativeDecoder(*tiny_pair).generate(PROMPTS[:1], 2, temperature=0.8)
    assert out.stats.tree == "5 nodes, 2 levels, the default of models of less than a megabyte"
    assert not caplog.text


def test_drafts_that_cannot_catch_up_draft_a_token_at_least_or_nothing_to_the_end(demo_pair):
    target, draft, _ = demo_pair
    head = SpeculativeDecoder(target, load_demo_head(target))
    assert min(map(len, head.trees.by_batch(Filters(0.0), 2).trees)) == 4
    assert head.trees.by_batch(Filters(0.0), 8).trees == (ROOT,), "also when fewer run: it has not read their tokens"
    assert min(map(len, head.trees.by_batch(Filters(0.0), 8, rests=False).trees)) == 2
    decoder = SpeculativeDecoder(target, draft)
    assert min(map(len, decoder.trees.by_batch(Filters(0.0), 256).trees)) == 1
    assert min(map(len, decoder.trees.by_batch(Filters(0.0), 256, rests=False).trees)) == 2
    merged = SpeculativeDecoder(target, Merge([draft, PromptLookup()]), "specinfer")
    assert len(merged.trees.by_batch(Filters(0.0), 256).trees) == 1, "its trees have a child for each of its drafts"


def test_trees_up_to_a_batch_are_those_that_stand_for_it():
    """The nearest number by ratio, and of two as near the larger."""
    asked, known = [], (1, 2, 4, 8, 16)

    def tree_at(batch):
        asked.append(batch)
        return TokenTree.chain(9 - batch)

    trees = trees_up_to(5, known, tree_at, "chain", rests=True)
    assert asked == [1, 2, 4]
    assert [trees.of(running).depth for running in range(1, 6)] == [8, 7, 5, 5, 5]
    assert len(trees.trees) == 3
    never = trees_up_to(5, (1, 4), lambda batch: ROOT, "chain", rests=False)
    assert never.trees == (ROOT,), "a draft that does not pay for one sequence is left out"
    larger = trees_up_to(5, (1, 4), lambda batch: CHAIN if batch == 1 else ROOT, "chain", rests=False)
    assert [len(larger.of(running)) for running in (1, 4)] == [4, 2]
    assert [standing_for(running, known) for running in (5, 6, 11, 12, 1000)] == [4, 8, 8, 16, 16]
    assert standing_for(2, (1, 4)) == 4


def test_costs_between_batches_lie_on_straight_lines():
    low, high = Costs({1: 1.0, 3: 2.0}, 0.1, {1: 0.0, 3: 0.2}, 0.01, 5), Costs({1: 3.0, 2: 4.0, 5: 9.0}, 0.5)
    costs = CostsByBatch({1: low, 5: high})
    assert costs.batches == (1, 5)
    assert (costs.at(1), costs.at(5), costs.at(9)) == (low, high, high)
    middle = costs.at(3)
    assert middle.step == pytest.approx({1: 2.0, 2: (1.5 + 4.0) / 2, 3: (2.0 + 4.0 + 5 / 3) / 2})
    assert (middle.level, middle.level_error) == pytest.approx((0.3, 0.005))
    assert middle.step_error[3] == pytest.approx(0.1)
    assert high.step_seconds(2, 3) == pytest.approx(4.0 + 3 * 0.5)
    assert high.step_seconds(10, 0) == pytest.approx(18.0), "beyond what was timed, in proportion to nodes"
    with pytest.raises(ValueError, match=r"must include batch size 1, and none below, got \[2\]"):
        CostsByBatch({2: low})


def test_a_batch_on_a_gpu_costs_what_as_many_tokens_cost():
    """Beside the kernels of a step, rows are rows: of one sequence's nodes or of several sequences."""
    target = LlamaForward(tiny_llama(1))
    alone, batch = (estimated_costs(target, [], FAST, *given) for given in ((1, (64,)), (16, (4,))))
    assert batch.step[4] == pytest.approx(alone.step[64])


def by_batch_profile(target=None, draft=None):
    """Trees that pay for one sequence and not for eight."""
    accepted = [[600, 150, 60], [500, 120, 70], [450, 100, 60]]
    steps = {1: {1: 1.0, 4: 1.02, 16: 1.4}, 4: {1: 1.2, 4: 2.0}, 8: {1: 1.0, 4: 4.0}}
    costs = CostsByBatch({batch: Costs(step, 0.1 if batch == 8 else 0.05) for batch, step in steps.items()})
    profile = replace(profile_of(counts(accepted), greedy_counts(accepted, [1000] * 3)), costs=costs)
    return profile if target is None else replace(profile, target=describe(target), draft=describe(draft))


def test_a_profile_has_a_tree_for_each_batch_and_keeps_them_in_its_file(tmp_path):
    profile = by_batch_profile()
    sizes = [len(profile.plan("sequoia", Filters(1.0), batch).plan.tree) for batch in (1, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] == 1
    between = profile.plan("sequoia", Filters(1.0), 6).plan
    assert sizes[2] <= len(between.tree) <= sizes[1]
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert loaded.costs.at(4) == profile.costs.at(4)
    assert profile.speedup_error(profile.plan("sequoia", Filters(1.0), 4), 4) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_a_profile_trees_follow_the_batch_also_where_texts_are_sampled(temperature):
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    profile = by_batch_profile(target, draft)
    decoder = SpeculativeDecoder(target, draft, "sequoia", profile=profile, verifier="rejection")
    sizes = {batch: len(decoder.tree_for(Filters(temperature), batch)) for batch in (1, 2, 4, 8)}
    assert sizes[1] > sizes[4] > sizes[8] == 1
    assert sizes[2] == sizes[4], "of two as near the larger"
    prompts = torch.randint(0, 7, (8, 3), generator=torch.Generator().manual_seed(1))
    out = decoder.generate(prompts, 40, temperature=temperature, eos_token_id=6, pad_token_id=0)
    found = [int(tree.split()[0]) for tree in [out.stats.tree, *(tree for _, tree in out.stats.replans)]]
    assert found[0] == 1
    assert found == sorted(found)


def test_re_planning_takes_the_costs_of_as_many_sequences_as_run():
    shapes = Shapes.of(by_batch_profile(), "sequoia", Filters(1.0), None, most=8)
    assert {*shapes.shapes[0].costs} == {1, 4, 8}
    assert min(len(shape.planned) for shape in shapes.shapes) == 2, "nothing is learned without a draft"
    first = StepPlan(None, NO_DRAFT, shapes.trees[0], None, shapes.trees)
    choose = BestShape(first, shapes)
    nothing = torch.zeros(2, first.depth * first.branching, dtype=torch.long)
    sizes = [len(choose(running, EVERY, nothing)) for running in (1, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] == 2


def test_warming_up_makes_the_steps_of_each_size_of_the_batch(monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(1), tiny_llama(2, layers=1), "ersd")
    run, seen = type(decoder.runner).run, set()

    def noted(self, plan, workspace, *, slots, **given):
        seen.add((slots, len(plan.tree)))
        return run(self, plan, workspace, slots=slots, **given)

    monkeypatch.setattr(type(decoder.runner), "run", noted)
    decoder.warm_up(batch_size=8, prompt_tokens=4, max_new_tokens=8, temperature=0.9)
    trees = decoder.trees.by_batch(Filters(0.9), 8)
    assert seen == {(slots, size) for slots in (1, 2, 4, 8) for size in (1, len(trees.of(slots)))}
