"""Connections that say nothing or too little, names that are not the server's, and clients who want everything."""

import http.client
import json
import logging
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import played_service
import pytest
from http_server import NAME, PATIENCE, ask, eventually, open_stream, running

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.connections import AcceptErrors
from heavypath.speculative.http.guard import client_of, host_of

BODY = {"model": NAME, "prompt": "def", "max_tokens": 8}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le"
OTHER = "127.0.0.2"  # another client of this machine, for a server that looks at addresses


@pytest.fixture
def tokenizer(demo_pair):
    return demo_pair.tokenizer


def at_once(completion):
    completion.emit([5] * completion.options["max_new_tokens"])
    return "length"


def opened(base, said=b""):
    host, port = urlsplit(base).netloc.split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    with suppress(OSError):
        connection.sendall(said)
    return connection


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


def timed(base, body, source="127.0.0.1"):
    """(seconds, status, headers) of an answer to a client with this address."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE, source_address=(source, 0))
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return time.monotonic() - begin, answer.status, answer.headers
    finally:
        connection.close()


def test_a_connection_has_a_time_until_its_request_is_there(tokenizer):
    go_on = threading.Event()

    def slow(completion):
        completion.emit([5])
        go_on.wait(PATIENCE)
        return "length"

    bounds = {"head_seconds": 0.4}
    with (
        played_service.Service(slow) as service,
        running(service, tokenizer, bounds=bounds) as base,
        ExitStack() as all_,
    ):
        asking = all_.enter_context(open_stream(base, BODY | {"stream": True}))
        silent, half, drips = (all_.enter_context(opened(base, said)) for said in (b"", HALF, b""))
        again = all_.enter_context(opened(base, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(HALF)  # the next one on the same connection
        begin = time.monotonic()
        for byte in HALF[:20]:
            time.sleep(0.05)
            with suppress(OSError):
                drips.sendall(bytes([byte]))
        assert all(is_closed(each) for each in (silent, half, drips, again))
        assert time.monotonic() - begin < 4  # uvicorn alone ends what is kept alive after 5 s, and the rest never
        go_on.set()
        received = b""
        while part := asking.recv(10_000):
            received += part
            if b"[DONE]" in received:
                break
        assert b"[DONE]" in received


@pytest.mark.parametrize(("size", "status"), [(1, b"400"), (100, b"200")])
def test_a_body_by_very_many_small_pieces_is_refused(size, status, tokenizer):
    body = json.dumps(BODY).encode().ljust(6000 * size)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    fields = b"Host: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = (
        b"POST /v1/completions HTTP/1.1\r\n"
        + fields
        + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        + b"0\r\n\r\n"
    )
    with played_service.Service(at_once) as service, running(service, tokenizer) as base, opened(base, sent) as asking:
        asking.settimeout(PATIENCE)
        assert asking.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_a_body_that_comes_on_behind_its_refusal_is_not_waited_for(tokenizer):
    bounds = {"head_seconds": 0.4}
    with (
        played_service.Service(at_once) as service,
        running(service, tokenizer, bounds=bounds, api_key="key") as base,
        opened(base, b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n") as connection,
    ):
        begin = time.monotonic()
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
        with suppress(OSError):
            while time.monotonic() < begin + 4:
                connection.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() < begin + 4


def test_silent_connections_make_room_for_others(tokenizer):
    bounds = {"head_seconds": PATIENCE, "connections": 8}
    with (
        played_service.Service(at_once) as service,
        running(service, tokenizer, bounds=bounds) as base,
        ExitStack() as all_,
    ):
        many = [all_.enter_context(opened(base, HALF if number % 2 else b"")) for number in range(40)]
        assert ask(base, "GET", "/health")[0] == 200
        assert ask(base, "POST", "/v1/completions", BODY)[0] == 200
        eventually(lambda: sum(is_closed(each, 0.01) for each in many) >= 32)
        assert [is_closed(each, 0.01) for each in many[-5:]] == [False] * 5  # those that came first have gone


def test_where_all_connections_have_work_another_one_is_closed(tokenizer):
    end = threading.Event()

    def slow(completion):
        completion.emit([5])
        end.wait(PATIENCE)
        return "length"

    with (
        played_service.Service(slow, slots=3) as service,
        running(service, tokenizer, bounds={"connections": 3}) as base,
        ExitStack() as all_,
    ):
        streams = [all_.enter_context(open_stream(base, BODY | {"stream": True})) for _ in range(3)]
        eventually(lambda: len(service.completions) == 3)
        assert is_closed(all_.enter_context(opened(base)))
        assert not any(is_closed(each, 0.05) for each in streams)
        end.set()
        eventually(lambda: service.outcomes == ["length"] * 3)


def test_connections_that_cannot_be_accepted_are_one_line_a_minute(caplog):
    said = []

    class Loop:
        def default_exception_handler(self, context):
            said.append(context)

    handler, context = (
        AcceptErrors(),
        {"message": "socket.accept() out of system resource", "exception": OSError(24, "x")},
    )
    for _ in range(1000):
        handler(Loop(), context)
    assert len(caplog.records) == 1
    assert "connections cannot be accepted" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert "Traceback" not in caplog.text
    handler(Loop(), {"message": "another"})
    assert said == [{"message": "another"}]
    handler = AcceptErrors(seconds=0)
    handler(Loop(), context)
    handler(Loop(), context)
    assert len(caplog.records) == 3


def test_only_its_own_names_are_answered(tokenizer):
    hosts = {"localhost", "127.0.0.1", "::1", "models.example"}
    with played_service.Service(at_once) as service, running(service, tokenizer, hosts=hosts) as base:
        for host in ("localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "models.example:80"):
            assert ask(base, "POST", "/v1/completions", BODY, {"Host": host})[0] == 200, host
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "0.0.0.0",
            "[::2]",
            "",
            "[",
        ):
            for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/metrics")):
                status, _, content = ask(base, method, path, BODY if method == "POST" else None, {"Host": host})
                assert status == 421, host
                error = json.loads(content)["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
        with opened(base, b"GET /v1/models HTTP/1.0\r\n\r\n") as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 421")
        assert len(service.completions) == 6
    with played_service.Service(at_once) as service, running(service, tokenizer) as base:
        assert ask(base, "POST", "/v1/completions", BODY, {"Host": "any.example"})[0] == 200
    assert host_of("A.b:80") == "a.b"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", None]
)
def test_what_a_page_of_the_web_may_send_without_asking_is_refused(tokenizer, kind):
    with played_service.Service(at_once) as service, running(service, tokenizer) as base:
        content = json.dumps(BODY).encode()
        connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", content, {} if kind is None else {"Content-Type": kind})
        assert connection.getresponse().status == 400
        connection.close()
        assert service.completions == []


def test_a_client_is_an_address_or_a_network_of_one_customer():
    def of(host):
        return client_of({"client": (host, 1234)})

    assert of("10.1.2.3") == of("::ffff:10.1.2.3") == "10.1.2.3"
    assert of("10.1.2.3") != of("10.1.2.4")
    assert of("2001:db8::1") == of("2001:db8::ffff:2") != of("2001:db8:0:1::1")
    assert of("fe80::1%eth0") == "fe80::/64"
    assert of("testclient") == "testclient"
    assert client_of({"client": None}) is None


def test_a_client_over_its_share_is_told_to_wait_and_another_is_answered(demo_pair):
    """Long texts of one fill its share of everything, and more of its requests come all the time."""
    target, draft, tokenizer = demo_pair
    long = {"model": NAME, "prompt": "class Stack:", "max_tokens": 900, "ignore_eos": True, "n": 2}
    short = {"model": NAME, "prompt": "def read_lines(path):", "max_tokens": 8, "ignore_eos": True, "seed": 1}
    with (
        SpeculativeDecoder(target, draft, "ersd").serve(slots=3, max_tokens=1000, queue=8) as service,
        running(service, tokenizer, max_tokens=1000) as base,
        ExitStack() as all_,
    ):
        for running_and_waiting in ((2, 0), (2, 2), (2, 4)):
            all_.enter_context(open_stream(base, long | {"stream": True}))
            eventually(lambda: (service.stats().running, service.stats().waiting) == running_and_waiting)  # noqa: B023
        for _ in range(3):
            _, status, headers = timed(base, long)
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
            assert timed(base, short, OTHER)[1] == 200
        assert service.stats().completed == 3  # the short ones, while none of the long ones ended
        service.close(graceful=False)


HOG = """
import http.client, json, sys, threading, time
where, body = sys.argv[1], sys.argv[2]
def ask():
    while True:
        connection = http.client.HTTPConnection(where, timeout=600)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status != 200:
            time.sleep(int(answer.headers["Retry-After"]))
for _ in range(8):
    threading.Thread(target=ask, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_beside_many_long_texts_a_short_one_takes_less_than_three_times_its_quiet_time(demo_pair):
    """One client has 8 connections with 16 texts of 1,000 tokens each; the least of five medians, on a busy machine."""
    target, draft, tokenizer = demo_pair
    long = {"model": NAME, "prompt": "class Stack:", "max_tokens": 1000, "ignore_eos": True, "n": 16}
    short = {"model": NAME, "prompt": "def read_lines(path):", "max_tokens": 16, "ignore_eos": True, "seed": 1}
    with (
        SpeculativeDecoder(target, draft, "ersd").serve(slots=8, max_tokens=1024) as service,
        running(service, tokenizer, max_tokens=1024) as base,
    ):

        def median(count):
            answers = [timed(base, short, OTHER) for _ in range(count)]
            assert [status for _, status, _ in answers] == [200] * count
            return statistics.median(seconds for seconds, _, _ in answers)

        ratios = []
        for _ in range(5):
            median(5)
            quiet = median(15)
            where = urlsplit(base).netloc
            hog = subprocess.Popen([sys.executable, "-c", HOG, where, json.dumps(long)], stdin=subprocess.PIPE)
            try:
                eventually(lambda: service.stats().running >= 7 and service.stats().waiting > 20)
                ratios.append(median(25) / quiet)
            finally:
                hog.kill()
                hog.communicate()
            eventually(lambda: service.stats().running == 0)
            if ratios[-1] < 3:
                break
        service.close(graceful=False)
    assert min(ratios) < 3, ratios


@pytest.mark.slow
def test_more_silent_connections_than_the_process_may_have_files_shut_out_nobody():
    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))

    command = [
        sys.executable,
        "-m",
        "heavypath.speculative",
        "serve",
        "--port",
        "0",
        "--max-tokens",
        "64",
        "--slots",
        "2",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=limited)
    try:
        for line in server.stderr:
            if found := re.search(r" at (http://\S+)/v1", line):
                break
        base = found[1]
        said = []
        reading = threading.Thread(target=lambda: said.extend(server.stderr))
        reading.start()
        with ExitStack() as all_:
            for number in range(1100):
                all_.enter_context(opened(base, HALF if number % 2 else b""))
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1024, 1024)
            begin = time.monotonic()
            assert ask(base, "GET", "/health")[0] == 200
            assert ask(base, "POST", "/v1/completions", BODY | {"model": "heavypath-demo"})[0] == 200
            assert time.monotonic() - begin < 10
            assert len(os.listdir(f"/proc/{server.pid}/fd")) < 700
        server.terminate()
        assert server.wait(PATIENCE) == 0
        reading.join(PATIENCE)
        assert len(said) < 5, said
    finally:
        server.kill()
        server.communicate()
