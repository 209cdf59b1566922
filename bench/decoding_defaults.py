"""The defaults of every method beside plain decoding and beside chains: the sweep `defaults` of bench/decoding.py."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from batches import batch_of
from common import Row, Spread, timed

from heavypath.speculative import PromptLookup, Recall, SpeculativeDecoder, TokenTree, load_demo_head
from heavypath.speculative.decoding.statistics import Statistics

if TYPE_CHECKING:
    from decoding import Bench

KINDS = ("model", "head", "lookup", "recall")
PLAIN = "plain"
CHAINS = 8  # levels of the longest chain that defaults are compared with


def defaults(bench: "Bench") -> Iterator[Row]:
    given = bench.given
    head, lookup = load_demo_head(bench.target), PromptLookup()
    kinds = {"model": lambda: bench.draft, "head": lambda: head, "lookup": lambda: lookup, "recall": Recall}
    for name in given.draft:
        chains = {f"chain of {levels}": {"tree": TokenTree.chain(levels)} for levels in range(1, CHAINS + 1)}
        ways = {way: ("chain", options) for way, options in chains.items()} | {way: (way, {}) for way in given.method}
        for temperature in given.temperature:
            for size in given.batch:
                decoders = {PLAIN: bench.decoder("autoregressive")}
                for way, (method, options) in ways.items():
                    decoders[way] = SpeculativeDecoder(bench.target, kinds[name](), method, **options)
                case = {"draft": name, "temperature": temperature, "batch": size}
                yield from _beside_chains(bench, decoders, [*chains], case)


def _beside_chains(
    bench: "Bench", decoders: Mapping[str, SpeculativeDecoder], chains: Sequence[str], case: Row
) -> Iterator[Row]:
    """A row for each decoder: its speed, and how many times as fast as plain decoding and as the best chain it is.

    Two factors are measured apart. Tokens per step follow from the texts, and are counted over all of them. The time of
    a step, in steps of plain decoding, hardly depends on the text. So its median is taken, and plain decoding runs just
    before each way, while the machine is as fast. The row of plain decoding itself shows the noise that is left.
    """
    new, size, rounds = bench.given.max_new_tokens, case["batch"], bench.given.rounds
    every = bench.few_prompts(size * (rounds + 1))
    texts = [batch_of(every[size * place : size * (place + 1)]) for place in range(rounds + 1)]
    decoded: dict[str, list[Statistics]] = {name: [] for name in decoders}
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    step_ratios: dict[str, list[float]] = {name: [] for name in decoders}
    plain = decoders[PLAIN]

    def run(name: str, round_number: int) -> None:
        text = texts[round_number]
        asked = {"max_new_tokens": new, "temperature": case["temperature"], **text.options}
        plain_seconds, of_plain = timed(lambda: plain.generate(text.tokens, **asked).stats)
        own_seconds, stats = timed(lambda: decoders[name].generate(text.tokens, **asked).stats)
        if round_number > 0:  # the first one warms up
            decoded[name].append(stats)
            seconds[name].append(own_seconds)
            step_ratios[name].append((own_seconds / stats.steps) / (plain_seconds / of_plain.steps))

    for round_number in range(rounds + 1):
        for name in decoders:
            run(name, round_number)
    per_step = {
        name: sum(each.new_tokens for each in stats) / sum(each.steps for each in stats)
        for name, stats in decoded.items()
    }
    to_plain = {name: per_step[name] / per_step[PLAIN] / median(step_ratios[name]) for name in decoders}
    best = max(chains, key=to_plain.__getitem__)
    for name in decoders:
        yield case | {
            "way": name,
            "tree": decoded[name][0].tree,
            "tokens_per_second": size * new / median(seconds[name]),
            "tokens_per_step": per_step[name],
            "step": median(step_ratios[name]),
            "step_quartiles": Spread.of(step_ratios[name])[1:],
            "to_plain": to_plain[name],
            "to_chain": to_plain[name] / to_plain[best],
            "best_chain": best,
        }
