"""Connections that say nothing or too little, names that are not the server's, and clients who want everything."""

import json
import logging
import os
import resource
import threading
import time
from contextlib import ExitStack, suppress
from functools import partialmethod
from unittest.mock import Mock

import pytest
import uvicorn
from http_server import NAME, PATIENCE, ask, eventually, open_stream, opened, post, process, received, running
from played_service import Held, at_once, served

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.connections import AcceptErrors
from heavypath.speculative.http.guard import client_of

BODY = {"model": NAME, "prompt": "def", "max_tokens": 8}
STREAM = BODY | {"stream": True}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le"
OTHER = "127.0.0.2"  # another client of this machine, for a server that looks at addresses


def is_closed(connection, seconds=PATIENCE):
    """Whether the server closes it before it has said nothing for so many seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1000):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_a_connection_has_a_time_until_its_request_is_there(tokenizer, monkeypatch):
    slow = Held()
    made = partialmethod(uvicorn.Config.__init__, timeout_keep_alive=10 * PATIENCE)
    monkeypatch.setattr(uvicorn.Config, "__init__", made)  # uvicorn itself would end what is kept alive after 5 s
    with served(slow, tokenizer, bounds={"head_seconds": 0.4}) as (_, base), ExitStack() as all_:
        asking = all_.enter_context(open_stream(base, STREAM))
        silent, half, drips = (all_.enter_context(opened(base, said)) for said in (b"", HALF, b""))
        again = all_.enter_context(opened(base, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(HALF)  # the next one on the same connection
        for byte in HALF[:20]:
            time.sleep(0.05)
            with suppress(OSError):
                drips.sendall(bytes([byte]))
        assert all(is_closed(each) for each in (silent, half, drips, again))
        slow.go_on.set()
        assert b"[DONE]" in received(asking)


@pytest.mark.parametrize(("size", "status"), [(1, b"400"), (100, b"200")])
def test_a_body_by_very_many_small_pieces_is_refused(size, status, tokenizer):
    body = json.dumps(BODY).encode().ljust(6000 * size)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    pieces = b"".join(b"%x\r\n%s\r\n" % (size, body[at : at + size]) for at in range(0, len(body), size))
    sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    with served(at_once, tokenizer) as (_, base), opened(base, sent) as asking:
        assert asking.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_a_body_that_comes_on_behind_its_refusal_is_not_waited_for(tokenizer):
    head = b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    with (
        served(at_once, tokenizer, bounds={"head_seconds": 0.4}, api_key="key") as (_, base),
        opened(base, head) as connection,
    ):
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
        with suppress(OSError):
            for _ in range(100_000):  # bytes that are announced
                connection.sendall(b"a")
                time.sleep(0.05)
            pytest.fail("it is read to its end")


def test_silent_connections_make_room_for_others(tokenizer):
    bounds = {"head_seconds": PATIENCE, "connections": 8}
    with served(at_once, tokenizer, bounds=bounds) as (_, base), ExitStack() as all_:
        many = [all_.enter_context(opened(base, HALF if number % 2 else b"")) for number in range(40)]
        assert ask(base, "GET", "/health")[0] == 200
        assert post(base, BODY)[0] == 200
        eventually(lambda: sum(is_closed(each, 0.01) for each in many) >= 32)
        assert [is_closed(each, 0.01) for each in many[-5:]] == [False] * 5  # those that came first have gone


def test_where_all_connections_have_work_another_one_is_closed(tokenizer):
    slow = Held()
    with served(slow, tokenizer, slots=3, bounds={"connections": 3}) as (service, base), ExitStack() as all_:
        streams = [all_.enter_context(open_stream(base, STREAM)) for _ in range(3)]
        eventually(lambda: len(service.completions) == 3)
        assert is_closed(all_.enter_context(opened(base)))
        assert not any(is_closed(each, 0.05) for each in streams)
        slow.go_on.set()
        eventually(lambda: service.outcomes == ["length"] * 3)


def test_connections_that_cannot_be_accepted_are_one_line_a_minute(caplog):
    loop = Mock()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "x")}
    handler = AcceptErrors()
    for _ in range(1000):
        handler(loop, context)
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.ERROR, None)]
    assert "connections cannot be accepted" in caplog.text
    handler(loop, {"message": "another"})
    loop.default_exception_handler.assert_called_once_with({"message": "another"})
    often = AcceptErrors(seconds=0)
    often(loop, context)
    often(loop, context)
    assert len(caplog.records) == 3


def test_only_its_own_names_are_answered(tokenizer):
    own = ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "models.example:80")
    others = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "[::2]", "", "[")
    hosts = {"localhost", "127.0.0.1", "::1", "models.example"}
    with served(at_once, tokenizer, hosts=hosts) as (service, base):
        for host in own:
            assert post(base, BODY, headers={"Host": host})[0] == 200, host
        for host in others:
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/metrics")):
                status, _, content = ask(base, method, path, BODY if method == "POST" else None, {"Host": host})
                assert status == 421, host
                error = json.loads(content)["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
        with opened(base, b"GET /v1/models HTTP/1.0\r\n\r\n") as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 421")
        assert len(service.completions) == len(own)
    with served(at_once, tokenizer) as (_, base):
        assert post(base, BODY, headers={"Host": "any.example"})[0] == 200


def test_a_client_is_an_address_or_a_network_of_one_customer():
    def of(host):
        return client_of({"client": (host, 1234)})

    assert of("10.1.2.3") == of("::ffff:10.1.2.3") == "10.1.2.3"
    assert of("10.1.2.3") != of("10.1.2.4")
    assert of("2001:db8::1") == of("2001:db8::ffff:2") != of("2001:db8:0:1::1")
    assert of("fe80::1%eth0") == "fe80::/64"
    assert of("testclient") == "testclient"
    assert client_of({"client": None}) is None


def texts(prompt, count, **more):
    return {"model": NAME, "prompt": prompt, "max_tokens": count, "ignore_eos": True} | more


def test_a_client_over_its_share_is_told_to_wait_and_another_is_answered(demo_pair):
    """Long texts of one fill its share of everything, and more of its requests come all the time."""
    target, draft, tokenizer = demo_pair
    long, short = texts("class Stack:", 900, n=2), texts("def read_lines(path):", 8, seed=1)
    with (
        SpeculativeDecoder(target, draft, "ersd").serve(slots=3, max_tokens=1000, queue=8) as service,
        running(service, tokenizer, max_tokens=1000) as base,
        ExitStack() as all_,
    ):
        for running_and_waiting in ((2, 0), (2, 2), (2, 4)):
            all_.enter_context(open_stream(base, long | {"stream": True}))
            eventually(lambda: (service.stats().running, service.stats().waiting) == running_and_waiting)  # noqa: B023
        for _ in range(3):
            status, headers, _ = ask(base, "POST", "/v1/completions", long)
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
            assert post(base, short, source=OTHER)[0] == 200
        assert service.stats().completed == 3  # the short ones, while none of the long ones ended
        service.close(graceful=False)


@pytest.mark.integration
def test_more_silent_connections_than_the_process_may_have_files_shut_out_nobody():
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))

    with process("--max-tokens", 64, "--slots", 2, preexec_fn=limited) as (server, base, _), ExitStack() as all_:
        said = []
        reading = threading.Thread(target=lambda: said.extend(server.stderr))
        reading.start()
        for number in range(1100):
            all_.enter_context(opened(base, HALF if number % 2 else b""))
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1024, 1024)
        assert ask(base, "GET", "/health")[0] == 200
        assert post(base, BODY | {"model": "heavypath-demo"})[0] == 200
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < 700
        server.terminate()
        assert server.wait(PATIENCE) == 0
        reading.join(PATIENCE)
        assert len(said) < 5, said
        assert said[-1] == "heavypath: stopped\n"
