"""Tokens per second against llama.cpp with the same weights, transformers' generate and its assisted generation.

    python bench/peers.py --build                             # once: gets and builds llama.cpp; pip install '.[peers]'
    python bench/peers.py [--prompts 4] [--max-new-tokens 64] [--rounds 3] [--json FILE]
    python bench/peers.py --pairs shipped --methods autoregressive,sequoia,top-k --threads 2 --temperature 0

Each way to decode is tried with each number of threads, and counts with the one that it is fastest with: small products
do not pay for a second thread everywhere.

Two pairs in fp32: the shipped one, and that one widened, by default sixfold to 327 million parameters of the target,
which computes the same, so that just as many tokens are accepted. In each round all decode each prompt, one after the
other, and a ratio is taken within a prompt of a round. Medians of these are printed: over the best of transformers,
over the best of llama.cpp, and over our own plain decoding, `autoregressive`. The last is what speculation brings; what
plain decoding has over transformers is what compiled code brings.

Seconds are those of decoding: loading, tokenizing, warming up and the prompt's forward passes are in none of them.

llama-completion            its "eval time": forward passes of one token, without sampling and printing
llama-speculative-simple k  what it has "decoded", in all the time after the prompt's passes; it drafts up to k tokens.
                            With "k, p" it stops before a token that the draft holds for less likely than p
llama-speculative k         the same; it has one branch, its default, with which it is fastest
transformers                a call of generate less such a call for one token; the tokens less one
a method of ours            a call less its prefill, which leaves the prompt's last token to the first step
METHOD+head                 the same with the shipped EAGLE head as the draft, which fits the shipped target alone
METHOD*8                    the prompt and the seven after it as one batch; tokens of all. It is compared with plain
                            decoding and transformers' generate of the same batch, which are tried with it

llama.cpp's cache is in fp16, its default, which is faster. Flash attention is off where it drafts: several tokens a
forward pass take a fifth less time so. Neither llama.cpp nor ours stops at an end of text. Of greedy texts the table
has the share that equals transformers': rounding decides where two tokens tie. At temperature > 0 llama-speculative
drafts the likeliest token, and accepts it with min(1, P / Q) as though it had been drawn from Q: its text has another
distribution, in which likely tokens come too often, and it does not count among the best of llama.cpp.
What is missing is named, and left out.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from batches import Texts, batch_of, by_transformers
from common import (
    Spread,
    argument_parser,
    environment,
    options_of,
    quiet_demo_pair,
    show,
    timed_behind_first,
    token_ids,
    until_stopped,
    write_results,
)  # fmt: skip
from enlarging import widened
from llama_cpp import (
    COMPLETION,
    FOLDER,
    SIMPLE,
    SPECULATIVE,
    Asked,
    Drafting,
    Runner,
    Timed,
    build,
    how_to_get,
    missing,
    plain_runner,
    speculative_runner,
    write_gguf,
)  # fmt: skip
from transformers import LlamaForCausalLM

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.demo.trained_head import load_demo_head
from heavypath.speculative.ways import ASSISTED, PLAIN, transformers_runner

DRAFTINGS = [Drafting(2), Drafting(3), Drafting(5), Drafting(5, 0.5)]  # the last by llama-speculative-simple alone
TOLERANCE = 1e-3  # of logits of the widened model, which are about 10
WARM_UP_TOKENS = 8
LLAMA, OURS, TRANSFORMERS = "llama.cpp", "ours", "transformers"  # whose a way to decode is


class Way(NamedTuple):
    """A way to decode, whose it is, and whether its text keeps the target's distribution at temperature > 0."""

    whose: str
    run: Runner
    lossless: bool = True


Turn = tuple[str, int]  # the name of a way to decode, and the number of its threads


def llama_ways(folder: Path, target: Path, draft: Path, lacking: list[str]) -> dict[str, Way]:
    """llama.cpp's programs that there are. target, draft: their files of weights."""
    ways = {} if COMPLETION in lacking else {COMPLETION: Way(LLAMA, plain_runner(folder, target))}
    for program in (SIMPLE, SPECULATIVE):
        for drafting in [] if program in lacking else DRAFTINGS[: 3 + (program == SIMPLE)]:
            runner = speculative_runner(folder, program, (target, draft), drafting)
            ways[f"{program} {drafting}"] = Way(LLAMA, runner, lossless=program == SIMPLE)
    return ways


Batches = Callable[[list[int]], Texts]  # the batch that a prompt is the first one of


def batches_of(prompts: list[list[int]], size: int) -> Batches:
    """A prompt and those after it, after the last one the first again."""
    twice = [torch.tensor([prompt]) for prompt in prompts * (1 + -(-size // len(prompts)))]
    return lambda prompt: batch_of(twice[prompts.index(prompt) :][:size])


def our_runner(decoder: SpeculativeDecoder, batches: Batches) -> Runner:
    def run(prompt: list[int], asked: Asked) -> Timed:
        texts = batches(prompt)
        out = decoder.generate(texts.tokens, asked.new_tokens, asked.temperature, seed=asked.seed, **texts.options)
        seconds = out.stats.total_seconds - out.stats.seconds["prefill"]
        return Timed(out.stats.new_tokens, seconds, out.sequences[0, texts.tokens.shape[1] :].tolist())

    return run


def their_runner(target: LlamaForCausalLM, draft: LlamaForCausalLM | None) -> Runner:
    """A runner of transformers."""

    def run(prompt: list[int], asked: Asked) -> Timed:
        sampling = {"temperature": asked.temperature, "top_k": None, "top_p": None}
        generate = partial(transformers_runner(target, draft, sampling, asked.seed), torch.tensor([prompt]))
        seconds, decoded = timed_behind_first(generate, asked.new_tokens)
        text = decoded.sequence[0, len(prompt) :].tolist()
        return Timed(max(len(text) - 1, 1), seconds, text)

    return run


def their_batch_runner(target: LlamaForCausalLM, batches: Batches) -> Runner:
    """transformers' generate of a batch: each sequence has all tokens that are asked for."""

    def run(prompt: list[int], asked: Asked) -> Timed:
        texts = batches(prompt)
        torch.manual_seed(asked.seed)
        seconds, sequences = timed_behind_first(
            lambda new: by_transformers(target, texts, new, asked.temperature), asked.new_tokens
        )
        text = sequences[0, texts.tokens.shape[1] :].tolist()
        return Timed(len(sequences) * max(len(text) - 1, 1), seconds, text)

    return run


def batch_size(name: str) -> int:
    """Of a way to decode: 8 of "sequoia*8"."""
    return int(name.partition("*")[2] or 1)


def of_size(name: str, size: int) -> str:
    return name if size == 1 else f"{name}*{size}"


def ways_in_python(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, methods: Sequence[str], prompts: list[list[int]]
) -> dict[str, Way]:
    """Those of transformers, and each of ours; for a batch also plain decoding of it."""
    ways = {
        PLAIN: Way(TRANSFORMERS, their_runner(target, None)),
        ASSISTED: Way(TRANSFORMERS, their_runner(target, draft)),
    }
    sizes = sorted({batch_size(name) for name in methods} - {1})
    for size in sizes:
        ways[of_size(PLAIN, size)] = Way(TRANSFORMERS, their_batch_runner(target, batches_of(prompts, size)))
    for name in dict.fromkeys([*methods, *(of_size("autoregressive", size) for size in sizes)]):
        method, _, kind = name.partition("*")[0].partition("+")
        proposes = None if method == "autoregressive" else load_demo_head(target) if kind == "head" else draft
        decoder = SpeculativeDecoder(target, proposes, method)
        ways[name] = Way(OURS, our_runner(decoder, batches_of(prompts, batch_size(name))))
    return ways


def measured(ways: dict[Turn, Way], prompts: list[list[int]], asked: Asked, rounds: int) -> Iterator[dict[Turn, Timed]]:
    """The runs of all ways on the first prompt, the second and so on; then in the next round. The seed is the round."""

    def run(turn: Turn, prompt: list[int], asked: Asked) -> Timed:
        torch.set_num_threads(turn[1])
        return ways[turn].run(prompt, asked._replace(threads=turn[1]))

    for turn, way in ways.items():
        if way.whose != LLAMA:  # whose programs warm up themselves
            run(turn, prompts[0], asked._replace(new_tokens=min(WARM_UP_TOKENS, asked.new_tokens)))
    for number in range(rounds):
        for prompt in prompts:
            yield {turn: run(turn, prompt, asked._replace(seed=number)) for turn in ways}


def summary(ways: dict[Turn, Way], groups: list[dict[Turn, Timed]], greedy: bool) -> dict[str, Any]:
    """A row for each way to decode, with the threads it is fastest with; and the best of each that are lossless.

    Of a batch the first text is compared.
    """
    speeds = {turn: [group[turn].tokens / group[turn].seconds for group in groups] for turn in ways}
    fastest: dict[str, Turn] = {}
    for turn in sorted(ways, key=lambda turn: median(speeds[turn])):
        fastest[turn[0]] = turn

    def best(whose: str) -> Turn | None:
        own = [turn for turn in fastest.values() if ways[turn].whose == whose and (greedy or ways[turn].lossless)]
        alone = [turn for turn in own if batch_size(turn[0]) == 1]
        return max(alone, key=lambda turn: median(speeds[turn]), default=None)

    def ratio(turn: Turn, to: Turn | None) -> Spread | None:
        """Over the other one, which for a batch is what it does of the same batch."""
        size = batch_size(turn[0])
        if size > 1:
            same = {PLAIN: TRANSFORMERS, "autoregressive": OURS}
            to = next((fastest.get(of_size(each, size)) for each, whose in same.items()
                       if to is not None and ways[to].whose == whose), None)  # fmt: skip
        if to is None:
            return None
        return Spread.of([a / b for a, b in zip(speeds[turn], speeds[to], strict=True)])

    bests = {whose: best(whose) for whose in (OURS, LLAMA, TRANSFORMERS)}
    plain = fastest.get("autoregressive")
    rows = []
    for name in dict.fromkeys(name for name, _ in ways):
        turn, text = fastest[name], fastest[PLAIN]
        equal = [all(a == b for a, b in zip(group[turn].text, group[text].text, strict=False)) for group in groups]
        rows.append({  # some write more
            "name": name, "threads": turn[1], "tokens_per_second": Spread.of(speeds[turn]),
            "over_transformers": ratio(turn, bests[TRANSFORMERS]), "over_llama_cpp": ratio(turn, bests[LLAMA]),
            "over_plain": ratio(turn, plain) if ways[turn].whose == OURS else None,
            "equal": sum(equal) / len(equal) if greedy else None, "lossless": greedy or ways[turn].lossless,
            "speeds": {str(threads): speeds[name, threads] for other, threads in ways if other == name},
        })  # fmt: skip
    return {"rows": rows, "best": {whose: None if turn is None else turn[0] for whose, turn in bests.items()}}


def print_summary(title: str, found: dict[str, Any]) -> None:
    shown = []
    for row in found["rows"]:
        ratios = {f"/ {to}": row[f"over_{to}"] and f"{row[f'over_{to}'].median:.2f}"
                  for to in ("transformers", "llama_cpp", "plain")}  # fmt: skip
        kept = "same distribution" if row["lossless"] else "other distribution"
        text = kept if row["equal"] is None else f"{row['equal']:.0%} equal"
        line = {"": row["name"], "threads": row["threads"], "tokens/s (quartiles)": str(row["tokens_per_second"])}
        shown.append(line | ratios | {"text": text})
    show(shown, title=title)
    print("best:", ", ".join(f"{name} of {whose}" for whose, name in found["best"].items() if name is not None))


@torch.no_grad()
def checked_widened(model: LlamaForCausalLM, factor: int, prompt: list[int]) -> LlamaForCausalLM:
    """The widened model, whose logits have been compared on a prompt."""
    wide, ids = widened(model, factor), torch.tensor([prompt])
    gap = float((wide(ids).logits - model(ids).logits).abs().max())
    assert gap < TOLERANCE, f"logits of the widened model differ by {gap:.1e}, expected less than {TOLERANCE}"
    return wide


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], list]:
    return lambda text: [kind(part) for part in text.split(",")]


def parsed(given: Sequence[str] | None) -> Namespace:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--pairs", type=comma_separated(str), default=["shipped", "enlarged"])
    parser.add_argument("--factor", type=int, default=6, help="by which the enlarged pair is wider")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=comma_separated(int), default=[1, 2])
    parser.add_argument("--temperature", type=comma_separated(float), default=[0.0, 0.6])
    parser.add_argument("--methods", type=comma_separated(str), default=["autoregressive", "chain", "sequoia", "ersd"])
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", default=FOLDER / "bin", help="its programs' folder")
    parser.add_argument("--build", action="store_true", help=f"get llama.cpp by pip and build it in {FOLDER}")
    arguments = options_of(
        parser, given, prompts=1, rounds=1, max_new_tokens=4, factor=2, threads=[1], methods=["sequoia"]
    )
    if unknown := {*arguments.pairs} - {"shipped", "enlarged"}:
        parser.error(f"expected pairs of shipped and enlarged, got {', '.join(sorted(unknown))}; leave it out")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parsed(given)
    folder = build() if arguments.build else arguments.llama_cpp
    lacking = missing(folder)
    if lacking:
        print(how_to_get(lacking, folder))
    target, draft, tokenizer = quiet_demo_pair()
    every = [ids[0].tolist() for ids in token_ids(tokenizer, demo_prompts())]
    prompts = every[: arguments.prompts]
    results = []
    facts = environment("cpu", arguments, "prompts", "max_new_tokens", "rounds", "factor", "threads")
    with TemporaryDirectory() as made, until_stopped():
        for pair in arguments.pairs:
            models = [target, draft]
            if pair == "enlarged":
                models = [checked_widened(model, arguments.factor, prompts[0]) for model in models]
            files = Path(made) / f"{pair}-target.gguf", Path(made) / f"{pair}-draft.gguf"
            if "gguf" not in lacking:
                for model, file in zip(models, files, strict=True):
                    write_gguf(model, file)
            llama = {} if "gguf" in lacking else llama_ways(folder, *files, lacking)
            ways = {}
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                methods = [name for name in arguments.methods if pair == "shipped" or "+head" not in name]
                for name, way in (llama | ways_in_python(models[0], models[1], methods, every)).items():
                    ways[name, threads] = way
            for temperature in arguments.temperature:
                asked = Asked(arguments.max_new_tokens, temperature, threads=1, seed=0)
                groups = []
                try:
                    for group in measured(ways, prompts, asked, arguments.rounds):
                        groups.append(group)
                finally:  # what there is when it is stopped
                    if groups:
                        found = summary(ways, groups, greedy=temperature == 0)
                        print_summary(f"{pair} pair, temperature {temperature}", found)
                        cell = {"pair": pair, "temperature": temperature}
                        results.append(cell | {"runs": len(groups)} | found)
                        write_results(arguments.json, facts, cells=results)


if __name__ == "__main__":
    main()
