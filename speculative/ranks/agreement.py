"""Check after every step that all ranks agree on the drafted trees, the target's logits, and the accepted nodes.

Each rank drafts and verifies separately. All get the same results, for three reasons: random numbers are a function of
seed and position, the draft is the same on every rank, and a sum over ranks has the same bits on all of them. A
different seed or weight on one rank breaks this, and must be noticed. So a step ends with one small collective,
whatever the sizes of its tensors. Let w be a rank's vector of digests of its results:

    largest(w), largest(-w)        over all ranks;        they agree iff  largest(w) = -largest(-w)

A rank that must stop, because of Ctrl-C or an exception of its streamer, signals this by one more number. The outcome
is written to the state, where the host finds it with the step's other results: all sequences stop, and `LEFT` is
DIFFERENT or ENDED. So all ranks raise after the same step. A step in a CUDA graph does this without the host.

A wrong value in a split weight is not noticed, because that weight exists only once: all ranks then decode with the
same wrong model. Weights that every rank has in full are compared when a decoder is made and before each generation.
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
from heavypath.speculative.ranks.communication import Communication, RankFailedError, said_of
from heavypath.speculative.ranks.group import whole_ranks
from heavypath.speculative.ranks.peers import Peers, local_of

DIFFERENT = -2  # values of LEFT for all sequences, as the next one
ENDED = -3
PARTS = ("draft", "target logits", "verdict")
_BITS = (1 << 62) - 1  # so that a digest can be negated
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio as an odd number, which mixes bits well


class RankMismatchError(RuntimeError):
    """Raised on all ranks if ranks that decode together have different results, inputs or weights.

    rank:  the first rank that differs from the majority, or from rank 0 if there is no majority
    what:  what differs, such as "draft" or the name of a weight
    where: when it differed, for the message, such as "in step 3"
    """

    def __init__(self, rank: int, what: str, where: str):
        self.rank = rank
        self.what = what
        super().__init__(
            f"rank {rank} has another {what} than the other ranks {where}; all ranks need the same models, prompts and "
            "settings, the seed among them"
        )


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of tensors, LongTensor[], 0 to 2**62 - 1; different tensors have the same hash with probability 2**-62.

    The bits of each row [columns] are summed, and the sums are weighted by the row's index, so that swapped rows are
    noticed. Integer tensors are hashed number by number, so that swapped numbers are noticed, too.
    """
    found = torch.zeros((), dtype=torch.long, device=tensors[0].device)
    for tensor in tensors:
        rows = (row_digests(tensor) if tensor.is_floating_point() else tensor.long()).flatten()
        found = found * _FACTOR + (rows * _weights(len(rows), rows.device)).sum()
    return found & _BITS


def row_digests(tensor: Tensor) -> Tensor:
    """The sum LongTensor[...] of the bits, read as integers, of each row of floating-point numbers [..., columns]."""
    tensor = tensor.contiguous()
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    if tensor.shape[-1] * tensor.itemsize % 8 == 0 and tensor.data_ptr() % 8 == 0:
        words = torch.int64  # several numbers at once
    return tensor.view(words).sum(-1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers LongTensor[count]."""
    index = torch.arange(1, count + 1, device=device)
    mixed = index * _FACTOR
    mixed = (mixed ^ (mixed >> 29)) * _FACTOR
    return mixed ^ (mixed >> 32) | 1


class Agreement(Peers):
    """Checks after each step that the ranks of a decoder agree, and lets them stop together. One generation at a time.

    device: where the tensors of a step are
    compares_weights: whether `begin_text` compares the weights that every rank has in full, which only DTensors show
    """

    is_alone = False

    def __init__(self, ranks: Communication, device: torch.device, *, compares_weights: bool = True):
        self.ranks = ranks
        self._compares_weights = compares_weights
        self._words = torch.zeros(
            len(PARTS), dtype=torch.long, device=device
        )  # digests of the last step, or of the first step that differs
        self._ends = torch.zeros(1, dtype=torch.long, device=device)  # 1: this rank must stop
        self._differ = torch.zeros((), dtype=torch.bool, device=device)  # whether ranks differed in this generation
        self._problem: BaseException | None = None  # to be raised once all ranks have got the signal

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which makes decisions, writes and streams."""
        return self.ranks.rank == 0

    def begin(self, facts: Mapping[str, object]) -> None:
        """Begin a generation: forget the last one, and check that these facts are the same on all ranks.

        facts: name, for the message, -> a tensor, a list of tensors, or an object with a complete `repr`

        Raises RankMismatchError for the first name for which a rank differs.
        """
        for number in (self._words, self._ends, self._differ):
            number.zero_()
        self._problem = None
        described = {name: _text_of(fact) for name, fact in facts.items()}
        every = self.ranks.exchange(described)
        for name in facts:
            values = [one.get(name) for one in every]
            if len({*values}) > 1:
                raise RankMismatchError(_first_that_differs(values), name, "before the first step")

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Begin a generation: `begin` with these facts, and with the target's weights that every rank has in full."""
        self.begin({**facts, **own_weights(target)} if self._compares_weights else facts)

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers and the trace that this rank uses: on rank 0 those that are given.

        Other ranks have no streamers, and write the trace to os.devnull, so that their steps take as long.
        """
        return (streamers, trace) if self.is_first else ([], None if trace is None else os.devnull)

    def tell(self) -> None:
        """Called before a step: if `hold` has been called, set the signal by which the step stops all ranks."""
        if self._problem is not None:
            self._ends.fill_(1)

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """Called at the end of a step: stop all sequences on all ranks if results differ, or if a rank must stop.

        left: LongTensor[b], the sequences' `StateField.LEFT`. To stop them, it is set to DIFFERENT or ENDED
        """
        words = torch.stack([digest(part) for part in (_drawn(drafted), [logits], verified)])
        self._words.copy_(torch.where(self._differ, self._words, words))
        most = self.ranks.largest(torch.cat([self._words, -self._words, self._ends]))
        count = len(PARTS)
        self._differ.copy_((most[:count] != -most[count:-1]).any())
        left.copy_(torch.where(self._differ, DIFFERENT, torch.where(most[-1] > 0, ENDED, left)))

    def error(self, left: int, step: int) -> BaseException | None:
        """The error that all ranks must raise after a step if `left` is DIFFERENT or ENDED; None for other values.

        All ranks must call this together. step: the number of the step, for the message
        """
        if left == DIFFERENT:
            every = self.ranks.all_of(self._words).T.tolist()
            for what, values in zip(PARTS, every, strict=True):
                if len({*values}) > 1:
                    return RankMismatchError(_first_that_differs(values), what, f"in step {step}")
        return self._ending() if left == ENDED else None

    def end(self) -> None:
        """End a generation. If a rank had to stop in the last step, it raises its error, the others RankFailedError."""
        self.tell()
        if int(self.ranks.largest(self._ends.clone())):
            problem = self._ending()
            assert problem is not None
            raise problem

    def _ending(self) -> BaseException | None:
        problems = self.ranks.exchange(None if self._problem is None else said_of(self._problem))
        if self._problem is not None:
            return self._problem
        for rank, one in enumerate(problems):
            if one == KeyboardInterrupt.__name__:
                return KeyboardInterrupt()
            if one is not None:
                return RankFailedError(f"rank {rank} has raised {one}")
        return None

    def hold(self, problem: BaseException) -> None:
        """Keep an exception until the step ends; then this rank raises it, and the others raise RankFailedError."""
        self._problem = self._problem or problem

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Defer exceptions of code that only this rank runs until all ranks have reached the same step."""
        try:
            yield
        except Exception as problem:
            self.hold(problem)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context in which Ctrl-C stops all ranks after the same step.

        A second Ctrl-C interrupts this rank at once.
        """
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
        """The result of the function `by` on rank 0, which alone calls it. If it raises, all ranks raise."""
        return self.ranks.decided(by)

    def any(self, fact: bool) -> bool:
        """Whether `fact` is true on any rank."""
        return any(self.ranks.exchange(fact))


def agreement_of(models: Sequence[Any], device: torch.device, communication: Communication | None = None) -> Agreement:
    """Make the `Agreement` of the ranks over which the weights of target and draft are split.

    models: the forward passes. Their weights are checked; weights that every rank has in full must be equal
    communication: for models that a user has split. Which weights every rank has in full is not known then, so none
        are compared

    Raises errors of these checks on all ranks, and RankMismatchError if weights differ. Raises TypeError if
    `communication` is not a `Communication`, and ValueError if one model is split and another one is streamed, or if
    both transformers and `communication` split a model.
    """
    ranks = whole_ranks([model.ranks for model in models])
    if communication is not None:
        _check_communication(communication)
        if ranks is not None:
            raise ValueError(
                "communication is for models that you have split yourself, and one of these is split over "
                f"{ranks.count} processes by transformers or FSDP, which have theirs; leave it out"
            )
        ranks = communication
    assert ranks is not None
    streamed = [model.name for model in models if getattr(model, "stream", None) is not None]
    if streamed:
        raise ValueError(f"{streamed[0]} is streamed, and another model split over {ranks.count} processes; do one")
    agreement = Agreement(ranks, device, compares_weights=communication is None)
    for model in models:
        agreement.ranks.together(model.check_weights)
        if communication is None:
            agreement.begin(own_weights(model))
    return agreement


def _check_communication(given: object) -> None:
    if not isinstance(given, Communication):
        raise TypeError(f"communication must be an object of a class that inherits Communication, got {given!r}")
    numbers = [getattr(given, name, None) for name in ("rank", "count")]
    rank, count = numbers
    if not (isinstance(rank, int) and isinstance(count, int) and 0 <= rank < count):
        raise ValueError(f"communication must have rank and count, with 0 <= rank < count, got {numbers}")


def own_weights(model: Any) -> dict[str, object]:
    """The weights of a model that every rank has in full, those that are not split, by names for messages."""
    return {f"{model.name} weight {name}": own for name, own in model.weights() if local_of(own) is own}


def _drawn(drafted: Any) -> list[Tensor]:
    """What ranks compare of drafted trees: tokens, parents, and digests of the logits that tokens were drawn from."""
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
    """The first rank whose value differs from the majority; from rank 0 if there is no majority."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    return next(rank for rank, value in enumerate(values) if value != usual)
