"""The HTTP server where things go wrong: full queues, failures, clients that leave or do not read, and its end."""

import json
import threading
import time

import openai
import pytest
from http_server import (
    NAME,
    PATIENCE,
    ask,
    client_of,
    eventually,
    is_listening,
    metrics,
    open_stream,
    opened,
    post,
    received,
    running,
)
from played_service import Held, Service, at_once, endless, served

from heavypath.speculative.http.server import is_loopback

BODY = {"model": NAME, "prompt": "def", "max_tokens": 8}
STREAM = BODY | {"stream": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_texts(tokenizer, stream):
    with served(endless, tokenizer, slots=2) as (service, base):
        with open_stream(base, BODY | {"stream": stream, "n": 2}) as connection:
            eventually(lambda: len(service.completions) == 2 and all(each.tokens for each in service.completions))
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: service.outcomes == ["cancelled", "cancelled"])
        assert metrics(base)["heavypath_completions_total{outcome=disconnected}"] == 2
        answered = f"heavypath_http_requests_total{{path=/v1/completions}},{{status={200 if stream else 499}}}"
        eventually(lambda: answered in metrics(base))


def test_a_client_that_leaves_while_its_request_waits_ends_it(tokenizer):
    with served(endless, tokenizer) as (service, base), open_stream(base, STREAM):
        eventually(lambda: service.running == 1)
        with open_stream(base, BODY):
            eventually(lambda: len(service.completions) == 2)
        eventually(lambda: service.completions[1].is_cancelled)
        assert not service.completions[0].is_cancelled


def test_a_client_that_does_not_read_holds_up_no_one(tokenizer):
    def one_by_one(completion):
        for _ in range(completion.options["max_new_tokens"]):
            completion.emit([5])
            time.sleep(1e-4)
        return "length"

    def ended(base):
        return sum(value for name, value in metrics(base).items() if name.startswith("heavypath_completions_total"))

    with served(one_by_one, tokenizer, max_tokens=2000, fingerprint=60_000 * "f") as (service, base):
        many = STREAM | {"max_tokens": 400}
        with open_stream(base, many, buffer=4096):  # 24 MB of events, which is more than the sockets hold
            eventually(lambda: len(service.outcomes) == 1)
            for _ in range(5):
                assert post(base, BODY)[0] == 200
            assert metrics(base)["heavypath_completions_total{outcome=length}"] == 5  # the idle one is held back
        eventually(lambda: ended(base) == 6)


def test_a_full_queue_is_429_and_says_when_to_come_again_and_no_part_of_a_request_is_decoded(tokenizer):
    with served(endless, tokenizer, queue=1) as (service, base), open_stream(base, STREAM):
        eventually(lambda: service.running == 1)
        assert post(base, BODY | {"n": 2})[0] == 429
        assert [each.is_cancelled for each in service.completions] == [False, True]
        assert metrics(base)["heavypath_completions_total{outcome=refused}"] == 1
        assert service.stats().waiting == 1  # that one, since the played service has no step in which it would go
        assert int(ask(base, "POST", "/v1/completions", STREAM)[1]["Retry-After"]) >= 1
        status, error = post(base, STREAM)
        assert (status, error["code"]) == (429, "queue_full")
        with client_of(base) as client, pytest.raises(openai.RateLimitError):
            client.completions.create(**BODY)


def test_a_bug_is_500_in_openais_shape_and_leaves_no_text_running(tokenizer, caplog):
    class Broken(Service):
        def submit(self, input_ids, **options):
            if self.completions:
                raise KeyError("bug")
            return super().submit(input_ids, **options)

    with served(endless, tokenizer, kind=Broken) as (service, base):
        status, error = post(base, BODY | {"n": 2})
        eventually(lambda: service.outcomes == ["cancelled"])
    assert (status, error["code"]) == (500, "internal_error")
    assert "bug" in caplog.text
    assert "bug" not in error["message"]


def test_a_text_that_fails_is_500_without_its_reason_which_is_logged(tokenizer, caplog):
    def fail(completion):
        completion.emit([5])
        raise ArithmeticError("a secret of the machine")

    with served(fail, tokenizer) as (_, base):
        status, error = post(base, BODY)
        assert status == 500
        assert "secret" not in error["message"]
        assert "a secret of the machine" in caplog.text
        with client_of(base) as client, client.completions.create(**STREAM) as events:
            with pytest.raises(openai.APIError, match="the server failed") as caught:
                list(events)
            assert caught.value.code == "internal_error"
        status, _, content = ask(base, "POST", "/v1/completions", STREAM)
        assert status == 200
        assert b"[DONE]" not in content
        assert metrics(base)["heavypath_completions_total{outcome=failed}"] == 3


def test_a_text_that_takes_too_long_is_504(tokenizer):
    with served(endless, tokenizer, seconds=0.2) as (_, base):
        status, error = post(base, BODY)
        assert status == 504
        assert "0.2 seconds" in error["message"]
        assert metrics(base)["heavypath_completions_total{outcome=deadline}"] == 1


def test_a_body_that_is_too_large_is_413(tokenizer):
    with served(at_once, tokenizer, body_bytes=5000) as (service, base):
        large = BODY | {"prompt": "a" * 6000}
        status, error = post(base, large)
        assert status == 413
        assert "5000 bytes" in error["message"]
        chunks = iter([b'{"prompt": "', *100 * [b"a" * 100], b'"}'])
        assert post(base, chunks)[0] == 413
        with client_of(base) as client, pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**large)
        assert caught.value.status_code == 413
        assert service.completions == []


def test_a_body_that_does_not_come_is_given_up(tokenizer):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    with served(at_once, tokenizer, body_seconds=0.2) as (_, base), opened(base, head) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_server_with_a_key_asks_for_it_except_about_its_health(tokenizer):
    with served(at_once, tokenizer, api_key="s3cret") as (service, base):
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/")):
                status, _, content = ask(base, method, path, BODY if method == "POST" else None, headers)
                assert status == 401, (headers, path)
                assert b'"invalid_api_key"' in content
                assert b"s3cret" not in content
        assert ask(base, "GET", "/health")[0] == 200
        with client_of(base, "s3cret") as client:
            assert client.completions.create(**BODY).usage.completion_tokens == 8
        with client_of(base, "other") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(**BODY)
        assert len(service.completions) == 1


def test_paths_and_ways_to_ask_that_are_not_there_have_openais_shape(tokenizer):
    with served(at_once, tokenizer) as (_, base):
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)):
            found, _, content = ask(base, method, path)
            assert found == status
            assert path in json.loads(content)["error"]["message"]


def test_streams_under_way_end_when_the_server_stops_and_new_requests_are_not_taken(tokenizer):
    slow = Held()
    service = Service(slow)
    server = running(service, tokenizer, grace=PATIENCE)
    base = server.__enter__()
    with open_stream(base, STREAM) as connection:
        eventually(lambda: service.completions and service.completions[0].tokens)
        leaving = threading.Thread(target=server.__exit__, args=(None, None, None))
        leaving.start()
        eventually(lambda: not is_listening(base))
        slow.go_on.set()
        assert b"data: [DONE]" in received(connection)
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    service.close()
    assert service.outcomes == ["length"]


def test_addresses_of_this_machine_alone_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.org")))
