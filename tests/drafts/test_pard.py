"""Models trained by PARD: after a text come masks, and one pass over both gives the laws of all levels."""

import json

import pytest
import torch
from block_checkpoints import block_of
from conformance_parts import tokenizer_of
from drafted_cases import PROMPTS, assert_drafts_as_said, assert_later_turns_agree, small_draft
from rounding import SMALL_MODEL
from tiny_models import transformers_greedy

from heavypath.speculative import Cascade, Mixture, Pard, PromptLookup, SpeculativeDecoder, TokenTree, load_draft
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.loading import load_pair

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def pard():
    return Pard(small_draft(), mask_token_id=6, depths=4)


@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec"])
def test_every_node_has_the_law_of_the_text_and_as_many_masks(method, target, pard):
    decoder = SpeculativeDecoder(target, pard, method, tree_size=8)
    nodes = assert_drafts_as_said(decoder, pard, 14, [*PROMPTS, torch.tensor([4])], atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1
    assert min(len(node.text) for node in nodes) == 1


def test_beside_and_above_other_drafts_its_laws_are_the_same(target, pard, tmp_path):
    lookup, block = PromptLookup(), block_of(target, tmp_path)
    for draft in (Mixture([pard, lookup], [0.8, 0.2]), Cascade([pard, lookup], [1, 2]), Cascade([lookup, pard], [1, 2]),
                  Mixture([block, pard], [0.5, 0.5])):  # fmt: skip
        assert_drafts_as_said(SpeculativeDecoder(target, draft, "dyspec", tree_size=8), draft, 10, atol=SMALL_MODEL)


def test_a_later_turn_drafts_the_same(target, pard):
    assert_later_turns_agree(SpeculativeDecoder(target, pard, "sequoia", tree_size=8))


def test_one_pass_a_step_whose_text_is_greedy(target, pard, monkeypatch):
    decoder = SpeculativeDecoder(target, pard, "chain", tree_size=5)
    forward, passes = decoder._draft.forward, []
    run = type(forward).__call__
    monkeypatch.setattr(type(forward), "__call__", lambda self, *given, **more: (
        passes.append(self is forward), run(self, *given, **more))[1])  # fmt: skip
    out = decoder.generate(PROMPT, max_new_tokens=24)
    assert torch.equal(out.sequences, transformers_greedy(target, PROMPT, 24))
    steps = int(out.stats.steps)
    assert steps <= sum(passes) <= steps + 1  # and the prompt's


def test_a_folder_with_a_pard_token_is_one(target, tmp_path):
    small_draft().float().save_pretrained(tmp_path)
    assert not isinstance(load_draft(tmp_path, target), Pard)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": 6}))
    loaded = load_draft(tmp_path, target)
    assert isinstance(loaded, Pard)
    assert loaded.mask_token_id == 6
    tokenizer_of(7).save_pretrained(tmp_path)
    assert isinstance(load_pair(str(tmp_path), str(tmp_path)).draft, Pard)
    assert describe(loaded).startswith("pard of 8 levels, llama, 1 layers, ")


def test_what_cannot_be_is_refused(target, pard):
    with pytest.raises(ValueError, match="mask_token_id must be a token of the draft's 7, got 7"):
        Pard(pard.model, 7)
    with pytest.raises(ValueError, match="depths must be at least 1, got 0"):
        Pard(pard.model, 6, 0)
    with pytest.raises(ValueError, match="can draft 4 levels of a tree, got a tree of 5 levels"):
        SpeculativeDecoder(target, pard, "sequoia", tree=TokenTree.chain(5))
