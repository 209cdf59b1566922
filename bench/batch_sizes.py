"""How fast are batches on a CPU, with trees that follow their size, with a fixed tree, and without drafts?

    python bench/batch_sizes.py [--batch 1 4 8 16 24] [--method ersd sequoia] [--rounds 7] [--tokens 64] [--threads 2]

transformers  its own generate, of the same batch
default       the decoder's trees; they follow the batch at temperature 0, and for ersd
5 nodes       tree_size=5 in any batch, as one sequence has it; and so on for --nodes
plain         method "autoregressive"

All ways decode the batch in turn, in rounds, each of which begins with another way. A ratio is transformers'
time by the way's in the same round; printed are the medians and quartiles over rounds.

Behind that, batches whose sequences end after different numbers of tokens, a quarter of --tokens to twice as many, so
that the batch closes up: here the ratio is to plain decoding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from batches import batch_of
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import DemoPair, demo_prompts

BATCHES, METHODS, TEMPERATURES, NODES = [1, 4, 8, 16, 24], ["ersd"], [0.0, 0.6], [5, 2]
TRANSFORMERS, DEFAULT, PLAIN = "transformers", "default", "plain"
Way = Callable[[int], object]  # decodes the batch under a seed


class Ratio(NamedTuple):
    """Of another way's time to this one's, over rounds: the median and the quartiles; and tokens by step."""

    way: str
    tree: str
    median: float
    quartiles: tuple[float, float]
    seconds: float


def ratio(way: str, tree: str, reference: Sequence[float], own: Sequence[float]) -> Ratio:
    """What follows of the seconds of all rounds."""
    each = [other / mine for other, mine in zip(reference, own, strict=True)]
    low, middle, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(way, tree, middle, (low, high), sorted(own)[len(own) // 2])


def in_rounds(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """The seconds of each way in each round; one more round before these is for warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = [*ways]
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            ways[name](number)
            if number > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def transformers_way(pair: DemoPair, tokens: Tensor, mask: Tensor, new: int, temperature: float) -> Way:
    """Its own generate, of exactly so many new tokens."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    def run(seed: int) -> None:
        torch.manual_seed(seed)
        target: Any = pair.target
        target.generate(tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **sampling)

    return run


class Decoding:
    """A decoder on a batch, as a way; `tree` says with which tree it began."""

    def __init__(self, decoder: SpeculativeDecoder, tokens: Tensor, options: dict[str, Any]):
        self._decoder, self._tokens, self._options = decoder, tokens, options
        self.tree = ""

    def __call__(self, seed: int) -> None:
        """Decode."""
        self.tree = self._decoder.generate(self._tokens, seed=seed, **self._options).stats.tree


def decoders_of(pair: DemoPair, method: str, nodes: Sequence[int]) -> dict[str, SpeculativeDecoder]:
    """The decoders, by what they are called here."""
    found = {DEFAULT: SpeculativeDecoder(pair.target, pair.draft, method)}
    found |= {f"{size} nodes": SpeculativeDecoder(pair.target, pair.draft, method, tree_size=size) for size in nodes}
    return found | {PLAIN: SpeculativeDecoder(pair.target, None, "autoregressive")}


def ends_at(prompts: Tensor, new: Sequence[int]) -> Callable[[Tensor, None], bool]:
    """A stopping criterion that ends each sequence, known by its prompt, after its own number of tokens."""

    def ends(ids: Tensor, scores: None) -> bool:
        row = int((prompts == ids[0, : prompts.shape[1]]).all(1).nonzero()[0, 0])
        return ids.shape[1] - prompts.shape[1] >= new[row]

    return ends


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--method", nargs="+", default=METHODS)
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="of the fixed trees")
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    if arguments.miniature:
        arguments.batch, arguments.tokens, arguments.rounds, arguments.nodes = [2], 8, 1, [5]
    torch.set_num_threads(arguments.threads)
    pair, console = quiet_demo_pair(), Console(highlight=False, width=110)
    prompts = token_ids(pair.tokenizer, demo_prompts())
    facts = environment("cpu") | {"tokens": arguments.tokens, "rounds": arguments.rounds}
    rows: list[dict] = []

    def show(found: list[Ratio], case: dict) -> None:
        table = Table(Column("way", no_wrap=True), "tree", box=box.SIMPLE_HEAD, title=str(case), title_justify="left")
        for heading in ("ratio", "quartiles", "s"):
            table.add_column(heading, justify="right")
        for each in found:
            low, high = each.quartiles
            table.add_row(each.way, each.tree, f"{each.median:.2f}", f"{low:.2f} {high:.2f}", f"{each.seconds:.3f}")
            rows.append(case | each._asdict())
        console.print(table)
        write_results(arguments.json, facts, rows=rows)

    with until_stopped():
        for method in arguments.method:
            decoders = decoders_of(pair, method, arguments.nodes)
            for batch in arguments.batch:
                texts = batch_of([prompts[place % len(prompts)] for place in range(batch)])
                longer = torch.linspace(arguments.tokens / 4, 2 * arguments.tokens, batch).round().long().tolist()
                for temperature in arguments.temperature:
                    given = {"max_new_tokens": arguments.tokens, "temperature": temperature, **texts.options}
                    ways = {name: Decoding(each, texts.tokens, given) for name, each in decoders.items()}
                    plain = transformers_way(pair, texts.tokens, texts.mask, arguments.tokens, temperature)
                    seconds = in_rounds(ways | {TRANSFORMERS: plain}, arguments.rounds)
                    case = {"method": method, "batch": batch, "temperature": temperature}
                    show([ratio(each, ways[each].tree, seconds[TRANSFORMERS], seconds[each]) for each in ways], case)
                    if batch == 1:
                        continue
                    ends = [ends_at(texts.tokens, longer)]
                    mixed = given | {"max_new_tokens": max(longer), "stopping_criteria": ends}
                    ways = {name: Decoding(each, texts.tokens, mixed) for name, each in decoders.items()}
                    seconds = in_rounds(ways, arguments.rounds)
                    found = [ratio(each, ways[each].tree, seconds[PLAIN], seconds[each]) for each in ways]
                    show(found, case | {"lengths": "mixed"})


if __name__ == "__main__":
    main()
