"""`generate(..., past=out.cache)`: the same text, and no token computed twice."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest
import torch
from families import tiny
from head_cases import head_of
from texts_with_rules import left_padded
from tiny_models import tiny_llama
from transformers import Cache, DynamicCache

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.models.text_cache import CACHE_NAME

IDS = torch.tensor([[3, 1, 4, 1, 6, 2, 5, 5, 2]])
PROMPTS = torch.tensor([[3, 1, 4, 1, 6, 2], [0, 0, 6, 2, 5, 5], [0, 0, 0, 0, 0, 2], [0, 1, 1, 2, 0, 4]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1]])


@pytest.fixture
def computed(monkeypatch):
    """What goes through models' forward passes: for each call the model, its positions, and whether it is a prefill."""
    calls, forward = [], LlamaForward.__call__

    def noted(self, tokens, positions, *arguments, needs_logits=True, taps=None):
        calls.append((self.model, positions.clone(), not needs_logits))
        return forward(self, tokens, positions, *arguments, needs_logits=needs_logits, taps=taps)

    monkeypatch.setattr(LlamaForward, "__call__", noted)

    def prefilled(model):
        """How many tokens of each sequence were prefilled since the last question."""
        found = sum(positions.shape[1] for owner, positions, prefill in calls if owner is model and prefill)
        calls.clear()
        return found

    return prefilled


def texts_of(out, lengths):
    """Prompt and new tokens of each sequence, as lists."""
    width = out.sequences.shape[1] - int(out.stats.tokens_of.max())
    return [
        row[width - length : width + new].tolist()
        for row, length, new in zip(out.sequences, lengths, out.stats.tokens_of.tolist(), strict=True)
    ]


def test_a_head_over_transformers_forward_has_a_past_from_its_first_text_on():
    """The first time that it reads hidden states, transformers puts hooks into the target."""
    target = tiny("granite")
    decoder = SpeculativeDecoder(target, head_of(target))
    first = decoder.generate(IDS, 6, eos_token_id=None)
    turn = torch.cat([first.sequences, IDS], 1)
    later = decoder.generate(turn, 6, past=first.cache, eos_token_id=None)
    assert later.stats.reused_tokens > 0
    assert torch.equal(later.sequences, decoder.generate(turn, 6, eos_token_id=None).sequences)


def test_no_token_of_the_past_is_computed_again(tiny_pair, computed):
    target, draft = tiny_pair
    decoder = SpeculativeDecoder(target, draft, tree_size=5)
    out = decoder.generate(IDS, 10)
    assert computed(target) == 8  # all but the last, which is the first root
    assert out.cache.tokens[0].tolist() in (out.sequences[0].tolist(), out.sequences[0, :-1].tolist())
    turn = torch.cat([out.sequences, IDS], 1)
    later = decoder.generate(turn, 5, past=out.cache)
    assert (later.stats.prefill_tokens, later.stats.reused_tokens) == (9, 18)
    assert computed(target) == 9  # the last token of the text before, and eight of the nine new ones
    decoder.generate(turn, 5, past=out.cache)
    assert computed(draft) == 11  # its last two rows may be missing
    assert decoder.generate(later.sequences, 5, past=later.cache).stats.prefill_tokens == 0
    assert computed(target) == 0
    early = SpeculativeDecoder(target, EarlyExit(1), tree_size=5)  # which shares the target's rows
    past = early.generate(IDS, 10).cache
    computed(target)
    early.generate(turn, 5, past=past)
    assert computed(target) == 9 + 9 + 2


def test_what_is_taken_from_the_past_is_the_longest_common_prefix(tiny_pair, computed):
    """Whichever sequence has it: tokens that a template changed, a shorter prompt, the same one, another one."""
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(*tiny_pair)
    past = decoder.generate(PROMPTS, 8, attention_mask=PADDING, pad_token_id=0).cache
    text = past.tokens[3].tolist()
    assert len(text) == 12
    changed = [*text[:7], (text[7] + 1) % 7, *text[8:]]
    for prompt, reused in ((text, 11), (text[:7], 6), (changed, 7), ([*text, 3, 3], 12), (text[:1], 0), ([5, 5, 5], 0)):
        computed(target)
        out = decoder.generate(torch.tensor([prompt]), 6, past=past)
        assert torch.equal(out.sequences, decoder.generate(torch.tensor([prompt]), 6).sequences)
        assert out.stats.reused_tokens == reused
        assert out.stats.prefill_tokens == len(prompt) - 1 - reused


def test_one_text_serves_a_batch_and_a_batch_serves_one_text(tiny_pair, computed):
    """A common beginning, such as a system prompt; and branches of one chat, each from the same cache."""
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(*tiny_pair)
    past = decoder.generate(IDS, 4).cache
    before = [tokens.clone() for tokens in past.tokens]
    batch = left_padded([[*IDS[0].tolist(), token, *[3] * token] for token in range(5)])
    pairs = zip(batch["input_ids"][4].tolist(), past.tokens[0].tolist(), strict=False)  # of the longest and its past
    missing = 13 - sum(takewhile(bool, (one == other for one, other in pairs)))
    for seed in range(2):
        computed(target)
        out = decoder.generate(**batch, max_new_tokens=8, temperature=1.0, seed=seed, past=past, pad_token_id=0)
        assert computed(target) == missing
        expected = decoder.generate(**batch, max_new_tokens=8, temperature=1.0, seed=seed, pad_token_id=0)
        assert torch.equal(out.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(past.tokens, before, strict=True))
    one = batch["input_ids"][4:]
    assert decoder.generate(one, 4, past=out.cache).stats.prefill_tokens == 0


def test_sequences_that_ended_early_keep_their_rows(tiny_pair, computed):
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(*tiny_pair)

    def ends(ids, scores):
        row = int((ids[0, :6] == PROMPTS).all(1).nonzero()[0, 0])
        return ids.shape[1] - 6 >= (1, 3, 12, 2)[row]

    options = {"attention_mask": PADDING, "stopping_criteria": [ends], "pad_token_id": 0, "temperature": 0.9}
    first = decoder.generate(PROMPTS, 20, **options)
    assert first.stats.tokens_of.tolist() == [1, 3, 12, 2]
    past = first.cache
    for text in texts_of(first, PADDING.sum(1).tolist()):
        turn = torch.tensor([[*text, 6, 6]])
        computed(target)
        out = decoder.generate(turn, 8, past=past)
        assert computed(target) <= 2
        assert torch.equal(out.sequences, decoder.generate(turn, 8).sequences)


def test_methods_share_a_past(tiny_pair, computed):
    """The target's rows in any case; the draft's where it has some. Where not, it computes all of them."""
    target, draft = tiny_pair
    drafts = {"autoregressive": None, "sequoia": draft, "ersd": tiny_llama(4, layers=1)}
    decoders = [SpeculativeDecoder(target, each, method) for method, each in drafts.items()]
    turn = torch.cat([decoders[0].generate(IDS, 8).sequences, IDS], 1)
    pasts = [maker.generate(IDS, 8).cache for maker in decoders]
    for user in decoders:
        expected = user.generate(turn, 8, temperature=0.8).sequences
        for past in pasts:
            computed(target)
            assert torch.equal(user.generate(turn, 8, past=past, temperature=0.8).sequences, expected)
            assert computed(target) == 9


def test_a_past_of_other_models_is_refused(tiny_pair):
    target, draft = tiny_pair
    decoder = SpeculativeDecoder(target, draft)
    out, wide = decoder.generate(IDS, 4), copy.deepcopy(target)
    past = SpeculativeDecoder(wide, None, "autoregressive").generate(IDS, 4).cache
    wide.to(torch.bfloat16)
    for other, given in ((tiny_llama(1), out.cache), (wide, past)):
        with pytest.raises(ValueError, match=r"past must come from a decoder with the same target .* of another model"):
            SpeculativeDecoder(other, draft).generate(IDS, 4, past=given)
    for given in (DynamicCache(), out):
        message = rf"past must be the \.cache of what an earlier generate returned, got {type(given).__name__}"
        with pytest.raises(TypeError, match=message):
            decoder.generate(IDS, 4, past=given)


def test_a_list_of_answers_does_not_keep_their_caches(tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair)
    answers = [decoder.generate(IDS, 2) for _ in range(5)]
    held = answers[3].cache
    for _ in range(3):
        decoder.generate(IDS, 2)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"keeps the caches of its last 2 generations; .* reference to out.cache"):
        print(answers[4].cache)
    assert answers[3].cache is held
    gone = weakref.ref(held.tokens[0]), weakref.ref(held)
    del held, answers
    assert all(each() is None for each in gone)
    assert len(decoder.runner.kept) == 2


def test_a_cache_says_what_it_is(tiny_pair):
    out = SpeculativeDecoder(*tiny_pair).generate(PROMPTS, 4, attention_mask=PADDING, pad_token_id=0)
    assert len(out.cache) == 4
    assert "tokens=[9, 7, 4, 8]" in repr(out.cache)
    assert out.cache.nbytes == out.stats.cache_bytes
    assert "prompt tokens         12 computed, 0 reused" in str(out.stats)
    with pytest.raises(TypeError, match="a model cannot be called with a TextCache; give it to SpeculativeDecoder"):
        tiny_pair[0](PROMPTS, **{CACHE_NAME: out.cache})
    for same in (copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert torch.equal(same.sequences, out.sequences)
        with pytest.raises(RuntimeError, match="a copy of a Generation has no cache"):
            print(same.cache)


def test_threads_have_their_own_last_texts(tiny_pair):
    """Each goes on with its own chat, whatever the others write meanwhile."""
    decoder, barrier = SpeculativeDecoder(*tiny_pair), threading.Barrier(3)

    def chat(seed, uses_past):
        out = decoder.generate(IDS, 4, temperature=0.9, seed=seed)
        for _ in range(3):
            if uses_past:
                barrier.wait()
            text = torch.cat([out.sequences, IDS[:, :2]], 1)
            out = decoder.generate(text, 4, temperature=0.9, seed=seed, past=out.cache if uses_past else None)
            assert out.stats.prefill_tokens == 2 or not uses_past
        return out.sequences.tolist()

    alone = [chat(seed, False) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(chat, range(3), [True] * 3)] == alone


def test_texts_kept_for_later_give_way_where_memory_is_short(tiny_pair, monkeypatch):
    decoder = SpeculativeDecoder(*tiny_pair)
    expected = decoder.generate(IDS, 4).sequences
    make = Workspace.__init__

    def short(self, *arguments):
        if decoder.runner.kept:
            raise torch.OutOfMemoryError("no room")
        make(self, *arguments)

    monkeypatch.setattr(Workspace, "__init__", short)
    assert torch.equal(decoder.generate(IDS, 4).sequences, expected)
    assert len(decoder.runner.kept) == 1


@pytest.mark.parametrize("room", ["for one text", "for none"])
def test_a_text_is_not_lost_where_there_is_no_memory_to_keep_it(room, tiny_pair, monkeypatch):
    """It has been written, and its rows only spare a later text the time to compute them."""
    decoder = SpeculativeDecoder(*tiny_pair)
    expected, _ = (decoder.generate(IDS, 4).sequences for _ in range(2))
    copied = Workspace._kept

    def short(self, cache, texts):
        if texts.shape[1] and (room == "for none" or decoder.runner.kept):
            raise torch.OutOfMemoryError("no room")
        return copied(self, cache, texts)

    monkeypatch.setattr(Workspace, "_kept", short)
    out = decoder.generate(IDS, 4)
    assert torch.equal(out.sequences, expected)
    assert len(decoder.runner.kept) == 1
    assert (len(out.cache.tokens[0]) > 0) == (room == "for one text")
    text = torch.cat([out.sequences, IDS[:, :2]], 1)
    further = decoder.generate(text, 3, past=out.cache)
    assert torch.equal(further.sequences, SpeculativeDecoder(*tiny_pair).generate(text, 3).sequences)
    assert (further.stats.reused_tokens > 0) == (room == "for one text")


def test_transformers_generate_returns_and_takes_a_past(tiny_pair, computed):
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(*tiny_pair)
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "custom_generate": decoder, "return_dict_in_generate": True}
    first = target.generate(PROMPTS, attention_mask=PADDING, **settings)
    assert isinstance(first[CACHE_NAME], Cache)
    turn = torch.cat([first.sequences, IDS[:, :3].expand(4, -1)], 1)
    mask = torch.cat([PADDING, torch.ones(4, 9, dtype=torch.long)], 1)
    for inputs in ({"inputs": turn[:1]}, {"inputs": turn[:1], "attention_mask": mask[:1]},
                   {"inputs": turn, "attention_mask": mask}):  # fmt: skip
        expected = target.generate(**inputs, **settings | {"custom_generate": None})
        computed(target)
        out = target.generate(**inputs, **{CACHE_NAME: first[CACHE_NAME]}, **settings)
        assert computed(target) <= 3
        assert torch.equal(out.sequences, expected.sequences)


def test_transformers_generate_is_told_what_a_past_goes_with(tiny_pair):
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(*tiny_pair)
    past = decoder.generate(PROMPTS, 4, attention_mask=PADDING, pad_token_id=0).cache
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "custom_generate": decoder}
    with pytest.raises(ValueError, match=f"{CACHE_NAME} of type DynamicCache: it takes the {CACHE_NAME} that it"):
        target.generate(IDS, **{CACHE_NAME: DynamicCache()}, **settings)
    message = f"input_ids that begin behind {CACHE_NAME}: give the whole text as input_ids"
    for mask in (torch.ones(1, 15), torch.tensor([[0] + [1] * 14])):
        with pytest.raises(ValueError, match=message):
            target.generate(IDS, attention_mask=mask.long(), **{CACHE_NAME: past}, **settings)
    with pytest.raises(TypeError, match="together with custom_generate=decoder"):
        target.generate(IDS.repeat(1, 3), **{CACHE_NAME: past}, max_new_tokens=2, pad_token_id=0)
