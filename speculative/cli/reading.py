"""Reading of a streamed target's weights before the first token: the longest wait, and a status line for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from torch import nn

from heavypath.speculative.models.layer_weights import stream_of


@contextmanager
def reading(model: nn.Module, prompt_tokens: int) -> Iterator[Callable[[], None]]:
    """A status line on standard error, if that is a terminal, until the block calls what it is given.

    It says which layer the prompt is at, and what was read; for a model whose weights are all in memory, nothing.
    """
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
