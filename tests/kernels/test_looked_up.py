"""Drafts that look texts up by the compiled kernel: to the bit what the plain forms say, in steps that are recorded."""

import random

import numpy as np
import pytest
import torch
from drafted_cases import assert_replays_as_run
from kernel_cases import needs_compiler
from tiny_models import tiny_llama

from heavypath.kernels.native.recording import recorded
from heavypath.speculative import Cascade, Mixture, PromptLookup, Recall, Retrieval, SpeculativeDecoder
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.indexed import IndexedCache
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.drafts.recall import RecallDraft
from heavypath.speculative.drafts.retrieval import RetrievalDraft
from heavypath.speculative.models.caches import RowCache

pytestmark = needs_compiler
CPU = torch.device("cpu")
NO_MASK = torch.ones(1, 1, dtype=torch.bool)


def at_random(generator, count, vocab):
    return [generator.randrange(vocab) for _ in range(count)]


def one_token(generator, count, vocab):
    return [vocab - 1] * count


def periodic(generator, count, vocab):
    period = generator.randint(2, 5)
    return [place % period % vocab for place in range(count)]


def begins_alike(generator, count, vocab):
    """Its last tokens occurred at its very beginning, and seldom between."""
    text = [generator.randrange(vocab // 2, vocab) for _ in range(count)]
    text[:3], text[-3:] = [0, 1, 0][:count], [0, 1, 0][-count:]
    return text[:count]


KINDS = [at_random, one_token, periodic, begins_alike]


def lookup_draft(generator, vocab):
    longest = generator.randint(1, 5)
    return LookupDraft(PromptLookup(longest, generator.randint(1, longest)), vocab, CPU)


def retrieval_draft(generator, vocab):
    texts = [at_random(generator, generator.randint(1, 900), vocab) for _ in range(3)]
    return RetrievalDraft(Retrieval(texts, max_ngram=generator.randint(1, 9)), vocab, CPU)


def recall_draft(generator, vocab):
    """Half of them know nothing yet."""
    recall = Recall(2000, max_ngram=generator.randint(1, 9))
    if generator.random() < 0.5:
        recall.learn(np.array(at_random(generator, 700, vocab)))
    return RecallDraft(recall, vocab, CPU)


def levels_of(draft, text, lengths, seed, *, is_plain):
    """The logits of three levels of trees of random tokens, the root's alone in the first; and the cache."""
    generator = random.Random(seed)
    cache = draft.new_cache(len(text), text.shape[1] + 20)
    assert isinstance(cache, IndexedCache)
    if is_plain:
        cache = RowCache(cache.keys, cache.values)
    if text.shape[1] > 1:
        draft.prefill(text[:, :-1], cache)
    rows = torch.stack([(lengths - 1).clamp(min=0), lengths], 1)
    tokens, parents, found = text.gather(1, rows), rows - 1, []
    for level in range(4):
        visible = int(lengths.max()) + 20
        feed = Feed(tokens, rows, rows, parents, lengths, visible, NO_MASK, news=2 * (level == 0), level=level)
        found.append(draft(feed, cache)[:, -1:] if level == 0 else draft(feed, cache))
        above, count = rows[:, -1:], generator.randint(1, 4)
        rows = above + 1 + torch.arange(count)
        tokens = text[:, [generator.randrange(text.shape[1]) for _ in range(count)]]
        parents = above.expand(-1, count)
    return [*found, cache.keys, cache.values]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_of", [lookup_draft, retrieval_draft, recall_draft])
def test_what_is_found_is_what_the_plain_form_finds(draft_of, kind):
    """Batches of texts of any lengths, of one token and of several blocks, by the smallest vocabularies and others."""
    for seed in range(15):
        generator = random.Random(seed)
        vocab = generator.choice([2, 3, 7, 50, 1003])
        longest = generator.choice([1, 2, 3, 15, 16, 17, 18, 40, 400])
        lengths = [longest, *(generator.randint(1, longest) for _ in range(generator.randint(0, 2)))]
        texts = [kind(generator, count, vocab) + [0] * (longest - count) for count in lengths]
        prompt, roots = torch.tensor(texts), torch.tensor(lengths) - 1
        draft = draft_of(generator, vocab)
        ways = [levels_of(draft, prompt, roots, seed, is_plain=is_plain) for is_plain in (False, True)]
        assert all(map(torch.equal, *ways)), seed


def test_as_many_places_count_as_in_the_plain_form():
    """Before token 0 stand forty others, each once, of which 32 are proposed."""
    text = torch.tensor([[token for other in range(1, 41) for token in (0, other)] + [0]])
    draft, root = LookupDraft(PromptLookup(1), 41, CPU), torch.tensor([text.shape[1] - 1])
    ways = [levels_of(draft, text, root, 0, is_plain=is_plain) for is_plain in (False, True)]
    assert all(map(torch.equal, *ways))
    assert (ways[0][0] > -torch.inf).sum() == 32


@pytest.mark.parametrize("draft_of", [lookup_draft, retrieval_draft, recall_draft])
def test_a_text_read_in_pieces_leaves_the_rows_of_one_read_at_once(draft_of):
    """Each sequence goes on at a row of its own."""
    generator = random.Random(1)
    draft, text = draft_of(generator, 7), torch.tensor([at_random(generator, 30, 7) for _ in range(2)])
    whole, pieces = (draft.new_cache(2, 40) for _ in range(2))
    draft.prefill(text, whole)
    draft.prefill(text[:, :12], pieces)
    for begins in ([9, 1], [19, 12]):
        part = torch.stack([row[begin : begin + 11] for row, begin in zip(text, begins, strict=True)])
        draft.prefill(part, pieces, begins)
    for one, other in ((whole.keys, pieces.keys), (whole.values, pieces.values)):
        assert torch.equal(one[0, :, :30], other[0, :, :30])
        assert torch.equal(one[1, :, :23], other[1, :, :23])


@pytest.mark.parametrize("draft", [
    PromptLookup(), Retrieval([[3, 1, 4, 1, 5] * 5]), Recall(64, max_ngram=3),
    Mixture([Recall(64, max_ngram=3), PromptLookup()]), Cascade([Recall(64, max_ngram=3), PromptLookup()], [1, 2]),
], ids=["lookup", "retrieval", "recall", "mixture", "cascade"])  # fmt: skip
@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("ersd", 0.9), ("dyspec", 0.9)])
def test_steps_are_recorded(draft, method, temperature, monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(1), draft, method, tree_size=6)
    prompts = [torch.tensor([3, 1, 4, 1, 5, 3, 1])]
    decoder.generate(prompts[0][None], max_new_tokens=30)  # a Recall has learned it
    monkeypatch.setattr(Recall, "learn", lambda *_: None)
    replays = assert_replays_as_run(decoder, prompts, monkeypatch, max_new_tokens=40, temperature=temperature, seed=1)
    assert sum(replays) > 3


def test_a_recorded_step_finds_what_was_learned_since():
    recall = Recall(64, max_ngram=2)
    draft, text = RecallDraft(recall, 7, CPU), torch.tensor([[1, 2]])
    cache = draft.new_cache(1, 8)
    rows = torch.tensor([[0, 1]])
    feed = Feed(text, rows, rows, rows - 1, torch.tensor([1]), 4, NO_MASK, news=2)
    with recorded() as recording:
        logits = draft(feed, cache)
    assert recording.obstacle is None
    assert (logits == -torch.inf).all()
    recall.learn(np.array([1, 2, 5, 1, 2, 5]))
    recording.replay()
    assert logits[0, 0].argmax() == 5
