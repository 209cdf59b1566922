"""`heavypath trace`: make an HTML page from a trace that `heavypath generate --trace` wrote."""

from pathlib import Path
from typing import Annotated

import typer


def trace(
    file: Annotated[Path, typer.Argument(exists=True, help="File of `heavypath generate --trace`.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: the file's name with .html.")
    ] = None,
) -> None:
    """Make an HTML page that shows each step's tree, and why each node was accepted or not."""
    from heavypath.speculative.output.page import trace_page
    from heavypath.speculative.output.trace import read_trace

    header, steps = read_trace(file)
    page = file.with_suffix(".html") if out is None else out
    if page.resolve() == file.resolve():
        raise ValueError(f"--out must be another file than the trace itself, got {str(page)!r}")
    page.write_text(trace_page(header, steps), encoding="utf-8")
    typer.echo(f"wrote {page}", err=True)
