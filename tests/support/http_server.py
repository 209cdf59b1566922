"""A real server in a thread, on a free port of this machine, for tests that ask it over HTTP."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

from heavypath.speculative.http.app import create_app
from heavypath.speculative.http.exchange import Served
from heavypath.speculative.http.limits import Limits
from heavypath.speculative.http.metrics import Metrics
from heavypath.speculative.http.server import Server, bound_socket

NAME = "shipped"
PATIENCE = 60  # seconds until a test gives up


@contextmanager
def running(
    service, tokenizer, *, api_key=None, eos=(), grace=5, fingerprint="fingerprint", hosts=None, bounds=None, **limits
):
    """Serve; gives the base address, http://127.0.0.1:PORT. bounds: of connections, as `Server` has them."""
    served = Served(
        service=service,
        tokenizer=tokenizer,
        name=NAME,
        temperature=1.0,
        eos_token_ids=eos,
        limits=Limits(**{"max_tokens": 256, **limits}),
        metrics=Metrics(service),
    )
    ready = threading.Event()
    server = Server(create_app(served, fingerprint, api_key, hosts), grace=grace, ready=ready.set, **bounds or {})
    with bound_socket("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(PATIENCE)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def ask(base, method, path, body=None, headers=None):
    """(status, headers, body) of a request that no client would send; a dict goes as JSON, parts of bytes as chunks."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE)
    try:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, content, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def metrics(base):
    """Every sample of /metrics, by its name with labels."""
    from prometheus_client.parser import text_string_to_metric_families

    status, _, text = ask(base, "GET", "/metrics")
    assert status == 200
    families = text_string_to_metric_families(text.decode())
    return {
        each.name + ",".join(f"{{{name}={value}}}" for name, value in sorted(each.labels.items())): each.value
        for family in families
        for each in family.samples
    }


def eventually(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come to be"
        time.sleep(0.01)


def open_stream(base, body, buffer=None):
    """A socket on which a request has been sent, with a receive buffer of so many bytes."""
    content = json.dumps(body).encode()
    host, port = urlsplit(base).netloc.split(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection
