"""Decoding at the shapes of Llama-2-7B and its 68M draft, on one GPU, with the acceptance of a trained pair.

    python bench/large.py [--json FILE] [--minutes 7.5] [--sizes 32 16 64] [--batches 1 4] [--bandwidth 4.3e12]
    python bench/large.py --target 8 512 16 1024 --draft 2 384 12 512 --vocabulary 1500 --new-tokens 16 --prompts 2
    python bench/large.py --head --methods sequoia --sizes 60

The second line is something for a CPU. The models are the shipped pair, enlarged without a change of what they compute
(`enlarged`): every forward costs what it costs at these shapes, and tokens are accepted as the pair's are. Prompts of
128 tokens of Python, 128 new ones, no end of sequence; bfloat16 on a GPU, float32 on a CPU. The third line has an 8B
target with an EAGLE-3 head, both with random weights (random_head.py): what a step takes, not what it accepts.

tok/fwd     tokens per target forward (and sequence); transformers' count their prefill
tok/s       new tokens a second of the whole call, prefill included: median over the prompts
x plain     that over transformers' own generate, and x assist over its assisted generation with the same draft: medians
            of ratios, prompt by prompt in one run, and (range)
ms/step     of decoding as it runs: (a long text's wall time - a text's of one token) / steps between; (eager: the same
            without CUDA graphs)
alone       ms of one step of a text, done again and again in a row; models: of just its target and draft forwards, as a
            CUDA graph of their own, in turn with it
rest        what is not models: of the step alone, and (at batch 1, whose steps are alike, of the step as it runs, for
            which the host may be late). Bar: 3%
at others'  tokens a second by these steps, if each brought what one of others brings (random_head.py); only of --head
x limit     a step as it runs over the time to read the target's weights, but its embedding, at the bandwidth of a large
            copy, which is time per token over its limit; (of the whole call, prefill included). Bar: 1.25
GiB         of weights, and the most that the first text of this line took besides; graph: seconds to record it

Printed is the size of tree with the most tok/s of each method; the JSON has all, and is written after every prompt.
Behind the table come the kernels of one step, as a profiler sees it replayed, and its phases, run eagerly with a host
that waits for the GPU after each. SIGINT and SIGTERM end the measurement, and what there is is printed.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from common import (
    Run,
    argument_parser,
    captured,
    clock_of,
    copy_bandwidth,
    environment,
    in_turns,
    quiet_demo_pair,
    quieten,
    timed,
    until_stopped,
    write_results,
)
from enlarging import LLAMA_7B, LLAMA_68M, Widths, enlarged
from large_table import Ratio, Row, kernels_of, print_rows
from random_head import LLAMA_8B, MINIATURE, TOKENS_PER_STEP, random_pair
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.run import StepRunner
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.visits import CountedSteps, Watched
from heavypath.speculative.ways import ASSISTED, PLAIN, transformers_runner

METHODS = ("sequoia", "dyspec", "ersd")
PROMPT = 128  # tokens
OBSERVED, OBSERVED_TEXT = 4, 64  # the step that is taken apart, of a text of so many tokens
MOST_KERNELS = 30  # of a step, in the JSON


@dataclass(frozen=True)
class Text:
    """What was written for a prompt, and how long that took; tokens_per_forward and step_seconds: of the batch."""

    sequence: Tensor
    new_tokens: int
    tokens_per_forward: float
    seconds: float
    step_seconds: float | None = None

    @property
    def speed(self) -> float:
        return self.new_tokens / self.seconds


Writer = Callable[[Tensor], Text]


# A model or a draft, and the arguments that it was called with.
Call = tuple[Forward | Draft, tuple[Any, ...], dict[str, Any]]


class Heard:
    """A model's forward pass, or a draft, that notes what it is called with."""

    def __init__(self, forward: Forward | Draft, calls: list[Call]):
        self._forward, self._calls = forward, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self._calls.append((self._forward, arguments, options))
        return self._forward(*arguments, **options)


class Observer(Watched):
    """Times each step, and has step number OBSERVED taken apart."""

    def __init__(self, bench: "Bench", decoder: SpeculativeDecoder):
        super().__init__(decoder)
        self._bench = bench
        self.laps: list[float] = []
        self.alone_and_models = [math.nan, math.nan]
        self.kernels: list[dict[str, Any]] | None = None

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        if len(self.laps) == OBSERVED:
            self.alone_and_models, self.kernels = self._bench.parts(self.runner, plan, workspace, where)
        seconds, stepped = timed(lambda: self.runner.run(plan, workspace, **where), self._bench.clock)
        self.laps.append(seconds)
        return stepped


class Bench:
    """The pair, the prompts, and how they are timed."""

    def __init__(self, arguments: argparse.Namespace):
        self.begin = time.perf_counter()
        self.rows: list[Row] = []
        self.given = arguments
        self.gpu, self.clock = torch.device(arguments.device).type == "cuda", clock_of(arguments.device)
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.say("making the models")
        count = max(arguments.batches) * arguments.prompts
        if arguments.head:
            self.random_models(count)
        else:
            self.trained_models(count)
        self.weight_bytes = [sum(w.nbytes for w in model.parameters()) for model in (self.target, self.draft)]
        self.bytes_read = self.weight_bytes[0] - self.target.model.embed_tokens.weight.nbytes
        self.say("measuring the bandwidth")
        self.bandwidth = arguments.bandwidth or copy_bandwidth(arguments.miniature)
        self.read_seconds = self.bytes_read / self.bandwidth

    def trained_models(self, count: int) -> None:
        """The shipped pair, enlarged, and this many prompts of it."""
        given = self.given
        target, draft, tokenizer = quiet_demo_pair()
        shape = given.vocabulary, self.dtype, given.device
        self.target = enlarged(target, Widths(*given.target), *shape)
        self.draft = enlarged(draft, Widths(*given.draft), *shape)
        self.widths = [Widths(*given.target), Widths(*given.draft)]
        self.prompts = torch.stack([prompt(tokenizer, number) for number in range(count)]).to(given.device)
        self.peers = [PLAIN, ASSISTED]

    def random_models(self, count: int) -> None:
        """A target of 8B with an EAGLE-3 head, and this many prompts of random tokens."""
        quieten()
        shape = MINIATURE if self.given.miniature else LLAMA_8B
        self.target, self.draft = random_pair(shape, self.dtype, self.given.device)
        widths = Widths(shape.layers, shape.hidden, shape.heads, shape.intermediate)
        self.widths = [widths, widths._replace(layers=1)]
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(shape.vocabulary, (count, PROMPT), generator=generator)
        self.prompts = prompts.to(self.given.device)
        self.peers = [PLAIN]

    def say(self, what: object) -> None:
        print(f"[{time.perf_counter() - self.begin:4.0f} s] {what}", file=sys.stderr, flush=True)

    def late(self) -> bool:
        return time.perf_counter() - self.begin > 60 * self.given.minutes

    def keep(self) -> None:
        """Write what there is, should the rest not come to an end."""
        write_results(self.given.json, self.facts(), rows=[asdict(row) for row in self.rows])

    def section(self, batch: int, temperature: float) -> None:
        """The lines of a batch size and a temperature: each on its own first, then all of them prompt by prompt."""
        sampling = {"temperature": temperature, "top_k": None, "top_p": None}
        prompts = self.prompts[: batch * self.given.prompts].split(batch)
        peers = self.peers if batch == 1 else [PLAIN]  # assisted generation refuses more
        lines: list[tuple[str, int | None]] = [(peer, None) for peer in peers]
        methods = self.given.methods
        lines += [("autoregressive", 1), *((method, size) for size in self.given.sizes for method in methods)]
        rows = [Row(batch, temperature, *line) for line in lines]
        self.rows += rows
        writers: list[tuple[Row, Writer, list[Text]]] = []
        for row in rows:
            if self.late():
                row.failed = "not measured: out of time"
                continue
            self.say(row)
            try:
                writers.append((row, self.prepared(row, prompts[0], sampling), []))
            except Exception as error:  # the other lines are still worth their time
                row.failed = f"{type(error).__name__}: {error}"
                self.say(row.failed)
            self.keep()
        for number, given in enumerate(prompts, start=1):
            if number > 1 and self.late():
                break
            self.say(f"batch {batch}, temperature {temperature:g}: prompt {number} of {len(prompts)}")
            for _, writer, texts in writers:
                texts.append(writer(given))
            found = {row.method: texts for row, _, texts in writers}
            for row, _, texts in writers:
                self.fill(row, texts, found)
            self.keep()

    def prepared(self, row: Row, given: Tensor, sampling: dict[str, Any]) -> Writer:
        """What writes the texts of a line, warmed up; with all that is measured of it alone."""
        if row.method in (PLAIN, ASSISTED):
            write = self.stock(self.draft if row.method == ASSISTED else None, sampling)
            row.peak_bytes = self.peak(row.method, lambda: write(given))
            return write
        size = None if row.method == "autoregressive" else row.nodes
        decoder = SpeculativeDecoder(self.target, self.draft, row.method, tree_size=size)
        write = self.speculative(decoder, sampling, self.given.new_tokens)
        row.peak_bytes = self.peak(row.method, lambda: self.take_apart(row, decoder, given, sampling))
        if self.gpu:
            eager = SpeculativeDecoder(self.target, self.draft, row.method, tree_size=size, cuda_graphs=False)
            slowly = self.speculative(eager, sampling, min(48, self.given.new_tokens))
            seconds = [text.step_seconds or math.nan for text in (slowly(given) for _ in range(4))]
            row.eager_step_ms = median(seconds[1:]) * 1e3
            eager.clock = clock_of(self.given.device)
            stats = eager.generate(given, min(48, self.given.new_tokens), eos_token_id=None, **sampling).stats
            steps = len(given) * 1e3 / stats.steps
            row.phases_ms = {phase: each * steps for phase, each in stats.seconds.items() if phase != "prefill"}
        write(given)
        return write

    def fill(self, row: Row, own: list[Text], texts: dict[str, list[Text]]) -> None:
        """What follows from the texts that were written side by side."""
        row.tokens_per_forward = sum(text.tokens_per_forward for text in own) / len(own)
        row.tokens_per_second = median(text.speed for text in own)
        for field, name in (("over_plain", PLAIN), ("over_assisted", ASSISTED)):
            if name in texts:
                setattr(row, field, Ratio.of([a.speed / b.speed for a, b in zip(own, texts[name], strict=True)]))
        if PLAIN in texts and row.temperature == 0:
            pairs = zip(own, texts[PLAIN], strict=True)
            row.texts_equal_to_plain = sum(torch.equal(a.sequence, b.sequence) for a, b in pairs)
        steps = [text.step_seconds for text in own if text.step_seconds is not None]
        if steps:
            row.step_ms = median(steps) * 1e3
            row.over_limit = median(steps) / self.read_seconds
            calls = [text.seconds / text.new_tokens * row.batch * text.tokens_per_forward for text in own]
            row.over_limit_of_call = median(calls) / self.read_seconds
            if self.given.head and row.method != "autoregressive":
                row.at_others_acceptance = TOKENS_PER_STEP * row.batch / median(steps)
            if row.models_ms is not None and row.batch == 1:  # of more, some end sooner: steps become smaller
                row.rest = 1 - row.models_ms / row.step_ms

    def stock(self, draft: Any, sampling: dict[str, Any]) -> Writer:
        """By transformers' generate."""
        run = transformers_runner(self.target, draft, sampling, seed=0)

        def write(given: Tensor) -> Text:
            seconds, (sequence, forwards, _) = timed(lambda: run(given, self.given.new_tokens), self.clock)
            new = sequence.shape[1] - given.shape[1]
            return Text(sequence, new * len(given), new / forwards, seconds)

        return write

    def speculative(self, decoder: SpeculativeDecoder, sampling: dict[str, Any], new_tokens: int) -> Writer:
        """By a decoder; and a text of one token beside each, so that the difference is of steps alone."""
        counted = CountedSteps(decoder)

        def write(given: Tensor) -> Text:
            generate = partial(decoder.generate, given, eos_token_id=None, **sampling)
            before = counted.steps
            short, _ = timed(lambda: generate(1), self.clock)
            of_short = counted.steps - before
            seconds, out = timed(lambda: generate(new_tokens), self.clock)
            further = counted.steps - before - 2 * of_short
            each = (seconds - short) / further if further else None
            return Text(out.sequences, out.stats.new_tokens, out.stats.tokens_per_step, seconds, each)

        return write

    def take_apart(self, row: Row, decoder: SpeculativeDecoder, given: Tensor, sampling: dict[str, Any]) -> None:
        """Time the steps of a text, to see what the first ones take longer, and one of them part by part."""
        observer = Observer(self, decoder)
        try:
            decoder.generate(given, 20 if self.given.miniature else OBSERVED_TEXT, eos_token_id=None, **sampling)
        finally:
            decoder.runner = observer.runner
        alone, models = observer.alone_and_models
        row.alone_ms, row.models_ms, row.rest_alone = alone * 1e3, models * 1e3, 1 - models / alone
        row.kernels = observer.kernels
        if self.gpu:
            row.first_step_seconds, row.record_seconds = observer.laps[0], observer.laps[1] - median(observer.laps[2:])

    def parts(
        self, runner: StepRunner, plan: StepPlan, workspace: Workspace, where: dict[str, Any]
    ) -> tuple[list[float], list[dict[str, Any]]]:
        """Seconds of a step that is run again and again, and of only the two models' forward passes in it, in turn.

        Besides, the kernels of such a step.

        where: the keyword arguments of `StepRunner.run`. A step changes, and depends on, the state's numbers, besides
        rows of the caches that it writes before it reads them: with the numbers of before it does the same again.
        """
        state, numbers = workspace.state.numbers, workspace.state.numbers.clone()
        calls: list[Call] = []
        StepRunner(runner.cuda_graphs).run(heard(plan, calls), workspace, **where)

        def models() -> None:
            for forward, arguments, options in calls:
                forward(*arguments, **options)

        def again(what: Run) -> Run:
            return lambda: (state.copy_(numbers), what())

        state.copy_(numbers)
        only_models = captured(models) if self.gpu else models
        step = again(lambda: runner.run(plan, workspace, **where))
        repeats = 20 if self.gpu and not self.given.miniature else 1
        ways = {"step": step, "models": again(only_models)}
        taken = in_turns({name: lambda way=way: [way() for _ in range(repeats)] for name, way in ways.items()}, 5,
                         clock=self.clock)  # fmt: skip
        seconds = [median(each) / repeats for each in taken.values()]
        kernels = kernels_of(step, repeats=10 if self.gpu else 2)[:MOST_KERNELS]
        state.copy_(numbers)
        return seconds, kernels

    def peak(self, method: str, run: Run) -> int | None:
        """Bytes of the weights that a method needs, and the most that `run` takes besides."""
        if not self.gpu:
            run()
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        weights = self.weight_bytes[:1] if method in (PLAIN, "autoregressive") else self.weight_bytes
        return sum(weights) + torch.cuda.max_memory_allocated() - before

    def facts(self) -> dict[str, Any]:
        return environment(self.given.device, self.given, "vocabulary", "prompts", "new_tokens") | {
            "gpu": self.gpu,
            "dtype": str(self.dtype).removeprefix("torch."),
            "target": self.widths[0]._asdict(),
            "draft": self.widths[1]._asdict(),
            "prompt_tokens": PROMPT,
            "weight_bytes": self.weight_bytes,
            "bytes_read_of_the_target": self.bytes_read,
            "bandwidth": self.bandwidth,
            "read_ms": self.read_seconds * 1e3,
            "seconds": time.perf_counter() - self.begin,
        }  # fmt: skip


def heard(plan: StepPlan, calls: list[Call]) -> StepPlan:
    """The same plan, whose models' calls are noted."""
    target, draft = cast(Forward, Heard(plan.target, calls)), plan.draft
    if isinstance(draft, ModelDraft):
        draft = ModelDraft(cast(Forward, Heard(draft.forward, calls)), draft.forward.vocab_size)
    elif draft is not NO_DRAFT:
        draft = cast(Draft, Heard(draft, calls))
    return replace(plan, target=target, draft=draft)


def prompt(tokenizer: PreTrainedTokenizerBase, number: int) -> Tensor:
    """The last PROMPT tokens of some of the shipped prompts; each number has another one at its end."""
    texts = demo_prompts()
    tokens = tokenizer("\n\n".join(texts[(number - back) % len(texts)] for back in (4, 3, 2, 1, 0))).input_ids
    return torch.tensor(tokens[-PROMPT:])


def main() -> None:
    parser = argument_parser(__doc__, threads=False, device=True)
    widths = {"type": int, "nargs": 4, "metavar": tuple(name.upper() for name in Widths._fields)}
    parser.add_argument("--target", default=LLAMA_7B, **widths)
    parser.add_argument("--draft", default=LLAMA_68M, **widths)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--head", action="store_true", help="an 8B target with an EAGLE-3 head instead, both random")
    parser.add_argument("--methods", nargs="*", default=METHODS, help="with a tree")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 16, 64], help="nodes of the trees")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.0])
    parser.add_argument("--prompts", type=int, default=4, help="of each sequence of a batch")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=7.5, help="start nothing after so many")
    parser.add_argument("--bandwidth", type=float, help="bytes a second (default: measured by a large copy)")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    with until_stopped():
        for batch in arguments.batches:
            for temperature in arguments.temperatures:
                bench.section(batch, temperature)
    bench.keep()
    print_rows(bench.facts(), bench.rows)


if __name__ == "__main__":
    main()
