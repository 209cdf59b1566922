"""One request against the whole server: it gets its answer, and nobody else waits for it."""

import http.client
import json
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from http_server import ask
from server_process import process

BODY = {"model": "heavypath-demo", "prompt": "def", "max_tokens": 2, "temperature": 0}
SOON = 2.5  # seconds; each of these took 2 to 120, or for ever


@pytest.fixture(scope="module")
def base():
    with process("--slots", 2) as (server, base, _):
        yield base
        assert server.poll() is None
        server.terminate()
        assert server.stderr.read() == "heavypath: stopped\n", "a client's fault is not logged as the server's"


def chain(length, link=lambda name: {"$ref": name}):
    """A schema of references one behind the other."""
    definitions = {f"a{index}": link(f"#/$defs/a{index + 1}") for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length}": {"type": "null"}}}


@contextmanager
def watched(base):
    """Ask for /health all the time, on one connection; gives the list of the seconds that answers took."""
    took, over = [], threading.Event()

    def watch():
        connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=60)
        while not over.is_set():
            begin = time.monotonic()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            took.append(time.monotonic() - begin)
            time.sleep(0.01)
        connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def refused(base, path, body, soon=SOON):
    """The error that a request gets, without anybody's waiting for it."""
    with watched(base) as took:
        begin = time.monotonic()
        status, _, content = ask(base, "POST", path, json.dumps(body, separators=(",", ":")).encode())
        seconds = time.monotonic() - begin
    assert status == 400, content[:300]
    assert seconds < soon, seconds
    assert max(took) < soon, max(took)
    assert len(content) < 1000, "what was sent does not come back"
    assert ask(base, "POST", "/v1/completions", BODY)[0] == 200
    return json.loads(content)["error"]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (chain(3_000), "references lead to nothing but another"),
        (chain(100), "references lead to nothing but another"),
        (chain(1_500, lambda name: {"items": {"$ref": name}}), "nested"),
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83, 79)]}, "multipleOf"),
    ],
    ids=["long_chain", "chain", "nested_chain", "multiple", "multiples"],
)
def test_a_schema_that_would_end_or_hold_up_the_server_is_refused(base, schema, reason):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refused(base, "/v1/completions", BODY | {"response_format": wanted})
    assert error["param"] == "response_format"
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("completions", "prompt", [-1] * 340_000),
        ("completions", "prompt", [{}] * 340_000),
        ("completions", "prompt", [[""]] * 200_000),
        ("completions", "tools", [[]] * 340_000),
        ("chat/completions", "messages", [{}] * 340_000),
        ("chat/completions", "messages", [{"role": "user", "content": [{}] * 340_000}]),
        ("completions", "stop", [1] * 340_000),
    ],
    ids=["tokens", "prompts", "lists", "tools", "messages", "parts", "stops"],
)
def test_a_megabyte_of_wrong_json_holds_up_nobody(base, path, field, value):
    assert refused(base, f"/v1/{path}", BODY | {field: value})["param"] == field


def test_a_megabyte_of_unknown_fields_holds_up_nobody(base):
    assert "does not know" in refused(base, "/v1/completions", BODY | dict.fromkeys(map(str, range(80_000))))["message"]


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        (["a"] * 200_000, "prompt", None),
        (["a"] * 4_000, "n", None),
        ("some words of this " * 50_000, None, "context_length_exceeded"),
        ("some words of this " * 400, None, "context_length_exceeded"),
        ([5] * 300_000, None, "context_length_exceeded"),
    ],
    ids=["prompts", "fewer_prompts", "text", "shorter_text", "tokens"],
)
def test_what_is_too_many_or_too_long_is_refused_before_it_is_worked_on(base, prompt, param, code):
    error = refused(base, "/v1/completions", BODY | {"prompt": prompt})
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 5e-324), ("repetition_penalty", 1e300), ("top_p", 5e-324)],
)
def test_numbers_beyond_what_can_be_computed_are_the_clients_fault(base, field, value):
    assert field in refused(base, "/v1/completions", BODY | {"temperature": 1, field: value})["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 5e-324},
        {"temperature": 1.7e308},
        {"temperature": 1, "min_p": 5e-324},
        {"temperature": 1, "min_p": 1, "top_p": 1e-29, "top_k": 10**30},
        {"temperature": 1, "repetition_penalty": 0.01},
        {"temperature": 1, "repetition_penalty": 100, "seed": -(10**400)},
    ],
    ids=str,
)
def test_numbers_up_to_there_are_taken(base, more):
    status, _, content = ask(base, "POST", "/v1/completions", BODY | more)
    assert status == 200, content


@pytest.mark.parametrize("body", [
    {"a" * 900_000: 1}, {"model": "a" * 900_000}, {"stream": True, "stream_options": {"a" * 900_000: 1}},
    {"temperature": "a" * 900_000}, {"tools": "a" * 900_000},
])  # fmt: skip
def test_an_error_repeats_little_of_what_was_sent(base, body):
    status, _, content = ask(base, "POST", "/v1/chat/completions", BODY | body)
    assert status in (400, 404)
    assert b"aaaaaaa" not in content or 100 < content.count(b"a") < 500


def test_an_error_repeats_little_of_a_path(base):
    assert len(ask(base, "GET", "/" + "a" * 30_000)[2]) < 500


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_page_of_another_site_can_send_is_refused(base, kind):
    status, _, content = ask(base, "POST", "/v1/completions", BODY, {"Content-Type": kind})
    assert status == 400
    assert "application/json" in json.loads(content)["error"]["message"]
    assert ask(base, "POST", "/v1/completions", BODY, {"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_bodies_are_described(base):
    described = json.loads(ask(base, "GET", "/openapi.json")[2])
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "max_tokens" in content["properties"]
    assert "ResponseFormat" in described["components"]["schemas"]
