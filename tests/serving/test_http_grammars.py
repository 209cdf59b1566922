"""Schemas that no limit knows: what they do to the process that compiles them, and what the server makes of it."""

import json
import threading
import time

import played_service
import pytest
from grammar_cases import references
from http_server import NAME, PATIENCE, ask, eventually, metrics, open_stream, running

from heavypath.speculative.http import grammar as grammars
from heavypath.speculative.http.trial import Trial
from heavypath.speculative.processors import grammar as processor

llguidance = pytest.importorskip("llguidance")

BODY = {"model": NAME, "prompt": "def", "max_tokens": 2}
DEEP = references(3_000)  # overflows the stack
SLOW = {"type": "integer", "multipleOf": 4_000_037}  # takes minutes


def at_once(completion):
    completion.emit([5])
    return "stop"


def source(schema):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def held_to(schema):
    return BODY | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.fixture
def base(demo_pair, monkeypatch):
    """A server that checks no schema before it is compiled, whose texts have all come at once."""
    monkeypatch.setattr(processor, "check_schema", lambda _: None)
    monkeypatch.setattr(processor, "check_source", lambda *_: None)
    with played_service.Service(at_once) as service, running(service, demo_pair.tokenizer, eos=[0], seconds=20) as base:
        yield base


def test_what_ends_the_process_that_compiles_or_takes_too_long_is_an_error_and_others_are_compiled_after_it():
    trial = Trial(1.0, grammars.MEMORY)
    try:
        trial.check(source({"type": "null"}), "schema")
        for schema in (DEEP, SLOW):
            with pytest.raises(ValueError, match=r"schema .* takes more than 1 seconds, or too much memory"):
                trial.check(source(schema), "schema")
            trial.check(source({"type": "null"}), "schema")
        with pytest.raises(ValueError, match="schema cannot be followed: Invalid type: strin"):
            trial.check(source({"type": "strin"}), "schema")
        trial._process.kill()
        trial._process.wait()
        trial.check(source({"type": "null"}), "schema")
    finally:
        trial.close()


def test_compiling_has_as_much_memory_as_it_may_have():
    trial = Trial(60.0, 8 << 20)
    try:
        trial.check(source({"type": "null"}), "schema")
        with pytest.raises(ValueError, match="too much memory"):
            trial.check(source({"type": "integer", "multipleOf": 100_003}), "schema")
    finally:
        trial.close()


def test_a_process_that_does_not_start_is_no_clients_fault(monkeypatch, tmp_path):
    monkeypatch.setattr("heavypath.speculative.http.trial.PROGRAM", tmp_path / "nothing.py")
    with pytest.raises(RuntimeError, match="does not start"):
        Trial(1.0, grammars.MEMORY).check("{}", "schema")


def test_a_schema_that_ends_its_process_is_refused_and_the_server_lives(base):
    status, _, content = ask(base, "POST", "/v1/completions", held_to(DEEP))
    assert status == 400
    assert json.loads(content)["error"]["param"] == "response_format"
    assert ask(base, "POST", "/v1/completions", held_to({"type": "null"}))[0] == 200


@pytest.fixture
def held_up(monkeypatch):
    """Compiling a schema with a minimum takes until the event is set, and fails then; and the sources in order."""
    go_on, compiled = threading.Event(), []

    def check(self, source, what):
        compiled.append(source)
        if "minimum" in source:
            go_on.wait(PATIENCE)
            raise ValueError("it takes too long")

    monkeypatch.setattr(Trial, "check", check)
    yield go_on, compiled
    go_on.set()


def test_schemas_that_take_long_hold_up_no_text(base, held_up):
    go_on, compiled = held_up
    slow = [open_stream(base, held_to({"minimum": number})) for number in range(grammars.AT_ONCE)]
    eventually(lambda: len(compiled) == grammars.AT_ONCE)
    assert ask(base, "POST", "/v1/completions", BODY)[0] == 200
    go_on.set()
    for connection in slow:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        connection.close()


def test_a_schema_whose_client_has_left_is_not_compiled(base, held_up):
    go_on, compiled = held_up
    slow = [open_stream(base, held_to({"minimum": number})) for number in range(grammars.AT_ONCE)]
    eventually(lambda: len(compiled) == grammars.AT_ONCE)
    left = open_stream(base, held_to({"title": "left"}))
    time.sleep(0.2)  # it waits for a thread
    left.close()
    gone = "heavypath_http_requests_total{path=/v1/completions},{status=499}"
    eventually(lambda: metrics(base).get(gone) == 1)
    go_on.set()
    assert ask(base, "POST", "/v1/completions", held_to({"type": "null"}))[0] == 200
    assert not any("left" in each for each in compiled)
    for connection in slow:
        connection.close()


def test_a_schema_that_was_compiled_is_not_compiled_again(base, monkeypatch):
    compiled, check = [], Trial.check
    monkeypatch.setattr(Trial, "check", lambda *given: (compiled.append(given[1]), check(*given)))
    for _ in range(3):
        assert ask(base, "POST", "/v1/completions", held_to({"title": "a"}))[0] == 200
    assert len(compiled) == 1
    for number in range(grammars.KEPT):
        ask(base, "POST", "/v1/completions", held_to({"title": str(number)}))
    ask(base, "POST", "/v1/completions", held_to({"title": "a"}))
    assert len(compiled) == grammars.KEPT + 2, "no more than so many are kept"


def test_the_time_of_a_text_begins_with_its_request(demo_pair, monkeypatch):
    """What a schema takes is taken from it; and where nothing is left, that is the answer."""
    monkeypatch.setattr(Trial, "check", lambda *_: time.sleep(0.5))
    with (
        played_service.Service(at_once) as service,
        running(service, demo_pair.tokenizer, eos=[0], seconds=5.0) as base,
    ):
        assert ask(base, "POST", "/v1/completions", held_to({"type": "null"}))[0] == 200
        assert service.completions[0].options["deadline"] < 4.6
        assert ask(base, "POST", "/v1/completions", BODY)[0] == 200
    with (
        played_service.Service(at_once) as service,
        running(service, demo_pair.tokenizer, eos=[0], seconds=0.2) as base,
    ):
        status, _, content = ask(base, "POST", "/v1/completions", held_to({"type": "null"}))
        assert (status, json.loads(content)["error"]["code"]) == (504, "deadline")
        assert service.completions == []
