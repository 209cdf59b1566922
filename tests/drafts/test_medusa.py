"""Medusa heads as drafts: each depth has its head's logits of the root's feature, and no tree is deeper than heads."""

import pytest
import torch
from drafted_cases import PROMPTS, assert_drafts_as_said, assert_later_turns_agree
from medusa_checkpoints import heads_of
from rounding import SMALL_MODEL

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS, MedusaHeads, SpeculativeDecoder, TokenTree, calibrate, read_trace
from heavypath.speculative.costs.estimates import Work
from heavypath.speculative.costs.gpu_step import estimated_costs
from heavypath.speculative.costs.roofline import Device
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.drafts.medusa.heads import MedusaConfig
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.tree_choice import default_tree
from heavypath.speculative.trees.growth import Growth

DRAFTED = [method for method in METHODS if method != "autoregressive"]
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    return heads_of(target, tmp_path_factory.mktemp("medusa"))[0]


@pytest.mark.parametrize(("method", "owns"), [("chain", True), ("sequoia", False), ("dyspec", True), ("rsd-s", False)])
def test_every_node_has_its_depths_head_of_the_feature_before_the_root(method, owns, target, tmp_path):
    """Of zeros where the text is one token."""
    heads, _ = heads_of(target, tmp_path, owns=owns, layers=2)
    decoder = SpeculativeDecoder(target, heads, method, tree_size=8)
    prompts = [*PROMPTS, torch.tensor([4])]
    nodes = assert_drafts_as_said(decoder, heads, 14, prompts, atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1, "no node was deep"
    assert min(len(node.text) for node in nodes) == 1


def test_a_later_turn_drafts_the_same_and_computes_rows_without_features_again(heads, target):
    decoder = SpeculativeDecoder(target, heads, "sequoia", tree_size=8)
    assert_later_turns_agree(decoder, unread=0)
    plain = SpeculativeDecoder(target, method="autoregressive").generate(PROMPT, max_new_tokens=1)
    assert decoder.generate(plain.sequences, max_new_tokens=4, past=plain.cache).stats.reused_tokens == 0


@pytest.mark.parametrize("count", [1, 3])
def test_no_tree_is_deeper_than_there_are_heads(count, target, tmp_path):
    heads, _ = heads_of(target, tmp_path, heads=count)
    costs = estimated_costs(forward_of(target, "target"), [], Device(2e12, 3e14, 2e13))
    for method in DRAFTED:
        for options in ({}, {"threshold": 0.1, "tree_size": 9} if method == "chain" else {"tree_size": 20}):
            decoder = SpeculativeDecoder(target, heads, method, **options)
            assert 1 <= decoder.tree.depth <= count
            assert len(decoder.tree) <= options.get("tree_size", 5)
        assert default_tree(method, costs, count).depth <= count


def test_a_tree_that_is_asked_for_and_deeper_than_there_are_heads_is_refused(heads, target):
    draft = as_draft(heads, forward_of(target, "target"), target)
    assert draft.levels == 4
    deep, message = TokenTree.from_branching([2, 1, 1, 1, 1]), "can draft 4 levels of a tree, got a tree "
    with pytest.raises(ValueError, match=f"{message}of 5 levels; give at mo"):
        SpeculativeDecoder(target, heads, "sequoia", tree=deep)
    with pytest.raises(ValueError, match="got max_depth 6; give at most 4 levels"):
        SpeculativeDecoder(target, heads, "dyspec", tree_size=20, max_depth=6)
    assert SpeculativeDecoder(target, heads, "sequoia", tree=deep.truncated(4)[0]).tree.depth == 4
    assert isinstance(SpeculativeDecoder(target, heads, "dyspec", tree_size=20, max_depth=4).tree, Growth)


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 32}, "made for a target of width 32 .* tokens, got one of width 16 with 7"),
    ({"vocab_size": 9}, "made for a target of width .* 9 tokens, got one of width 16 with 7"),
])  # fmt: skip
def test_heads_that_do_not_fit_are_refused(changes, message, target):
    shape = {"heads": 2, "layers": 1, "hidden_size": 16, "vocab_size": 7, "owns_lm_heads": True} | changes
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, MedusaHeads(MedusaConfig(**shape)).double().eval())


@pytest.mark.slow
@pytest.mark.usefixtures("any_noise")
def test_calibration_knows_of_no_acceptance_beyond_the_heads(target, tmp_path):
    heads, _ = heads_of(target, tmp_path, heads=2)
    profile = calibrate(
        target, heads, prompts=[PROMPT[0]], temperatures=[0.0], sizes=[1, 2, 96], batch_sizes=[1], tokens=12,
        sequences=2, limit=60,
    )  # fmt: skip
    accepted = torch.tensor(profile.acceptance[0].accepted)
    assert accepted[0].sum() > 0
    assert accepted[2:].sum() == 0
    assert max(profile.costs.at(1).step) <= 1 + 8 + 64, "trees of two levels have no more nodes"
    decoder = SpeculativeDecoder(target, heads, "sequoia", profile=profile)
    assert decoder.tree_for(Filters(0.0)).depth <= 2
    assert profile.draft == describe(heads)
    assert describe(heads).startswith("2 medusa heads, 1 layers, ")


def test_a_level_costs_one_head_and_a_trace_says_who_drafted(heads, target, tmp_path):
    width, vocab = 16, 7
    own = width * width + width + vocab * width
    shared, _ = heads_of(target, tmp_path, owns=False)
    for each in (heads, shared):
        assert draft_parameter_count(each, target) == own
        work = Work.of(as_draft(each, forward_of(target, "target"), target))
        assert (work.weights, work.weight_bytes) == (own, 8 * own)
    SpeculativeDecoder(target, heads, "sequoia").generate(PROMPT, max_new_tokens=4, trace=tmp_path / "trace")
    header, _ = read_trace(tmp_path / "trace")
    assert header["draft"]["type"] == "medusa"
    assert header["draft"]["parameters"] == sum(weight.numel() for weight in heads.parameters())
