"""`SequenceState`: one sequence of a batch, the processors that are called for it, and its tokens so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.speculative.processors.kinds import TEXTLESS, Processor, name_of
from heavypath.speculative.processors.matching import GrammarText, Path
from heavypath.speculative.processors.watched import WatchedCallable


@dataclass
class SequenceState:
    """One sequence and its processors.

    processors: the objects to call for this sequence, in order
    ids: LongTensor[T'], the prompt and the new tokens so far
    stops: the tokens that end the sequence; processors are not called after them
    produced: number of new tokens
    steps: number of steps that have added tokens
    """

    processors: tuple["Processor | GrammarText | WatchedCallable", ...]
    ids: Tensor
    stops: frozenset[int]
    produced: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self._alike = tuple(map(_kind_of, self.processors))
        self._textless = all(isinstance(each, GrammarText) or type(each) in TEXTLESS for each in self.processors)

    @property
    def is_unseen(self) -> bool:
        """Whether a processor has state that cannot be read: then it may be called only once for each token."""
        return any(isinstance(each, WatchedCallable) and each.unseen for each in self.processors)

    @property
    def is_asked_twice(self) -> bool:
        """Whether the next step calls processors twice, as a check: steps 0, 1, 2, 4, 8, ..."""
        return not self.is_unseen and self.steps & (self.steps - 1) == 0

    def together(self, path: Path) -> tuple[object, int]:
        """A key for a node, given the path to it: nodes with equal keys can be processed in one call."""
        return self._alike, 0 if self._textless else len(self.ids) + len(path)

    def with_path(self, paths: Sequence[Path]) -> Tensor:
        """The sequence up to each of n nodes of one depth, LongTensor[n, T']; [n, 0] if no processor reads tokens.

        paths: the drafted tokens from the root's child to each node
        """
        if self._textless:
            return self.ids.new_empty(len(paths), 0)
        drafted = torch.tensor(paths, dtype=torch.long, device=self.ids.device)
        return torch.cat([self.ids.expand(len(paths), -1), drafted], 1)

    def advance(self, new: list[int]) -> None:
        """Append the new tokens of a step. Raises ValueError, again in each call, if a grammar does not allow them."""
        for processor in self.processors:
            if isinstance(processor, GrammarText):
                processor.advance(new)
        self.ids = torch.cat([self.ids, self.ids.new_tensor(new)])
        self.produced += len(new)
        self.steps += 1


def _kind_of(processor: "Processor | GrammarText | WatchedCallable") -> object:
    """A key: processors with equal keys can be called together for several sequences."""
    if isinstance(processor, GrammarText):
        return GrammarText
    return id(processor.kept if isinstance(processor, WatchedCallable) else processor)


def names_of(processors: Sequence["Processor | GrammarText | WatchedCallable"]) -> str:
    """The names of processors, for messages."""
    own = [each.processor if isinstance(each, WatchedCallable) else each for each in processors]
    return ", ".join("Grammar" if isinstance(each, GrammarText) else name_of(each) for each in own)
