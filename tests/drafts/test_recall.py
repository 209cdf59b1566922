"""Recall: what it has learned after any texts, against a corpus of these; texts that it drafts."""

import pickle
import random
from copy import copy, deepcopy

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama, transformers_greedy

from heavypath.speculative import Mixture, Recall, Retrieval, SpeculativeDecoder, TokenTree
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.forward_of import forward_of

VOCAB, CHAIN = 7, TokenTree.chain(5)
PROMPT = torch.tensor([[1, 2, 3, 4]])


def draft_of(given, target):
    return as_draft(given, forward_of(target, "target"), target)


def step(draft, cache, text, below):
    """The laws after the root, the last token of a text, and after nodes below it, one on each level."""
    found, length = [], len(text) - 1
    for level in range(len(below) + 1):
        rows = torch.tensor([[length - 1, length]]) if level == 0 else torch.tensor([[length + level]])
        tokens = torch.tensor([text[-2:] if level == 0 else [below[level - 1]]])
        mask = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool)
        feed = Feed(tokens, rows, rows, rows - 1, torch.tensor([length]), length + 5, mask, news=2 * (level == 0))
        found.append(draft(feed, cache)[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize("seed", range(6))
def test_it_knows_what_a_corpus_of_the_last_texts_knows(seed):
    """Texts come between steps, behind whose backs the ranges in the cache change; the oldest texts go."""
    generator, target = random.Random(seed), tiny_llama(1)
    recall = Recall(60, max_ngram=3)
    draft = draft_of(recall, target)
    text, kept = [generator.randrange(VOCAB) for _ in range(9)], []
    cache = draft.new_cache(1, 40)
    draft.prefill(torch.tensor([text[:-1]]), cache)
    sizes = []
    for _ in range(8):
        written = [generator.randrange(VOCAB) for _ in range(generator.randrange(4, 30))]
        draft.learn(torch.tensor([written]), torch.tensor([3]), torch.tensor([[*written[3:], 0]]),
                    torch.tensor([len(written) - 3]))  # fmt: skip
        kept.append(written)
        while sum(map(len, kept)) + len(kept) > 60:
            kept.pop(0)
        sizes.append(sum(map(len, kept)))
        below = [generator.randrange(VOCAB) for _ in range(2)]
        same = draft_of(Retrieval(kept, max_ngram=3), target)
        fresh = same.new_cache(1, 40)
        same.prefill(torch.tensor([text[:-1]]), fresh)
        assert torch.equal(step(draft, cache, text, below), step(same, fresh, text, below))
        text.append(generator.randrange(VOCAB))
    assert sizes[-1] <= 60 < sum(sizes)


def test_few_tokens_wait_until_they_are_sorted_and_long_texts_lose_their_beginnings():
    recall = Recall(400)
    recall.learn(np.arange(160) % 5)
    copy = recall.on(torch.device("cpu"))
    before = copy.corpus
    recall.learn(np.arange(6))
    assert copy.corpus is before  # 7 entries are less than a 16th of 161
    recall.learn(np.arange(6))
    assert copy.corpus is not before  # 14 are not
    recall.learn(np.arange(1000) % 6)
    assert len(copy.corpus.steps) == 400
    assert sorted(copy.corpus.followers.tolist()) == sorted([0, *(each % 6 + 1 for each in range(601, 1000))])


def test_a_text_is_drafted_once_it_was_written():
    target = tiny_llama(1, 60)
    text = transformers_greedy(target, PROMPT, 40)
    decoder = SpeculativeDecoder(target, Recall(), tree=CHAIN)
    steps = []
    for _ in range(2):
        out = decoder.generate(PROMPT, 40)
        assert torch.equal(out.sequences, text)
        steps.append(out.stats.tokens_per_step)
    assert steps[1] > 4 > 2 > steps[0]


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda given: pickle.loads(pickle.dumps(given))],
                         ids=["copy", "deepcopy", "pickle"])  # fmt: skip
def test_a_copy_has_the_texts_of_its_original_and_changes_without_it(copied):
    recall, expected, cpu = Recall(16, max_ngram=2), Recall(16, max_ngram=2), torch.device("cpu")
    of_recall = recall.on(cpu)
    recall.learn(np.arange(5))
    other = copied(recall)
    of_other = other.on(cpu)
    recall.forget()
    for text in (np.arange(5), np.arange(6) % 4, np.arange(8) % 3):  # the third takes the place of the first
        expected.learn(text)
        if len(text) > 5:
            other.learn(text)
    assert all(map(torch.equal, of_other.corpus, expected.on(cpu).corpus))
    assert all(map(torch.equal, of_recall.corpus, Recall(16, max_ngram=2).on(cpu).corpus))


def test_all_texts_of_a_batch_are_learned_without_padding(monkeypatch):
    target, recall, learned = tiny_llama(1), Recall(), []
    monkeypatch.setattr(recall, "learn", lambda text: learned.append(text.tolist()))
    ids = torch.tensor([[0, 0, 5, 1], [*PROMPT[0]], [2, 2, 6, 3]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    decoder = SpeculativeDecoder(target, Mixture([tiny_llama(2), recall]), tree_size=6)
    out = decoder.generate(ids, 12, temperature=1.0, attention_mask=mask, eos_token_id=2, pad_token_id=0)
    assert len({*out.stats.tokens_of.tolist()}) > 1  # some end before others
    begins = [2, 0, 0]
    assert learned == [
        row[begin : 4 + count].tolist()
        for row, begin, count in zip(out.sequences, begins, out.stats.tokens_of, strict=True)
    ]


def test_a_service_learns_from_one_request_to_the_next():
    target = tiny_llama(1, 60)
    with SpeculativeDecoder(target, Recall(), tree=CHAIN).serve(slots=2, max_tokens=60) as service:
        asked = [service.submit(PROMPT[0], 40, 0.0) for _ in range(2)]  # side by side
        first = asked[0].result(60)
        assert asked[1].result(60).tokens == first.tokens
        again = service.submit(PROMPT[0], 40, 0.0).result(60)
    assert again.tokens == first.tokens
    assert again.steps < 12 < 20 < first.steps


@pytest.mark.slow
def test_texts_of_one_vocabulary_do_not_draft_for_another():
    recall = Recall(tokens=64, max_ngram=3)
    SpeculativeDecoder(tiny_llama(0), recall, "chain")
    with pytest.raises(ValueError, match="vocabulary of 7 tokens, got a target of 9; make a Recall for each"):
        SpeculativeDecoder(tiny_llama(0, 9), recall, "chain")


@pytest.mark.slow
def test_on_a_gpu_steps_go_on_in_the_same_memory(as_on_a_gpu):
    """Graphs that were captured before draft what was learned since."""
    target = tiny_llama(1, 60, layers=1, hidden_size=32)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(target, Recall(64, max_ngram=2), tree=TokenTree.chain(2))
    steps = [decoder.generate(PROMPT, 6, eos_token_id=None).stats.steps for _ in range(2)]
    assert steps[1] < steps[0]


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Recall(15), r"tokens must be in 16 .. 4194304, got 15"),
    (lambda: Recall(2**22 + 1), r"tokens must be in 16 .. 4194304, got 4194305"),
    (lambda: Recall(max_ngram=65), r"max_ngram must be in 1 .. 64, got 65"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("given", [{"tokens": 64.5}, {"tokens": True}, {"max_ngram": 2.5}, {"max_ngram": "2"}])
def test_numbers_that_are_not_whole_are_refused(given):
    (name,) = given
    with pytest.raises(TypeError, match=f"{name} must be an integer"):
        Recall(**given)
    assert getattr(Recall(**{name: torch.tensor(32)}), name) == 32
