"""Does a server keep its promises for a long time? Clients of all kinds, and a count of what became of each request.

    python bench/soak.py [--minutes 10] [--clients 8] [--slots 4] [--seed 0] [--threads 2] [--json FILE]

Starts `heavypath serve` with the shipped pair, and asks it over HTTP from several clients at a time: prompts and
lengths of all kinds, greedy and sampled, whole and streamed, some with stop strings. One request in ten is dropped by
its client before its end, one in twenty is nonsense, one in twenty is read very slowly, and one client asks for a long
stream and never reads it. At the end:

* each request has been answered, and with the right status: none is lost
* each text is the one that `decoder.generate` gives alone, under the request's seed (for a share of them, at the end)
* the server has nothing running or waiting, and its memory is where it was after the first tenth of the time

Exits with 1 if anything of this is not so.
"""

import asyncio
import json
import random
import re
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, environment, options_of, quiet_demo_pair, write_results
from serving_ways import Server, connection

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts

MEMORY = 30e6  # bytes that may come and go; see tests/core/test_soak.py
CHECKED = 2000  # texts that are compared with `generate`, at most
PATIENCE = 120.0  # seconds for one answer
NONSENSE: tuple[dict[str, Any], ...] = (
    {"model": "another"},
    {"prompt": ""},
    {"temperature": -1},
    {"logprobs": 21},
    {"frobnicate": True},
    {"max_tokens": 10_000},
    {"n": 1000},
    {"response_format": {"type": "xml"}},
)


@dataclass
class Record:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = options_of(parser, minutes=0.1)
    server = Server("--slots", str(arguments.slots), "--queue", str(2 * arguments.clients))
    try:
        seconds, pid = 60 * arguments.minutes, server.process.pid
        record = asyncio.run(soak(server.base, pid, seconds, arguments.clients, arguments.seed))
    finally:
        errors = server.stop().strip()
    if server.process.returncode != 0 or errors != "heavypath: stopped":
        record.wrong.insert(0, f"the server ended with {server.process.returncode}, and said: {errors[:3000]}")
    print("requests:", ", ".join(f"{count} {name}" for name, count in sorted(record.counts.items())))
    compare_texts(record, arguments.seed)
    grown = growth(record.resident)
    print(f"memory: {record.resident[-1][1] / 1e6:.1f} MB, {grown / 1e6:+.1f} MB since the first tenth of the time")
    if grown > MEMORY and not arguments.miniature:
        record.wrong.append(f"the server's memory has grown by {grown / 1e6:.1f} MB")
    for each in record.wrong[:20]:
        print("wrong:", each)
    print("nothing is wrong" if not record.wrong else f"{len(record.wrong)} things are wrong")
    write_results(
        arguments.json,
        environment("cpu", arguments, "minutes", "clients", "slots"),
        requests=dict(record.counts),
        resident_mb=[[round(at), round(size / 1e6, 1)] for at, size in record.resident],
        wrong=record.wrong,
    )
    return bool(record.wrong)


async def soak(base: str, pid: int, seconds: float, clients: int, seed: int) -> Record:
    """Ask for so many seconds; then wait until all is answered and see whether the server has come to rest."""
    record, begin = Record(), time.monotonic()
    idle = await connection(base, body_of(random.Random(seed), stream=True) | {"max_tokens": 400, "ignore_eos": True})

    async def one(client: int) -> None:
        chance = random.Random(f"{seed} {client}")
        while time.monotonic() - begin < seconds:
            try:
                async with asyncio.timeout(PATIENCE):
                    await request(base, chance, record)
            except Exception as error:
                record.wrong.append(f"a request was lost: {error!r}")

    async def watch() -> None:
        while True:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            record.resident.append((time.monotonic() - begin, pages * resource.getpagesize()))
            await asyncio.sleep(min(5.0, seconds / 20))

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(one, range(clients)))
    await at_rest(base, record)
    watching.cancel()
    idle[1].close()
    return record


async def request(base: str, chance: random.Random, record: Record) -> None:
    """Send a request of some kind, and note what became of it."""
    kind = chance.random()
    body = body_of(chance, stream=chance.random() < 0.5)
    if kind < 0.05:
        status, answer = await ask(base, body | chance.choice(NONSENSE))
        record.counts["refused"] += 1
        if status not in (400, 404) or "error" not in answer:
            record.wrong.append(f"nonsense was answered with {status}: {answer}")
    elif kind < 0.15:
        _, writer = await connection(base, body | {"max_tokens": 200})
        await asyncio.sleep(chance.random() / 4)
        writer.transport.abort()
        record.counts["dropped"] += 1
    else:
        slow = kind < 0.2
        status, answer = await ask(base, body | ({"stream": True} if slow else {}), pause=0.05 if slow else 0.0)
        if status == 429:
            record.counts["queue full"] += 1
            return
        record.counts["answered"] += 1
        record.counts["of these read slowly"] += slow
        if status != 200 or answer.get("finish_reason") not in ("stop", "length"):
            record.wrong.append(f"{body} was answered with {status}: {answer}")
        else:
            record.texts.append((body, answer["text"]))


def body_of(chance: random.Random, *, stream: bool) -> dict[str, Any]:
    """A request that is in order."""
    body: dict[str, Any] = {"model": "heavypath-demo", "prompt": chance.choice(demo_prompts()), "stream": stream}
    body |= {"max_tokens": chance.randint(1, 96), "temperature": chance.choice([0, 0, 0.6, 1.0])}
    body |= {"seed": chance.randrange(1 << 27), "ignore_eos": chance.random() < 0.5}
    body |= chance.choice([{}, {}, {"top_p": 0.9}, {"top_k": 20}, {"stop": "\n\n"}, {"stop": ["return", ")"]}])
    return body


async def ask(base: str, body: dict[str, Any], *, pause: float = 0.0) -> tuple[int, dict[str, Any]]:
    """The status, and the choice or the error; a stream's pieces put together.

    pause: seconds after each 256 bytes
    """
    reader, writer = await connection(base, body)
    try:
        answer = b""
        while part := await reader.read(256 if pause else 1 << 16):
            answer += part
            await asyncio.sleep(pause)
    finally:
        writer.close()
    status = int(answer.split(b" ", 2)[1])
    events = [json.loads(each) for each in re.findall(rb"^(?:data: )?(\{.*\})\r?$", answer, re.M)]
    if any("error" in event for event in events):
        return status, next(event for event in events if "error" in event)
    if b"text/event-stream" in answer and b"data: [DONE]" not in answer:
        return status, {"text": "", "finish_reason": "a stream without an end"}
    choices = [event["choices"][0] for event in events]
    return status, {"text": "".join(each["text"] for each in choices), "finish_reason": choices[-1]["finish_reason"]}


async def at_rest(base: str, record: Record) -> None:
    """Wait until nothing runs and waits."""
    end = time.monotonic() + PATIENCE
    while True:
        reader, writer = await connection(base, path="/metrics")
        text = (await reader.read()).decode().partition("\r\n\r\n")[2]
        writer.close()
        found = {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.M)}
        if found["heavypath_running"] == found["heavypath_waiting"] == 0:
            return
        if time.monotonic() > end:
            record.wrong.append("the server does not come to rest")
            return
        await asyncio.sleep(0.2)


def compare_texts(record: Record, seed: int) -> None:
    """Decode a share of the texts alone."""
    pair = quiet_demo_pair()
    decoder = SpeculativeDecoder(pair.target, pair.draft, "ersd")
    end = pair.target.generation_config.eos_token_id
    chosen = random.Random(seed).sample(record.texts, min(CHECKED, len(record.texts)))
    for body, text in chosen:
        ids = pair.tokenizer(body["prompt"], return_tensors="pt").input_ids
        sampling = {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
        out = decoder.generate(
            ids,
            body["max_tokens"],
            sequence_ids=torch.tensor([body["seed"]]),
            eos_token_id=None if body["ignore_eos"] else pair.tokenizer.eos_token_id if end is None else end,
            **sampling,
        )
        alone = pair.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        stops = body.get("stop", [])
        ends = [alone.find(stop) for stop in ([stops] if isinstance(stops, str) else stops)]
        alone = alone[: min((place for place in ends if place >= 0), default=len(alone))]
        if text != alone:
            record.wrong.append(f"{body} has the text {text!r} and alone {alone!r}")
    print(f"texts: {len(chosen)} of {len(record.texts)} decoded again, alone")


def growth(resident: list[tuple[float, int]]) -> int:
    """Bytes by which the memory of the last tenth of the time is above that after the first tenth."""
    total = resident[-1][0]
    early = [size for at, size in resident if 0.1 * total <= at <= 0.2 * total] or [resident[0][1]]
    late = [size for at, size in resident if at >= 0.9 * total]
    return min(late) - max(early)


if __name__ == "__main__":
    sys.exit(main())
