"""`heavypath calibrate`: measure a pair of models; `heavypath plan`: show the best trees by this profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    from torch import Tensor

    from heavypath.speculative.loading import Pair

PROMPT_TOKENS = 64  # of each piece of the text that is continued
PROMPTS = 64  # most pieces
FEW = 16  # with fewer pieces `calibrate` warns
LIMIT = 45  # seconds, the default of `calibrate`


def calibrate(
    target: options.Target = None,
    draft: options.Draft = None,
    text: Annotated[
        Path | None, typer.Option(help="A text like those to be continued (UTF-8); without it the target samples some.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="A temperature to measure at; repeat it for several. Default: 0, 0.6, 1.")
    ] = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    limit: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds that it may take, without loading; less time gives less exact figures. Default: {LIMIT}, "
            "or with --memory the time of 80 passes."
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Batch sizes (sequences decoded together) at which trees are timed; 1 is always one of them. Default: "
            "1,2,4,8,16 and, on a GPU, 32,64, up to the first for which no tree pays.",
        ),
    ] = None,
    verifier: options.Verifier = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the profile.")] = Path("profile.json"),
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Measure costs of steps on this machine and acceptance of drafts, for `plan` and `generate --profile`."""
    temperatures = sorted(set(temperature or [0.0, 0.6, 1.0]))
    if limit is not None and not limit > 0:
        raise ValueError(f"--limit must be a number of seconds above 0, got {limit}")
    batches = None if batch_sizes is None else _numbers(batch_sizes)
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {str(out)!r}")
    content = None if text is None else _read(text)
    if target is not None and draft is None:
        raise ValueError("calibrate needs a --draft with the --target: a model, a trained head, or recall")
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.calibration import calibrate as measure
        from heavypath.speculative.cli.plan_tables import drawing_in_words, warnings_of
        from heavypath.speculative.cli.support import load, say_if_busy
        from heavypath.speculative.methods import row_of

    for each in temperatures:
        Filters(each, top_k, top_p, min_p).check()
    row_of("sequoia", verifier)  # raises ValueError for an unknown verifier
    pair = load(target, draft, dtype, memory, host_memory, device=device, threads=threads, offline=offline)
    assert pair.draft is not None
    say_if_busy()
    prompts = [] if content is None else pieces(pair, content)
    with progress("calibrating") as report:
        profile = measure(
            pair.target,
            pair.draft,
            prompts=prompts,
            temperatures=temperatures,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            batch_sizes=batches,
            seed=seed,
            on_progress=report,
            limit=limit,
            verifier=verifier,
        )
    profile.save(out)
    for line in drawing_in_words(profile) + warnings_of(profile):
        typer.echo(f"heavypath: {line}", err=True)
    typer.echo(f"wrote {out}; `heavypath plan {out}` shows the trees that follow from it", err=True)


def plan(
    profile: Annotated[Path, typer.Argument(help="The profile that `heavypath calibrate` wrote.")] = Path(
        "profile.json"
    ),
    method: Annotated[
        str, typer.Option(help=f"The method whose tree is drawn: {', '.join(options.LOSSLESS_METHODS)}.")
    ] = "sequoia",
    temperature: Annotated[
        float | None, typer.Option(help="The temperature whose tree is drawn; default: the lowest measured.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw the tree into this file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the best tree of every method for each sampling of a profile, and of one method by batch, and draw one."""
    if svg is not None and not svg.parent.is_dir():
        raise ValueError(f"--svg must be in a folder that exists, got {str(svg)!r}")
    options.check_word("--method", method, [name for name in options.LOSSLESS_METHODS if name != "autoregressive"])
    from rich.console import Console

    with starting():
        from heavypath.speculative.cli import plan_tables as tables
        from heavypath.speculative.output.page import sampling_in_words
        from heavypath.speculative.profile import Profile
        from heavypath.speculative.trees.drawing import tree_svg
        from heavypath.speculative.trees.planning import node_probabilities

    measured = Profile.load(profile)
    samplings = list(dict.fromkeys(entry.filters for entry in measured.acceptance))
    chosen = samplings[0] if temperature is None else samplings[0]._replace(temperature=temperature)
    rows = [
        tables.row(measured, name, filters)
        for filters in samplings
        for name in options.LOSSLESS_METHODS
        if name != "autoregressive"
    ]
    by_batch = [
        tables.row(measured, method, filters, batch) for filters in samplings for batch in measured.costs.batches
    ]
    by_length = [
        tables.row(measured.for_length(length), method, filters) | {"prompt": length}
        for filters in samplings
        for length in measured.attention
    ]
    limits = {filters: tables.limit(measured, method, filters) for filters in samplings}
    drawn, acceptance, _ = measured.plan(method, chosen)
    if svg is not None:
        probabilities = node_probabilities(drawn.tree, acceptance.rates())
        svg.write_text(tree_svg(drawn.tree, probabilities=probabilities), encoding="utf-8")
        typer.echo(f"wrote {svg}", err=True)
    if as_json:
        tree = {"method": method, "temperature": chosen.temperature, "parents": drawn.tree.parents.tolist()}
        tree |= {"ranks": drawn.tree.ranks.tolist()}
        plans = {"plans": rows, "by_batch": by_batch, "by_length": by_length}
        options.print_json({**plans, "limits": [*limits.values()], "tree": tree})
        return
    console = Console(highlight=False)
    console.print(f"target: {measured.target}\ndraft: {measured.draft}", style="dim")
    facts = ", ".join(f"{name} {value}" for name, value in measured.environment.items())
    verified = "" if measured.verifier is None else f", verifier {measured.verifier}"
    console.print(f"measured with {facts}{verified}", style="dim")
    for batch in measured.costs.batches:
        console.print(tables.costs_in_words(measured.costs.at(batch), batch), style="dim")
    console.print()
    for filters in samplings:
        console.print(sampling_in_words(filters._asdict()))
        console.print(tables.table([row for row in rows if row["temperature"] == filters.temperature]))
        console.print(tables.limit_in_words(limits[filters]))
        if len(measured.costs.batches) > 1:
            console.print(f"{method} by the number of sequences decoded together")
            console.print(
                tables.table([row for row in by_batch if row["temperature"] == filters.temperature], key="sequences")
            )
        if measured.attention:
            console.print(f"{method} by the tokens of the prompt, with estimated costs of attention")
            console.print(
                tables.table([row for row in by_length if row["temperature"] == filters.temperature], key="prompt")
            )
    for line in tables.drawing_in_words(measured) + tables.warnings_of(measured):
        console.print(line, style="bold")
    for note in tables.NOTES:
        console.print(note, style="dim")
    console.print(f"\nThe tree of {method}, {sampling_in_words(chosen._asdict())}:\n{drawn.tree}")


def _numbers(given: str) -> list[int]:
    """Parse --batch-sizes; ValueError if it is not a list of numbers from 1."""
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


def pieces(pair: "Pair", content: str) -> "list[Tensor]":
    """Return up to PROMPTS pieces of PROMPT_TOKENS tokens each, LongTensors [T], spread over the text."""
    from heavypath.speculative.cli.support import encode

    ids = encode(pair, content)[0]
    found = [piece for piece in ids.split(PROMPT_TOKENS) if len(piece) == PROMPT_TOKENS] or [ids]
    if len(found) < FEW:
        typer.echo(
            f"heavypath: the text has {len(ids):,} tokens, too few for independent counts, above all at T = 0; "
            f"expected at least {FEW * PROMPT_TOKENS:,}, the more, the better",
            err=True,
        )
    every = max(1, len(found) // PROMPTS)
    return found[::every][:PROMPTS]
