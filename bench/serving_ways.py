"""Ways to serve requests as they come, all asked alike: heavypath's service, over HTTP too, and two of transformers'.

A way is a context in which `tokens(ask)` gives, asynchronously, how many new tokens came at a time. Each loads the
shipped pair for itself: continuous batching changes how its model computes attention.
"""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from common import quiet_demo_pair
from transformers import ContinuousBatchingConfig, GenerationConfig

from heavypath.speculative import SpeculativeDecoder


class Ask(NamedTuple):
    """A request: its prompt's tokens, how many new ones, its seed, and when it comes, in seconds from the start."""

    prompt: list[int]
    new_tokens: int
    seed: int
    at: float


class Way(Protocol):
    """Serves while it is entered."""

    def __enter__(self) -> "Way": ...
    def __exit__(self, *error: object) -> None: ...
    def tokens(self, ask: Ask) -> AsyncIterator[int]:
        """How many tokens came at a time."""
        ...


class Heavypath:
    """The service of a decoder, in this process."""

    def __init__(self, method: str, slots: int, temperature: float):
        self._method, self._slots, self._temperature = method, slots, temperature

    def __enter__(self) -> "Heavypath":
        pair = quiet_demo_pair()
        decoder = SpeculativeDecoder(pair.target, pair.draft, self._method)
        self._service = decoder.serve(self._slots, max_tokens=512, queue=1024)
        return self

    def __exit__(self, *error: object) -> None:
        self._service.close(graceful=False)

    async def tokens(self, ask: Ask) -> AsyncIterator[int]:
        options = {"temperature": self._temperature, "seed": ask.seed, "eos_token_id": None}
        async for tokens in self._service.submit(ask.prompt, ask.new_tokens, **options):
            yield len(tokens)


class Server:
    """`heavypath serve` with the shipped pair, in a process of its own, at the address `base`."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "heavypath.speculative", "serve", "--port", "0", "--max-tokens", "512"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"at (http://\S+)/v1", line):
                self.base = found[1]
                return
        raise RuntimeError(f"the server did not start: {said}")

    def stop(self) -> str:
        """End it; what it said since it had started."""
        self.process.terminate()
        return self.process.communicate(timeout=120)[1]


class OverHttp:
    """A server that is asked for streams, whose pieces count as tokens."""

    def __init__(self, method: str, slots: int, temperature: float):
        self._options = ("--queue", "1024", "--method", method, "--slots", str(slots))
        self._temperature = temperature

    def __enter__(self) -> "OverHttp":
        self._server = Server(*self._options)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()

    async def tokens(self, ask: Ask) -> AsyncIterator[int]:
        body: dict[str, Any] = {"model": "heavypath-demo", "prompt": ask.prompt, "max_tokens": ask.new_tokens}
        body |= {"temperature": self._temperature, "seed": ask.seed, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with aclosing(events(self._server.base, body)) as stream:
            async for event in stream:
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                if usage := event.get("usage"):
                    assert usage["completion_tokens"] == ask.new_tokens
                elif event["choices"][0]["text"]:
                    yield 1


async def connection(
    base: str, body: dict[str, Any] | None = None, path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a request has been sent: it posts its body, or gets a page where it has none."""
    address, content = urlsplit(base), b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    verb = "GET" if body is None else "POST"
    head = f"{verb} {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def events(base: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, or the one error."""
    reader, writer = await connection(base, body)
    try:
        while line := await reader.readline():
            if line.startswith((b"data: {", b'{"error"')):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        writer.close()


class ContinuousBatching:
    """transformers' own: a paged cache, and requests that join while others are decoded."""

    def __init__(self, slots: int, temperature: float):
        self._config = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512, max_requests_per_batch=slots)
        self._generation = GenerationConfig(
            do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        self._number = 0

    def __enter__(self) -> "ContinuousBatching":
        self._target = quiet_demo_pair().target
        self._manager = self._target.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=self._config
        )
        self._manager.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.stop(block=True, timeout=10)

    async def tokens(self, ask: Ask) -> AsyncIterator[int]:
        self._number += 1
        name, come, had = f"request {self._number}", asyncio.Queue(), 0
        self._manager.register_result_handler(name, come.put_nowait)
        self._manager.add_request(ask.prompt, request_id=name, max_new_tokens=ask.new_tokens, streaming=True)
        while True:
            output = await come.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            new, had = len(output.generated_tokens) - had, len(output.generated_tokens)
            if new:
                yield new
            if output.is_finished():
                return


class OneByOne:
    """transformers' generate: one request after the other, in the order in which they come."""

    def __init__(self, temperature: float):
        self._options = {"do_sample": temperature > 0, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        self._options |= {"temperature": temperature} if temperature > 0 else {}
        self._turn = asyncio.Lock()

    def __enter__(self) -> "OneByOne":
        self._target = quiet_demo_pair().target
        return self

    def __exit__(self, *error: object) -> None:
        del self._target

    async def tokens(self, ask: Ask) -> AsyncIterator[int]:
        async with self._turn:
            come: asyncio.Queue[int] = asyncio.Queue()
            streamer = _Counting(asyncio.get_running_loop(), come)
            ids = torch.tensor([ask.prompt])
            thread = threading.Thread(
                target=self._target.generate,
                kwargs={"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": ask.new_tokens}
                | {"streamer": streamer, **self._options},
            )
            thread.start()
            for _ in range(ask.new_tokens):
                yield await come.get()
            thread.join()


class _Counting:
    """A streamer that puts the number of tokens into a queue of an event loop; the prompt is not counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, come: asyncio.Queue[int]):
        self._loop, self._come, self._begun = loop, come, False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self._loop.call_soon_threadsafe(self._come.put_nowait, value.numel())
        self._begun = True

    def end(self) -> None:
        pass
