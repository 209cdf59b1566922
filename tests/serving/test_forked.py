"""A process that is forked while a service is open has its objects and not its thread: nothing waits for it there."""

import asyncio
import os
import signal

import pytest
from serving_cases import held, tiny_llama

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SECONDS = 60  # until a child that waits is ended


def in_a_child(call):
    """What a call says in a forked process: an error's type and words, or its result's `repr`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            said = repr(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def service():
    with SpeculativeDecoder(tiny_llama(0), method="autoregressive").serve(slots=1, max_tokens=64) as service:
        yield service


async def waited(completion):
    return await completion


CALLS = {
    "submit": lambda service, completion: service.submit([1, 2], 4),
    "close": lambda service, completion: service.close(),
    "stats": lambda service, completion: service.stats(),
    "result": lambda service, completion: completion.result(),
    "result with a time": lambda service, completion: completion.result(timeout=1),
    "tokens": lambda service, completion: [*completion],
    "asyncio": lambda service, completion: asyncio.run(waited(completion)),
    "cancel": lambda service, completion: completion.cancel(),
    "done": lambda service, completion: completion.done(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forked_process_is_told_that_nothing_decodes_there(call, service):
    with held(service) as entered:
        completion = service.submit([1, 2, 3], 20, eos_token_id=None)
        assert entered.wait(30)
        with service._lock, service._arrivals._lock, completion._lock:  # as other threads may have them
            said = in_a_child(lambda: CALLS[call](service, completion))
    assert said.startswith(f"RuntimeError: the service decodes in process {os.getpid()}; this is process "), said
    assert "or make a service here by decoder.serve()" in said
    assert len(completion.result(60).tokens) == 20


def test_what_had_ended_can_be_read_and_the_block_be_left(service):
    completion = service.submit([1, 2, 3], 5, eos_token_id=None)
    tokens = completion.result(60).tokens
    with completion._lock:
        said = in_a_child(lambda: (completion.cancel(), completion.done(), completion.result().tokens, *completion))
    assert said == repr((None, True, tokens, tokens))
    assert in_a_child(lambda: (service.is_open, service.__exit__(None))) == "(False, None)"
    assert service.is_open


def test_a_forked_process_serves_by_a_service_of_its_own(service):
    decoder = SpeculativeDecoder(tiny_llama(0), method="autoregressive")
    expected = service.submit([1, 2, 3], 5, temperature=0.0, eos_token_id=None).result(60).tokens

    def serve():
        with decoder.serve(slots=1, max_tokens=64) as own:
            return own.submit([1, 2, 3], 5, temperature=0.0, eos_token_id=None).result(60).tokens

    assert in_a_child(serve) == repr(expected)
