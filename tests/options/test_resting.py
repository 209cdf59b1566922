"""A draft rests where it does not pay: no text is another one, little time is lost, and it is tried again."""

import logging
from copy import deepcopy

import pytest
import torch

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.adapting import FIRST, LOOK, LOSS, MOST, READING, SAVED, TRY, Rest
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.tree_choice import tokens_of_tree
from heavypath.speculative.trees.tree import ROOT

TREE = TokenTree.chain(2)


@pytest.fixture(scope="module")
def pairs(demo_pair):
    """The shipped target with the shipped draft, and with one that knows nothing."""
    target, draft, tokenizer = demo_pair
    knows_nothing = deepcopy(draft)
    torch.manual_seed(0)
    for weight in knows_nothing.parameters():
        weight.data.normal_(0, 0.02)
    prompt = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
    return target, {"good": draft, "bad": knows_nothing}, prompt


def sizes_of(stats):
    return [int(tree.split()[0]) for tree in [stats.tree, *(tree for _, tree in stats.replans)]]


@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("dyspec", 0.0), ("ersd", 0.8)])
def test_a_draft_that_knows_nothing_rests_and_the_text_stays(method, temperature, pairs, caplog):
    target, drafts, prompt = pairs
    options = {"max_new_tokens": 60, "temperature": temperature, "eos_token_id": None, "seed": 3}
    decoder = SpeculativeDecoder(target, drafts["bad"], method)
    with caplog.at_level(logging.INFO, "heavypath.speculative.adapting"):
        first, second = (decoder.generate(prompt, **options) for _ in range(2))
    expected = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, **options)
    assert torch.equal(first.sequences, expected.sequences)
    assert torch.equal(second.sequences, expected.sequences)
    assert sizes_of(first.stats) == [5, 1]
    assert first.stats.replans[0][0] <= 16
    assert sizes_of(second.stats)[0] == 1, "the decoder has learned it"
    assert len(caplog.records) == 1
    assert "the draft rests: by the costs of steps it does not pay" in caplog.text


def test_a_draft_that_pays_does_not_rest(pairs):
    target, drafts, prompt = pairs
    decoder = SpeculativeDecoder(target, drafts["good"])
    for _ in range(2):
        assert not decoder.generate(prompt, 60, temperature=0.0, eos_token_id=None).stats.replans


def test_a_tree_that_was_asked_for_and_a_sampled_text_are_drafted_always(pairs):
    target, drafts, prompt = pairs
    for options, temperature, size in (({"tree_size": 5}, 0.0, 5), ({}, 0.8, 5)):
        decoder = SpeculativeDecoder(target, drafts["bad"], **options)
        out = decoder.generate(prompt, 40, temperature=temperature, eos_token_id=None)
        assert sizes_of(out.stats) == [size]


def test_a_draft_as_large_as_its_target_has_no_cache_and_reads_nothing(pairs):
    target, _, prompt = pairs
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, 12, temperature=0.0)
    out = SpeculativeDecoder(target, deepcopy(target)).generate(prompt, 12, temperature=0.0)
    assert sizes_of(out.stats) == [1]
    assert out.stats.cache_bytes == plain.stats.cache_bytes
    assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "specinfer"])
def test_a_sampled_batch_that_drafts_do_not_pay_for_is_decoded_without(method, pairs):
    target, drafts, prompt = pairs
    decoder = SpeculativeDecoder(target, drafts["good"], method)
    asked = {"temperature": 1.0, "eos_token_id": None, "pad_token_id": 0}
    out = decoder.generate(prompt.expand(8, -1), 20, **asked)
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(prompt.expand(8, -1), 20, **asked)
    assert sizes_of(out.stats) == [1]
    assert out.stats.steps == plain.stats.steps
    assert out.stats.cache_bytes == plain.stats.cache_bytes
    given = SpeculativeDecoder(target, drafts["good"], method, tree_size=4)
    assert given.generate(prompt.expand(8, -1), 2, **asked).stats.nodes > 16, "a tree that was asked for is drafted"


def test_asking_for_a_tree_changes_nothing():
    gain = gain_with(0.9)
    assert [gain.first(TREE, 1) for _ in range(3)] == [ROOT] * 3
    assert (gain.pause, gain.loss) == (0, FIRST)
    gain.begin(ROOT, rests=True)
    assert gain.pause > 0


def test_a_large_draft_drafts_once_a_batch_is_small_enough():
    """Only a draft that did not pay waits for the next text."""
    gain = gain_with(0.3, read=0.5)
    gain.begin(ROOT, rests=False)
    assert gain.after(ROOT, 64, None) == ROOT
    assert gain.after(TREE, 1, None) == TREE


def test_what_a_text_has_gained_may_be_lost_again_and_no_more_than_that():
    gain = gain_with(0.25)  # a step costs 1.5
    gain.begin(TREE, rests=False)
    for tokens in (3, 3, 3, 3, 3, 3, 3, 3, 3):
        assert gain.after(TREE, 1, tokens) == TREE
    assert gain.loss == -SAVED
    steps = 1
    while gain.after(TREE, 1, 1) == TREE:
        steps += 1
    assert steps == (SAVED + MOST) / 0.5 + 1
    gain.begin(TREE, rests=False)
    gain.after(TREE, 1, 20)
    assert gain.loss < 0
    gain.begin(TREE, rests=False)
    assert gain.loss == 0, "another text gains and loses for itself"


def gain_with(level, read=0.0, models=(None,)):
    """The `Rest` of a draft whose level costs this share of a step; few of its tokens are expected to be accepted."""

    class Fixed(Rest):
        _share_of_trials = LOSS - READING * read

    draft = type("SomeDraft", (Draft,), {"models": models})()
    usual = draft.usual_acceptance(0.0)
    return Fixed(None, draft, lambda tree, running: 1 + level * tree.depth, lambda tree: tokens_of_tree(tree, usual))


def run(gain, tokens, steps, tree=TREE):
    """How many of so many steps draft, each of which brings `tokens` tokens, and the tree after them."""
    drafted = 0
    for _ in range(steps):
        drafted += len(tree) > 1
        tree = gain.after(TREE, 1, tokens if len(tree) > 1 else None)
    return drafted, tree


@pytest.mark.parametrize("level", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("read", [0.0, 0.08])
def test_trials_cost_no_more_of_the_time_than_they_may(level, read):
    gain, cost, steps = gain_with(level, read), 1 + level * TREE.depth, 20000
    first, _ = run(gain, 1, 30)
    assert first * (cost - 1) <= MOST - FIRST + cost, "what a first text may lose"
    drafted, last = run(gain, 1, gain.pause + 15, ROOT)
    assert 0 < drafted * (cost - 1) <= 1.25 * TRY, "trials have whole steps"
    assert last == ROOT
    drafted, _ = run(gain, 1, steps, ROOT)
    reads = READING * read * steps  # each token of the text, at some time
    assert (drafted * (cost - 1) + reads) / steps <= LOSS / 2 + READING * read


def test_a_draft_that_pays_now_and_then_is_not_laid_to_rest():
    gain, steps = gain_with(0.2), [1, 1, 3, 1, 2, 1, 1, 3, 1, 2] * 100  # 1.6 on average at a cost of 1.4
    assert all(len(gain.after(TREE, 1, tokens)) > 1 for tokens in steps)


def test_a_draft_that_gets_better_is_taken_again():
    gain = gain_with(0.2)
    assert run(gain, 1, 60)[1] == ROOT
    pause = gain.pause
    assert 0 < pause <= TRY / LOSS
    assert run(gain, 3, 400, ROOT) == (400 - pause, TREE)
    assert run(gain, 1, 60)[1] == ROOT
    assert 0 < gain.pause <= TRY / LOSS, "a draft that paid meanwhile is tried again as soon as at first"


def test_a_draft_that_reads_too_slowly_is_tried_again_in_a_later_text_alone():
    gain = gain_with(0.3, read=0.5)
    assert gain.first(TREE, 1) == TREE
    _, last = run(gain, 1, 20)
    assert last == gain.first(TREE, 1) == ROOT, "too soon after"
    assert run(gain, 1, 500, ROOT) == (0, ROOT)
    assert gain.first(TREE, 1) == TREE


def test_a_draft_that_would_not_pay_if_all_was_accepted_never_drafts():
    assert gain_with(1.0).never_drafts(TREE, 1)
    assert gain_with(1.0).first(TREE, 1) == ROOT
    assert not gain_with(0.9).never_drafts(TREE, 1)
    assert gain_with(0.9).first(TREE, 1) == ROOT, "it may pay, and is not expected to"
    assert gain_with(0.1).first(TREE, 1) == TREE
    assert gain_with(0.1).first(ROOT, 64) == ROOT, "a batch that drafts nothing may close up"


@pytest.mark.parametrize("level", [0.05, 0.1, 0.2])
def test_a_draft_without_weights_loses_less_and_is_tried_sooner(level):
    gain, cost = gain_with(level, models=()), level * TREE.depth
    first, last = run(gain, 1, 8)
    assert last == ROOT
    assert first * cost <= LOOK + cost
    lost = (LOOK // cost + 1) * cost  # a trial ends with the first loss above LOOK
    pause = max(LOOK, lost) / LOSS
    assert gain.pause <= pause + 1
    drafted, _ = run(gain, 1, 500, ROOT)
    assert 0 < drafted * cost <= 500 * LOSS + cost
    assert gain.pause <= pause + 1, "pauses do not become longer"
    assert gain.first(TREE, 1) == TREE, "each text begins with a trial"
    gain.begin(TREE, rests=False)
    assert run(gain, 3, 100) == (100, TREE), "of a text that repeats itself nothing is missed"
