"""Does a tree that changes while a text is decoded keep up with the best fixed one, before and after a turn?

The shipped target continues each prompt, half of the text with the shipped draft as it is, and from there on with one
that knows nothing: its logits are moved to other tokens. A profile is calibrated for the pair as it is. Then, in turn,
each of the shapes that re-planning chooses among drafts the whole text, and `replan=True`. For both halves: tokens per
second, the median over rounds, and its ratio to that of the best fixed shape of that half.

    python bench/replanning.py [--method sequoia] [--temperature 0.6] [--tokens 640] [--rounds 5]
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder, calibrate
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.step import Stepped
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.replanning import Shapes

REPLANNED = "replan"


class Turning(ModelDraft):
    """A draft that knows nothing from position `at` on."""

    at = 0

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The draft's logits, moved by one token behind the turn."""
        logits = super().__call__(feed, cache)
        lost = (feed.positions[:, -logits.shape[1] :] >= self.at)[..., None]
        return logits.roll(1, -1).where(lost, logits)


class Clocked:
    """Stands in the place of a decoder's runner: notes when each step ended, and how long the text then was."""

    def __init__(self, runner: StepRunner):
        self._runner = runner
        self.begin = 0.0
        self.ends: list[tuple[float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: Any, workspace: Any, **where: Any) -> Stepped:
        """Run a step."""
        self.begin = self.begin or time.perf_counter()
        stepped = self._runner.run(plan, workspace, **where)
        self.ends.append((time.perf_counter(), int(workspace.state.lengths[0])))
        return stepped


class Halves(NamedTuple):
    """Tokens per second before and after the turn."""

    before: float
    after: float


def halves(decoder: SpeculativeDecoder, draft: Turning, prompt: Tensor, seed: int, arguments: Any) -> Halves:
    """Continue one prompt."""
    runner = decoder.runner
    clocked = Clocked(runner)
    decoder.runner = cast(StepRunner, clocked)
    start = prompt.shape[1] - 1
    draft.at = start + arguments.tokens // 2
    try:
        decoder.generate(
            prompt, max_new_tokens=arguments.tokens, temperature=arguments.temperature, seed=seed, eos_token_id=None
        )
    finally:
        decoder.runner = runner
    turn = next(step for step, (_, length) in enumerate(clocked.ends) if length >= draft.at)
    (middle, reached), (end, length) = clocked.ends[turn], clocked.ends[-1]
    return Halves((reached - start) / (middle - clocked.begin), (length - reached) / (end - middle))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--method", default="sequoia")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--tokens", type=int, default=640, help="of each text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the calibration")
    arguments = parser.parse_args(argv)
    if arguments.miniature:
        arguments.tokens, arguments.prompts, arguments.rounds, arguments.limit = 16, 1, 1, 12.0
    torch.set_num_threads(arguments.threads)
    pair, console = quiet_demo_pair(), Console(highlight=False, width=110)
    profile = calibrate(
        pair.target,
        pair.draft,
        temperatures=[arguments.temperature],
        batch_sizes=[1],
        limit=arguments.limit,
        on_progress=None,
    )
    shapes = Shapes.of(profile, arguments.method, Filters(arguments.temperature), None)
    runs: dict[str, tuple[SpeculativeDecoder, Turning]] = {}
    for number in range(len(shapes.shapes) + 1):
        decoder = SpeculativeDecoder(
            pair.target, pair.draft, arguments.method, profile=profile, replan=number == len(shapes.shapes)
        )
        name = REPLANNED
        if number < len(shapes.shapes):
            planned = shapes.shapes[number].planned
            name = f"shape {number + 1}: {len(planned)} nodes, {planned.depth} levels"
            decoder.tree = shapes.trees[number]
        draft = Turning(forward_of(pair.draft, "draft"), pair.target.config.vocab_size)
        decoder._draft = draft
        runs[name] = decoder, draft
    prompts = token_ids(pair.tokenizer, demo_prompts()[: arguments.prompts])
    found: dict[str, list[Halves]] = {name: [] for name in runs}
    with until_stopped():
        for number in range(arguments.rounds):
            for prompt in prompts:
                for name, (decoder, draft) in runs.items():
                    found[name].append(halves(decoder, draft, prompt, number, arguments))
            console.print(f"round {number + 1} of {arguments.rounds}")
    medians = {
        name: Halves(*(median(getattr(each, half) for each in measured) for half in Halves._fields))
        for name, measured in found.items()
        if measured
    }
    best = Halves(
        *(max(getattr(each, half) for name, each in medians.items() if name != REPLANNED) for half in Halves._fields)
    )
    table = Table(Column("tree", no_wrap=True), box=box.SIMPLE_HEAD)
    for heading in ("before, tokens/s", "to the best", "after, tokens/s", "to the best"):
        table.add_column(heading, justify="right")
    for name, each in medians.items():
        cells = []
        for half in Halves._fields:
            cells += [f"{getattr(each, half):.0f}", f"{getattr(each, half) / getattr(best, half):.2f}"]
        table.add_row(name, *cells)
    console.print(table)
    settings = {name: getattr(arguments, name) for name in ("method", "temperature", "tokens", "prompts", "rounds")}
    write_results(
        arguments.json, environment("cpu") | settings, rows={name: each._asdict() for name, each in medians.items()}
    )


if __name__ == "__main__":
    main()
