"""Requests without a seed: independent from service to service, and repeated where that is asked for."""

import pytest
from serving_cases import alone, tiny_llama

from heavypath.speculative import SpeculativeDecoder

SAMPLED = {"max_new_tokens": 24, "temperature": 1.2, "eos_token_id": None}


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(tiny_llama(0), method="autoregressive")


def texts(decoder, count=4, seed=None, **limits):
    """What a new service answers the same request, `count` times."""
    with decoder.serve(slots=4, max_tokens=64, **limits) as service:
        sent = [service.submit([1, 2, 3], **SAMPLED, seed=seed) for _ in range(count)]
        return [tuple(each.result(60).tokens) for each in sent]


def test_no_two_services_answer_alike_and_no_two_requests(decoder):
    found = [*texts(decoder), *texts(decoder), *texts(decoder)]
    assert len({*found}) == len(found)


def test_a_requests_seed_is_the_same_on_every_service(decoder):
    expected = tuple(alone(decoder, [1, 2, 3], SAMPLED, 7))
    assert {*texts(decoder, seed=7), *texts(decoder, seed=7), *texts(decoder, seed=7, unseeded=5)} == {expected}


def test_a_number_repeats_them_and_another_one_gives_others(decoder):
    assert texts(decoder, unseeded=5) == texts(decoder, unseeded=5)
    assert not {*texts(decoder, unseeded=5)} & {*texts(decoder, unseeded=6)}
    with decoder.serve(slots=1, max_tokens=64) as service:
        first = service.submit([1, 2, 3], **SAMPLED)
        again = service.submit([1, 2, 3], **SAMPLED, seed=first.seed)
        assert first.result(60).tokens == again.result(60).tokens
        number = service.unseeded
    assert texts(decoder, 1, unseeded=number) == [tuple(first.result().tokens)]


@pytest.mark.parametrize("given", [-1, "7", 0.5])
def test_what_is_no_number_is_refused(given, decoder):
    with pytest.raises((TypeError, ValueError), match=f"unseeded must be .*integer.*, got {given!r}"):
        decoder.serve(unseeded=given)
