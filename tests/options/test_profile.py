"""What calibration measures, and the trees that follow from a profile."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from profile_cases import REJECTION, WAYS, constant_llama, counts, greedy_counts, profile_of, way_of
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    EarlyExit,
    Plan,
    Profile,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    expected_tokens,
)
from heavypath.speculative.calibration import SEQUENCE_COUNTS, calibrate, own_prompts, ways_to_draft
from heavypath.speculative.cli.plan_tables import warnings_of
from heavypath.speculative.costs.estimates import attention_by_length
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Attention, Costs
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.methods import default_verifier, row_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import VERSION, Planned
from heavypath.speculative.tree_by_profile import TreeByProfile
from heavypath.speculative.trees.counted import PRIOR
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.visits import sizes_worth_timing
from heavypath.speculative.walking import LEAST_TOKENS, Extent, as_measured, measure_ways, walk


def counted_by(texts, depth, children):
    """What was accepted [depth, children] and reached [depth], by the ranks that were noted along each text."""
    accepted, reached = torch.zeros(depth, children, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for ranks in (text for several in texts for text in several.tolist()):
        at = 0
        for rank in ranks:
            assert (rank == -2) == (at == depth)
            if at < depth:
                reached[at] += 1
            if rank >= 0:
                accepted[at, rank] += 1
            at = at + 1 if rank >= 0 else 0
    return accepted, reached


@pytest.mark.parametrize("way", WAYS)
def test_acceptance_on_a_walk_is_that_of_the_law(way):
    """Where no law depends on the text, every depth has the same acceptance, known for the first child or for all."""
    draw, verification, *_ = way
    target_logits, draft_logits, filters = [1.0, 0.2, -0.5, 0.0], [0.3, 0.9, -0.2, -1.0], Filters(0.8)
    target = LlamaForward(constant_llama(target_logits))
    draft = as_draft(constant_llama(draft_logits), target, None)
    tokens, sequences = 40, 100
    accepted, reached, moments, ranks = walk(
        target, draft, [torch.tensor([1, 2, 3]), torch.tensor([0])], way._replace(sequence_count=None), filters,
        Extent(tokens, sequences, depth=3, children=3), seed=3,
    )  # fmt: skip
    assert torch.equal(moments[:, 0, 0], reached.double())
    assert torch.equal(moments[..., 3], accepted.double())
    assert all(map(torch.equal, counted_by(ranks, 3, 3), (accepted, reached)))
    p, q = (filtered_logprobs(torch.tensor([x]), filters)[0].exp() for x in (target_logits, draft_logits))
    assert (reached[1:] <= accepted.sum(1)[:-1]).all()
    assert int(reached.sum()) <= tokens * sequences  # the rest follow three accepted ones
    first = {
        "without_replacement": torch.minimum(p, q).sum(), "with_replacement": torch.minimum(p, q).sum(),
        "race": (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum(),
        "target_sample": p[q.argmax()] if draw == "top_k" else (p * q).sum(),
    }  # fmt: skip
    independent = (draw, verification) == ("with_replacement", "target_sample")
    for depth in range(3):
        error = 5 / float(reached[depth]) ** 0.5
        share = accepted[depth].double() / reached[depth]
        if verification in first:
            assert float(share[0]) == pytest.approx(float(first[verification]), abs=error)
        if independent:  # the first j children are missed by independent draws
            by_hand = [float((p * (1 - q) ** child * q).sum()) for child in range(3)]
            assert share.tolist() == pytest.approx(by_hand, abs=error)
        if draw == "top_k":
            assert float(share.sum()) == pytest.approx(float(p[q.topk(3).indices].sum()), abs=error)
    assert verification != "kseq" or float(accepted.sum() / reached.sum()) > float(torch.minimum(p, q).sum())


@pytest.mark.parametrize(("method", "tree"), [
    ("specinfer", TokenTree.independent(3, 3)), ("spectr", TokenTree.independent(3, 3)),
    ("naive-distinct", TokenTree.k_ary(3, 2)),
    ("naive", TokenTree.k_ary(3, 1)),  # deeper, the children of equal siblings count together
])  # fmt: skip
def test_drafts_are_accepted_as_often_as_in_decoding(method, tree):
    """On a language where depth counts for nothing but which independent sequences are still alive."""
    target, draft = constant_llama([1.0, 0.2, -0.5, 0.0]), constant_llama([0.3, 0.9, -0.2, -1.0])
    forward, filters, way = LlamaForward(target), Filters(0.6), way_of(METHODS[method], 0.6)
    extent = Extent(tokens=40, sequences=200, depth=tree.depth, children=3)
    counted = walk(forward, as_draft(draft, forward, target), [torch.tensor([1, 2, 3])], way, filters, extent, seed=3)
    entry = as_measured(way, filters, counted)
    assert (entry.draw, entry.verification, entry.sequence_count, entry.filters) == (*way[:3], filters)
    assert entry.is_of(METHODS[method], 0.6)
    assert not entry.is_of(METHODS[method], 0.0)
    verifier = "rejection" if method == "specinfer" else None
    decoder = SpeculativeDecoder(target, draft, method, tree=tree, verifier=verifier)
    stats = decoder.generate(torch.tensor([[1, 2, 3]]).expand(200, -1), 40, temperature=0.6, seed=1).stats
    expected = expected_tokens(tree, entry.rates())
    assert stats.tokens_per_step == pytest.approx(expected, abs=0.06 + 5 * 1.2 / stats.steps**0.5)


@pytest.mark.parametrize("draft", [None, PromptLookup()], ids=["model", "prompt lookup"])
def test_a_calibration_is_of_use_to_the_decoder(draft, tmp_path, any_noise):
    target = tiny_llama(1, max_position_embeddings=128)
    draft = draft or tiny_llama(2, layers=1, max_position_embeddings=128)
    lines, temperatures = [], (0.0, 0.9)
    extent = {"sizes": (1, 8), "batch_sizes": (1, 3), "tokens": 5, "sequences": 3}
    profile = calibrate(target, draft, temperatures=temperatures, **extent, on_progress=lines.append)
    drafting = [method for method in LOSSLESS_METHODS if method != "autoregressive"]
    ways = {way_of(row_of(method, default_verifier(method, "cpu")), 0.9) for method in drafting}
    trees = sum(way.sequence_count is None for way in ways)
    assert len(profile.acceptance) == 1 + len(SEQUENCE_COUNTS) + trees + (len(ways) - trees) * len(SEQUENCE_COUNTS)
    assert profile.target_parameters == sum(weight.numel() for weight in target.parameters())
    assert profile.draft_parameters == draft_parameter_count(draft, target)
    for said in ("pass 1 of 3", "s left", "timing trees of 1 to 8 nodes, round 3, about ", "nodes for 3 sequences, "):
        assert any(said in line for line in lines), said
    assert profile.costs.batches == (1, 3)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    for entry in profile.acceptance:
        kept = torch.tensor(entry.moments_by_depth)
        assert entry.temperatures == []
        assert (len(kept) > 0) == (entry.draw == "without_replacement")
        assert kept.numel() == 0 or torch.equal(kept[:, 0, 0], torch.tensor(entry.reached[: len(kept)]).float())
    for method in drafting:
        decoder = SpeculativeDecoder(target, draft, method, profile=tmp_path / "profile.json")
        assert decoder.tree_for(Filters(0.8)) is not None


def test_a_limit_in_which_acceptance_cannot_be_counted_is_refused_at_once():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    with pytest.raises(ValueError, match=r"would take about .* give a limit of \d+ s .* idle"):
        calibrate(target, draft, temperatures=(0.9,), sizes=(1, 2), tokens=12, limit=1e-3)
    with pytest.raises(ValueError, match="limit must be a number of seconds above 0, got 0"):
        calibrate(target, draft, limit=0)


@pytest.mark.parametrize(("given", "message"), [
    ({"temperatures": []}, "temperatures must be a list of at least one number, got none"),
    ({"prompts": [torch.tensor([[1, 2]])]}, r"prompts must be LongTensors \[T\] .*, got torch.int64 \[1, 2\]"),
    ({"prompts": [torch.tensor([1]), torch.tensor([1.0])]}, r"got torch.float32 \[1\]"),
    ({"prompts": [torch.zeros(0, dtype=torch.long)]}, r"of at least one token, got torch.int64 \[0\]"),
    ({"prompts": ["a text"]}, "got 'a text'"),
])  # fmt: skip
def test_what_cannot_be_calibrated_with_is_refused_before_anything_is_measured(given, message):
    with pytest.raises(ValueError, match=message):
        calibrate(tiny_llama(1), tiny_llama(2, layers=1), **given, on_progress=pytest.fail)


def test_texts_are_cut_off_where_the_time_is_over():
    model = tiny_llama(1)
    target = LlamaForward(model)
    for seconds, tokens in ((0.0, LEAST_TOKENS), (math.inf, 20)):
        extent = Extent(tokens=20, sequences=4, seconds=seconds)
        draft, prompts = as_draft(model, target, model), [torch.tensor([1, 2])]
        counted = walk(target, draft, prompts, REJECTION, Filters(1.0), extent, 0)
        assert [each.shape for each in counted.ranks] == [(4, tokens)]
        assert 0 < int(counted.reached.sum()) <= 4 * tokens


def test_passes_over_the_targets_own_texts_add_up_to_all_texts(monkeypatch):
    """For every way as where it is counted alone, though the prompts of a pass are read once for all of them."""
    model, lines, reads = tiny_llama(1), [], []
    target = LlamaForward(model)
    draft, prompts = as_draft(tiny_llama(2, layers=1), target, None), own_prompts(model, 6, 5, seed=1)
    assert [len(prompt) for prompt in prompts] == [6] * 6
    assert len({tuple(prompt.tolist()) for prompt in prompts}) == 6
    wanted = [(way, Filters(0.0)) for way in ways_to_draft(0.0, "cpu")]
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda *given, **more: reads.append(1) or prefill(*given, **more))
    entries = measure_ways(target, draft, prompts, wanted, Extent(tokens=9, sequences=6), 3, math.inf, lines.append)
    assert len(reads) == 3
    for (way, filters), whole in zip(wanted, entries, strict=True):
        part = partial(walk, target, draft, way=way, filters=filters, extent=Extent(9, 2))
        parts = [part(prompts[2 * number : 2 * number + 2], seed=3 + number) for number in range(3)]
        assert whole.reached == sum(part.reached for part in parts).tolist()
        assert whole.accepted == sum(part.accepted for part in parts).tolist()
    assert lines[0].startswith("acceptance, pass 1 of 3, 1 of 6: temperature 0, ")


def test_sizes_worth_timing_are_those_near_the_plans():
    measured = [counts([[550, 150, 60], [500, 120, 70], [450, 100, 60]])]
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    steep = Costs({1: 0.01, 2: 0.012, 4: 0.02, 8: 0.04}, 0.001)
    plan = profile_of(*measured, step=steep.step).plan("sequoia", Filters(1.0)).plan
    assert sizes_worth_timing(measured, sizes, steep) == {1, 2, 3}
    assert len(plan.tree) in (2, 3)
    flat = Costs({1: 0.01, 2: 0.01, 4: 0.01, 8: 0.01}, 0.0)
    assert max(sizes_worth_timing(measured, sizes, flat)) > 8, "nothing says yet that a larger tree would cost more"


def test_the_error_of_expected_tokens_is_what_they_vary_by():
    """Against counting again and again: each depth is a multinomial of its own."""
    rates, reached = torch.tensor([[0.5, 0.2], [0.4, 0.1]]).double(), [4000, 1500]
    tree = TokenTree.from_branching([2, 2])
    generator = torch.Generator().manual_seed(0)

    def counted():
        rows = []
        for row, number in zip(rates, reached, strict=True):
            choice = torch.multinomial(torch.cat([row, 1 - row.sum()[None]]), number, True, generator=generator)
            rows.append(choice.bincount(minlength=3)[:2].tolist())
        return replace(counts(rows), reached=reached)

    entries = [counted() for _ in range(200)]
    plans = [Planned(Plan(tree, expected_tokens(tree, entry.rates()), 1.0), entry) for entry in entries]
    spread = float(torch.tensor([planned.plan.expected_tokens for planned in plans]).std())
    assert plans[0].tokens_error == pytest.approx(spread, rel=0.25)
    exact = Costs({1: 0.01, 7: 0.02}, 0.001)
    rough = replace(exact, step_error={1: 0.0, 7: 0.002})
    sure, unsure = (
        replace(profile_of(plans[0].acceptance), costs=CostsByBatch({1: costs})).speedup_error(plans[0])
        for costs in (exact, rough)
    )
    assert sure == pytest.approx(plans[0].tokens_error / plans[0].plan.expected_tokens)
    assert unsure == pytest.approx((sure**2 + (0.002 / 0.022) ** 2) ** 0.5)


def test_seldom_seen_depths_are_drawn_to_the_mean():
    measured = greedy_counts([[600, 100], [5, 0]], [1000, 10])
    pooled = torch.tensor([605, 100]) / 1010
    expected = [[(600 + PRIOR * pooled[0]) / 1050, (100 + PRIOR * pooled[1]) / 1050],
                [(5 + PRIOR * pooled[0]) / 60, PRIOR * pooled[1] / 60]]  # fmt: skip
    assert torch.allclose(measured.rates()[:2, :2], torch.tensor(expected).double())
    sequences = greedy_counts([[600, 100], [5, 0], [9, 0]], [1000, 10, 10], sequence_count=2)
    assert torch.allclose(sequences.rates()[0], torch.tensor([0.6, 0.1]).double())
    assert sequences.rates()[1:3, 0].tolist() == pytest.approx(
        [(5 + PRIOR * 0.7) / (10 + PRIOR), (9 + PRIOR * 0.7) / (10 + PRIOR)]
    )


def test_confidence_is_the_line_of_least_squares():
    share = torch.rand(500, generator=torch.Generator().manual_seed(0)).double()
    hit = 0.3 + 0.5 * share
    first = [500.0, float(share.sum()), float((share**2).sum()), float(hit.sum()), float((share * hit).sum())]
    constant = [100.0, 20.0, 4.0, 30.0, 6.0]  # always a share of 0.2, accepted 0.3 of the time
    seldom = [3.0, 1.0, 0.5, 3.0, 1.0]
    measured = replace(counts([[0]]), moments=[first, constant, seldom])
    assert measured.confidence().base == pytest.approx((0.3, 0.3))
    assert measured.confidence().slope == pytest.approx((0.5, 0.0))


def test_confidence_steeper_than_a_chance_can_be_is_the_best_line_that_ends_at_one():
    """Half of the nodes have a share of 0.1 and are refused, the others 0.3 and are accepted: base 0.4 / 1.3."""
    measured = replace(counts([[0]]), moments=[[100.0, 20.0, 5.0, 50.0, 15.0]])
    assert measured.confidence().base == pytest.approx((0.4 / 1.3,))
    assert measured.confidence().slope == pytest.approx((0.9 / 1.3,))


def test_confidence_by_depth_is_drawn_to_that_of_all_depths_as_by_fifty_nodes():
    """Children are accepted by half of their share at the root, and with 0.4 below it; there were few below."""
    shares = torch.linspace(0, 1, 101).double()
    sums = [
        torch.tensor([101.0, shares.sum(), (shares**2).sum(), hit.sum(), (hit * shares).sum()])
        for hit in (shares / 2, torch.full_like(shares, 0.4))
    ]
    often, seldom = sums[0] * 100, sums[1] * 0.1
    every = often + seldom
    measured = replace(
        counts([[0]]), moments=[every.tolist()] * 2, moments_by_depth=[[often.tolist()], [seldom.tolist()]]
    )
    confidence = measured.confidence()
    assert (confidence.base, confidence.slope) == (pytest.approx((0, 0), abs=1e-3), pytest.approx((0.5, 0.5), abs=1e-3))
    (below,) = confidence.deeper
    share = 10.1 / 60.1  # of the nodes that count below; all have alike shares, so that the lines mix as the nodes do
    assert below.base == pytest.approx((0.4 * share, 0), abs=1e-3)
    assert below.slope == pytest.approx((0.5 * (1 - share), 0.5), abs=1e-3)
    assert replace(measured, moments_by_depth=[]).confidence().deeper == ()


def test_plans_are_the_fastest_of_their_kind():
    acceptance = [[550, 150, 60], [500, 120, 70], [450, 100, 60]]
    profile = profile_of(*(counts(acceptance, way=way) for way in WAYS))
    rates, costs = counts(acceptance).rates(), profile.costs.at(1).steps_of(range(1, 17))

    def speedup(tree):
        return expected_tokens(tree, rates) / (costs[len(tree)] + 0.1 * tree.depth)

    chains = [speedup(TokenTree.chain(length)) for length in range(4)]
    planned = profile.plan("chain", Filters(1.0)).plan
    assert planned.speedup == pytest.approx(max(chains))
    assert planned.tree.depth == chains.index(max(chains))
    sequences = [TokenTree.independent(3, length) for length in (1, 2, 3)]
    own = counts(acceptance, way=way_of(METHODS["spectr"])).rates()
    gains = [expected_tokens(tree, own) / (costs[len(tree)] + 0.1 * tree.depth) for tree in sequences]
    assert profile.plan("spectr", Filters(1.0)).plan.speedup == pytest.approx(max(gains))
    best = profile.plan("sequoia", Filters(1.0)).plan
    assert best.speedup == pytest.approx(speedup(best.tree))
    for method in LOSSLESS_METHODS:
        if method != "autoregressive":
            assert 1 <= profile.plan(method, Filters(1.0)).plan.speedup <= best.speedup + 1e-12
    grown = profile.tree_for("dyspec", Filters(1.0))
    assert isinstance(grown, Growth)
    assert (grown.size, grown.depth) == (len(best.tree), best.tree.depth)


def test_the_memory_bound_speedup_is_made_of_sizes():
    """RSD's MBSU: tokens / (1 + levels x size ratio), whatever anything costs."""
    tree = TokenTree.k_ary(2, 2)
    for costly in (0.001, 0.5):
        profile = replace(profile_of(counts([[1, 0]]), level=costly), target_parameters=1000, draft_parameters=50)
        assert profile.mbsu(Plan(tree, expected_tokens=2.2, speedup=1.5)) == pytest.approx(2.2 / (1 + 2 * 0.05))


def test_drafts_count_the_parameters_that_they_go_through():
    target = tiny_llama(1, layers=3)
    whole, layer = (sum(weight.numel() for weight in part.parameters()) for part in (target, target.model.layers[0]))
    assert draft_parameter_count(target, target) == whole
    assert draft_parameter_count(EarlyExit(1), target) == whole - 2 * layer
    assert draft_parameter_count(PromptLookup(), target) == 0


def test_drafts_that_do_not_pay_are_not_made_and_it_is_said_with_the_figures(caplog):
    profile = profile_of(counts([[50, 10]]), level=0.02)
    (line,) = warnings_of(profile)
    assert "temperature 1.0: this draft does not pay here" in line
    assert "accepted with probability 0.05; a step over 4 nodes takes 1.20 ± 0.00 steps" in line
    assert "drafting a level 2.00 ± 0.00" in line
    assert warnings_of(profile_of(counts([[500, 100]]))) == []
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    ours = replace(profile, target=describe(target), draft=describe(draft))
    SpeculativeDecoder(target, draft, profile=ours, verifier="rejection").generate(
        torch.tensor([[1, 2]]), 3, temperature=1.0
    )
    assert "no tree of 'sequoia' pays at temperature 1" in caplog.text
    assert len(profile.plan("sequoia", Filters(1.0)).plan.tree) == 1
    assert len(profile.tree_for("dyspec", Filters(1.0))) == 1


def test_the_nearest_measurement_is_taken():
    filtered = replace(counts([[1, 0]], reached=2), filters=Filters(0.9, top_k=40))
    profile = profile_of(counts([[1, 0]], temperature=0.6), counts([[1, 0]]), filtered)
    assert profile.measured("sequoia", Filters(0.7))[0].filters.temperature == 0.6
    assert profile.measured("dyspec", Filters(5.0))[0].filters.temperature == 1.0
    assert profile.measured("sequoia", Filters(0.6, top_k=40)) == [filtered]
    for filters, method in ((Filters(0.0), "sequoia"), (Filters(1.0), "ersd")):
        with pytest.raises(ValueError, match="calibrate with --temperature"):
            profile.measured(method, filters)


def test_a_profile_without_figures_by_depth_is_read(tmp_path):
    """As calibrations wrote it that had none."""
    entry, path = (
        replace(counts([[500, 100]]), moments=[[100.0, 60.0, 40.0, 70.0, 45.0]] * 2),
        tmp_path / "profile.json",
    )
    profile_of(entry).save(path)
    content = json.loads(path.read_text())
    for each in content["acceptance"]:
        del each["moments_by_depth"], each["temperatures"]
    path.write_text(json.dumps(content))
    loaded = Profile.load(path)
    assert loaded == profile_of(entry)
    assert loaded.changes("dyspec", Filters(1.0)) == ()
    assert loaded.tree_for("dyspec", Filters(1.0)).confidence.deeper == ()


def test_a_profile_of_another_device_or_precision_or_of_other_models_or_no_profile_is_refused(tmp_path):
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    other = profile_of(counts([[1, 0]]))
    own, path = replace(other, target=describe(target), draft=describe(draft)), tmp_path / "profile.json"
    assert SpeculativeDecoder(target, draft, profile=own, verifier="rejection").profile is own

    def refused(profile, message, error=ValueError, **options):
        with pytest.raises(error, match=message):
            SpeculativeDecoder(target, draft, profile=profile, **options)

    for name, value in (("device_type", "cuda"), ("dtype", "bfloat16")):
        elsewhere = replace(own, environment=own.environment | {name: value})
        refused(elsewhere, f"measured with {name} {value}, got ", verifier="rejection")
    refused(other, "measured with a target of a target, got llama, 2 layers", verifier="rejection")
    refused(other, "leave out tree_size", tree_size=8)
    without = replace(own, acceptance=[replace(own.acceptance[0], moments=[], moments_by_depth=[[[0.0] * 5]])])
    without.save(path)
    refused(path, "moments must have a row for each child at temperature 1")
    for content in ("[1]", "no JSON", json.dumps({"heavypath profile": VERSION})):
        path.write_text(content)
        refused(path, "is no profile that `heavypath calibrate` writes")
    for version in (1, 99):
        path.write_text(json.dumps({"heavypath profile": version, "target": "llama"}))
        refused(path, f"version {version}, expected {VERSION}; make it again with `heavypath")
    refused(tmp_path / "absent.json", "`heavypath calibrate --out", FileNotFoundError)


def test_trees_of_long_prompts_are_smaller_by_what_attention_is_estimated_to_cost(tmp_path):
    """From 4,096 tokens on reading is added, from 65,536 on 10 ms a node; the profile's file keeps both."""
    attention = {4096: Attention(0.001, 0.0), 65_536: Attention(0.002, 0.01)}
    profile = replace(profile_of(counts([[600, 200, 100]] * 6)), attention=attention)
    assert profile.for_length(4095) is profile
    assert profile.for_length(5000).costs.at(1).step == pytest.approx({1: 0.011, 4: 0.013, 16: 0.031})
    long = profile.for_length(10**6)
    assert long.costs.at(1).step == pytest.approx({1: 0.02, 4: 0.052, 16: 0.19})
    sizes = [len(each.tree_for("sequoia", Filters(1.0))) for each in (profile, long)]
    assert sizes[1] < sizes[0]
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    content = json.loads((tmp_path / "profile.json").read_text())
    del content["attention"]
    (tmp_path / "profile.json").write_text(json.dumps(content))
    assert Profile.load(tmp_path / "profile.json") == replace(profile, attention={})
    content["attention"] = {"4096": {"reading": -1.0, "node": 0.0}}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="attention must be seconds from 0"):
        Profile.load(tmp_path / "profile.json")


def test_a_policy_by_a_profile_follows_the_prompts_length():
    profile = replace(profile_of(counts([[600, 200, 100]] * 6)), attention={4096: Attention(0.002, 0.01)})
    target, draft = LlamaForward(tiny_llama(1)), as_draft(tiny_llama(2), LlamaForward(tiny_llama(1)), None)
    policy = TreeByProfile(profile, "sequoia", row_of("sequoia", "rejection"), target, draft)
    assert policy.for_length(4095) is policy
    assert policy.for_length(5000) is policy.for_length(9000)
    assert len(policy.for_length(5000).tree(Filters(1.0), 1)) < len(policy.tree(Filters(1.0), 1))


def test_a_profile_of_a_cpu_knows_no_costs_of_attention():
    assert attention_by_length(LlamaForward(tiny_llama(1))) == {}
