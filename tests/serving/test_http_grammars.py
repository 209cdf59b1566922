"""Schemas that no limit knows: what they do to the process that compiles them, and what the server makes of it."""

import json
import threading
import time
from contextlib import ExitStack

import pytest
from http_server import NAME, PATIENCE, ask, eventually, metrics, open_stream, post
from played_service import at_once, served
from processed_texts import references

from heavypath.speculative.http import grammar as grammars
from heavypath.speculative.http.trial import Trial
from heavypath.speculative.processors import grammar as processor

llguidance = pytest.importorskip("llguidance")

BODY = {"model": NAME, "prompt": "def", "max_tokens": 2}
DEEP = references(3_000)  # overflows the stack
SLOW = {"type": "integer", "multipleOf": 4_000_037}  # takes minutes


def source(schema):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def held_to(schema):
    return BODY | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.fixture
def base(demo_pair, monkeypatch):
    """A server that checks no schema before it is compiled, whose texts have all come at once."""
    monkeypatch.setattr(processor, "check_schema", lambda _: None)
    monkeypatch.setattr(processor, "check_source", lambda *_: None)
    with served(at_once, demo_pair.tokenizer, eos=[0], seconds=20) as (_, base):
        yield base


@pytest.fixture
def trial():
    made = []

    def make(seconds, memory=grammars.MEMORY):
        made.append(Trial(seconds, memory))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_ends_the_process_that_compiles_or_takes_too_long_is_an_error_and_others_are_compiled_after_it(trial):
    bounded = trial(0.5)
    bounded.check(source({"type": "null"}), "schema")
    for schema in (DEEP, SLOW):
        with pytest.raises(ValueError, match=r"schema .* takes more than 0.5 processor seconds, or too much memory"):
            bounded.check(source(schema), "schema")
        bounded.check(source({"type": "null"}), "schema")
    with pytest.raises(ValueError, match="schema cannot be followed: Invalid type: strin"):
        bounded.check(source({"type": "strin"}), "schema")
    bounded._process.kill()
    bounded._process.wait()
    bounded.check(source({"type": "null"}), "schema")


def test_compiling_has_as_much_memory_as_it_may_have(trial):
    bounded = trial(60.0, 8 << 20)
    bounded.check(source({"type": "null"}), "schema")
    with pytest.raises(ValueError, match="too much memory"):
        bounded.check(source({"type": "integer", "multipleOf": 100_003}), "schema")


def test_a_process_that_does_not_start_is_no_clients_fault(trial, monkeypatch, tmp_path):
    monkeypatch.setattr("heavypath.speculative.http.trial.PROGRAM", tmp_path / "nothing.py")
    with pytest.raises(RuntimeError, match="does not start"):
        trial(1.0).check("{}", "schema")


def test_a_schema_that_ends_its_process_is_refused_and_the_server_lives(base):
    status, error = post(base, held_to(DEEP))
    assert (status, error["param"]) == (400, "response_format")
    assert post(base, held_to({"type": "null"}))[0] == 200


@pytest.fixture
def slow(base, monkeypatch):
    """As many schemas as are compiled at once, which take until an event is set, and fail; what is compiled in order;
    and their connections."""
    go_on, compiled = threading.Event(), []

    def check(self, source, what):
        compiled.append(source)
        if "minimum" in source:
            go_on.wait(PATIENCE)
            raise ValueError("it takes too long")

    monkeypatch.setattr(Trial, "check", check)
    with ExitStack() as all_:
        bodies = [held_to({"minimum": number}) for number in range(grammars.AT_ONCE)]
        connections = [all_.enter_context(open_stream(base, body)) for body in bodies]
        eventually(lambda: len(compiled) == grammars.AT_ONCE)
        yield go_on, compiled, connections
        go_on.set()


def test_schemas_that_take_long_hold_up_no_text(base, slow):
    go_on, _, connections = slow
    assert post(base, BODY)[0] == 200
    go_on.set()
    for connection in connections:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_schema_whose_client_has_left_is_not_compiled(base, slow):
    go_on, compiled, _ = slow
    with open_stream(base, held_to({"title": "left"})):
        time.sleep(0.2)  # it waits for a thread
    gone = "heavypath_http_requests_total{path=/v1/completions},{status=499}"
    eventually(lambda: metrics(base).get(gone) == 1)
    ask(base, "GET", "/health")  # the event loop has gone on since then
    go_on.set()
    assert post(base, held_to({"type": "null"}))[0] == 200
    assert not any("left" in each for each in compiled)


def test_a_schema_that_was_compiled_is_not_compiled_again(base, monkeypatch):
    compiled = []
    monkeypatch.setattr(Trial, "check", lambda self, source, what: compiled.append(source))
    for _ in range(3):
        assert post(base, held_to({"title": "a"}))[0] == 200
    assert len(compiled) == 1
    for number in range(grammars.KEPT):
        post(base, held_to({"title": str(number)}))
    post(base, held_to({"title": "a"}))
    assert len(compiled) == grammars.KEPT + 2, "no more than so many are kept"


def test_the_time_of_a_text_begins_with_its_request(demo_pair, monkeypatch):
    """What a schema takes is taken from it; and where nothing is left, that is the answer."""
    monkeypatch.setattr(Trial, "check", lambda *_: time.sleep(0.5))
    with served(at_once, demo_pair.tokenizer, eos=[0], seconds=5.0) as (service, base):
        assert post(base, held_to({"type": "null"}))[0] == 200
        assert service.completions[0].options["deadline"] < 4.6
    with served(at_once, demo_pair.tokenizer, eos=[0], seconds=0.2) as (service, base):
        status, error = post(base, held_to({"type": "null"}))
        assert (status, error["code"]) == (504, "deadline")
        assert service.completions == []
