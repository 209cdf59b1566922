"""Show that long work continues: by a status line on a terminal, otherwise by occasional lines on standard error."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import typer

from heavypath.speculative.cli.ranks import this_rank

if TYPE_CHECKING:
    from torch import nn

FIRST = 1.0  # seconds until the first line, without a terminal
EVERY = 5.0  # seconds between lines, without a terminal
PATIENCE = 10.0  # seconds until the first line for importing and loading, which mostly take less


@contextmanager
def progress(text: str, *, first: float = FIRST, quiet: bool = False) -> Iterator[Callable[[str], object]]:
    """A context that shows on standard error what is being done. It yields a function to report the current activity.

    first: without a terminal, seconds until the first line
    quiet: without a terminal, write nothing
    """
    from rich.console import Console

    console = Console(stderr=True)
    if this_rank() > 0 or (quiet and not console.is_terminal):
        yield lambda line: None
    elif console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:
        with _lines(text, first) as say:
            yield say


def starting() -> AbstractContextManager[object]:
    """A context for importing PyTorch and transformers, which says so if it takes long."""
    return progress("starting PyTorch", first=PATIENCE)


@contextmanager
def _lines(text: str, first: float) -> Iterator[Callable[[str], object]]:
    """Write a line after `first` seconds, and further lines less and less often while nothing changes.

    A thread writes them, because the code of the context may be inside a single long call.
    """
    doing = [text]
    ended = threading.Event()

    def write() -> None:
        wait = first
        written = ""
        while not ended.wait(wait):
            line = text if doing[0] == text else f"{text}: {doing[0]}"
            typer.echo(f"heavypath: {line}{' ...' if line != written else ', still'}", err=True)
            wait = wait * 2 if line == written else EVERY
            written = line

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield lambda line: doing.__setitem__(0, line)
    finally:
        ended.set()
        thread.join()


@contextmanager
def reading(model: "nn.Module", prompt_tokens: int) -> Iterator[Callable[[], None]]:
    """A context that shows on a terminal how far a prompt has got through a streamed model.

    It yields a function that ends the display. For a model whose weights are all in memory it shows nothing.
    """
    from rich.console import Console

    from heavypath.speculative.models.layer_weights import stream_of

    stream = stream_of(model)
    console = Console(stderr=True)
    begin = time.perf_counter()
    if stream is None or not console.is_terminal:
        yield lambda: None
        return
    before = stream.counts()
    with console.status(f"the prompt's {prompt_tokens} tokens go through the target") as status:

        def show(layer: int) -> None:
            counts = stream.counts().since(before)
            status.update(
                f"the prompt's {prompt_tokens} tokens are at layer {layer + 1} of {stream.layers}: "
                f"{counts.bytes_read / 1e9:.1f} GB read at {counts.bandwidth / 1e9:.1f} GB/s, "
                f"{time.perf_counter() - begin:.0f} s"
            )

        def end() -> None:
            stream.on_take = None
            status.stop()

        stream.on_take = show
        try:
            yield end
        finally:
            end()
