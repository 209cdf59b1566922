"""`heavypath trace` makes a page of what `heavypath generate --trace` wrote."""

from pathlib import Path
from typing import Annotated

import typer

from heavypath.speculative.output.page import trace_page
from heavypath.speculative.output.trace import read_trace

TraceFile = Annotated[
    Path | None, typer.Option(help="Also write what each step drafted and accepted into this file, for `trace`.")
]


def trace(
    file: Annotated[Path, typer.Argument(help="File of `heavypath generate --trace`.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: the file's name with .html.")
    ] = None,
) -> None:
    """Make one HTML page where each step's tree is seen, and why each node was accepted or was not."""
    page = file.with_suffix(".html") if out is None else out
    if page.resolve() == file.resolve():
        raise ValueError(f"--out must be another file than the trace itself, got {str(page)!r}")
    page.write_text(trace_page(*read_trace(file)), encoding="utf-8")
    typer.echo(f"wrote {page}", err=True)
