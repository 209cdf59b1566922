"""A sign that long work goes on: a status line on a terminal, and elsewhere a line on standard error now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import typer

from heavypath.speculative.cli.ranks import this_rank

if TYPE_CHECKING:
    from torch import nn

FIRST, EVERY = 1.0, 5.0  # seconds after which lines are written where there is no terminal
PATIENCE = 10.0  # the same, of importing and loading, which is mostly done before


@contextmanager
def progress(text: str, *, first: float = FIRST, quiet: bool = False) -> Iterator[Callable[[str], object]]:
    """Say on standard error what is done while the block runs. The block calls what it is given with what it does now.

    first: seconds of silence where there is no terminal
    quiet: nothing is written there
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
    """Say, while the block imports PyTorch and transformers, what takes so long."""
    return progress("starting PyTorch", first=PATIENCE)


@contextmanager
def _lines(text: str, first: float) -> Iterator[Callable[[str], object]]:
    """A line after `first` seconds, and then less and less often while it stays, written by a thread.

    The block may be in one call.
    """
    doing, ended = [text], threading.Event()

    def write() -> None:
        wait, written = first, ""
        while not ended.wait(wait):
            line = text if doing[0] == text else f"{text}: {doing[0]}"
            typer.echo(f"heavypath: {line}{' ...' if line != written else ', still'}", err=True)
            wait, written = wait * 2 if line == written else EVERY, line

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield lambda line: doing.__setitem__(0, line)
    finally:
        ended.set()
        thread.join()


@contextmanager
def reading(model: "nn.Module", prompt_tokens: int) -> Iterator[Callable[[], None]]:
    """A status line on standard error, if that is a terminal, until the block calls what it is given.

    It says which layer the prompt is at, and what was read; for a model whose weights are all in memory, nothing.
    """
    from rich.console import Console

    from heavypath.speculative.models.layer_weights import stream_of

    stream, console, begin = stream_of(model), Console(stderr=True), time.perf_counter()
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
