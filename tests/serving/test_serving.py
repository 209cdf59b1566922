"""Requests that come and go while others are decoded: each has its own text, and nobody waits for ever."""

import asyncio
import gc
import itertools
import random
import threading
import time

import pytest
import torch
from head_cases import head_of
from own_drafts import Bigrams
from played_graphs import Stream
from played_steps import Tape
from processed_texts import odd_behind_even
from serving_cases import VOCAB, alone, generated, held, tiny_llama
from tiny_models import tiny_llama as shorter_llama
from transformers import SuppressTokensLogitsProcessor

from heavypath.speculative import Cascade, EarlyExit, Lookahead, Mixture, PromptLookup, SpeculativeDecoder
from heavypath.speculative.serving import Closed, QueueFull


def requests(count, seed=0):
    """Prompts and settings of all kinds: lists of a prompt and of what `submit` and `generate` both take."""
    made = random.Random(seed)
    for number in range(count):
        settings = {
            "max_new_tokens": made.randint(1, 24),
            "temperature": made.choice([0.0, 0.0, 0.7, 1.3]),
            "top_k": made.choice([None, None, 3]),
            "top_p": made.choice([None, None, 0.8]),
            "min_p": made.choice([None, None, 0.05]),
            "eos_token_id": made.choice([None, None, 5, [2, 6]]),
        }
        yield [made.randrange(VOCAB) for _ in range(made.randint(1, 30))], settings, number


@pytest.fixture
def decoder():
    return SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd")


def served(service, wanted):
    completions = [service.submit(prompt, **settings, seed=name) for prompt, settings, name in wanted]
    return [completion.result(60).tokens for completion in completions]


DRAFTS = {
    "model": lambda target: tiny_llama(1),
    "head": lambda target: head_of(target),
    "lookahead": lambda target: Lookahead(window=3, ngram=3, pool=8),
    "cascade": lambda target: Cascade([tiny_llama(1), EarlyExit(1)], [1, 2]),
    "mixture": lambda target: Mixture([tiny_llama(1), PromptLookup(2)]),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_each_text_is_that_of_the_prompt_alone(name):
    """18 requests in three slots, prompts in pieces of 8 tokens, any sampling side by side, texts of any end."""
    target = tiny_llama(0)
    decoder = SpeculativeDecoder(target, DRAFTS[name](target), "ersd", tree_size=6)
    wanted = list(requests(18))
    with decoder.serve(slots=3, max_tokens=64, prefill_tokens=8, seed=3) as service:
        sent = [service.submit(prompt, **settings, seed=number) for prompt, settings, number in wanted]
        found = [completion.result(60) for completion in sent]
        stats = service.stats()
    for (prompt, settings, number), done in zip(wanted, found, strict=True):
        expected = generated(decoder, prompt, settings, number, seed=3)
        assert done.tokens == expected.sequences[0, len(prompt) :].tolist()
        if settings["temperature"] > 0:  # greedy text is drafted in another way
            assert done.steps == expected.stats.steps
    assert (stats.submitted, stats.completed, stats.failed) == (18, 18, 0)
    assert stats.new_tokens == sum(len(done.tokens) for done in found)
    assert stats.prompt_tokens == sum(len(each[0]) for each in wanted)
    assert stats.batch_steps < stats.steps == sum(done.steps for done in found)


def test_tokens_come_as_steps_bring_them_to_threads_and_to_asyncio(decoder):
    expected = alone(decoder, [1, 2, 3], {"max_new_tokens": 30, "temperature": 0.9}, 8)

    async def read(completion):
        parts = [tokens async for tokens in completion]
        done = await completion
        return parts, done

    async def read_two(service):
        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(read(service.submit([1, 2, 3], 30, temperature=0.9, seed=8)) for _ in range(2))
            )

    with decoder.serve(slots=2, max_tokens=64) as service:
        completion = service.submit([1, 2, 3], 30, temperature=0.9, seed=8)
        parts = list(completion)
        assert [token for part in parts for token in part] == expected
        assert 1 <= len(parts) <= completion.result().steps
        assert all(parts)
        assert [token for part in completion for token in part] == expected  # read again
        for parts, done in asyncio.run(read_two(service)):
            assert [token for part in parts for token in part] == done.tokens == expected
            assert 0 <= done.seconds_waiting <= done.seconds_to_first <= done.seconds


def test_reasons_and_stops(decoder):
    text = alone(decoder, [1, 2], {"max_new_tokens": 20, "temperature": 0.0, "eos_token_id": None}, 0)
    with decoder.serve(slots=2, max_tokens=64) as service:
        length = service.submit([1, 2], 20, temperature=0.0, eos_token_id=None).result(60)
        assert (length.tokens, length.reason) == (text, "length")
        stopped = service.submit([1, 2], 20, temperature=0.0, eos_token_id=text[3]).result(60)
        assert (stopped.tokens, stopped.reason) == (text[: text.index(text[3]) + 1], "stop")

        for most in range(2, 9):

            def long_enough(ids, scores, most=most):
                return ids.shape[1] >= 2 + most

            done = service.submit([1, 2], 20, temperature=0.0, eos_token_id=None, stopping_criteria=[long_enough])
            assert done.result(60)[:2] == (text[:most], "stop")


def test_cancelled_and_late_requests_end_wherever_they_are(decoder):
    with decoder.serve(slots=1, max_tokens=128) as service:
        with held(service) as entered:
            running = service.submit([1, 2, 3], 100, temperature=0.0, eos_token_id=None)
            assert entered.wait(30)
            waiting = service.submit([1, 2], 100)
            late = service.submit([1, 2, 3, 4], 100, deadline=0.01)
            last = service.submit([1, 2], 4, temperature=0.0, eos_token_id=None)
            running.cancel()
            waiting.cancel()
            assert not running.done()
            assert service.stats().waiting == 3
            time.sleep(0.02)
        assert running.result(60).reason == "cancelled"
        assert len(running.result().tokens) < 100
        assert waiting.result(60)[:2] == ([], "cancelled")
        assert waiting.result().seconds_to_first is None
        assert late.result(60)[:2] == ([], "deadline")
        assert len(last.result(60).tokens) == 4
        last.cancel()
        assert last.result().reason == "length"
        stats = service.stats()
    assert (stats.cancelled, stats.expired, stats.completed, stats.running, stats.waiting) == (2, 1, 1, 0, 0)


def test_a_full_queue_and_a_closed_service_refuse(decoder):
    service = decoder.serve(slots=1, max_tokens=64, queue=2)
    with held(service) as entered:
        sent = [service.submit([1], 5, eos_token_id=None)]
        assert entered.wait(30)
        sent += [service.submit([1], 5, eos_token_id=None) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests are waiting, as many as may"):
            service.submit([1], 5)
    service.close()
    assert [len(each.result().tokens) for each in sent] == [5, 5, 5]
    assert (service.stats().refused, service.stats().completed) == (1, 3)
    with pytest.raises(Closed):
        service.submit([1], 5)
    with decoder.serve(slots=1, max_tokens=64) as service, held(service) as entered:
        sent = [service.submit([1], 50, eos_token_id=None) for _ in range(2)]
        assert entered.wait(30)
        threading.Timer(0.05, service.close, [False]).start()
        time.sleep(0.1)
    assert [each.result(60).reason for each in sent] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(("given", "message"), [
    ({"input_ids": []}, "at least one token"),
    ({"input_ids": [[1, 2]]}, r"one prompt, integers \[T\], got torch.int64 \[1, 2\]"),
    ({"input_ids": [1, 99]}, r"input_ids must be in 0 .. 6, got 1 .. 99"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": 199}, "at most 200 tokens, which a slot has room for, got 2 and 199"),
    ({"temperature": -1.0}, "temperature must be"),
    ({"top_p": 2.0}, "top_p must be"),
    ({"seed": 1 << 27}, r"seed must be None or in 0 .. 134217727, got 134217728"),
    ({"stop_strings": "x"}, "stop_strings need tokenizer="),
    ({"deadline": 0}, "deadline must be"),
])  # fmt: skip
def test_bad_requests_and_limits_are_refused_at_once(given, message, decoder):
    for name in ("slots", "max_tokens", "queue", "prefill_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            decoder.serve(**{name: 0})
    with decoder.serve(slots=1, max_tokens=200) as service:
        with pytest.raises(ValueError, match=message):
            service.submit(**({"input_ids": [1, 2]} | given))
        assert service.stats().submitted == 0
        assert len(service.submit([1, 2], 3, eos_token_id=None).result(60).tokens) == 3


def test_requests_without_a_seed_are_repeated_by_the_services_number_and_by_their_own():
    decoder = SpeculativeDecoder(tiny_llama(0), method="autoregressive")
    sampled = {"max_new_tokens": 24, "temperature": 1.2, "eos_token_id": None}

    def texts(unseeded):
        with decoder.serve(slots=4, max_tokens=64, unseeded=unseeded) as service:
            sent = [service.submit([1, 2, 3], **sampled) for _ in range(4)]
            return [(each.seed, tuple(each.result(60).tokens)) for each in sent], service.unseeded

    (first, number), (other, _) = texts(None), texts(6)
    assert texts(number) == (first, number)
    assert len({text for _, text in [*first, *other]}) == 8
    for seed, text in first:
        assert alone(decoder, [1, 2, 3], sampled, seed) == [*text]
    for given in (-1, "7", 0.5):
        with pytest.raises((TypeError, ValueError), match=f"unseeded must be .*integer.*, got {given!r}"):
            decoder.serve(unseeded=given)


def test_an_error_ends_the_request_that_it_is_about_and_no_other():
    """A draft that fails where a text has a certain token: one of four requests gets it."""

    class Fails(Bigrams):
        def __call__(self, feed, cache):
            if (feed.tokens == VOCAB).any():
                raise RuntimeError("a seven")
            return super().__call__(feed, cache)

    without = torch.zeros(VOCAB + 1, VOCAB + 1).index_fill(1, torch.tensor([VOCAB]), -torch.inf)
    target = tiny_llama(0, VOCAB + 1)
    plain = SpeculativeDecoder(target, method="autoregressive")
    options = {"max_new_tokens": 12, "temperature": 0.9, "eos_token_id": None}
    prompts = [[first, second] for first in range(VOCAB) for second in range(VOCAB)]
    texts = {number: alone(plain, prompt, options, number) for number, prompt in enumerate(prompts)}
    fine = [number for number, text in texts.items() if VOCAB not in text][:3]
    with SpeculativeDecoder(target, Fails(without), "ersd").serve(slots=4, max_tokens=64) as service:
        with held(service) as entered:
            sent = [service.submit(prompts[number], **options, seed=number) for number in fine]
            bad = service.submit([4, VOCAB], **options)
            assert entered.wait(30)
        with pytest.raises(RuntimeError, match="a seven"):
            bad.result(60)
        with pytest.raises(RuntimeError, match="a seven"):
            list(bad)
        assert [each.result(60).tokens for each in sent] == [texts[number] for number in fine]
        assert (service.stats().failed, service.stats().completed) == (1, 3)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_rows_of_a_request_that_overflows_do_not_reach_later_ones(which):
    """In one slot, by another request, and while a third one runs beside it."""
    models = {"target": shorter_llama(1, vocab_size=9), "draft": shorter_llama(2, vocab_size=9)}
    overflows = []  # a decoder tries its models with all tokens

    def embedded(module, given, states):
        return states.masked_fill((given[0] == 8)[..., None] & bool(overflows), torch.nan)

    models[which].get_input_embeddings().register_forward_hook(embedded)
    decoder = SpeculativeDecoder(**models, method="sequoia", tree_size=6)
    overflows.append(True)
    settings = {"temperature": 0.9, "seed": 3, "eos_token_id": None}
    settings["logits_processor"] = [SuppressTokensLogitsProcessor([8])]
    with decoder.serve(slots=2, max_tokens=40, prefix_bytes=0) as service:
        expected = service.submit([1, 2, 3], 20, **settings).result(60).tokens
        for beside in (False, True):
            runs = [service.submit([1, 2, 3], 20, **settings) for _ in range(beside)]
            with pytest.raises(ValueError, match=f"NaN.* {which}'s logits|{which}'s logits .* NaN"):
                service.submit([1] * 20 + [8] * 4, 8, **settings).result(60)
            runs += [service.submit([1, 2, 3], 20, **settings) for _ in range(2)]
            assert [run.result(60).tokens for run in runs] == [expected] * len(runs)


def test_a_criterion_that_fails_ends_its_own_request_alone(decoder):
    """In the step in which it fails another text ends by a stop, behind which nothing may come."""
    settings = {"max_new_tokens": 20, "temperature": 0.0}
    text = alone(decoder, [1, 2], settings | {"eos_token_id": None}, 0)
    expected = text[: text.index(text[1]) + 1]

    def fails(ids, scores):
        if ids.shape[1] >= 2 + len(expected):
            raise RuntimeError("a criterion")
        return False

    with decoder.serve(slots=3, max_tokens=64) as service:
        with held(service) as entered:
            first = service.submit([3], 20, temperature=0.0, eos_token_id=None)
            assert entered.wait(30)
            stopped = service.submit([1, 2], **settings, eos_token_id=text[1])
            bad = service.submit([1, 2], **settings, eos_token_id=None, stopping_criteria=[fails])
        with pytest.raises(RuntimeError, match="a criterion"):
            bad.result(60)
        assert stopped.result(60)[:2] == (expected, "stop")
        assert len(first.result(60).tokens) == 20


def test_requests_bring_their_own_processors(decoder):
    """Side by side with a request that has none; one whose processors leave no token fails alone."""
    prompt, settings = [1, 2, 3], {"max_new_tokens": 14, "temperature": 0.8}
    own = [{"repetition_penalty": 1.4}, {"logits_processor": [odd_behind_even]}, {}]
    wanted = [(prompt, settings | more, number) for number, more in enumerate(own)]
    with decoder.serve(slots=4, max_tokens=64) as service:
        bad = service.submit([3, 4], 9, logits_processor=[lambda ids, scores: scores - torch.inf])
        assert served(service, wanted) == [alone(decoder, *each) for each in wanted]
        with pytest.raises(ValueError, match="leave no token after the 0 new tokens"):
            bad.result(60)
        assert (service.stats().failed, service.stats().completed) == (1, len(wanted))


def test_memory_is_taken_at_the_beginning_and_given_back(decoder):
    service = decoder.serve(slots=4, max_tokens=256)
    workspace = service._slots._workspace
    assert 1.25 <= service.stats().cache_bytes / workspace.cache_bytes < 2, (
        "prompts have a slot, and room for short ones"
    )
    keys = workspace.target_cache.keys
    assert keys.shape[0] == 4
    assert keys.shape[2] >= 256
    service.close()
    del workspace, keys
    gc.collect()
    assert not hasattr(service._slots, "_workspace")


def test_there_is_no_more_room_than_the_target_has_positions(decoder, monkeypatch):
    monkeypatch.setattr(decoder._target, "max_positions", 96)
    with decoder.serve(slots=1, max_tokens=2048) as service:
        assert service.limits.max_tokens == 97
        assert len(service.submit([1], 96, eos_token_id=None).result(60).tokens) == 96
        with pytest.raises(ValueError, match="96"):
            service.submit([1], 97)


def test_a_prompt_holds_up_others_for_one_piece_at_most(decoder):
    """While a prompt of 40 tokens goes in, in pieces of 4, the one that runs has a step between any two of them."""
    events = []
    with decoder.serve(slots=2, max_tokens=256, prefill_tokens=4) as service:
        slots = service._slots
        entering, step = slots.entering, slots._step
        first = service.submit([1], 200, temperature=0.0, eos_token_id=None)
        while not service.stats().new_tokens:
            time.sleep(0.001)

        def pieces(group):
            for piece in entering(group):
                events.append("piece")
                yield piece

        def steps(count):
            events.append("step")
            return step(count)

        slots.entering, slots._step = pieces, steps
        second = service.submit([1, 2, 3, 4] * 10, 4, temperature=0.0, eos_token_id=None)
        assert len(second.result(60).tokens) == 4
        assert len(first.result(60).tokens) == 200
    assert events.count("piece") >= 20
    assert all("piece" not in pair or "step" in pair for pair in itertools.pairwise(events))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "slots"), [("autoregressive", 1), pytest.param("ersd", 2, marks=pytest.mark.slow)])
def test_steps_done_by_rote_bring_the_same_texts(method, slots, as_on_a_gpu):
    """On a played GPU: the host is a step late, and slots are taken again while it is."""
    target, draft = (shorter_llama(seed, layers=1, num_attention_heads=1) for seed in (1, 2))
    pair, tree = ((target, draft), {"tree_size": 3}) if method == "ersd" else ((target,), {})
    wanted = [
        ([1, 2, 1], {"max_new_tokens": 3, "temperature": 0.9, "top_p": 0.9}, 4),
        ([5, 2], {"max_new_tokens": 3, "temperature": 0.0, "eos_token_id": [0, 2, 3]}, 0),
        ([4], {"max_new_tokens": 2, "temperature": 0.7, "top_k": 3}, 5),
    ][: slots + 1]
    expected = [alone(SpeculativeDecoder(*pair, method=method, **tree), *each) for each in wanted]
    as_on_a_gpu()
    decoder = SpeculativeDecoder(*pair, method=method, **tree)
    with decoder.serve(slots=slots, max_tokens=8, prefill_tokens=2) as service:
        assert served(service, wanted) == expected
    assert Tape.replays >= 2


def test_a_request_is_looked_at_on_another_stream_than_the_steps_are_on(as_on_a_gpu, monkeypatch):
    """On a GPU each look waits for all that its stream was given before; a server's event loop would wait with it."""
    as_on_a_gpu()
    decoder = SpeculativeDecoder(shorter_llama(1, layers=1, num_attention_heads=1), method="autoregressive")
    streams, tolist = {}, torch.Tensor.tolist

    def watched(tensor):
        streams.setdefault(threading.current_thread(), set()).add(torch.cuda.current_stream())
        return tolist(tensor)

    with decoder.serve(slots=1, max_tokens=8) as service:
        monkeypatch.setattr(torch.Tensor, "tolist", watched)
        assert len(service.submit([1, 2, 1], 2, temperature=0.9, eos_token_id=None).result(60).tokens) == 2
    mine, steps = streams.pop(threading.main_thread()), streams.pop(service._thread)
    assert (mine, steps) == ({service._beside}, {Stream(number=0)})
