"""Ranks that decode one text must agree, in every step: on the drafted trees, the target's logits, and the verdict.

Each rank drafts and verifies for itself. Its result is that of the others, for three reasons. Random numbers are a
function of seed and place, a draft is the same everywhere, and a sum over ranks has the same bits on all of them.
Another seed, or a weight that differs, breaks this, and must not mix texts silently. So a step ends with one small
collective, whatever the sizes of its tensors: with the words w of a rank, which are digests of its results,

    largest(w), largest(-w)        over all ranks;        they agree iff  largest(w) = -largest(-w)

A rank that is to end, by Ctrl-C or because its streamer has raised, says so by one more number. The result is kept in
the state, where the host finds it with the rest of the step: no sequence goes on, and `LEFT` is DIFFERENT or ENDED. So
all ranks raise after the same step. A step in a CUDA graph does the same without the host.

It does not see a wrong weight that is split, because such a weight exists once, and nothing differs. All ranks then
decode one text by another model. Weights that each rank has for itself are compared when a decoder is made and before
each text.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.ranks.group import RankFailedError, Ranks, said_of, whole_ranks
from heavypath.speculative.ranks.parts import local_of
from heavypath.speculative.ranks.peers import Peers

DIFFERENT, ENDED = -2, -3  # what is LEFT of all sequences
PARTS = ("draft", "target logits", "verdict")
_BITS = (1 << 62) - 1  # so that a digest has a negative
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and without a pattern: the golden ratio


class RankMismatchError(RuntimeError):
    """Ranks that are to decode one text do not agree.

    rank: the first one that differs from most, or from rank 0 where neither is more; what: it differs in
    """

    def __init__(self, rank: int, what: str, where: str):
        self.rank, self.what = rank, what
        super().__init__(
            f"rank {rank} has another {what} than the other ranks {where}; all ranks need the same models, prompts and "
            "settings, the seed among them"
        )


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """A number LongTensor[] that is another one, but for a chance of 2**-62, if any number of the tensors is.

    Of the rows of each tensor [..., columns] the bits are summed, and the sums weighted by the rows' places: swapped
    rows are seen. Tensors of whole numbers count number by number, so that swapped numbers are seen, too.
    """
    found = torch.zeros((), dtype=torch.long, device=tensors[0].device)
    for tensor in tensors:
        rows = (row_digests(tensor) if tensor.is_floating_point() else tensor.long()).flatten()
        found = found * _FACTOR + (rows * _weights(len(rows), rows.device)).sum()
    return found & _BITS


def row_digests(tensor: Tensor) -> Tensor:
    """The sum LongTensor[...] of the bits of each row of floating-point numbers [..., columns], as whole numbers."""
    tensor = tensor.contiguous()
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    if tensor.shape[-1] * tensor.itemsize % 8 == 0 and tensor.data_ptr() % 8 == 0:
        words = torch.int64  # several numbers at once
    return tensor.view(words).sum(-1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers LongTensor[count] without a pattern."""
    place = torch.arange(1, count + 1, device=device)
    mixed = place * _FACTOR
    mixed = (mixed ^ (mixed >> 29)) * _FACTOR
    return mixed ^ (mixed >> 32) | 1


class Agreement(Peers):
    """The messages between the ranks of a decoder while they decode. One generation at a time."""

    is_alone = False

    def __init__(self, ranks: Ranks, device: torch.device):
        self.ranks = ranks
        self._words = torch.zeros(
            len(PARTS), dtype=torch.long, device=device
        )  # of the last step, or that which differs
        self._ends = torch.zeros(1, dtype=torch.long, device=device)  # 1: this rank is to end
        self._differ = torch.zeros((), dtype=torch.bool, device=device)  # whether ranks did, in a step of this text
        self._problem: BaseException | None = None  # that this rank is to raise when all know of it

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which decides, writes and streams."""
        return self.ranks.rank == 0

    def begin(self, facts: Mapping[str, object]) -> None:
        """Begin a generation, of which these facts must be the same on all ranks.

        facts: names, and what has them: tensors, or anything whose `repr` says all

        Raises RankMismatchError for the first name under which one rank has something else.
        """
        for number in (self._words, self._ends, self._differ):
            number.zero_()
        self._problem = None
        told = {name: _text_of(fact) for name, fact in facts.items()}
        every = self.ranks.told(told)
        for name in facts:
            values = [one.get(name) for one in every]
            if len({*values}) > 1:
                raise RankMismatchError(_first_that_differs(values), name, "before the first step")

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Begin a text: `begin` with these facts, and with the target's weights that each rank has for itself."""
        self.begin({**facts, **own_weights(target)})

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers and the trace of rank 0. Others have none; they write a trace to nowhere, to take as long."""
        return (streamers, trace) if self.is_first else ([], None if trace is None else os.devnull)

    def tell(self) -> None:
        """Before a step: have it tell the other ranks if this one is to end."""
        if self._problem is not None:
            self._ends.fill_(1)

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """End all sequences, on all ranks, if the ranks did not do the same in a step, or if one is to end.

        left: LongTensor[b], which this changes
        """
        words = torch.stack([digest(part) for part in (_drawn(drafted), [logits], verified)])
        self._words.copy_(torch.where(self._differ, self._words, words))
        most = self.ranks.largest(torch.cat([self._words, -self._words, self._ends]))
        count = len(PARTS)
        self._differ.copy_((most[:count] != -most[count:-1]).any())
        left.copy_(torch.where(self._differ, DIFFERENT, torch.where(most[-1] > 0, ENDED, left)))

    def error(self, left: int, step: int) -> BaseException | None:
        """The error that all ranks raise where `LEFT` is DIFFERENT or ENDED after a step; None where it is neither.

        step: its number in the text, for the message. All ranks must ask alike.
        """
        if left == DIFFERENT:
            every = self.ranks.all_of(self._words).T.tolist()
            for what, values in zip(PARTS, every, strict=True):
                if len({*values}) > 1:
                    return RankMismatchError(_first_that_differs(values), what, f"in step {step}")
        return self._ending() if left == ENDED else None

    def end(self) -> None:
        """End a generation: raise on all ranks if one of them was to end in the last step."""
        self.tell()
        if int(self.ranks.largest(self._ends.clone())):
            problem = self._ending()
            assert problem is not None
            raise problem

    def _ending(self) -> BaseException | None:
        said = self.ranks.told(None if self._problem is None else said_of(self._problem))
        if self._problem is not None:
            return self._problem
        for rank, one in enumerate(said):
            if one == KeyboardInterrupt.__name__:
                return KeyboardInterrupt()
            if one is not None:
                return RankFailedError(f"rank {rank} has raised {one}")
        return None

    def hold(self, problem: BaseException) -> None:
        """Raise this exception, and RankFailedError on the other ranks, but all of them after the same step."""
        self._problem = self._problem or problem

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold what the block raises, which other ranks do not run."""
        try:
            yield
        except Exception as problem:
            self.hold(problem)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In the block Ctrl-C ends all ranks after the same step; a second one interrupts this rank where it is."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        def later(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)
            self.hold(KeyboardInterrupt())

        signal.signal(signal.SIGINT, later)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def decided(self, by: Callable[[], Any]) -> Any:
        """The answer of rank 0, see `Ranks.decided`."""
        return self.ranks.decided(by)

    def any(self, fact: bool) -> bool:
        """True if something holds on any of the ranks."""
        return any(self.ranks.told(fact))


def agreement_of(models: Sequence[Any], device: torch.device) -> Agreement:
    """The agreement of the ranks that some models' weights are split over.

    models: as of `peers.peers_of`. Checks their weights: those that each rank has for itself must be the same. Raises
    the checks' errors, on all ranks, and RankMismatchError; ValueError where one is split and another streamed.
    """
    ranks = whole_ranks([model.ranks for model in models])
    assert ranks is not None
    streamed = [model.name for model in models if getattr(model, "stream", None) is not None]
    if streamed:
        raise ValueError(f"{streamed[0]} is streamed, and another model split over {ranks.count} processes; do one")
    agreement = Agreement(ranks, device)
    for model in models:
        agreement.ranks.together(model.check_weights)
        agreement.begin(own_weights(model))
    return agreement


def own_weights(model: Any) -> dict[str, object]:
    """The weights of a model that each rank has for itself, by names for messages."""
    return {f"{model.name} weight {name}": own for name, own in model.weights() if local_of(own) is own}


def _drawn(drafted: Any) -> list[Tensor]:
    """The values that are equal where the same was drafted: tokens, parents, and of the logits those drawn from."""
    if drafted.logits is None:
        return [drafted.tokens, drafted.parents]
    sources = drafted.parents[..., 1:].expand(len(drafted.tokens), -1)
    used = torch.zeros(drafted.logits.shape[:2], dtype=torch.long, device=drafted.tokens.device)
    used.scatter_(1, sources.where(drafted.tokens[:, 1:] >= 0, 0), 1)
    return [drafted.tokens, drafted.parents, row_digests(drafted.logits) * used]


def _text_of(fact: object) -> str:
    tensors = [fact] if isinstance(fact, Tensor) else fact
    if not (isinstance(tensors, list) and tensors and all(isinstance(one, Tensor) for one in tensors)):
        return repr(fact)
    return f"{[[*one.shape] for one in tensors]} {int(digest(tensors))}"


def _first_that_differs(values: Sequence[object]) -> int:
    """The first rank with another value than most; than rank 0 where as many have another one."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    return next(rank for rank, value in enumerate(values) if value != usual)
