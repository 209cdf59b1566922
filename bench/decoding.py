"""Decoding with the shipped pair: every sweep decodes the same held-out prompts, and varies one thing.

    python bench/decoding.py [--sweep batch] [--prompts 24] [--max-new-tokens 128] [--threads 1 2] [--json FILE]

methods      (the default) every method beside transformers' generate and assisted generation. All decode each prompt,
             one after the other, and a ratio is taken within a prompt
batch        batches of several sizes: trees that follow them, fixed ones, no draft, transformers. Behind that batches
             whose sequences end after a quarter of the tokens to twice as many; their ratio is to plain decoding
defaults     each method with its defaults beside plain decoding and chains of 1 to 8 levels, by each kind of draft, for
             one sequence and in batches. All take turns of eight steps. `step` is the time of a step over one of plain
             decoding; `to_chain` a speed over that of the fastest chain, with its standard error
in-vain      defaults beside plain decoding where drafts cannot pay: of random weights, as large as the target, or in a
             batch of 32; each method at its temperature. After the first round decoders know that
ragged       the sequences of a batch end after 16, 32, 48, ... tokens: slots that close up, and that are carried along
draft        tokens per forward pass with each kind of draft, by verifiers of the papers. `overlap`: how often the first
             token drafted after a root is accepted. The corpus to retrieve from is what the models were trained on
retrieval    what a corpus takes to make, to load and to ask (a call for the nodes of a level, behind 300 tokens); the
             tokens that it brings beside prompt lookup and the draft model, by the trees that are the default here
recall       texts of each prompt, --rounds of them under one seed after the other, by drafts that learn and others:
             tokens per forward pass of each round. Of Recall the first round has had other prompts' texts alone
verifier     each verifier on trees of the same shape. All prompts under all seeds are one batch; the gain is over
             rejection, its standard error a jackknife over the prompts; the first --timed prompts are decoded alone
nodes        tokens per forward pass of every method with an equal budget of nodes, and what planning expected by the
             acceptance that is measured first; verified as in the papers. SpecInfer and SpecTr get three sequences, and
             as many as promise most. The first token comes from the prompt's pass and is not counted
phases       milliseconds of a step by phase; `beside` is the share of all but the two models. On a GPU steps are eager
             and the host waits after each phase: they add up to more than a step takes
chat         seconds to the first token of a turn of --turn tokens behind --history, with and without the cache of these
attention    attn_implementation="heavypath" and "sdpa" in transformers' own calls: heavypath is slower above a ratio
             of 1. Where others use the machine, set OMP_WAIT_POLICY=PASSIVE, or threads that spin are timed

Things that are compared take turns within a round, each round begins with another one, and a first one warms up.
Seconds are medians over rounds, ratios are taken within a round and have their quartiles.
"""

import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from batches import batch_of, by_transformers, gain
from common import (
    Row,
    argument_parser,
    clock_of,
    environment,
    in_turns,
    paper_verifier,
    quiet_demo_pair,
    report,
    timed,
    times_as_fast,
    token_ids,
)
from decoding_defaults import KINDS, PLAIN, defaults
from demo_pair import corpus
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    Cascade,
    EarlyExit,
    Lookahead,
    Mixture,
    PromptLookup,
    Recall,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
    expected_tokens,
    load_demo_head,
    sequoia_tree,
)
from heavypath.speculative.calibration import ways_to_draft
from heavypath.speculative.comparison import compare
from heavypath.speculative.decoding import run
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.drafts.retrieval import RetrievalDraft
from heavypath.speculative.methods import VERIFIERS
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import MeasuredAcceptance
from heavypath.speculative.trees.branching import branching_tree
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.walking import DEPTH, Extent, as_measured, walk

REJECTION, TRANSFORMERS, MODEL = "rejection", "transformers", "model"
CHAIN = 6  # nodes of a chain, whatever the trees have
PHASES = ("draft", "sampling", "target", "verification", "compaction", "host")
PREFIX, LEVELS = 300, (1, 4, 16)  # rows behind which a corpus is asked, for so many nodes
TREES = {  # of --sweep verifier: the method, and the decoder's options; then methods with their default trees
    "chain 8": ("chain", {"tree": TokenTree.chain(8)}),
    "sequoia 16": ("sequoia", {"tree_size": 16}),
    "sequoia 64": ("sequoia", {"tree_size": 64, "max_depth": 8}),
    "dyspec 64": ("dyspec", {"tree_size": 64}),
    "rsd-c 64": ("rsd-c", {"tree_size": 64}),
    "rsd-s 64": ("rsd-s", {"tree_size": 64}),
    "specinfer 4 x 8": ("specinfer", {"tree": TokenTree.independent(4, 8)}),
} | {method: (method, {}) for method, row in METHODS.items() if row.verifiers}


class Bench:
    """The pair, the prompts as tokens, and what was asked for on the command line."""

    def __init__(self, given: Namespace):
        self.given, self.pair = given, quiet_demo_pair(given.device)
        self.target, self.draft, self.tokenizer = self.pair
        texts = demo_prompts()[: getattr(given, "prompts", None)]
        self.prompts = token_ids(self.tokenizer, texts, given.device)

    def decoder(self, method: str, **options: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.target, None if method == "autoregressive" else self.draft, method, **options)

    def few_prompts(self, count: int) -> list[Tensor]:
        """So many, again from the first one where there are fewer."""
        return [self.prompts[place % len(self.prompts)] for place in range(count)]


def methods(bench: Bench) -> Iterator[Row]:
    given = bench.given
    for temperature in given.temperature:
        for row in compare(
            bench.target, bench.draft, bench.prompts, methods=given.method, max_new_tokens=given.max_new_tokens,
            temperature=temperature, tree_size=given.nodes[0] if given.nodes else None,
        ):  # fmt: skip
            yield {"temperature": temperature} | asdict(row)


def batch(bench: Bench) -> Iterator[Row]:
    given, new = bench.given, bench.given.max_new_tokens
    for method in given.method:
        fixed = {f"{size} nodes": bench.decoder(method, tree_size=size) for size in given.nodes}
        decoders = {"default": bench.decoder(method), **fixed, PLAIN: bench.decoder("autoregressive")}
        for size in given.batch:
            texts = batch_of(bench.few_prompts(size))
            longer = torch.linspace(new / 4, 2 * new, size).round().long().tolist()
            for temperature in given.temperature:
                asked = {"max_new_tokens": new, "temperature": temperature, **texts.options}
                mixed = {"max_new_tokens": max(longer), "stopping_criteria": [ends_at(texts.tokens, longer)]}
                case = {"method": method, "batch": size, "temperature": temperature}
                their = {TRANSFORMERS: partial(by_transformers, bench.target, texts, new, temperature)}
                yield from _ways(decoders, texts.tokens, asked, case, given.rounds, their)
                if size > 1:
                    yield from _ways(decoders, texts.tokens, asked | mixed, case | {"lengths": "mixed"}, given.rounds)


def _ways(
    decoders: Mapping[str, SpeculativeDecoder], tokens: Tensor, asked: dict, case: Row, rounds: int,
    reference: Mapping[str, Callable[[], object]] = {},
) -> Iterator[Row]:  # fmt: skip
    """A row for each decoder of a batch: how many times as fast as the reference, or else as plain decoding."""
    trees = {}

    def run(name: str) -> None:
        trees[name] = decoders[name].generate(tokens, **asked).stats.tree

    times = in_turns({**{name: partial(run, name) for name in decoders}, **reference}, rounds)
    for name in decoders:
        ratio = times_as_fast(times, name, next(iter(reference), PLAIN))
        row = {"way": name, "tree": trees[name], "median": ratio.median, "quartiles": ratio[1:]}
        yield case | row | {"seconds": median(times[name])}


def in_vain(bench: Bench) -> Iterator[Row]:
    given, copied, random = bench.given, deepcopy(bench.target), deepcopy(bench.draft)
    for weight in random.parameters():
        weight.data.normal_(0, 0.02)
    pairs = {"the shipped draft": (bench.draft, 1), "a draft of random weights": (random, 1), "the target": (copied, 1)}
    for name, (draft, size) in (pairs | {"the shipped draft, 32 sequences": (bench.draft, 32)}).items():
        texts = batch_of(bench.few_prompts(size))
        for method, temperature in zip(given.method, given.temperature, strict=True):
            decoders = {
                "default": SpeculativeDecoder(bench.target, draft, method),
                PLAIN: bench.decoder("autoregressive"),
            }
            asked = {"max_new_tokens": given.max_new_tokens, "temperature": temperature, **texts.options}
            case = {"method": method, "temperature": temperature, "draft": name}
            yield next(_ways(decoders, texts.tokens, asked, case, given.rounds))


def ends_at(prompts: Tensor, new: Sequence[int]) -> Callable[[Tensor, None], bool]:
    """A stopping criterion that ends each sequence, known by its prompt, after its own number of tokens."""

    def ends(ids: Tensor, scores: None) -> bool:
        row = int((prompts == ids[0, : prompts.shape[1]]).all(1).nonzero()[0, 0])
        return ids.shape[1] - prompts.shape[1] >= new[row]

    return ends


def ragged(bench: Bench) -> Iterator[Row]:
    texts, closing = batch_of(bench.few_prompts(bench.given.batch[0])), run.close_up
    new = [16 * (row + 1) for row in range(len(texts.tokens))]
    asked = {"max_new_tokens": new[-1], "stopping_criteria": [ends_at(texts.tokens, new)], **texts.options}
    for method in bench.given.method:
        decoder = bench.decoder(method)

        def decoded(close_up: Callable, decoder: SpeculativeDecoder = decoder) -> None:
            run.close_up = close_up
            assert decoder.generate(texts.tokens, **asked).stats.tokens_of.tolist() == new

        ways = {"closing up": partial(decoded, closing), "carried along": partial(decoded, lambda *slots: None)}
        times = in_turns(ways, bench.given.rounds)
        run.close_up = closing
        seconds = {f"{name}, s": median(each) for name, each in times.items()}
        yield {"method": method, **seconds, "ratio": times_as_fast(times, *times).median}


def draft(bench: Bench) -> Iterator[Row]:
    texts = training_texts(bench.given.miniature)
    head, lookup, retrieval = load_demo_head(bench.target), PromptLookup(), Retrieval(texts, bench.tokenizer)
    drafts = {
        MODEL: bench.draft,
        "head": head,
        "prompt lookup": lookup,
        "lookahead": Lookahead(),
        "retrieval": retrieval,
        "early exit of 2": EarlyExit(2),
        "head, prompt lookup": Mixture([head, lookup]),
        "head, retrieval": Mixture([head, retrieval]),
        "head above retrieval": Cascade([head, retrieval], levels=[2, 4]),
    }
    yield from of_drafts(bench, drafts, bench.given.nodes[0])


def training_texts(few: bool) -> list[str]:
    return [source.text for source in corpus.read_corpus() if not source.held_out][: 5 if few else None]


def of_drafts(bench: Bench, drafts: Mapping[str, Any], nodes: int | None) -> Iterator[Row]:
    """Tokens per forward pass with each draft, of all prompts together, and over the draft model's."""
    given = bench.given
    for method in given.method:
        size = None if nodes is None else min(nodes, CHAIN) if method == "chain" else nodes
        options = {"tree_size": size, "verifier": paper_verifier(method)}
        decoders = {name: SpeculativeDecoder(bench.target, each, method, **options) for name, each in drafts.items()}
        for temperature in given.temperature:
            every: dict[str, list] = {name: [] for name in drafts}
            for prompt in bench.prompts:
                for name, decoder in decoders.items():
                    out = decoder.generate(prompt, given.max_new_tokens, temperature=temperature, seed=1)
                    every[name].append(out.stats)
            steps = {name: sum(stats.steps for stats in own) for name, own in every.items()}
            reached = {name: sum(stats.new_tokens for stats in own) / steps[name] for name, own in every.items()}
            for name, own in every.items():
                firsts = sum(int(stats.accepted[:1].sum()) for stats in own)  # a step without a draft has none
                yield {
                    "temperature": temperature, "method": method, "draft": name, "tokens_per_forward": reached[name],
                    "overlap": firsts / steps[name] if method == "chain" else None,
                    "to_model": reached[name] / reached[MODEL],
                    "tokens_per_second": median(stats.tokens_per_second for stats in own),
                }  # fmt: skip


def retrieval(bench: Bench) -> Iterator[Row]:
    texts, seconds, found = training_texts(bench.given.miniature), {}, {}
    bench.tokenizer(texts, add_special_tokens=False, verbose=False)  # once, so that the tokenizer is warm
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.safetensors"
        for name, work in {
            "encode": lambda: bench.tokenizer(texts, add_special_tokens=False, verbose=False),
            "make": lambda: Retrieval(texts, bench.tokenizer),  # which encodes, and sorts
            "save": lambda: found["make"].save(path),
            "load": lambda: Retrieval.load(path, bench.tokenizer),
        }.items():
            seconds[f"{name}_seconds"], found[name] = timed(work)
        size = path.stat().st_size / 2**20
    yield {"draft": "retrieval", "tokens": found["load"].tokens, "texts": len(texts), "MiB": size} | seconds
    held_out = "\n".join(source.text for source in corpus.read_corpus() if source.held_out)[:20_000]
    text = bench.tokenizer(held_out, return_tensors="pt", verbose=False).input_ids[0, 1000:]
    vocabulary, cpu = bench.target.vocab_size, torch.device("cpu")
    lookup, drafted = LookupDraft(PromptLookup(), vocabulary, cpu), RetrievalDraft(found["load"], vocabulary, cpu)
    for name, queried in {"prompt lookup": lookup, "retrieval": drafted}.items():
        for nodes in LEVELS:
            taken = median(query_seconds(queried, text, nodes, bench.given.rounds))
            yield {"draft": name, "nodes": nodes, "query_microseconds": 1e6 * taken}
    yield from of_drafts(bench, {"prompt lookup": PromptLookup(), "retrieval": found["load"], MODEL: bench.draft}, None)


def recall(bench: Bench) -> Iterator[Row]:
    given, head = bench.given, load_demo_head(bench.target)
    for temperature in given.temperature:
        drafts = {
            "prompt lookup": PromptLookup(), "recall": Recall(), "head": head, "head, recall": Mixture([head, Recall()])
        }  # fmt: skip
        for name, each in drafts.items():
            decoder, rounds = SpeculativeDecoder(bench.target, each, tree_size=given.nodes[0]), []
            for seed in range(given.rounds):
                outs = [
                    decoder.generate(prompt, given.max_new_tokens, temperature=temperature, seed=seed)
                    for prompt in bench.prompts
                ]
                rounds.append(sum(out.stats.new_tokens for out in outs) / sum(out.stats.steps for out in outs))
            yield {"temperature": temperature, "draft": name, "tokens_per_forward": rounds}


def query_seconds(queried: Draft, text: Tensor, nodes: int, rounds: int) -> list[float]:
    """Of calls for so many children of the root."""
    text = text[: PREFIX + 1 + nodes]
    cache = queried.new_cache(1, len(text))
    queried.prefill(text[None, : PREFIX + 1], cache)
    rows = torch.arange(PREFIX + 1, PREFIX + 1 + nodes)[None]
    feed = Feed(
        tokens=text[None, -nodes:], positions=rows, cache_rows=rows, parent_rows=torch.full_like(rows, PREFIX),
        prefix_lengths=torch.tensor([PREFIX]), visible_rows=len(text),
        ancestor_mask=torch.ones(nodes, nodes + 1, dtype=torch.bool),
    )  # fmt: skip
    return in_turns({"": lambda: queried(feed, cache)}, rounds)[""]


def verifier(bench: Bench) -> Iterator[Row]:
    given, texts = bench.given, batch_of(bench.prompts, bench.given.seeds)
    for tree in given.tree:
        method, options = TREES[tree]
        names = [name for name in (REJECTION, *given.verifier) if name in METHODS[method].verifiers]
        decoders = {name: bench.decoder(method, verifier=name, **options) for name in dict.fromkeys(names)}
        for decoder in decoders.values():
            decoder.clock = clock_of(given.device)
        for temperature in given.temperature:
            asked = {"max_new_tokens": given.max_new_tokens, "temperature": temperature}
            stats = {name: each.generate(texts.tokens, **texts.options, **asked).stats
                     for name, each in decoders.items()}  # fmt: skip
            alone = [
                {name: each.generate(prompt, eos_token_id=None, **asked).stats for name, each in decoders.items()}
                for prompt in texts.prompts[: given.timed]
            ]
            for name, own in stats.items():
                more = gain(own, stats[REJECTION], texts.seeds)
                spent = [1e3 * run[name].seconds.get("verification", math.nan) / run[name].steps for run in alone]
                speed = [run[name].tokens_per_second / run[REJECTION].tokens_per_second for run in alone]
                yield {
                    "tree": tree, "verifier": name, "temperature": temperature,
                    "tokens_per_forward": own.tokens_per_step, "gain": more.value, "gain_error": more.standard_error,
                    "verification_milliseconds": median(spent), "speed": median(speed),
                }  # fmt: skip


def nodes(bench: Bench) -> Iterator[Row]:
    given, texts = bench.given, batch_of(bench.prompts)
    forward = LlamaForward(bench.target, "target")
    source = as_draft(bench.draft, forward, bench.target)
    for temperature in given.temperature:
        measured: list[MeasuredAcceptance] = []
        for way in ways_to_draft(temperature, "cpu", REJECTION):
            extent = Extent.of_trees(given.max_new_tokens, 2 * len(bench.prompts), source.levels)
            rows = [ids[0] for ids in bench.prompts]
            counts = walk(forward, source, rows, way, Filters(temperature), extent, seed=1)
            measured.append(as_measured(way, Filters(temperature), counts))
        decoded = {}  # at temperature 0 methods differ in their trees alone
        for size in given.nodes:
            for name in [name for name in given.method if name != "autoregressive"]:
                fitting = [entry for entry in measured if entry.is_of(METHODS[name], temperature)]
                own = {entry.sequence_count: entry for entry in fitting}
                for label, options, sequences in shapes(name, size, own):
                    tree = options.get("tree")
                    key = (tree or str(options), name if temperature > 0 or tree is None else "")
                    if key not in decoded:
                        decoder = bench.decoder(name, verifier=paper_verifier(name), **options)
                        asked = {"max_new_tokens": given.max_new_tokens, "temperature": temperature, "seed": 2}
                        decoded[key] = decoder.generate(texts.tokens, **texts.options, **asked).stats
                    out = decoded[key]
                    yield {
                        "temperature": temperature, "size": size, "method": label, "nodes": out.nodes / out.steps,
                        "block_efficiency": out.tokens_per_step,
                        "expected": None if tree is None else own[sequences].counts.tokens(tree),
                        "steps": out.steps,
                    }  # fmt: skip


def shapes(
    method: str, size: int, measured: Mapping[int | None, MeasuredAcceptance]
) -> list[tuple[str, dict, int | None]]:
    """Rows of a method: name, options of the decoder, and how many sequences the measured acceptance is that of."""
    if None not in measured:
        counts = [count for count in measured if count is not None and count < size]
        trees = {count: TokenTree.independent(count, min(DEPTH, (size - 1) // count)) for count in counts}
        best = max(trees, key=lambda count: expected_tokens(trees[count], measured[count].rates()))
        return [(f"{method}, {count} sequences", {"tree": trees[count]}, count) for count in {best, 3}]
    if isinstance(METHODS[method].tree_of(8), Growth):
        options = {"tree_size": size, "max_depth": DEPTH}
        published = [("dyspec as published", options | {"confidence": "draft"}, None)] if method == "dyspec" else []
        return [(method, options, None), *published]
    if method == "chain":
        return [(method, {"tree": TokenTree.chain(min(size - 1, DEPTH))}, None)]
    plan = branching_tree if method == "rsd-c" else sequoia_tree
    return [(method, {"tree": plan(measured[None].rates(), size, DEPTH)}, None)]


def phases(bench: Bench) -> Iterator[Row]:
    given = bench.given
    for temperature in given.temperature:
        for method in given.method:
            decoder = bench.decoder(method, cuda_graphs=False)
            decoder.clock = clock_of(given.device)
            rounds = []
            for _ in range(given.rounds + 1):  # the first is for warming up
                every = [
                    decoder.generate(ids, given.max_new_tokens, temperature=temperature, seed=1, eos_token_id=None)
                    for ids in bench.prompts
                ]
                steps = sum(out.stats.steps for out in every)
                rounds.append({
                    phase: 1e3 * sum(out.stats.seconds.get(phase, 0.0) for out in every) / steps for phase in PHASES
                })  # fmt: skip
            spent = min(rounds[1:], key=lambda each: sum(each.values()))
            step = sum(spent.values())
            beside = 1 - (spent["draft"] + spent["target"]) / step
            yield {
                "method": method, "temperature": temperature, "milliseconds": spent, "step_ms": step, "beside": beside,
            }  # fmt: skip


class FirstToken:
    """A streamer that notes when the first new tokens come: they are what is put after the prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begin = time.perf_counter()

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.perf_counter() - self._begin)

    def end(self) -> None:
        pass


def chat(bench: Bench) -> Iterator[Row]:
    given = bench.given
    tokens = bench.tokenizer("\n\n".join(demo_prompts()), return_tensors="pt").input_ids.to(given.device)
    text = tokens[:, : given.history + given.turn]
    for method in given.method:
        decoder, times = bench.decoder(method), {"ms": [], "ms_with_past": []}
        asked = {"temperature": 0.0, "eos_token_id": None}
        for number in range(given.rounds + 1):
            past = decoder.generate(text[:, : given.history], 2, **asked).cache
            answers = []
            for name in list(times)[:: 1 if number % 2 else -1]:
                clock = FirstToken()
                own = {"past": past} if name == "ms_with_past" else {}
                answers.append(decoder.generate(text, 8, streamer=clock, **own, **asked).sequences)
                times[name] += [1e3 * clock.seconds[1]] * (number > 0)
            assert torch.equal(*answers)
        ratio = times_as_fast(times, "ms", "ms_with_past")
        row = {"method": method, **{name: median(each) for name, each in times.items()}}
        yield row | {"ratio": ratio.median, "quartiles": ratio[1:]}


def attention(bench: Bench) -> Iterator[Row]:
    model, device, new = bench.target, bench.given.device, bench.given.max_new_tokens
    one = bench.tokenizer(demo_prompts()[0], return_tensors="pt").to(device)
    four = bench.tokenizer(demo_prompts()[:4], return_tensors="pt", padding=True, padding_side="left").to(device)
    long = torch.arange(512, device=device)[None] + 100
    length = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    for name, work in {
        "decode": lambda: model.generate(**one, **length),
        "decode 4, padded": lambda: model.generate(**four, **length),
        "prefill 512": lambda: model(long, logits_to_keep=1).logits,
    }.items():
        outputs = {}

        def run(by: str, work: Callable[[], Tensor] = work, outputs: dict = outputs) -> None:
            model.set_attn_implementation(by)
            outputs[by] = work().cpu()

        with torch.inference_mode():
            times = in_turns({by: partial(run, by) for by in ("sdpa", "heavypath")}, bench.given.rounds)
        torch.testing.assert_close(*outputs.values(), rtol=1e-3, atol=1e-3)
        ratio = times_as_fast(times, "sdpa", "heavypath")
        milliseconds = {by: 1e3 * median(each) for by, each in times.items()}
        yield {"work": name, **milliseconds, "ratio": ratio.median, "quartiles": ratio[1:]}


class Sweep(NamedTuple):
    """Its rows; the options that it takes, with their defaults; and what --miniature makes of these."""

    rows: Callable[[Bench], Iterator[Row]]
    defaults: dict[str, Any]
    miniature: dict[str, Any]


def sweep(rows: Callable[[Bench], Iterator[Row]], miniature: Row | None = None, **defaults: Any) -> Sweep:
    small = {"prompts": 1, "max_new_tokens": 4, "rounds": 1, "temperature": [0.6], "method": ["sequoia"]}
    small = {name: value for name, value in small.items() if name in defaults}
    return Sweep(rows, defaults, small | (miniature or {}))


LOSSLESS, FEW, COLD = list(LOSSLESS_METHODS), ["autoregressive", "sequoia"], [0.0, 0.6]
SWEEPS = {
    "methods": sweep(methods, prompts=24, max_new_tokens=128, temperature=COLD, method=LOSSLESS, nodes=[]),
    "batch": sweep(
        batch, {"batch": [2], "nodes": [5]}, batch=[1, 4, 8, 16, 24], method=["ersd"], temperature=COLD, nodes=[5, 2],
        max_new_tokens=64, rounds=7,
    ),
    "defaults": sweep(
        defaults, {"batch": [2], "draft": ["lookup"], "max_new_tokens": 24}, draft=list(KINDS),
        temperature=[*COLD, 1.0], batch=[1, 4, 8], method=[name for name in LOSSLESS if name != "autoregressive"],
        max_new_tokens=64, rounds=5,
    ),
    "in-vain": sweep(
        in_vain, {"method": ["ersd"]}, method=["sequoia", "ersd"], temperature=[0.0, 0.6], max_new_tokens=128, rounds=15
    ),
    "ragged": sweep(ragged, {"batch": [2]}, batch=[8], method=FEW, rounds=7),
    "draft": sweep(
        draft, prompts=24, max_new_tokens=96, nodes=[64], temperature=[*COLD, 1.0],
        method=["chain", "sequoia", "dyspec", "eagle-2"],
    ),
    "retrieval": sweep(
        retrieval, prompts=24, max_new_tokens=128, temperature=[*COLD, 1.0], method=["chain", "sequoia"], rounds=200
    ),
    "recall": sweep(recall, prompts=24, max_new_tokens=96, rounds=4, nodes=[16], temperature=[0.6, 1.0]),
    "verifier": sweep(
        verifier, {"prompts": 2, "seeds": 1, "timed": 1, "tree": ["sequoia 16"]}, prompts=24, seeds=2,
        max_new_tokens=96, timed=4, temperature=[0.6, 1.0], tree=list(TREES), verifier=list(VERIFIERS),
    ),
    "nodes": sweep(
        nodes, {"nodes": [4], "method": ["chain", "sequoia", "specinfer", "dyspec"]}, prompts=24, max_new_tokens=96,
        nodes=[32, 64], temperature=[*COLD, 1.0], method=LOSSLESS,
    ),
    "phases": sweep(
        phases, prompts=8, max_new_tokens=64, rounds=3, temperature=COLD, method=[*FEW, "ersd", "top-k"]
    ),
    "chat": sweep(chat, {"history": 40, "turn": 4}, history=900, turn=16, rounds=15, method=[*FEW, "dyspec"]),
    "attention": sweep(attention, max_new_tokens=64, rounds=25),
}  # fmt: skip
OPTIONS: dict[str, tuple[type, str]] = {
    "prompts": (int, "held-out prompts, from the first"),
    "max_new_tokens": (int, "after each prompt"),
    "rounds": (int, "in which things take turns"),
    "seeds": (int, "texts of each prompt"),
    "timed": (int, "prompts that are decoded alone, for the times"),
    "history": (int, "tokens of the chat so far"),
    "turn": (int, "tokens of its next turn"),
    "temperature": (float, ""),
    "method": (str, ""),
    "draft": (str, f"of {', '.join(KINDS)}"),
    "nodes": (int, "of the trees"),
    "batch": (int, "sequences"),
    "tree": (str, f"of {', '.join(TREES)}"),
    "verifier": (str, "beside rejection"),
}


def parsed(argv: Sequence[str] | None) -> Namespace:
    """What was asked for, and the sweep's defaults for what was not. An option that the sweep lacks is refused."""
    parser = argument_parser(__doc__, threads=False, device=True)
    parser.add_argument("--sweep", choices=SWEEPS, default="methods")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="one run for each")
    for name, (kind, text) in OPTIONS.items():
        several = any(isinstance(each.defaults.get(name), list) for each in SWEEPS.values())
        where = ", ".join(each for each in SWEEPS if name in SWEEPS[each].defaults)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, nargs="+" if several else None, help=f"{text} ({where})".strip()
        )
    given = parser.parse_args(argv)
    chosen = SWEEPS[given.sweep]
    for name in OPTIONS:
        if name not in chosen.defaults:
            if getattr(given, name) is not None:
                parser.error(f"--sweep {given.sweep} has no --{name.replace('_', '-')}")
            delattr(given, name)
        elif getattr(given, name) is None:
            setattr(given, name, chosen.defaults[name])
    for name, known in {"tree": TREES, "draft": KINDS}.items():
        if unknown := {*getattr(given, name, [])} - {*known}:
            parser.error(f"expected {name} of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    vars(given).update(chosen.miniature if given.miniature else {})
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parsed(argv)
    torch.set_num_threads(given.threads[0])
    bench, chosen = Bench(given), SWEEPS[given.sweep]
    facts = environment(given.device, given, "sweep", *chosen.defaults)

    def measured() -> Iterator[Row]:
        for threads in given.threads:
            torch.set_num_threads(threads)
            for row in chosen.rows(bench):
                yield {"threads": threads} | row if len(given.threads) > 1 else row

    report(measured(), facts, given.json, title=given.sweep)


if __name__ == "__main__":
    main()
