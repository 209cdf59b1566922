"""The defaults of every method beside plain decoding and beside chains: the sweep `defaults` of bench/decoding.py.

All ways to decode a prompt take turns of IN_A_ROW steps, each in a thread of its own of which one runs at a time. So
they meet the same machine, however its speed changes. A speed is made of counts, medians and trimmed means,

    tokens / (prefill + steps * seconds of a step)

with tokens and steps over the same prompts for all ways. Errors are those of the time of a step and, of sampled texts,
of the tokens per step.

Rounds decode other prompts each, under other seeds. A chain that is clearly behind the best one, and a way that drafted
nothing, stop after `rounds` rounds; the others go on until PROMPTS prompts are decoded, and until their comparisons are
clear: a speed is apart from plain decoding's and from the best chain's by more than two standard errors, or the
standard error of its steps is at most PRECISION, or MOST_ROUNDS are over. What drafted nothing does the steps of plain
decoding: its speed is 1 by definition, `drafts` is false, and `step` is noise.

The best of eight chains by some figures is in part the one that these figures are wrong about. So it is chosen by one
half of the rounds and compared with by the other half, both ways round, and the two ratios are averaged.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from batches import batch_of, jackknife
from common import Row, Spread

from heavypath.speculative import PromptLookup, Recall, SpeculativeDecoder, TokenTree, load_demo_head
from heavypath.speculative.decoding.statistics import Statistics

if TYPE_CHECKING:
    from decoding import Bench

KINDS = ("model", "head", "lookup", "recall")
PLAIN = "plain"
CHAINS = 8  # levels of the longest chain that defaults are compared with
PRECISION = 0.01  # a relative standard error that is small enough
MOST_ROUNDS = 48
IN_A_ROW = 8  # steps of a way until the next one has its turn
PROMPTS = 48  # whose tokens per step are counted
BEHIND = 0.85  # a chain below this speed, relative to the best, is not the best one
QUARTILES = 1.349  # between the quartiles of a normal distribution, in standard deviations
EVERY = slice(None)
HALVES = (slice(0, None, 2), slice(1, None, 2))  # of the rounds
OF_MEDIANS = math.sqrt(math.pi / 2)  # the standard error of a median over the one of a mean


def defaults(bench: "Bench") -> Iterator[Row]:
    given = bench.given
    head, lookup = load_demo_head(bench.target), PromptLookup()
    kinds = {"model": lambda: bench.draft, "head": lambda: head, "lookup": lambda: lookup, "recall": Recall}
    chains = {f"chain of {levels}": {"tree": TokenTree.chain(levels)} for levels in range(1, CHAINS + 1)}
    ways = {way: ("chain", options) for way, options in chains.items()} | {way: (way, {}) for way in given.method}
    for size in given.batch:
        for name in given.draft:
            for temperature in given.temperature:
                decoders = {PLAIN: bench.decoder("autoregressive")}
                for way, (method, options) in ways.items():
                    decoders[way] = SpeculativeDecoder(bench.target, kinds[name](), method, **options)
                case = {"draft": name, "temperature": temperature, "batch": size}
                yield from _beside_chains(bench, decoders, [*chains], case)


def trimmed_mean(seconds: Sequence[float]) -> float:
    """The mean of all but the shortest and the longest tenth.

    A median would take a way whose draft rests in some steps for one that never rests, or always.
    """
    left_out = len(seconds) // 10
    return mean(sorted(seconds)[left_out : len(seconds) - left_out])


class Way:
    """One way to decode, and what was measured of it: an entry of each list for each round after the first one."""

    def __init__(self, decoder: SpeculativeDecoder):
        self.decoder = decoder
        self.stats: list[Statistics] = []
        self.steps: list[float] = []  # seconds of a step: the trimmed mean of a round
        self.step_ratios: list[float] = []  # over the one of plain decoding in the same round, if that took part

    @property
    def drafts(self) -> bool:
        return any(stats.nodes > int(stats.steps_of.sum()) for stats in self.stats)

    def step(self, rounds: slice = EVERY) -> float:
        """The time of a step in some rounds, in steps of plain decoding."""
        return median(self.step_ratios[rounds]) if self.drafts else 1.0

    @property
    def error(self) -> float:
        """The relative standard error of `step`."""
        if not self.drafts:
            return 0.0
        _, low, high = Spread.of(self.step_ratios)
        return OF_MEDIANS * (high - low) / QUARTILES / math.sqrt(len(self.step_ratios)) / self.step()

    def tokens_per_step(self, rounds: Sequence[int]) -> float:
        stats = [self.stats[place] for place in rounds]
        return sum(each.new_tokens for each in stats) / sum(each.steps for each in stats)

    def seconds_per_token(self, plain: "Way", rounds: Sequence[int], timed: slice = EVERY) -> float:
        """Seconds per new token, with the prompt's pass. rounds: whose tokens count; timed: whose seconds of a step."""
        stats = [self.stats[place] for place in rounds]
        prefill = median((self if self.drafts else plain).stats[place].seconds["prefill"] for place in rounds)
        seconds = len(stats) * prefill + sum(each.steps for each in stats) * self.step(timed) * median(plain.steps)
        return seconds / sum(each.new_tokens for each in stats)


class Comparison:
    """Speeds relative to each other, by the rounds that both ways decoded, at most the first `most`."""

    def __init__(self, plain: Way, most: int, *, samples: bool):
        self.plain, self.most, self.samples = plain, most, samples

    def over(self, way: Way, other: Way) -> float:
        """How many times as fast as another one it is."""
        return self._over(way, other, range(self._rounds(way, other)))

    def over_best(self, way: Way, others: Sequence[Way]) -> float:
        """How many times as fast as the best of the others it is, which other rounds have chosen."""
        ratios = []
        for chosen_in, compared_in in ((HALVES[0], HALVES[1]), (HALVES[1], HALVES[0])):
            best = max(others, key=lambda other: self._over_in(other, self.plain, chosen_in))
            ratios.append(self._over_in(way, best, compared_in))
        return mean(ratios)

    def error(self, way: Way, other: Way) -> float:
        """The standard error of `over`: that of the steps' times and, of sampled texts, that of tokens per step."""
        if way is other or not (way.drafts or other.drafts):
            return 0.0
        of_times = self.over(way, other) * math.hypot(way.error, other.error)
        rounds = self._rounds(way, other)
        if not self.samples or rounds < 2:
            return of_times
        of_tokens = jackknife(lambda some: self._over(way, other, some.tolist()), rounds).standard_error
        return math.hypot(of_times, of_tokens)

    def is_clear(self, way: Way, other: Way) -> bool:
        return abs(self.over(way, other) - 1) > 2 * self.error(way, other)

    def best(self, ways: Sequence[Way]) -> Way:
        return max(ways, key=lambda way: self.over(way, self.plain))

    def _rounds(self, way: Way, other: Way) -> int:
        return min(self.most, len(way.stats), len(other.stats))

    def _over_in(self, way: Way, other: Way, part: slice) -> float:
        rounds = range(self._rounds(way, other))
        if len(rounds) < len(HALVES):
            return self._over(way, other, rounds)
        return self._over(way, other, rounds[part], part)

    def _over(self, way: Way, other: Way, rounds: Sequence[int], timed: slice = EVERY) -> float:
        seconds = [each.seconds_per_token(self.plain, rounds, timed) for each in (way, other)]
        return seconds[1] / seconds[0]


def _beside_chains(
    bench: "Bench", decoders: Mapping[str, SpeculativeDecoder], chains: Sequence[str], case: Row
) -> Iterator[Row]:
    """A row for each decoder: its speed, and how many times as fast as plain decoding and as the best chain it is."""
    new, size, least = bench.given.max_new_tokens, case["batch"], bench.given.rounds
    most = max(least, PROMPTS // size) if least > 1 else 1
    ways = {name: Way(decoder) for name, decoder in decoders.items()}
    plain, of_chains = ways[PLAIN], [ways[name] for name in chains]
    speeds = Comparison(plain, most, samples=case["temperature"] > 0)

    def decode(running: Sequence[Way], round_number: int) -> None:
        text = batch_of(bench.few_prompts(size * (round_number + 1))[size * round_number :])
        asked = {"max_new_tokens": new, "temperature": case["temperature"], "seed": round_number, **text.options}
        measured = in_turns_of_steps([way.decoder for way in running], text.tokens, asked)
        if round_number == 0:  # it warms up
            return
        for way, (stats, seconds) in zip(running, measured, strict=True):
            way.stats.append(stats)
            way.steps.append(trimmed_mean(seconds))
            way.step_ratios.append(way.steps[-1] / plain.steps[-1])

    def goes_on(way: Way, rounds: int) -> bool:
        best = speeds.best(of_chains)
        if not way.drafts or (way in of_chains and speeds.over(way, best) < BEHIND):
            return False
        if rounds < most or way is best:
            return rounds < most
        return way.error > PRECISION and not (speeds.is_clear(way, plain) and speeds.is_clear(way, best))

    running = [way for way in ways.values() if way is not plain]
    for round_number in range((MOST_ROUNDS if least > 1 else 1) + 1):
        if running or round_number <= most:
            decode([plain, *running], round_number)
        if round_number >= least:
            running = [way for way in running if goes_on(way, round_number)]
    best = speeds.best(of_chains)
    for name, way in ways.items():
        rounds = range(min(most, len(way.stats)))
        yield case | {
            "way": name,
            "tree": way.stats[0].tree,
            "drafts": way.drafts,
            "rounds": len(way.stats),
            "tokens_per_second": 1 / way.seconds_per_token(plain, rounds),
            "tokens_per_step": way.tokens_per_step(rounds),
            "prefill": median(way.stats[place].seconds["prefill"] for place in rounds),
            "step": median(way.step_ratios),
            "to_plain": speeds.over(way, plain),
            "to_plain_error": speeds.error(way, plain),
            "to_chain": speeds.over_best(way, of_chains),
            "to_chain_error": speeds.error(way, best),
            "best_chain": next(chain for chain in chains if ways[chain] is best),
        }


class Turn:
    """Lets the next thread run after every IN_A_ROW steps, and keeps the seconds of steps.

    The first step after another thread's, whose code and data are in the caches, is not counted.
    """

    def __init__(self, threads: list["Turn"], clock: Callable[[], float]):
        self.threads = threads  # those still running, itself among them
        self.seconds: list[float] = []
        self._clock = clock
        self._mine = threading.Semaphore(0)
        self._steps = 0
        self._since = 0.0

    def streamers(self, batch: int) -> list["Counting"]:
        """The streamers of a batch of sequences."""
        return [Counting(self) for _ in range(batch)]

    def start(self) -> None:
        self._mine.release()

    def wait(self) -> None:
        self._mine.acquire()

    def begin(self) -> None:
        """The prompt's pass begins."""
        self._since = self._clock()

    def count(self, steps: int) -> None:
        """So many steps are done. Each sequence that still runs says so, and the first one is heard."""
        if steps == self._steps:
            return
        self._steps = steps
        if steps % IN_A_ROW != 1:
            self.seconds.append(self._clock() - self._since)
        if steps % IN_A_ROW == 0:
            self._pass_on()
        self._since = self._clock()

    def _pass_on(self) -> None:
        after = self._after()
        if after is not self:
            after.start()
            self.wait()

    def leave(self) -> None:
        after = self._after()
        self.threads.remove(self)
        if after is not self:
            after.start()

    def _after(self) -> "Turn":
        return self.threads[(self.threads.index(self) + 1) % len(self.threads)]


class Counting:
    """A streamer that counts the steps of its sequence: it is given the prompt, and the tokens of each step."""

    def __init__(self, turn: Turn):
        self._turn, self._values = turn, 0

    def put(self, value: object) -> None:
        """Called by `generate` with the prompt before its pass, and after each step."""
        if self._values == 0:
            self._turn.begin()
        else:
            self._turn.count(self._values)
        self._values += 1

    def end(self) -> None:
        """Called by `generate` at the sequence's end."""


def in_turns_of_steps(
    decoders: Sequence[SpeculativeDecoder], tokens: torch.Tensor, asked: Mapping[str, Any]
) -> list[tuple[Statistics, list[float]]]:
    """The statistics of each decoder, and the seconds of its steps, while all decode the same prompts in turns."""
    turns: list[Turn] = []
    number_of_threads = torch.get_num_threads()
    # A thread's own time is not that of other programs on its processor.
    alone = number_of_threads == 1 and tokens.device.type == "cpu"
    clock = time.thread_time if alone else decoders[0].clock
    turns.extend(Turn(turns, clock) for _ in decoders)
    every = [*turns]
    done: dict[int, Statistics] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        torch.set_num_threads(number_of_threads)  # which a new thread does not have from the one that started it
        every[place].wait()
        decoders[place].clock = clock
        try:
            done[place] = decoders[place].generate(tokens, streamer=every[place].streamers(len(tokens)), **asked).stats
        except BaseException as error:
            errors.append(error)
        every[place].leave()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(decoders))]
    for thread in threads:
        thread.start()
    every[0].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [(done[place], turn.seconds) for place, turn in enumerate(every)]
