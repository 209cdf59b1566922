"""`Communication`: what processes that decode together, each with a part of a model, send to each other.

All ranks must make the same calls in the same order, with tensors of the same shapes. So the calls must not depend on
anything that may differ between ranks, such as a clock or a user's function. `decided` lets rank 0 decide.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RankFailedError(RuntimeError):
    """Raised on a rank because another rank has raised an exception, or was interrupted, in what they do together."""


class Communication(ABC):
    """Communication between the ranks of a model that you have split yourself. `exchange` is all it needs.

    rank:  the number of this process, from 0; set it in `__init__`
    count: the number of processes

    Models that transformers splits have their own, the `Ranks` of a process group. Errors of `exchange`, as that of a
    rank that does not answer, are raised by `generate`.
    """

    rank: int
    count: int

    @abstractmethod
    def exchange(self, what: T) -> list[T]:
        """Send an object that can be pickled to all ranks. Returns the objects of all ranks, by rank, its own included.

        Every rank calls this, and waits for the others.
        """

    def largest(self, numbers: Tensor) -> Tensor:
        """Replace each of these numbers by its maximum over all ranks, and return the tensor.

        It is called once in each step. Override it if tensors on a GPU can be compared without the host; otherwise a
        step cannot be a CUDA graph.

        numbers: LongTensor [any], of the same shape on all ranks
        """
        return numbers.copy_(self.all_of(numbers).amax(0))

    def all_of(self, numbers: Tensor) -> Tensor:
        """The tensors of all ranks, stacked to [ranks, ...]. numbers: this rank's tensor, of the same shape on all."""
        return torch.stack(self.exchange(numbers.to("cpu", copy=True))).to(numbers.device)

    def decided(self, by: Callable[[], T]) -> T:
        """The result of the function `by` on rank 0, returned on all ranks; only rank 0 calls it.

        If it raises, rank 0 raises its exception, and the others RankFailedError with its message.
        """
        answer: list[T] = []
        problem: BaseException | None = None
        if self.rank == 0:
            try:
                answer = [by()]
            except BaseException as error:
                problem = error
        said, answer = self.exchange((None if problem is None else said_of(problem), answer))[0]
        if problem is not None:
            raise problem
        if said is not None:
            raise RankFailedError(f"rank 0 has raised {said}")
        return answer[0]

    def together(self, function: Callable[[], T]) -> T:
        """Call a function without collectives on each rank, and return its result; if it raises on one rank, all raise.

        A rank raises its own exception; the others raise RankFailedError with its message.
        """
        problem: Exception | None = None
        result: list[T] = []
        try:
            result.append(function())
        except Exception as error:
            problem = error
        said = self.exchange(None if problem is None else said_of(problem))
        if problem is not None:
            raise problem
        for rank, one in enumerate(said):
            if one is not None:
                raise RankFailedError(f"rank {rank} has raised {one}")
        return result[0]


def said_of(problem: BaseException) -> str:
    """An exception as text: the name of its class, and its message if it has one."""
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
