"""Where a draft finds nothing a step is that of the root alone, and where its finds are vain it rests: texts stay."""

import random

import pytest
import torch
from drafted_cases import steps_of
from played_steps import PADDING, PROMPTS
from tiny_models import tiny_llama
from tree_policies import Scripted

from heavypath.kernels.commit import StateField
from heavypath.speculative import (
    LOSSLESS_METHODS,
    Merge,
    Mixture,
    PromptLookup,
    Recall,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
)
from heavypath.speculative.decoding import drafting
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.trees.tree import ROOT

VOCAB = 40
PROMPT = torch.tensor([[3, 1, 4, 15, 9, 26, 5]])


@pytest.fixture(scope="module")
def target():
    return tiny_llama(1, VOCAB)


def texts_and_sizes(decoder, prompts=PROMPT, **options):
    """The text of each seed, and the nodes of each step."""
    texts, sizes = [], []
    for seed in range(3):
        out, steps = steps_of(decoder, prompts, max_new_tokens=20, eos_token_id=None, seed=seed, **options)
        texts.append(out.sequences)
        sizes += [drafted.tokens.shape[1] for _, drafted in steps]
    return texts, sizes


def assert_no_text_changes(make, monkeypatch, *arguments, **options):
    """With whole trees, and with roots alone. Returns the sizes of the latter's trees."""
    texts, sizes = texts_and_sizes(make(), *arguments, **options)
    monkeypatch.setattr(drafting, "any_drafted", lambda tokens: True)
    whole, whole_sizes = texts_and_sizes(make(), *arguments, **options)
    assert all(map(torch.equal, texts, whole))
    assert sizes.count(1) > whole_sizes.count(1)
    return sizes


@pytest.mark.parametrize("method", [name for name in LOSSLESS_METHODS if name not in ("autoregressive", "dyspec",
                                                                                      "rsd-s", "eagle-2")])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_root_alone_gives_the_text_of_a_whole_tree(method, temperature, target, monkeypatch):
    sizes = assert_no_text_changes(
        lambda: SpeculativeDecoder(target, PromptLookup(3, 2), method, tree_size=7),
        monkeypatch,
        temperature=temperature,
    )
    assert max(sizes) > 1 or temperature > 0


@pytest.mark.parametrize("draft", [
    Recall(), Retrieval([[7] * 5]), Mixture([Recall(), PromptLookup(4, 3)]), Merge([PromptLookup(3, 2), Recall()]),
], ids=["recall", "retrieval", "mixture", "merge"])  # fmt: skip
def test_whatever_finds_nothing_drafts_nothing(draft, target, monkeypatch):
    monkeypatch.setattr(Recall, "learn", lambda *_: None)
    method = "specinfer" if isinstance(draft, Merge) else "sequoia"
    assert_no_text_changes(lambda: SpeculativeDecoder(target, draft, method, tree_size=6), monkeypatch, temperature=1.0)


@pytest.mark.parametrize("verifier", ["traversal", "held", "held_traversal"])
def test_verifiers_of_other_orders_agree(verifier, target, monkeypatch):
    """In a batch a step is the roots alone where none of the sequences finds anything."""
    prompts = PROMPTS + torch.arange(PROMPTS.shape[1]) * 5 % 30
    sizes = assert_no_text_changes(
        lambda: SpeculativeDecoder(target, PromptLookup(3, 3), "sequoia", tree_size=7, verifier=verifier),
        monkeypatch, prompts, temperature=1.0, attention_mask=PADDING, pad_token_id=0,
    )  # fmt: skip
    assert 1 in sizes


def test_a_model_is_not_asked_whether_it_drafts(target, monkeypatch):
    monkeypatch.setattr(drafting, "any_drafted", lambda tokens: pytest.fail("asked"))
    SpeculativeDecoder(target, tiny_llama(2, VOCAB), "sequoia", tree_size=4).generate(PROMPT, 8)


def sizes_of(stats):
    return [int(tree.split()[0]) for tree in [stats.tree, *(tree for _, tree in stats.replans)]]


DRAFTS = {
    "lookup": PromptLookup(), "retrieval": Retrieval([[0, 3, 1, 5, 2, 4, 6] * 3], max_ngram=4), "recall": Recall()
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("ersd", 1.0)])
def test_a_draft_that_rested_knows_the_text_written_meanwhile(name, method, temperature, monkeypatch):
    """Of sequences of several lengths, which rest from the first step on, and at times after it."""
    monkeypatch.setattr(Recall, "learn", lambda *_: None)
    target, chain, turns = tiny_llama(1), TokenTree.chain(3), random.Random(0)
    decoder = SpeculativeDecoder(target, DRAFTS[name], method)
    decoder.trees = Scripted([ROOT, chain], lambda: turns.choice([ROOT, chain]))
    options = {"max_new_tokens": 60, "temperature": temperature, "eos_token_id": None, "attention_mask": PADDING}
    out, steps = steps_of(decoder, PROMPTS, **options)
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(PROMPTS, **options)
    assert torch.equal(out.sequences, plain.sequences)
    compared = 0
    for numbers, drafted in steps:
        for slot in range(numbers.shape[1] if drafted.logits is not None else 0):
            member, length = (int(numbers[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = out.sequences[member][len(PROMPTS[0]) - int(PADDING[member].sum()) :][None, : length + 1]
            assert torch.equal(drafted.logits[slot, :1], said_of_root(DRAFTS[name], target, text)), (slot, length)
            compared += 1
    assert compared > 20


def said_of_root(given, target, text):
    """The logits of a draft that has read all of a text at once."""
    draft, last = as_draft(given, forward_of(target, "target"), target), torch.tensor([text.shape[1] - 1])
    cache, rows = draft.new_cache(1, text.shape[1] + 1), torch.stack([last - 1, last], 1)
    draft.prefill(text[:, :-1], cache)
    return draft(Feed(text[:, -2:], rows, rows, rows - 1, last, int(last) + 1, PADDING > 0, news=2), cache)[0, -1:]


@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("ersd", 0.8)])
def test_a_draft_whose_finds_are_vain_rests_by_default(demo_pair, method, temperature):
    target, _, tokenizer = demo_pair
    prompt = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
    vain = Retrieval([[token, 777] for token in range(1024)], max_ngram=1)
    options = {"max_new_tokens": 60, "temperature": temperature, "eos_token_id": None}
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, **options)
    out = SpeculativeDecoder(target, vain, method).generate(prompt, **options)
    assert torch.equal(out.sequences, plain.sequences)
    first, second, *_ = sizes_of(out.stats)
    assert first > second == 1
    assert out.stats.replans[0][0] <= 4


def test_nothing_is_caught_up_by_a_draft_that_never_rests(target, monkeypatch):
    monkeypatch.setattr(Workspace, "_catch_up", lambda *_: pytest.fail("it never rested"))
    out = SpeculativeDecoder(target, PromptLookup(), tree_size=4).generate(PROMPT, 20, temperature=0.0)
    assert sizes_of(out.stats) == [4]
