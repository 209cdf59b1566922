"""The HTTP server where things go wrong: full queues, failures, clients that leave or do not read, and its end."""

import json
import socket
import threading
import time
from urllib.parse import urlsplit

import openai
import played_service
import pytest
from http_server import NAME, PATIENCE, ask, eventually, metrics, open_stream, running

from heavypath.speculative.http.server import bound_socket, is_loopback

BODY = {"model": NAME, "prompt": "def", "max_tokens": 8}


@pytest.fixture
def tokenizer(demo_pair):
    return demo_pair.tokenizer


def endless(completion):
    """One token after the other until it is cancelled."""
    while True:
        completion.emit([5])
        time.sleep(0.002)


def at_once(completion):
    """All its tokens in one step."""
    completion.emit([5] * completion.options["max_new_tokens"])
    return "length"


def error_of(answer):
    return json.loads(answer[2])["error"]


def completions(base):
    return sum(value for name, value in metrics(base).items() if name.startswith("heavypath_completions_total"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_texts(tokenizer, stream):
    with played_service.Service(endless, slots=2) as service, running(service, tokenizer) as base:
        connection = open_stream(base, BODY | {"stream": stream, "n": 2})
        eventually(lambda: len(service.completions) == 2 and all(each.tokens for each in service.completions))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        eventually(lambda: service.outcomes == ["cancelled", "cancelled"])
        assert metrics(base)["heavypath_completions_total{outcome=disconnected}"] == 2
        status = 200 if stream else 499
        eventually(
            lambda: f"heavypath_http_requests_total{{path=/v1/completions}},{{status={status}}}" in metrics(base)
        )


def test_a_client_that_leaves_while_its_request_waits_ends_it(tokenizer):
    with played_service.Service(endless) as service, running(service, tokenizer) as base:
        first = open_stream(base, BODY | {"stream": True})
        eventually(lambda: service.running == 1)
        second = open_stream(base, BODY)
        eventually(lambda: len(service.completions) == 2)
        second.close()
        eventually(service.completions[1].cancelled.is_set)
        assert not service.completions[0].cancelled.is_set()
        first.close()


def test_a_client_that_does_not_read_holds_up_no_one(tokenizer):
    def one_by_one(completion):
        for _ in range(completion.options["max_new_tokens"]):
            completion.emit([5])
            time.sleep(1e-4)
        return "length"

    with (
        played_service.Service(one_by_one) as service,
        running(service, tokenizer, max_tokens=2000, fingerprint=30_000 * "f") as base,
    ):
        many = BODY | {"stream": True, "max_tokens": 1000}
        idle = open_stream(base, many, buffer=4096)  # 30 MB of events, which is more than the sockets hold
        eventually(lambda: len(service.outcomes) == 1)
        begin = time.monotonic()
        for _ in range(5):
            assert ask(base, "POST", "/v1/completions", BODY)[0] == 200
        assert time.monotonic() - begin < PATIENCE / 2
        assert metrics(base)["heavypath_completions_total{outcome=length}"] == 5  # of six: the idle one is held back
        idle.close()
        eventually(lambda: completions(base) == 6)


def test_a_full_queue_is_429_and_says_when_to_come_again(tokenizer):
    with played_service.Service(endless, queue=1) as service, running(service, tokenizer) as base:
        waiting = [open_stream(base, BODY | {"stream": True})]
        eventually(lambda: service.running == 1)
        waiting.append(open_stream(base, BODY))
        eventually(lambda: service.stats().waiting == 1)
        status, headers, content = ask(base, "POST", "/v1/completions", BODY | {"stream": True})
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert json.loads(content)["error"]["code"] == "queue_full"
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.completions.create(**BODY)
        for connection in waiting:
            connection.close()


def test_where_some_texts_of_a_request_find_no_place_none_is_decoded(tokenizer):
    with played_service.Service(endless, queue=1) as service, running(service, tokenizer) as base:
        first = open_stream(base, BODY | {"stream": True})
        eventually(lambda: service.running == 1)
        assert ask(base, "POST", "/v1/completions", BODY | {"n": 2})[0] == 429
        assert [each.cancelled.is_set() for each in service.completions] == [False, True]
        assert metrics(base)["heavypath_completions_total{outcome=refused}"] == 1
        first.close()


def test_a_bug_behind_the_first_of_several_texts_leaves_none_of_them_running(tokenizer, caplog):
    class Broken(played_service.Service):
        def submit(self, input_ids, **options):
            if self.completions:
                raise KeyError("bug")
            return super().submit(input_ids, **options)

    with Broken(endless) as service, running(service, tokenizer) as base:
        assert ask(base, "POST", "/v1/completions", BODY | {"n": 2})[0] == 500
        eventually(lambda: service.outcomes == ["cancelled"])


def test_a_closed_service_is_503_and_not_healthy(tokenizer):
    service = played_service.Service(at_once)
    with running(service, tokenizer) as base:
        assert ask(base, "GET", "/health")[0] == 200
        service.close()
        assert ask(base, "GET", "/health")[0] == 503
        answer = ask(base, "POST", "/v1/completions", BODY)
        assert answer[0] == 503
        assert error_of(answer)["type"] == "server_error"


def test_a_text_that_fails_is_500_without_its_reason_which_is_logged(tokenizer, caplog):
    def fail(completion):
        completion.emit([5])
        raise ArithmeticError("a secret of the machine")

    with played_service.Service(fail) as service, running(service, tokenizer) as base:
        answer = ask(base, "POST", "/v1/completions", BODY)
        assert answer[0] == 500
        assert "secret" not in error_of(answer)["message"]
        assert "a secret of the machine" in caplog.text
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        with (
            client,
            pytest.raises(openai.APIError, match="the server failed"),
            client.completions.create(**BODY, stream=True) as events,
        ):
            list(events)
        assert metrics(base)["heavypath_completions_total{outcome=failed}"] == 2


def test_a_stream_that_fails_does_not_end_with_done(tokenizer):
    def fail(completion):
        completion.emit([5])
        raise ArithmeticError

    with played_service.Service(fail) as service, running(service, tokenizer) as base:
        status, _, content = ask(base, "POST", "/v1/completions", BODY | {"stream": True})
    assert status == 200
    assert b"[DONE]" not in content
    assert json.loads(content.split(b"data: ")[-1])["error"]["code"] == "internal_error"


def test_a_bug_of_the_server_is_500_in_openais_shape(tokenizer, caplog):
    class Broken(played_service.Service):
        def submit(self, input_ids, **options):
            raise KeyError("bug")

    with Broken(at_once) as service, running(service, tokenizer) as base:
        answer = ask(base, "POST", "/v1/completions", BODY)
    assert answer[0] == 500
    assert error_of(answer)["code"] == "internal_error"
    assert "bug" in caplog.text


def test_a_text_that_takes_too_long_is_504(tokenizer):
    with played_service.Service(endless) as service, running(service, tokenizer, seconds=0.2) as base:
        answer = ask(base, "POST", "/v1/completions", BODY)
        assert answer[0] == 504
        assert "0.2 seconds" in error_of(answer)["message"]
        assert metrics(base)["heavypath_completions_total{outcome=deadline}"] == 1


def test_a_body_that_is_too_large_is_413(tokenizer):
    with played_service.Service(at_once) as service, running(service, tokenizer, body_bytes=5000) as base:
        large = BODY | {"prompt": "a" * 6000}
        answer = ask(base, "POST", "/v1/completions", large)
        assert answer[0] == 413
        assert "5000 bytes" in error_of(answer)["message"]
        chunks = iter([b'{"prompt": "', *100 * [b"a" * 100], b'"}'])
        assert ask(base, "POST", "/v1/completions", chunks)[0] == 413
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        with client, pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**large)
        assert caught.value.status_code == 413
        assert service.completions == []


def test_a_body_that_does_not_come_is_given_up(tokenizer):
    with played_service.Service(at_once) as service, running(service, tokenizer, body_seconds=0.2) as base:
        host, port = urlsplit(base).netloc.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_server_with_a_key_asks_for_it_except_about_its_health(tokenizer):
    with played_service.Service(at_once) as service, running(service, tokenizer, api_key="s3cret") as base:
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/")):
                answer = ask(base, method, path, BODY if method == "POST" else None, headers)
                assert answer[0] == 401, (headers, path)
                assert error_of(answer)["code"] == "invalid_api_key"
                assert "s3cret" not in error_of(answer)["message"]
        assert ask(base, "GET", "/health")[0] == 200
        with openai.OpenAI(base_url=f"{base}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.completions.create(**BODY).usage.completion_tokens == 8
        with (
            openai.OpenAI(base_url=f"{base}/v1", api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.completions.create(**BODY)
        assert len(service.completions) == 1


def test_paths_and_ways_to_ask_that_are_not_there_have_openais_shape(tokenizer):
    with played_service.Service(at_once) as service, running(service, tokenizer) as base:
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)):
            answer = ask(base, method, path)
            assert answer[0] == status
            assert path in error_of(answer)["message"]


def test_streams_under_way_end_when_the_server_stops_and_new_requests_are_not_taken(tokenizer):
    go_on = threading.Event()

    def slow(completion):
        completion.emit([5])
        go_on.wait(PATIENCE)
        completion.emit([6])
        return "length"

    with played_service.Service(slow) as service:
        server = running(service, tokenizer, grace=PATIENCE)
        base = server.__enter__()
        connection = open_stream(base, BODY | {"stream": True})
        eventually(lambda: service.completions and service.completions[0].tokens)
        leaving = threading.Thread(target=server.__exit__, args=(None, None, None))
        leaving.start()
        eventually(lambda: is_refused(base))
        go_on.set()
        received = b""
        while part := connection.recv(10000):
            received += part
        connection.close()
        leaving.join(PATIENCE)
        assert not leaving.is_alive()
    assert b"data: [DONE]" in received
    assert service.outcomes == ["length"]


def test_what_is_not_done_within_the_grace_is_cancelled(tokenizer, caplog):
    with played_service.Service(endless) as service:
        with running(service, tokenizer, grace=0) as base:
            connection = open_stream(base, BODY | {"stream": True})
            eventually(lambda: service.completions and service.completions[0].tokens)
        eventually(lambda: service.outcomes == ["cancelled"])
        connection.close()


def is_refused(base):
    host, port = urlsplit(base).netloc.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_addresses_of_this_machine_alone_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.org")))


def test_a_port_that_is_taken_is_said_by_name():
    with bound_socket("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
            bound_socket("127.0.0.1", port)
