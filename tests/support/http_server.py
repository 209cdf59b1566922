"""A real server on a free port of this machine, in a thread or as a process, for tests that ask it over HTTP."""

import copy
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from heavypath.speculative.http.app import create_app
from heavypath.speculative.http.metrics import Metrics
from heavypath.speculative.http.served import Limits, Served
from heavypath.speculative.http.server import Server, bound_socket

NAME = "shipped"
PATIENCE = 300  # seconds until a test gives up: only what hangs takes so long


def with_template(tokenizer, template, folder):
    """A copy of a tokenizer with a chat template, as it comes from a folder."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    own.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@contextmanager
def running(
    service, tokenizer, *, api_key=None, eos=(), grace=5, fingerprint="fingerprint", hosts=None, bounds=None,
    origins=(), measured=False, reasoning="auto", **limits
):  # fmt: skip
    """Serve; gives the base address, http://127.0.0.1:PORT. bounds: of connections, as `Server` has them."""
    served = Served(
        service=service, tokenizer=tokenizer, name=NAME, temperature=1.0, eos_token_ids=eos, metrics=Metrics(service),
        limits=Limits(**{"max_tokens": 256, **limits}), measured=measured, reasoning=reasoning,
    )  # fmt: skip
    ready = threading.Event()
    server = Server(
        create_app(served, fingerprint, api_key, hosts, origins), grace=grace, ready=ready.set, **bounds or {}
    )
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


@contextmanager
def process(*arguments, **more):
    """`heavypath serve` as a process, once it serves: (process, base address, what it said until then)."""
    command = [sys.executable, "-m", "heavypath.speculative", "serve", "--port", "0", *map(str, arguments)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    watchdog = threading.Timer(2 * PATIENCE, started.kill)
    watchdog.start()
    try:
        said = []
        for line in started.stderr:
            said.append(line)
            if found := re.search(r"serving (\S+) by \S+ at (http://\S+)/v1", line):
                yield started, found[2], said
                break
        else:
            pytest.fail("".join(said))
    finally:
        watchdog.cancel()
        started.kill()
        started.communicate()


def client_of(base, key="any"):
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def ask(base, method, path, body=None, headers=None, source="127.0.0.1"):
    """(status, headers, body) of a request that no client would send; a dict goes as JSON, parts of bytes as chunks.

    headers: a type of None is left out; source: the address of this machine that it comes from
    """
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE, source_address=(source, 0))
    try:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        given = {"Content-Type": "application/json"} | (headers or {})
        given = {name: value for name, value in given.items() if value is not None}
        connection.request(method, path, content, given)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def post(base, body, path="/v1/completions", **given):
    """(status, answer) of a body of JSON: an error's own object where the answer is one."""
    status, _, content = ask(base, "POST", path, body, **given)
    answer = json.loads(content)
    return status, answer.get("error", answer)


def metrics(base):
    """Every sample of /metrics, by its name with labels."""
    families = text_string_to_metric_families(ask(base, "GET", "/metrics")[2].decode())
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
        time.sleep(0.005)


def is_listening(base):
    host, port = urlsplit(base).netloc.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


def opened(base, said=b"", buffer=None):
    """A socket on which something has been sent, with a receive buffer of so many bytes."""
    host, port = urlsplit(base).netloc.split(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    with suppress(OSError):
        connection.sendall(said)
    return connection


def open_stream(base, body, buffer=None):
    """A socket on which a request has been sent."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return opened(base, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, buffer)


def received(connection):
    """All that comes on a connection until its stream is done or the server closes it."""
    content = b""
    while b"[DONE]" not in content and (part := connection.recv(10_000)):
        content += part
    return content
