"""`heavypath calibrate` measures a pair of models; `heavypath plan` shows the trees that follow from that."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from heavypath.kernels.filtering import Filters
from heavypath.speculative.calibration import LIMIT
from heavypath.speculative.calibration import calibrate as measure
from heavypath.speculative.cli.support import (
    AsJson,
    Draft,
    Dtype,
    HostMemory,
    Memory,
    MinP,
    Seed,
    Target,
    TopK,
    TopP,
    Verbose,
    Verifier,
    encode,
    load,
    print_json,
    progress,
    say_if_busy,
)
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.loading import Pair
from heavypath.speculative.methods import LOSSLESS_METHODS, row_of
from heavypath.speculative.output.page import sampling_in_words
from heavypath.speculative.profile import MeasuredAcceptance, Profile
from heavypath.speculative.trees.bounds import tree_bounds
from heavypath.speculative.trees.drawing import tree_svg
from heavypath.speculative.trees.planning import node_probabilities

PROMPT_TOKENS = 64  # of each piece of the text that is continued
PROMPTS = 64  # pieces, at most


def calibrate(
    target: Target = None,
    draft: Draft = None,
    text: Annotated[
        Path | None, typer.Option(help="A text like those to be continued (UTF-8); without it the target samples some.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="A temperature to measure at; repeat it for several. Default: 0, 0.6, 1.")
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    limit: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds that it may take, loading aside; less leaves the figures less sure. Default: {LIMIT:g}, or "
            "with --memory the time of 80 passes."
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of sequences decoded together to time trees for; 1 is always among them. Default: 1,2,4,8,16 "
            "and, on a GPU, 32,64.",
        ),
    ] = None,
    verifier: Verifier = None,
    dtype: Dtype = None,
    memory: Memory = None,
    host_memory: HostMemory = None,
    out: Annotated[Path, typer.Option(help="Where to write the profile.")] = Path("profile.json"),
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Measure what steps cost on this machine and which drafts are accepted, for `plan` and `generate --profile`."""
    temperatures = sorted(set(temperature or [0.0, 0.6, 1.0]))
    for each in temperatures:
        Filters(each, top_k, top_p, min_p).check()
    if limit is not None and not limit > 0:
        raise ValueError(f"--limit must be a number of seconds above 0, got {limit}")
    batches = None if batch_sizes is None else _numbers(batch_sizes)
    row_of("sequoia", verifier)  # refuses a word that is none
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {str(out)!r}")
    content = None if text is None else _read(text)
    if target is not None and draft is None:
        raise ValueError("calibrate needs a --draft with the --target")
    pair = load(target, draft, dtype, memory, host_memory)
    assert pair.draft is not None
    say_if_busy()
    prompts = [] if content is None else _pieces(pair, content)
    with progress("calibrating") as report:
        profile = measure(
            pair.target, pair.draft, prompts=prompts, temperatures=temperatures, top_k=top_k, top_p=top_p, min_p=min_p,
            batch_sizes=batches, seed=seed, on_progress=report, limit=limit, verifier=verifier,
        )  # fmt: skip
    profile.save(out)
    for line in warnings_of(profile):
        typer.echo(f"heavypath: {line}", err=True)
    typer.echo(f"wrote {out}; `heavypath plan {out}` shows the trees that follow from it", err=True)


def warnings_of(profile: Profile) -> list[str]:
    """A line for each sampling at which even the best trees, those of sequoia, are expected not to pay."""
    lines = []
    for filters in dict.fromkeys(entry.filters for entry in profile.acceptance):
        planned = profile.plan("sequoia", filters)
        if len(planned.plan.tree) > 1:
            continue
        costs = profile.costs.at(1)
        unit, smallest = costs.step[1], min(size for size in costs.step if size > 1)
        error = costs.step_error.get(smallest, 0.0) / unit
        lines.append(
            f"{sampling_in_words(filters._asdict())}: this draft does not pay here, and --profile will decode without "
            f"it. Its first token is accepted with probability {float(planned.acceptance.rates()[0, 0]):.2f}; a step "
            f"over {smallest} nodes takes {costs.step[smallest] / unit:.2f} ± {error:.2f} steps of plain decoding, "
            f"drafting a level {costs.level / unit:.2f} ± {costs.level_error / unit:.2f}"
        )
    return lines


def plan(
    profile: Annotated[Path, typer.Argument(help="The profile that `heavypath calibrate` wrote.")] = Path(
        "profile.json"
    ),
    method: Annotated[
        str, typer.Option(help=f"The method whose tree is drawn: {', '.join(LOSSLESS_METHODS)}.")
    ] = "sequoia",
    temperature: Annotated[
        float | None, typer.Option(help="The temperature whose tree is drawn; default: the lowest measured.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the tree into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the best tree of every method for each sampling of a profile, and of one method by batch, and draw one."""
    if method not in LOSSLESS_METHODS or method == "autoregressive":
        names = ", ".join(name for name in LOSSLESS_METHODS if name != "autoregressive")
        raise ValueError(f"--method must be one of {names}, got {method!r}")
    measured = Profile.load(profile)
    samplings = list(dict.fromkeys(entry.filters for entry in measured.acceptance))
    chosen = samplings[0] if temperature is None else samplings[0]._replace(temperature=temperature)
    rows = [
        _row(measured, name, filters) for filters in samplings for name in LOSSLESS_METHODS if name != "autoregressive"
    ]
    by_batch = [_row(measured, method, filters, batch) for filters in samplings for batch in measured.costs.batches]
    limits = {filters: _limit(measured, method, filters) for filters in samplings}
    drawn, acceptance = measured.plan(method, chosen)
    if svg is not None:
        probabilities = node_probabilities(drawn.tree, acceptance.rates())
        svg.write_text(tree_svg(drawn.tree, probabilities=probabilities), encoding="utf-8")
    if as_json:
        tree = {"method": method, "temperature": chosen.temperature, "parents": drawn.tree.parents.tolist()}
        tree |= {"ranks": drawn.tree.ranks.tolist()}
        print_json({"plans": rows, "by_batch": by_batch, "limits": [*limits.values()], "tree": tree})
        return
    console = Console(highlight=False)
    console.print(f"target: {measured.target}\ndraft: {measured.draft}", style="dim")
    facts = ", ".join(f"{name} {value}" for name, value in measured.environment.items())
    verified = "" if measured.verifier is None else f", verifier {measured.verifier}"
    console.print(f"measured with {facts}{verified}", style="dim")
    for batch in measured.costs.batches:
        console.print(_costs_in_words(measured.costs.at(batch), batch), style="dim")
    console.print()
    for filters in samplings:
        console.print(sampling_in_words(filters._asdict()))
        console.print(_table([row for row in rows if row["temperature"] == filters.temperature]))
        console.print(_limit_in_words(limits[filters]))
        if len(measured.costs.batches) > 1:
            console.print(f"{method} by the number of sequences decoded together")
            console.print(
                _table([row for row in by_batch if row["temperature"] == filters.temperature], key="sequences")
            )
    for line in warnings_of(measured):
        console.print(line, style="bold")
    for note in NOTES:
        console.print(note, style="dim")
    console.print(f"\nThe tree of {method}, {sampling_in_words(chosen._asdict())}:\n{drawn.tree}")


NOTES = (
    "expected: tokens per step of the target. For naive it is a little too low, as it does not count the children of "
    "equal siblings together.",
    "bound: no tree of so many nodes is expected to yield more. It is the least of four: merged is ERSD's lemma 4.2, "
    "leaves a form of its theorem 4.1; renewal and moments are our own. heavypath.speculative.trees.bounds has the "
    "proofs.",
    "speed-up: over plain decoding of as many sequences, by the costs that were measured. What follows +- is one "
    "standard error, by the "
    "timings' spread and by the number of nodes whose acceptance was counted.",
    "MBSU: memory-bound speed-up, expected / (1 + depth x draft's parameters / target's parameters) (RSD).",
    "rsd-s, dyspec and eagle-2 grow their trees anew in each step: shown is the static tree that gives their size.",
)


def _limit(profile: Profile, method: str, filters: Filters) -> dict:
    """The limit on the plan of a method under some sampling."""
    planned = profile.plan(method, filters)
    return {
        "temperature": filters.temperature,
        "method": method,
        "speedup": planned.plan.speedup,
        **profile.limit(method, planned)._asdict(),
    }


def _limit_in_words(facts: dict) -> str:
    """The same in a line."""
    return (
        f"{facts['method']}: {facts['speedup']:.2f} times as fast as plain decoding, limited by {facts['limited_by']}, "
        f"{facts['without_that']:.2f} without that; up to {facts['free_nodes']} nodes a step takes the time of reading "
        "weights (bandwidth)"
    )


def _row(profile: Profile, method: str, filters: Filters, batch: int = 1) -> dict:
    found = profile.plan(method, filters, batch)
    planned, acceptance = found
    tree = planned.tree
    limits = tree_bounds(_dominating(acceptance), len(tree))
    return {
        "temperature": filters.temperature,
        "method": method,
        "sequences": batch,
        "nodes": len(tree),
        "depth": tree.depth,
        "expected_tokens": planned.expected_tokens,
        "expected_tokens_error": found.tokens_error,
        "bound": limits.least,
        "bound_by": limits.tightest,
        "speedup": planned.speedup,
        "speedup_error": profile.speedup_error(found, batch),
        "mbsu": profile.mbsu(planned),
    }


def _dominating(measured: MeasuredAcceptance) -> torch.Tensor:
    """An acceptance vector [child] under which every best tree yields at least what it yields under the measured rates.

    Each of its partial sums is the largest that any depth has. A best tree has larger subtrees below likelier children,
    and then a sum over children grows with the partial sums of the acceptance (Abel summation).
    """
    sums = measured.rates().cumsum(1).amax(0)
    return sums.diff(prepend=sums.new_zeros(1))


def _table(rows: list[dict], key: str = "method") -> Table:
    """The rows, each with what it has under `key` first."""
    table = Table(Column(key, no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("nodes", "depth", "expected", "bound", "by", "speed-up", "MBSU"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (
            f"{row['expected_tokens']:.2f} ± {row['expected_tokens_error']:.2f}",
            f"{row['bound']:.2f}",
            row["bound_by"],
            f"{row['speedup']:.2f} ± {row['speedup_error']:.2f}",
            f"{row['mbsu']:.2f}",
        )
        table.add_row(str(row[key]), str(row["nodes"]), str(row["depth"]), *figures)
    return table


def _costs_in_words(costs: Costs, batch: int) -> str:
    """The costs of steps of a batch, with errors, in milliseconds."""
    steps = ", ".join(
        f"{size}: {_milliseconds(seconds, costs.step_error.get(size, 0.0))}" for size, seconds in costs.step.items()
    )
    level = _milliseconds(costs.level, costs.level_error)
    of = "1 sequence" if batch == 1 else f"{batch} sequences"
    return f"milliseconds of a step of {of} by nodes, in {costs.rounds} rounds: {steps}; of drafting a level: {level}"


def _milliseconds(seconds: float, error: float) -> str:
    return f"{1e3 * seconds:.3g} ± {1e3 * error:.1g}"


def _numbers(given: str) -> list[int]:
    """The numbers of sequences that --batch-sizes lists."""
    try:
        numbers = [int(number) for number in given.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"--batch-sizes must be numbers of sequences with commas between them, as 1,4,16; got {given!r}"
        )
    return numbers


def _read(file: Path) -> str:
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ValueError(f"the text in {str(file)!r} is not UTF-8: {error}") from error
    if not content.strip():
        raise ValueError(f"the text in {str(file)!r} is empty; expected a text like those to be continued")
    return content


def _pieces(pair: Pair, content: str) -> list[torch.Tensor]:
    """Up to PROMPTS pieces of PROMPT_TOKENS tokens each, LongTensors [T], spread over the text."""
    ids = encode(pair, content)[0]
    pieces = [piece for piece in ids.split(PROMPT_TOKENS) if len(piece) == PROMPT_TOKENS] or [ids]
    every = max(1, len(pieces) // PROMPTS)
    return pieces[::every][:PROMPTS]
