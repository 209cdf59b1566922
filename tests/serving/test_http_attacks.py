"""One request against the whole server: it gets its answer, and so do others after it."""

import copy
import json

import pytest
from http_server import NAME, ask, opened, post, received, running
from processed_texts import references

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.prompts import PromptTokens
from heavypath.speculative.http.requests import ChatRequest
from heavypath.speculative.http.served import Limits

BODY = {"model": NAME, "prompt": "def", "max_tokens": 2, "temperature": 0}
CHAT = "chat/completions"


@pytest.fixture(scope="module")
def base(demo_pair):
    decoder = SpeculativeDecoder(demo_pair.target, demo_pair.draft, "ersd")
    with decoder.serve(slots=2, max_tokens=512) as service:
        with running(service, demo_pair.tokenizer, max_tokens=512, eos=[0]) as base:
            yield base
        assert (service.is_open, service.stats().failed) == (True, 0)


def refused(base, path, body, caplog):
    """The error that a request gets, without a line in the server's log; the next request gets its answer."""
    sent = json.dumps(BODY | body, separators=(",", ":")).encode()
    status, _, content = ask(base, "POST", f"/v1/{path}", sent)
    assert status == 400, content[:300]
    assert len(content) < 1000, "what was sent does not come back"
    assert post(base, BODY)[0] == 200
    assert not [each for each in caplog.records if each.levelname == "ERROR" or each.name.startswith("uvicorn")]
    return json.loads(content)["error"]


@pytest.mark.parametrize(("schema", "reason"), [
    (references(3_000), "references lead to nothing but another"),
    (references(100), "references lead to nothing but another"),
    (references(1_500, lambda name: {"items": {"$ref": name}}), "nested"),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    ({"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83, 79)]}, "multipleOf"),
], ids=["long_chain", "chain", "nested_chain", "multiple", "multiples"])  # fmt: skip
def test_a_schema_that_would_end_or_hold_up_the_server_is_refused(base, schema, reason, caplog):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = refused(base, "completions", {"response_format": wanted}, caplog)
    assert error["param"] == "response_format"
    assert reason in error["message"]


MUCH = 340_000  # of something small: a megabyte


@pytest.mark.parametrize(("path", "body", "param", "said"), [
    ("completions", {"prompt": [-1] * MUCH}, "prompt", ""),
    ("completions", {"prompt": [{}] * MUCH}, "prompt", ""),
    ("completions", {"prompt": [[""]] * 200_000}, "prompt", ""),
    ("completions", {"tools": [[]] * MUCH}, "tools", ""),
    (CHAT, {"messages": [{}] * MUCH}, "messages", ""),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * MUCH}]}, "messages", ""),
    ("completions", {"stop": [1] * MUCH}, "stop", ""),
    ("completions", {"logit_bias": dict.fromkeys(map(str, range(70_000)), 200)}, "logit_bias", "at most 1024"),
    ("completions", {"guided_choice": ["a" * 60] * 1000 + ["b" * 9000]}, "guided_choice", "at most 65536 bytes"),
    (CHAT, {"messages": [{"role": "tool", "content": [{}] * MUCH}]}, "messages", ""),
    ("completions", dict.fromkeys(map(str, range(80_000))), "0", "does not know"),
    ("completions", {"prompt": ["a"] * 200_000}, "prompt", ""),
    ("completions", {"prompt": ["a"] * 4_000}, "n", ""),
    ("completions", {"prompt": "some words of this " * 50_000}, None, "there is room for 512 tokens"),
    ("completions", {"prompt": "some words of this " * 400}, None, "there is room for 512 tokens"),
    ("completions", {"prompt": [5] * 300_000}, None, "there is room for 512 tokens"),
    ("completions", {"temperature": 1, "repetition_penalty": 5e-324}, "repetition_penalty", "repetition_penalty"),
    ("completions", {"temperature": 1, "repetition_penalty": 1e300}, "repetition_penalty", "repetition_penalty"),
    ("completions", {"temperature": 1, "top_p": 5e-324}, "top_p", "top_p"),
], ids=[
    "tokens", "prompts", "lists", "tools", "messages", "parts", "stops", "biases", "choices", "tool_parts",
    "unknown_fields", "many_prompts",
    "fewer_prompts", "text", "shorter_text", "many_tokens", "small_penalty", "large_penalty", "small_top_p",
])  # fmt: skip
def test_what_is_wrong_or_too_much_is_refused_and_the_server_lives(base, path, body, param, said, caplog):
    error = refused(base, path, body, caplog)
    assert error["param"] == param
    assert said in error["message"]
    assert (error["code"] == "context_length_exceeded") == said.startswith("there is room")


@pytest.mark.parametrize("more", [
    {"temperature": 5e-324},
    {"temperature": 1.7e308},
    {"temperature": 1, "min_p": 5e-324},
    {"temperature": 1, "min_p": 1, "top_p": 1e-29, "top_k": 10**30},
    {"temperature": 1, "repetition_penalty": 0.01},
    {"temperature": 1, "repetition_penalty": 100, "seed": -(10**400)},
], ids=str)  # fmt: skip
def test_numbers_up_to_the_bounds_are_taken(base, more):
    status, answer = post(base, BODY | more)
    assert status == 200, answer


@pytest.mark.parametrize("body", [
    {"a" * 900_000: 1}, {"model": "a" * 900_000}, {"stream": True, "stream_options": {"a" * 900_000: 1}},
    {"temperature": "a" * 900_000}, {"tools": "a" * 900_000},
], ids=["field", "model", "option", "number", "tools"])  # fmt: skip
def test_an_error_repeats_little_of_what_was_sent(base, body):
    status, _, content = ask(base, "POST", "/v1/chat/completions", BODY | body)
    assert status in (400, 404)
    assert b"aaaaaaa" not in content or 100 < content.count(b"a") < 500
    assert len(ask(base, "GET", "/" + "a" * 30_000)[2]) < 500, "nor of a path"


@pytest.mark.parametrize("kind", [
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "", None,
])  # fmt: skip
def test_what_a_page_of_another_site_can_send_is_refused(base, kind):
    """Without asking its visitor's browser for more than that: every type but JSON, and none."""
    status, error = post(base, json.dumps(BODY).encode(), headers={"Content-Type": kind})
    assert status == 400
    assert "application/json" in error["message"]
    assert post(base, BODY, headers={"Content-Type": "application/json; charset=utf-8"})[0] == 200


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ '{0.__class__.__globals__}'.format(messages) }}",
    "{{ lipsum.__globals__ }}", "{% for i in range(100001) %}{% endfor %}", "{{ 'x' * 10 ** 18 }}", "{{ 9 ** 99999 }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "{% if %}",
])  # fmt: skip
def test_a_checkpoints_template_reaches_neither_files_nor_python(template, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(Refusal, match="messages: the chat template"):
        PromptTokens(own, Limits(256)).of(request)


def test_nothing_that_a_client_says_is_in_the_log(base, caplog, capfd):
    """Neither lines of its own nor what a terminal obeys, wherever it stands in a request."""
    evil = "x\r\nFORGED line\x1b[31m\x07"
    fields = "model", "prompt", "stop", evil, "user", "guided_regex", "stream"
    for more in (*({name: evil} for name in fields), {"logit_bias": {evil: 1}}):
        post(base, BODY | more)
    for path in ("/v1/%0aFORGED%1b", "/health?%0aFORGED", "/v1/models/%0d%0aFORGED"):
        ask(base, "GET", path)
    for head in (
        b"GET /\x1b\nFORGED HTTP/1.1",
        b"FORGED\x1b",
        b"GET / HTTP/1.1\r\nConnection: close\r\nHost: \x1bFORGED",
        b"\x16FORGED\n",
    ):
        with opened(base, head + b"\r\n\r\n") as connection:
            received(connection)
    said = caplog.text + "".join(capfd.readouterr())
    assert "FORGED" not in said
    assert "\x1b" not in said


def test_bodies_are_described(base):
    described = json.loads(ask(base, "GET", "/openapi.json")[2])
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "max_tokens" in content["properties"]
    assert "ResponseFormat" in described["components"]["schemas"]
