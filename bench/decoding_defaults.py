"""The defaults of every method beside plain decoding and beside chains: the sweep `defaults` of bench/decoding.py."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from batches import batch_of
from common import Row, in_turns, times_as_fast

from heavypath.speculative import PromptLookup, Recall, SpeculativeDecoder, TokenTree, load_demo_head

if TYPE_CHECKING:
    from decoding import Bench

KINDS = ("model", "head", "lookup", "recall")
PLAIN = "plain"
CHAINS = 8  # levels of the longest chain that defaults are compared with


def defaults(bench: "Bench") -> Iterator[Row]:
    given = bench.given
    kinds = {"model": bench.draft, "head": load_demo_head(bench.target), "lookup": PromptLookup(), "recall": Recall()}
    for name in given.draft:
        chains = {f"chain of {levels}": {"tree": TokenTree.chain(levels)} for levels in range(1, CHAINS + 1)}
        ways = {way: ("chain", options) for way, options in chains.items()} | {way: (way, {}) for way in given.method}
        for temperature in given.temperature:
            for size in given.batch:
                decoders = {PLAIN: bench.decoder("autoregressive")}
                for way, (method, options) in ways.items():
                    decoders[way] = SpeculativeDecoder(bench.target, kinds[name], method, **options)
                case = {"draft": name, "temperature": temperature, "batch": size}
                yield from _beside_chains(bench, decoders, [*chains], case)


def _beside_chains(
    bench: "Bench", decoders: Mapping[str, SpeculativeDecoder], chains: Sequence[str], case: Row
) -> Iterator[Row]:
    """A row for each decoder: its speed, and how many times as fast as plain decoding and as the best chain it is."""
    new, size, rounds = bench.given.max_new_tokens, case["batch"], bench.given.rounds
    every = bench.few_prompts(size * (rounds + 1))
    texts = [batch_of(every[size * place : size * (place + 1)]) for place in range(rounds + 1)]
    decoded: dict[str, list] = {name: [] for name in decoders}

    def run(name: str) -> None:
        own = texts[len(decoded[name])]
        asked = {"max_new_tokens": new, "temperature": case["temperature"], **own.options}
        decoded[name].append(decoders[name].generate(own.tokens, **asked).stats)

    times = in_turns({name: partial(run, name) for name in decoders}, rounds)
    best = max(chains, key=lambda chain: times_as_fast(times, chain, PLAIN).median)
    for name in decoders:
        to_plain, to_chain = (times_as_fast(times, name, other) for other in (PLAIN, best))
        counted = decoded[name][1:]
        yield case | {
            "way": name, "tree": counted[0].tree, "tokens_per_second": size * new / median(times[name]),
            "tokens_per_step": sum(each.new_tokens for each in counted) / sum(each.steps for each in counted),
            "to_plain": to_plain.median, "plain_quartiles": to_plain[1:],
            "to_chain": to_chain.median, "chain_quartiles": to_chain[1:], "best_chain": best,
        }  # fmt: skip
