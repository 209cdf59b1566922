"""Requests that come as they like: how many are served a second, and how long each waits for its tokens.

    python bench/serving.py [--requests 32] [--rate 1 --rate 4] [--slots 1 --slots 8] [--temperature 0.6] [--threads 2]
                            [--http] [--json bench/results/serving-cpu.json]

Requests come by a Poisson process, at several rates, and all at once ("16 at once"). Each has one of the shipped
prompts and 16 to 128 new tokens, with the same lengths and times for every way to serve them: heavypath's service by
`ersd`, and by `autoregressive`, which has its compiled forward pass and drafts nothing; transformers' continuous
batching; and its `generate`, one request after the other. All on the shipped pair, in this process, one way after the
other; `--http` adds `heavypath serve` in a process of its own, with the client in this one.

requests, tokens per second: from the first arrival to the last token; above what a way can do its queue grows
first token: from a request's arrival to its first token, waiting included; median and 99th percentile over requests
between tokens: time since the tokens before, shared among those that come at a time; median and 99th percentile over
all tokens (over HTTP by pieces of text)
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from common import Row, argument_parser, environment, options_of, quiet_demo_pair, report
from serving_ways import Ask, ContinuousBatching, Heavypath, OneByOne, OverHttp, Way

from heavypath.speculative.demo import demo_prompts

AT_ONCE = 16
SHORTEST, LONGEST = 16, 128


@dataclass
class Timeline:
    """When a request came and when its tokens did, in seconds of one clock."""

    arrived: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def to_first(self) -> float:
        return self.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Of each token but the first ones."""
        found = []
        for before, now, count in zip(self.times, self.times[1:], self.counts[1:], strict=False):
            found += count * [(now - before) / count]
        return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, action="append", help="requests a second; repeat it for several")
    parser.add_argument("--slots", type=int, action="append", help="of the service; repeat it for several")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--http", action="store_true", help="also over HTTP")
    arguments = options_of(parser, rate=[50.0], slots=[2], requests=3)
    rates, slots = arguments.rate or [1.0, 2.0, 4.0, 8.0], arguments.slots or [1, 2, 4, 8, 16, 32]
    longest, at_once = (SHORTEST + 2, 3) if arguments.miniature else (LONGEST, AT_ONCE)
    tokenizer = quiet_demo_pair().tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in demo_prompts()]
    loads = {f"{at_once} at once": asks(prompts, at_once, None, longest)}
    loads |= {f"{rate:g}/s": asks(prompts, arguments.requests, rate, longest) for rate in rates}
    facts = environment("cpu", arguments, "requests", "temperature") | {"at_once": at_once}
    report(measured(ways(slots, arguments.temperature, http=arguments.http), loads), facts, arguments.json)


def ways(slots: Sequence[int], temperature: float, *, http: bool) -> dict[str, Callable[[], Way]]:
    """What is compared, by name."""
    most = 8 if 8 in slots else max(slots)
    found: dict[str, Callable[[], Way]] = {
        f"heavypath ersd, {count} slot{'s' * (count > 1)}": partial(Heavypath, "ersd", count, temperature)
        for count in slots
    }
    found[f"heavypath autoregressive, {most} slots"] = partial(Heavypath, "autoregressive", most, temperature)
    if http:
        found[f"heavypath serve, {most} slots"] = partial(OverHttp, "ersd", most, temperature)
    found[f"transformers batching, {most} slots"] = partial(ContinuousBatching, most, temperature)
    found["transformers generate"] = partial(OneByOne, temperature)
    return found


def asks(prompts: Sequence[list[int]], count: int, rate: float | None, longest: int) -> list[Ask]:
    """Requests of mixed lengths, at a rate a second; None lets all come at once."""
    chance, at, found = random.Random(0), 0.0, []
    for number in range(count):
        at += 0.0 if rate is None else chance.expovariate(rate)
        found.append(Ask(prompts[number % len(prompts)], chance.randint(SHORTEST, longest), number, at))
    return found


def measured(ways: Mapping[str, Callable[[], Way]], loads: Mapping[str, Sequence[Ask]]) -> Iterator[Row]:
    """What each load came to, by each way."""
    for name, make in ways.items():
        with make() as way, asyncio.Runner() as runner:
            runner.run(served(way, next(iter(loads.values()))[:2]))  # what the first requests alone wait for
            for load, each in loads.items():
                yield {"way": name, "load": load} | figures(runner.run(served(way, each)), each)


async def served(way: Way, requests: Sequence[Ask]) -> list[Timeline]:
    """Let the requests come at their times, and wait until all have been served."""
    begin = time.perf_counter()

    async def one(ask: Ask) -> Timeline:
        await asyncio.sleep(max(0.0, begin + ask.at - time.perf_counter()))
        timeline = Timeline(begin + ask.at)
        async for count in way.tokens(ask):
            timeline.times.append(time.perf_counter())
            timeline.counts.append(count)
        assert sum(timeline.counts) == ask.new_tokens or isinstance(way, OverHttp)  # which has pieces of several
        return timeline

    return await asyncio.gather(*map(one, requests))


def figures(timelines: Sequence[Timeline], requests: Sequence[Ask]) -> dict[str, float]:
    """What a load came to."""
    seconds = max(each.times[-1] for each in timelines) - min(each.arrived for each in timelines)
    first = [each.to_first for each in timelines]
    gaps = [gap for each in timelines for gap in each.gaps]
    return {
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": sum(ask.new_tokens for ask in requests) / seconds,
        "first_p50_ms": 1e3 * quantile(first, 0.5),
        "first_p99_ms": 1e3 * quantile(first, 0.99),
        "between_p50_ms": 1e3 * quantile(gaps, 0.5),
        "between_p99_ms": 1e3 * quantile(gaps, 0.99),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
