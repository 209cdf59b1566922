"""Prompts that cost once: rows of other texts are taken over, short prompts go together, and texts stay the same."""

import random
import threading

import pytest
import torch
from conformance_parts import translated_of
from families import tiny
from head_cases import head_of
from rope_cases import LIMIT, LONGROPE
from serving_cases import VOCAB, alone, held, tiny_llama

from heavypath.speculative import Cascade, EarlyExit, Lookahead, SpeculativeDecoder
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.serving.prefixes import Prefixes

DRAFTS = {
    "model": lambda target: tiny_llama(1),
    "head": lambda target: head_of(target),
    "lookahead": lambda target: Lookahead(window=3, ngram=3, pool=8),
    "translated": lambda target: translated_of(VOCAB, torch.float32, max_position_embeddings=256),
    "cascade": lambda target: Cascade([tiny_llama(1), EarlyExit(1)], [1, 2]),
}


@pytest.fixture
def read(monkeypatch):
    """The shapes of what goes through the target as prompts."""
    calls, forward = [], LlamaForward.__call__

    def noted(self, tokens, *arguments, needs_logits=True, taps=None):
        if not needs_logits and self.name == "target":
            calls.append(tuple(tokens.shape))
        return forward(self, tokens, *arguments, needs_logits=needs_logits, taps=taps)

    monkeypatch.setattr(LlamaForward, "__call__", noted)
    return calls


def conversations(count, seed):
    """The turns of some conversations, mixed: each is a prompt that goes on from the one before in its own way."""
    made = random.Random(seed)
    begun = [[made.randrange(VOCAB) for _ in range(made.randint(1, 20))] for _ in range(count)]
    for _ in range(3 * count):
        turn = made.choice(begun)
        turn += [made.randrange(VOCAB) for _ in range(made.randint(1, 9))]
        if made.random() < 0.2:
            del turn[made.randrange(1, len(turn) + 1) :]
        yield turn[:60], made.choice([0.0, 0.9])


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_are_those_without_rows_of_others(name):
    target = tiny_llama(0)
    decoder = SpeculativeDecoder(target, DRAFTS[name](target), "ersd", tree_size=6)
    wanted = [
        (prompt, {"max_new_tokens": 8, "temperature": temperature, "eos_token_id": None}, number)
        for number, (prompt, temperature) in enumerate(conversations(8, 1))
    ]
    with decoder.serve(slots=3, max_tokens=80, prefill_tokens=16, prefix_bytes=1 << 20) as service:
        sent = [service.submit(prompt, **settings, seed=seed) for prompt, settings, seed in wanted]
        found = [each.result(60) for each in sent]
        stats = service.stats()
    assert [done.tokens for done in found] == [alone(decoder, *each) for each in wanted]
    assert stats.reused_tokens == sum(done.reused_tokens for done in found) > 0.2 * stats.prompt_tokens


def test_a_later_turn_computes_its_new_tokens_alone(read):
    decoder = SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd", tree_size=3)
    first, more = [1, 2, 3, 4, 5, 6] * 6, [3, 3, 3, 2]
    with decoder.serve(slots=1, max_tokens=100, prefix_bytes=1 << 20) as service:
        read.clear()  # what tried the models
        answer = service.submit(first, 10, 0.0, eos_token_id=None).result(60).tokens
        assert sum(columns for _, columns in read) == len(first) - 1
        read.clear()
        turn = [*first, *answer, *more]
        done = service.submit(turn, 4, 0.0, eos_token_id=None).result(60)
    assert done.reused_tokens == len(first) + len(answer) - 1
    assert sum(columns for _, columns in read) == len(more)
    assert done.tokens == alone(decoder, turn, {"max_new_tokens": 4, "temperature": 0.0, "eos_token_id": None}, 0)


def test_several_texts_of_a_prompt_read_it_once_and_short_prompts_go_together(read):
    decoder = SpeculativeDecoder(tiny_llama(0), method="autoregressive")
    prompt, others = [1, 2, 3, 4, 5, 6] * 5, [[2, 1, 1], [3, 5, 5, 6, 2], [4, 4], [5] * 9]
    with decoder.serve(slots=8, max_tokens=64, prefill_tokens=64, prefix_bytes=0) as service:
        with held(service) as entered:
            service.submit([6], 40, eos_token_id=None)
            assert entered.wait(30)
            read.clear()
            several = [service.submit(prompt, 6, 0.9, seed=seed, group="one", eos_token_id=None) for seed in range(3)]
            short = [
                service.submit(each, 6, 0.9, seed=seed, group="one", eos_token_id=None)
                for seed, each in enumerate(others)
            ]
        found = [each.result(60).tokens for each in (*several, *short)]
    assert read[0] == (1, 29), "the prompt once"
    assert len(read) < len(others), "short ones go together"
    assert sum(rows * columns for rows, columns in read) <= 29 + 4 * 8
    settings = {"max_new_tokens": 6, "temperature": 0.9, "eos_token_id": None}
    wanted = [(prompt, seed) for seed in range(3)] + [(each, seed) for seed, each in enumerate(others)]
    assert found == [alone(decoder, each, settings, seed) for each, seed in wanted]


def test_memory_is_bounded_and_what_was_used_last_stays():
    decoder = SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd", tree_size=3)
    prompts = [[first, second] * 10 for first in range(4) for second in range(4)]
    with decoder.serve(slots=1, max_tokens=64, prefix_bytes=1 << 20) as service:
        service.submit(prompts[0], 4, 0.0, eos_token_id=None).result(60)
        most = 4 * service._slots._prefixes.nbytes
    with decoder.serve(slots=1, max_tokens=64, prefix_bytes=most) as service:
        kept = service._slots._prefixes
        for prompt in prompts:
            service.submit(prompt, 4, 0.0, eos_token_id=None).result(60)
            assert 0 < kept.nbytes <= most
            assert kept.nbytes == sum(cache.nbytes for _, cache in kept._ended.values())
            again = service.submit(prompts[0], 2, 0.0, eos_token_id=None).result(60)
            assert again.reused_tokens == len(prompts[0]) - 1, "it is used between any two others"
        assert 1 < len(kept) < len(prompts)
        assert service.submit(prompts[1], 2, 0.0, eos_token_id=None).result(60).reused_tokens < len(prompts[1]) - 1


def test_a_text_that_is_larger_than_the_memory_leaves_the_others_there_and_none_is_kept_beyond_it(monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd", tree_size=3)
    with decoder.serve(slots=1, max_tokens=64, prefix_bytes=1 << 20) as service:
        service.submit([1] * 10, 2, 0.0, eos_token_id=None).result(60)
        most = 3 * service._slots._prefixes.nbytes
    with decoder.serve(slots=1, max_tokens=64, prefix_bytes=most) as service:
        kept, copied, copying = service._slots._prefixes, [], Prefixes._cache

        def noted(prefixes, *arguments, **options):
            cache = copying(prefixes, *arguments, **options)
            if options["copied"]:
                copied.append(prefixes.nbytes + cache.nbytes)
            return cache

        monkeypatch.setattr(Prefixes, "_cache", noted)
        for first in range(5):
            service.submit([first] * 10, 2, 0.0, eos_token_id=None).result(60)
        service.submit([4] * 50, 2, 0.0, eos_token_id=None).result(60)
        again = service.submit([4] * 10, 2, 0.0, eos_token_id=None).result(60)
    assert len(kept) == 3
    assert again.reused_tokens == 9
    assert max(copied) == most


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory"), torch.OutOfMemoryError("none"), MemoryError()]
)
def test_where_memory_is_exhausted_texts_that_have_ended_are_forgotten_and_service_goes_on(error, monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd", tree_size=3)
    settings, trimmed = {"max_new_tokens": 4, "temperature": 0.0, "eos_token_id": None}, RowCache.trimmed
    prompts, fails = [[first] * 10 for first in range(3)], [False, True, False]

    def allocate(cache, *arguments):
        if failing:
            raise error
        return trimmed(cache, *arguments)

    monkeypatch.setattr(RowCache, "trimmed", allocate)
    with decoder.serve(slots=2, max_tokens=64, prefix_bytes=1 << 20) as service:
        kept = service._slots._prefixes
        for prompt, failing in zip(prompts, fails, strict=True):  # noqa: B007 - which `allocate` reads
            assert service.submit(prompt, **settings).result(60).tokens == alone(decoder, prompt, settings, 0)
        assert service.is_open
    assert [text[0] for text, _ in kept._ended.values()] == [2]
    assert kept.nbytes == sum(cache.nbytes for _, cache in kept._ended.values())


@pytest.mark.parametrize("most", [0, None])
def test_without_memory_for_texts_requests_share_nothing_even_while_they_run(most):
    decoder, prompt = SpeculativeDecoder(tiny_llama(0), method="autoregressive"), [1, 2, 3, 4, 5, 6] * 3
    with decoder.serve(slots=4, max_tokens=64, prefix_bytes=most) as service:
        with held(service) as entered:
            service.submit(prompt, 30, client="a", group="one", eos_token_id=None)
            assert entered.wait(30)
            others = [("b", "one"), ("a", "other"), ("a", "one")]
            sent = [service.submit(prompt, 2, client=whose, group=group, eos_token_id=None) for whose, group in others]
        reused = {name: each.result(60).reused_tokens for name, each in zip(others, sent, strict=True)}
    assert reused == {name: 0 if most == 0 and name != ("a", "one") else 17 for name in others}


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize("piece", [5, 512])
def test_long_prompts_of_longrope_are_read_and_scored_as_long_in_pieces_of_any_size(kind, piece):
    """Of 24 tokens and more, where the model's embeddings change; beside short ones, which phi3 has in other steps."""
    model = tiny(kind, **LONGROPE)
    ids = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    decoder = SpeculativeDecoder(model, model, "chain", tree_size=3)
    with decoder.serve(slots=4, max_tokens=60, prefill_tokens=piece) as service:
        lengths = (12, 25, 40, 12, 26)
        sent = [
            service.submit(ids[0, :length].tolist(), 4, 0.0, prompt_logprobs=scores, logprobs=0, eos_token_id=None)
            for length in lengths
            for scores in (0, None)
        ]
        found = [(each.result(60).tokens, each.prompt_logprobs, each.logprobs) for each in sent]
    for place, (tokens, *scores) in enumerate(found):
        length = lengths[place // 2]
        told = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids[:, :length], max_new_tokens=4, **told)
        assert tokens == expected[0, length:].tolist()
        for whole, first, texts in ((ids[:, :length], 1, scores[0][1:]), (expected, length, scores[1])):
            logprobs = model(whole).logits[0].log_softmax(-1)[first - 1 :]
            for logprob, each in zip(logprobs, texts, strict=False):
                assert abs(logprob[each.token].item() - each.logprob) < 1e-3


def test_short_and_long_texts_of_longrope_take_turns_by_transformers_own_forward_pass():
    """None waits for those that came after it; the draft's limit counts as the target's does."""
    decoder = SpeculativeDecoder(tiny_llama(0, vocab_size=61), tiny("phi3", **LONGROPE), "ersd", tree_size=3)
    lengths, ends = [4, 5, 30, 6, 31, 7, 8, 40], []
    with decoder.serve(slots=4, max_tokens=60, prefix_bytes=0) as service:
        step, together = service._slots._step, []

        def noted(count):
            together.append({arrival.prompt_length > LIMIT for arrival in service._slots.running})
            ended = step(count)
            ends.extend(arrival.prompt_length for arrival, _ in ended)
            return ended

        service._slots._step = noted
        with held(service) as entered:
            sent = [service.submit([3] * length, 4, 0.0, eos_token_id=None) for length in lengths]
            assert entered.wait(30)
        for each in sent:
            each.result(60)
    assert all(len(kinds) == 1 for kinds in together)
    assert [sorted(ends[:2]), ends[2:5], sorted(ends[5:7]), ends[7]] == [[4, 5], [30, 6, 31], [7, 8], 40]


def test_slots_that_long_texts_have_left_do_not_make_short_ones_long(monkeypatch):
    """On a GPU a step has some slots that nobody is in; here the service is told that it is on one."""
    monkeypatch.setattr("heavypath.speculative.serving.slots.host_can_read", lambda device: False)
    model, told = tiny("phi3", **LONGROPE), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with SpeculativeDecoder(model, model, "chain", tree_size=3).serve(slots=4, max_tokens=60) as service:
        with held(service) as entered:
            sent = [service.submit([3 + number] * 30, 20, 0.0, eos_token_id=None) for number in range(4)]
            assert entered.wait(30)
            sent += [service.submit([3, 9 + number], 20, 0.0, eos_token_id=None) for number in range(3)]
        found = [each.result(60).tokens for each in sent[4:]]
    prompts = [torch.tensor([[3, 9 + number]]) for number in range(3)]
    assert found == [model.generate(prompt, max_new_tokens=20, **told)[0, 2:].tolist() for prompt in prompts]


def test_rows_of_a_text_that_failed_are_not_taken_over():
    decoder = SpeculativeDecoder(tiny_llama(0), method="autoregressive")

    def fails(ids, scores):
        raise RuntimeError("a criterion")

    with decoder.serve(slots=1, max_tokens=64, prefix_bytes=1 << 20) as service:
        with pytest.raises(RuntimeError, match="a criterion"):
            service.submit([1, 2, 3] * 5, 4, stopping_criteria=[fails]).result(60)
        assert len(service._slots._prefixes) == 0


def test_a_prompt_that_is_given_up_leaves_the_others_of_its_group():
    decoder = SpeculativeDecoder(tiny_llama(0), method="autoregressive")
    entered, go_on = threading.Event(), threading.Event()
    with decoder.serve(slots=4, max_tokens=64, prefill_tokens=64) as service:
        with held(service) as holding:
            service.submit([6], 40, eos_token_id=None)
            assert holding.wait(30)
            entering = service._slots.entering

            def slowly(group):
                for piece in entering(group):
                    entered.set()
                    assert go_on.wait(30)
                    yield piece

            service._slots.entering = slowly
            sent = [service.submit(prompt, 4, 0.0, eos_token_id=None) for prompt in ([1, 1], [2, 2, 2], [3, 3])]
        assert entered.wait(30)
        sent[1].cancel()
        go_on.set()
        assert sent[1].result(60).reason == "cancelled"
        for each, prompt in ((sent[0], [1, 1]), (sent[2], [3, 3])):
            settings = {"max_new_tokens": 4, "temperature": 0.0, "eos_token_id": None}
            assert each.result(60).tokens == alone(decoder, prompt, settings, 0)
