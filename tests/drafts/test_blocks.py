"""Block drafts at work: each node has the law that the oracle gives, in one pass a step; cached rows are the text's."""

import pytest
import torch
from block_checkpoints import LAWS, block_of
from drafted_cases import PROMPTS, assert_drafts_as_said, assert_later_turns_agree
from rounding import SMALL_MODEL
from tiny_models import tiny_llama

from heavypath.speculative import (
    Cascade,
    Mixture,
    Pard,
    PromptLookup,
    SpeculativeDecoder,
    goodness_of_fit,
    joint_law,
)
from heavypath.speculative.costs.estimates import Work, host_costs
from heavypath.speculative.costs.gpu_step import LEVEL_NODES, estimated_costs
from heavypath.speculative.costs.roofline import Device
from heavypath.speculative.drafts.blocks.draft import BlockHeadDraft
from heavypath.speculative.drafts.kinds import as_draft, draft_parameter_count
from heavypath.speculative.models.forward_of import forward_of

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
VARIANTS = {
    "both see all": {},
    "causal": {"causal": (True, True)},
    "from the root": {"shift": 1},
    "windows": {"windows": (3, 3)},
    "causal windows, capped": {"windows": (3, 3), "causal": (True, True), "cap": 2.0},
    "four tokens": {"drafted": 4, "own_lm_head": True},
    "vanilla": {"term": "vanilla", "shift": 1},
    "gated, four tokens": {"term": "gated", "shift": 1, "drafted": 4, "own_lm_head": True},
    "rnn": {"term": "rnn", "shift": 1},
    "domino, four tokens": {"term": "domino", "plain": 1, "shift": 1, "drafted": 4, "own_lm_head": True},
    "selector": {"term": "selector", "selected": 3, "conv": 2},
}


@pytest.mark.parametrize(("variant", "method"), [
    *((variant, "sequoia") for variant in VARIANTS),
    ("causal", "chain"), ("from the root", "dyspec"), ("four tokens", "rsd-s"), ("windows", "eagle-2"),
    ("gated, four tokens", "eagle-2"), ("rnn", "dyspec"), ("rnn", "rsd-s"),
    ("domino, four tokens", "dyspec"), ("domino, four tokens", "rsd-s"),
])  # fmt: skip
def test_every_node_has_the_law_of_its_depth(variant, method, target, tmp_path):
    """In a batch of texts of several lengths, one of them of one token, over steps that accept some nodes."""
    head = block_of(target, tmp_path, **VARIANTS[variant])
    decoder = SpeculativeDecoder(target, head, method, tree_size=8)
    nodes = assert_drafts_as_said(decoder, head, 14, [*PROMPTS, torch.tensor([4])], atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1, "no node was deep"
    assert min(len(node.text) for node in nodes) == 1


def test_beside_and_below_other_drafts_its_laws_are_the_same(target, tmp_path):
    head = block_of(target, tmp_path)
    for draft in (Mixture([head, PromptLookup()], [0.8, 0.2]), Cascade([head, PromptLookup()], [1, 2]),
                  Cascade([PromptLookup(), head], [1, 2])):  # fmt: skip
        assert_drafts_as_said(SpeculativeDecoder(target, draft, "dyspec", tree_size=8), draft, 10, atol=SMALL_MODEL)


def test_a_later_turn_drafts_the_same_and_computes_nothing_again(target, tmp_path):
    head = block_of(target, tmp_path)
    decoder = SpeculativeDecoder(target, head, "sequoia", tree_size=8)
    assert_later_turns_agree(decoder, unread=0)
    plain = SpeculativeDecoder(target, method="autoregressive").generate(PROMPT, max_new_tokens=1)
    assert decoder.generate(plain.sequences, max_new_tokens=4, past=plain.cache).stats.reused_tokens == 0


def test_one_draft_pass_a_step_at_any_depth(target, tmp_path, monkeypatch):
    """And the layers run as many times as there are of them."""
    passes, blocks = [], BlockHeadDraft._draft_block
    monkeypatch.setattr(BlockHeadDraft, "_draft_block", lambda *given: passes.append(1) or blocks(*given))
    head = block_of(target, tmp_path, block=8)
    for method, shape in (("chain", {"tree_size": 8}), ("dyspec", {"tree_size": 20, "max_depth": 7}), ("chain", {})):
        passes.clear()
        out = SpeculativeDecoder(target, head, method, **shape).generate(PROMPT, max_new_tokens=12, temperature=1.0)
        drafting = int(out.stats.steps) - (int(out.stats.steps) > len(passes))  # the last may draft nothing
        assert len(passes) == drafting > 0


@pytest.mark.parametrize("variant", ["causal", "vanilla"])
def test_the_pass_is_a_cost_of_the_step_and_a_level_has_that_of_the_term(variant, target, tmp_path):
    """So a deeper tree costs no more of the draft, and a step of one node, which drafts nothing, has none of it."""
    head = block_of(target, tmp_path, block=5, **VARIANTS[variant])
    forward = forward_of(target, "target")
    draft = as_draft(head, forward, target)
    term = sum(weight.numel() for weight in head.term.parameters())
    whole = sum(weight.numel() for weight in head.parameters()) + target.lm_head.weight.numel()
    assert draft_parameter_count(head, target) == whole // head.config.depths
    once, level = Work.split(draft)
    assert once[:3] == (8 * (whole - term), whole - term, head.config.layers)
    assert level[:3] == (8 * term, term, 0)
    device, sizes = Device(4e12, 8e14, 6e13), (1, 2, 16)
    costs, without = (estimated_costs(forward, drafting, device, sizes=sizes) for drafting in ([draft], []))
    more = [costs.step[size] - without.step[size] for size in sizes]
    assert more == pytest.approx([0, *2 * [device.pass_seconds(once, LEVEL_NODES)]])
    assert costs.level - without.level == pytest.approx(device.pass_seconds(level, LEVEL_NODES))
    host, without = (host_costs(forward, drafting, 1, sizes) for drafting in ([draft], []))
    more = [host.step[size] - without.step[size] for size in sizes]
    assert more[0] == 0 < more[1] == pytest.approx(more[2])
    assert (host.level > without.level) == (term > 0)


def test_the_pass_of_a_pard_model_is_a_cost_of_the_step(target):
    forward = forward_of(target, "target")
    draft = as_draft(Pard(tiny_llama(2), 3), forward, target)
    once, level = Work.split(draft.forward)
    assert once == Work.of(draft.forward)
    assert level.weights == 0


WAYS = [("sequoia", "rejection"), ("sequoia", "traversal"), ("sequoia", "held"), ("dyspec", "rejection"),
        ("ersd", None), ("eagle-2", None)]  # fmt: skip
EVERY = [(law, *way, 20_000) for law in LAWS for way in WAYS]
SOME = [([*LAWS][place % len(LAWS)], *way, 3_000) for place, way in enumerate(WAYS)]


@pytest.mark.parametrize(
    ("law", "method", "verifier", "sequences"), [*SOME, *(pytest.param(*row, marks=pytest.mark.slow) for row in EVERY)]
)
def test_the_joint_law_of_four_tokens_is_the_targets(law, method, verifier, sequences, tmp_path):
    """By enumeration. The draft has few of the tokens, so that Q lacks what P has."""
    target = tiny_llama(0)
    head = block_of(target, tmp_path, **{"drafted": 4, "own_lm_head": True, "causal": (True, False)} | LAWS[law])
    given = {} if verifier is None else {"verifier": verifier}
    decoder = SpeculativeDecoder(target, head, method, tree_size=6, **given)
    out = decoder.generate(PROMPT.expand(sequences, -1), max_new_tokens=4, temperature=0.8, seed=5)
    assert out.stats.tokens_per_step > 1.1
    fit = goodness_of_fit(out.sequences[:, PROMPT.shape[1] :], joint_law(target, PROMPT[0], 4, temperature=0.8))
    assert fit.is_lossless(), str(fit)
