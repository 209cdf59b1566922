"""Show text on a terminal: the prompt dimmed, and drafted tokens in a colour."""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.output.text_stream import TextStream

GREEN = "\x1b[32m"
PLAIN = "\x1b[0m"


def show_dimmed(text: str, end: str = "") -> None:
    """Write a text to standard output, dimmed if that is a terminal."""
    Console(highlight=False, soft_wrap=True).print(Text(text, style="dim"), end=end)


class ColouredStream(TextStream):
    """A `TextStream` that colours the tokens which the draft proposed.

    A step produces the accepted tokens and then the target's bonus token. If the end of the text cuts a step short, its
    last token is shown as the bonus token. A character of several tokens has the colour of its last one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        super().__init__(tokenizer, self._coloured)
        self._out = write
        self._drafted = False
        self._begun = False

    def put(self, value: Tensor) -> None:
        """Take the prompt in the first call, then the tokens of a step."""
        if not self._begun:
            self._begun = True
            super().put(value)
            return
        tokens = value.flatten()
        self._drafted = True
        super().put(tokens[:-1])
        self._drafted = False
        super().put(tokens[-1:])

    def end(self) -> None:
        """Write what was held back. The next `put` gets another prompt."""
        super().end()
        self._begun = False

    def _coloured(self, piece: str) -> None:
        self._out(f"{GREEN}{piece}{PLAIN}" if self._drafted and piece else piece)
