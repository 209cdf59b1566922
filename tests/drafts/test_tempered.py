"""Drawing temperatures by depth: calibrated on texts, kept in a profile, and exact whatever they are."""

from dataclasses import replace

import pytest
import torch
from block_checkpoints import LAWS, block_of, of_one_law, said_of, tensors_of, variant, zlab
from drafted_cases import small_draft
from head_cases import VARIANTS, head_of
from head_checkpoints import write
from medusa_checkpoints import heads_of
from profile_cases import counts, profile_of, way_of
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    METHODS,
    Pard,
    PromptLookup,
    SpeculativeDecoder,
    calibration,
    goodness_of_fit,
    joint_law,
)
from heavypath.speculative.cli.plan_tables import drawing_in_words
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.blocks.checkpoint import load_block
from heavypath.speculative.drafts.blocks.draft import BlockHeadDraft
from heavypath.speculative.drafts.kinds import as_draft, describe
from heavypath.speculative.drafts.tempered import TEMPERATURES, fitted
from heavypath.speculative.drawing_temperatures import drawing_temperatures
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.walking import Extent

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
DRAWN_AT = [0.7, 0.25, 0.5]


def profile_with(target, draft, method, verifier="rejection", temperatures=DRAWN_AT):
    """A profile whose trees have six nodes, for temperatures 0 and 1."""
    row = METHODS[method].verified_by(verifier)
    shape = {"accepted": [[500, 200, 100], [450, 150, 100]], "reached": 1000}
    moments = [[900.0, 450.0, 300.0, 450.0, 260.0], [500.0, 100.0, 40.0, 200.0, 50.0], [300.0, 60.0, 20.0, 90.0, 20.0]]
    by_depth = [[[part * row[0], *row[1:]] for row in moments] for part in (1.0, 1.5)]
    entries = [
        replace(counts(**shape, temperature=each, way=way_of(row, each)), moments=moments) for each in (0.0, 1.0)
    ]
    entries[1] = replace(entries[1], temperatures=temperatures, moments_by_depth=by_depth)
    profile = profile_of(*entries, step={1: 0.01, 6: 0.01}, level=0.0)
    return replace(profile, target=describe(target), draft=describe(draft), verifier=verifier)


def flat_below_depth_1(folder):
    """A target whose law is the same after every token that it writes, and a block draft of the same logits.

    But those after a mask, of all depths below 1, are a quarter of them: far too flat.
    """
    target, kind = tiny_llama(0), variant(vocab=7, drafted=7, width=16, read=16, ids=(0,), mask=6, shift=1)
    tensors = of_one_law(target, tensors_of(kind), [1.3, 0.4, 0.2, 0.0, 0.0, -0.1, -9.0])
    with torch.no_grad():
        target.model.embed_tokens.weight[6, :2] = torch.tensor([0.25, 0.9375**0.5])
        target.lm_head.weight[6, 1] = -9.0  # a mask is not written, whatever the row
    tensors["norm.weight"] = torch.ones(16)
    config, _ = zlab(kind, shift_label=True)
    return target, load_block(write(folder, config | {"num_target_layers": 2}, tensors), target)


@pytest.mark.slow
@pytest.mark.usefixtures("any_noise")
def test_a_collapse_by_flat_deep_laws_is_cured_by_calibrating(tmp_path, monkeypatch):
    """Costs are such that a tree of six nodes pays."""
    costs = CostsByBatch({1: Costs({1: 0.01, 6: 0.01}, 0.0)})
    monkeypatch.setattr(calibration, "costs_by_batch", lambda *given, **more: costs)
    target, head = flat_below_depth_1(tmp_path)
    profile = calibration.calibrate(
        target, head, temperatures=(1.0,), tokens=8, sequences=2, verifier="rejection", prompts=[*PROMPT]
    )
    assert {each.draw for each in profile.acceptance if not each.temperatures} == {"top_k"}
    (line,) = drawing_in_words(profile)
    assert line == "temperature 1.0: the draft's depths are drawn at 1, 0.25, 0.25, 0.25, 0.25 times that temperature"
    (chain,) = profile.measured("chain", Filters(1.0))
    assert [row[0] for row in chain.accepted[:5]] == chain.reached[:5]
    gains = {gain.method: gain.factor for gain in profile.gains}
    assert gains["dyspec"] == pytest.approx(1, abs=0.05)
    profile.save(tmp_path / "profile.json")
    reached = []
    for options in ({"tree_size": 6}, {"profile": tmp_path / "profile.json"}):
        decoder = SpeculativeDecoder(target, head, "chain", verifier="rejection", **options)
        reached.append(decoder.generate(PROMPT.expand(400, -1), 12, temperature=1.0, seed=4).stats.tokens_per_step)
    assert reached[1] == 6 > 2 * reached[0]


@pytest.mark.parametrize(("law", "method", "verifier"), [
    ("of depths", "sequoia", "held_traversal"), ("of tokens", "dyspec", "traversal"),
    ("of paths", "chain", "rejection"),
    ("of few tokens", "sequoia", "rejection"), ("of depths", "ersd", None), ("of depths", "specinfer", "held"),
])  # fmt: skip
def test_the_joint_law_of_four_tokens_is_the_targets(law, method, verifier, tmp_path):
    """By enumeration. The draft has few of the tokens, so that Q lacks what P has."""
    target = tiny_llama(0)
    head = block_of(target, tmp_path, **{"drafted": 4, "own_lm_head": True, "causal": (True, False)} | LAWS[law])
    profile = profile_with(target, head, method, verifier)
    decoder = SpeculativeDecoder(target, head, method, profile=profile, verifier=verifier)
    out = decoder.generate(PROMPT.expand(3_000, -1), max_new_tokens=4, temperature=0.8, seed=5)
    assert out.stats.tokens_per_step > 1.1
    fit = goodness_of_fit(out.sequences[:, PROMPT.shape[1] :], joint_law(target, PROMPT[0], 4, temperature=0.8))
    assert fit.is_lossless(), str(fit)


@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec", "rsd-s"])
def test_a_profiles_temperatures_are_those_that_a_head_may_be_given(method, tmp_path):
    """The same text and steps, in a batch and in a service; at temperature 0 the profile changes nothing."""
    target = tiny_llama(0, max_position_embeddings=128)
    head = block_of(target, tmp_path, block=4)
    found = []
    for given, temperatures in (((), DRAWN_AT), (DRAWN_AT, []), ((), [])):
        head.set_temperatures(given)
        assert ("at temperatures" in describe(head)) == bool(given)
        profile = profile_with(target, head, method, temperatures=temperatures)
        decoder = SpeculativeDecoder(target, head, method, profile=profile, verifier="rejection")
        sampled, greedy = (decoder.generate(PROMPT.expand(6, -1), 20, temperature=each, seed=3) for each in (1.0, 0.0))
        with decoder.serve(slots=2, max_tokens=64) as service:
            served = service.submit(PROMPT[0], 20, temperature=1.0, seed=1).result()
        found.append([sampled.sequences.tolist(), sampled.stats.steps, served.tokens])
        found.append([greedy.sequences.tolist(), greedy.stats.steps])
    by_profile, greedy, by_head, _, plain, plain_greedy = found
    assert by_profile == by_head
    assert all(one != other for one, other in zip(by_profile, plain, strict=True))
    assert greedy == plain_greedy
    for wrong in ([0.5], [0.5, 0.5, 0.0]):
        with pytest.raises(ValueError, match=r"temperatures must be 3 numbers above 0, one a depth, got \[0.5"):
            head.set_temperatures(wrong)


@pytest.mark.parametrize("law", ["of depths", "of paths", "of few tokens"])
@torch.inference_mode()
def test_they_are_fitted_by_the_chance_that_a_chain_is_accepted(law, tmp_path, monkeypatch):
    """At each depth: the sum of prod min(P, Q) over all paths, Q by the oracle."""
    target, text, seen = tiny_llama(0), PROMPT[0], []
    head = block_of(target, tmp_path, block=4, **{"drafted": 4, "own_lm_head": True} | LAWS[law])
    fitted = "heavypath.speculative.drawing_temperatures.fitted"
    monkeypatch.setattr(fitted, lambda common, depths: seen.append((common, depths)) or ())
    call, asked = BlockHeadDraft.__call__, []

    def noted(draft, feed, cache):
        asked.append(feed.drafted.unique().tolist())
        return call(draft, feed, cache)

    monkeypatch.setattr(BlockHeadDraft, "__call__", noted)
    forward = forward_of(target, "target")
    extent = Extent(tokens=5, sequences=4_000)
    drawing_temperatures(forward, as_draft(head, forward, target), [text], [Filters(2.0)], extent, 0, str)
    ((common, depths),) = seen
    assert asked == [[number % depths] for number in range(5)] * 4
    oracle = said_of(head, target, text)
    for place, temperature in enumerate(TEMPERATURES):
        paths, weights = {(): 1.0}, torch.ones(4_000).double()
        for depth in range(min(depths, 3)):
            longer = {}
            for path, weight in paths.items():
                whole = torch.cat([text, torch.tensor(path, dtype=torch.long)])
                target_law = (target(whole[None]).logits[0, -1] / 2).softmax(-1)
                overlap = target_law.minimum((oracle.after(path) / (2 * temperature)).softmax(-1).float())
                longer |= {(*path, token): weight * float(part) for token, part in enumerate(overlap)}
            paths, each = longer, weights * common[depth, 0, place]
            error = 5 * float(each.std()) / 4_000**0.5 + 1e-6
            assert float(each.mean()) == pytest.approx(sum(paths.values()), abs=error)
            weights = weights * common[depth, 1, place]


def test_a_depth_takes_what_is_surely_better_than_what_the_depth_above_has():
    """By hand: overlaps of 1, 0.7, 0.5, 0.25 at three depths, on two texts; of the last depth there are no tokens."""
    overlaps = {
        0: [[0.5, 0.6, 0.8, 0.1], [0.5, 0.6, 0.8, 0.1]],  # 0.5, in both texts
        1: [[0.9, 0.8, 0.3, 0.1], [0.1, 0.1, 0.3, 0.1]],  # of two texts that count alike not even sure to be better
    }
    common = torch.tensor([[overlaps[depth], [[1.0] * 4] * 2] for depth in (0, 1)]).double().transpose(2, 3)
    assert fitted(common, 3) == (0.5, 0.5, 0.5)
    common[0, 1, 2] = torch.tensor([1.0, 0.1])  # the second text hardly gets to depth 1 if the first is drawn at 0.5
    assert fitted(common, 3) == (0.5, 1.0, 1.0)
    assert fitted(torch.ones(4, 2, 4, 2).double(), 2) == ()


@pytest.mark.parametrize("kind", ["p-eagle", "medusa", "pard", *LAWS, "model", "eagle-3", "prompt lookup"])
@torch.inference_mode()
def test_they_are_fitted_for_drafts_of_one_pass_alone_by_the_overlap_of_laws(kind, tmp_path):
    """Above temperature 0. With a target that takes any token alike nothing is sharpened."""
    target = tiny_llama(0, max_position_embeddings=256).double()
    if kind == "pard":
        given = Pard(small_draft(), mask_token_id=6, depths=3)
    elif kind == "medusa":
        given = heads_of(target, tmp_path, heads=3)[0]
    elif kind in LAWS:
        given = block_of(target, tmp_path, block=4, **LAWS[kind])
    else:
        given = {"model": small_draft(), "prompt lookup": PromptLookup()}.get(kind) or head_of(target, **VARIANTS[kind])
    forward = forward_of(target, "target")
    draft = as_draft(given, forward, target)
    at_once, draft.levels = kind not in ("model", "eagle-3", "prompt lookup"), 3
    target.lm_head.weight.zero_()
    found = drawing_temperatures(
        forward, draft, [PROMPT[0]], [Filters(0.0), Filters(0.9)], Extent(tokens=8, sequences=5), 0, print
    )  # fmt: skip
    assert found == ({} if not at_once else {Filters(0.9): ()})
