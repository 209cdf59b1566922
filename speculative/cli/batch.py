"""`heavypath batch`: answer a file of requests, on this machine or on a Ray cluster."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import starting
from heavypath.speculative.cli.serve import check_can_serve, default_temperature, name_of

if TYPE_CHECKING:
    from heavypath.speculative.http.batches.output import Output

AHEAD = 4  # lines in progress for each slot: answers are written in order, so they wait for each other


def batch(
    file: Annotated[
        Path, typer.Argument(exists=True, help="Requests, one on each line: OpenAI's batch lines, bodies, or prompts.")
    ],
    out: Annotated[Path, typer.Option(help="File for answers, in the order of the lines; continues where it ended.")],
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.Method = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="For lines without one. Default: the model's, or 1 if it has none.")
    ] = None,
    template: options.Template = None,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    verifier: options.Verifier = None,
    slots: options.Slots = 8,
    max_tokens: options.Room = 2048,
    ray: Annotated[
        str | None,
        typer.Option(help="Run on the machines of a Ray cluster: auto, or its address. Needs the extra ray."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: decoders. Default: one for each GPU, or each machine if there are none."),
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Answer a file of requests. If it was interrupted, run it again: it continues with the lines without an answer.

    Errors of refused lines go to a second file next to OUT, whose name ends with .errors.jsonl.
    """
    options.check_method(method, verifier)
    check_can_serve()
    own_template = None if template is None else options.read_template(template)
    if workers is not None and ray is None:
        raise ValueError("--workers is the number of decoders on a Ray cluster; give --ray, or leave it out")
    with starting():
        from heavypath.speculative.cli.support import choose, load
        from heavypath.speculative.http.batches.lines import count_lines, read_lines
        from heavypath.speculative.http.batches.output import Output, errors_beside
        from heavypath.speculative.http.batches.running import answer_all
        from heavypath.speculative.http.batches.worker import Worker
        from heavypath.speculative.profile import Profile

    if profile is not None:
        Profile.load(profile)
    for path in (out, errors_beside(out)):
        if path.exists() and path.samefile(file):
            raise ValueError(f"--out: {str(path)!r} is the file of requests; give another name for the answers")
    method, draft = choose(method, target, draft, verifier, default="ersd", offline=offline)
    defaults: dict[str, Any] = {"max_tokens": max_new_tokens}
    if temperature is not None:
        defaults["temperature"] = temperature
    count = count_lines(file)
    measured = None if profile is None else profile.read_text()
    decide = [target, draft, method, tree_size, measured, verifier, max_tokens, own_template, dtype, seed]
    depends_on = json.dumps(decide, default=str)
    output = Output(out)
    try:
        output.check(read_lines(file, 0, defaults, depends_on), most_dropped=AHEAD * slots)
        if output.done == count:
            _say(output, count)
            return

        def worker() -> Worker:
            pair = load(target, draft, dtype, device=device, threads=threads, offline=offline)
            return Worker(
                pair,
                name_of(target),
                default_temperature(pair),
                method=method,
                tree_size=tree_size,
                profile=profile,
                verifier=verifier,
                slots=slots,
                max_tokens=max_tokens,
                at_once=AHEAD * slots,
                template=own_template,
                seed=seed,
            )

        lines = read_lines(file, output.done, defaults, depends_on)
        with _bar(count, output.done) as advance:
            if ray is None:
                own = worker()
                try:
                    asyncio.run(answer_all(lines, output, own.answer, AHEAD * slots, advance))
                finally:
                    own.close()
            else:
                from heavypath.speculative.http.batches.cluster import on_cluster

                on_cluster(ray, workers, worker, lines, output, AHEAD * slots, advance)
    finally:
        output.close()
    _say(output, count)


def _say(output: "Output", count: int) -> None:
    bad = f", {output.bad} refused: {output.errors} says why" if output.bad else ""
    typer.echo(f"heavypath: {output.done - output.bad} of {count} lines answered in {output.path}{bad}", err=True)


@contextmanager
def _bar(count: int, done: int) -> Iterator[Callable[[], None]]:
    """A context with a progress bar on standard error; it yields a function to call after each answered line.

    count: lines of the file; done: lines that were answered before
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as shown:
        task = shown.add_task("", total=count, completed=done, rate="")

        def advance() -> None:
            shown.advance(task)
            speed = shown.tasks[0].speed
            shown.update(task, rate="" if speed is None else f"{speed:.1f} lines/s")

        yield advance
