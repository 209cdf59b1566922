"""The ranks of a model: processes that hold a part of its weights each, and what they do together.

Everybody's part of a collective must be called by all ranks in the same order, with tensors of the same shapes. So
nothing that one rank alone may decide, such as what a clock or a user's function says, may choose what is called:
`decided` makes it rank 0's decision.

How long a rank waits for another one is the time limit of the process group, which whoever made it has set. A process
that ends closes its connections, which the others notice at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

T = TypeVar("T")

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # which torch 2.13 calls by another name


class RankFailedError(RuntimeError):
    """Another rank has raised an exception, or was interrupted, where all ranks do something together."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, as one of them sees them."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self.group.rank()

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.group.size()

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape, in the place of this one's."""
        part = part.contiguous()
        dist.all_reduce(part, group=self.group)
        return part

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of all ranks' numbers at each place, in the place of this one's."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def joined(self, part: Tensor, columns: int) -> Tensor:
        """All ranks' columns side by side, [rows, columns], of this one's [rows, own].

        As `torch.chunk` splits them: each rank has ceil(columns / ranks), but for the last ones, which may have fewer.
        """
        rows, widest = len(part), -(-columns // self.count)
        if part.shape[1] < widest:
            part = nn.functional.pad(part, (0, widest - part.shape[1]))
        every = part.new_empty(self.count * rows, widest)
        _all_gather(every, part.contiguous(), group=self.group)
        return every.view(self.count, rows, widest).transpose(0, 1).reshape(rows, -1)[:, :columns]

    def all_of(self, numbers: Tensor) -> Tensor:
        """Every rank's numbers, [ranks, ...]."""
        every = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(every, numbers, group=self.group)
        return torch.stack(every)

    def told(self, what: T) -> list[T]:
        """The messages of all ranks to each other: any objects that can be pickled."""
        every: list[T] = [what] * self.count
        dist.all_gather_object(every, what, group=self.group)
        return every

    def decided(self, by: Callable[[], T]) -> T:
        """The answer of rank 0; the others do not call the function.

        Raises rank 0's exception there, and RankFailedError with its message on the others.
        """
        answer: list[T | None] = [None]
        problem: BaseException | None = None
        if self.rank == 0:
            try:
                answer = [by()]
            except BaseException as error:
                problem = error
        told = [None if problem is None else said_of(problem), *answer]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        if problem is not None:
            raise problem
        if told[0] is not None:
            raise RankFailedError(f"rank 0 has raised {told[0]}")
        return told[1]  # pyright: ignore[reportReturnType]

    def together(self, function: Callable[[], T]) -> T:
        """The result of a function without collectives on each rank; if it raises on one, it raises on all.

        Raises the rank's own exception, and on those that have none RankFailedError, with the message of another's.
        """
        problem: Exception | None = None
        result: list[T] = []
        try:
            result.append(function())
        except Exception as error:
            problem = error
        said = self.told(None if problem is None else said_of(problem))
        if problem is not None:
            raise problem
        for rank, one in enumerate(said):
            if one is not None:
                raise RankFailedError(f"rank {rank} has raised {one}")
        return result[0]


def said_of(problem: BaseException) -> str:
    """An exception in a line."""
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def ranks_of(model: nn.Module, name: str) -> Ranks | None:
    """The ranks that a model's weights are split over; None for a model that is whole in this process.

    Raises ValueError for weights that are split in more than one way.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # it leaves the outermost module's weights gathered after a pass
    meshes = {weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise ValueError(
            f"{name}'s weights must be split in one way, by a tensor-parallel plan or by FSDP, got "
            f"{' and '.join(map(str, (mesh, *meshes)))}; load it with DistributedConfig(tp_plan='auto', tp_size=...)"
        )
    return Ranks(mesh.get_group())


def whole_ranks(models: list[Ranks | None]) -> Ranks | None:
    """The ranks of several models that decode together; None if all are whole in this process.

    Raises ValueError for models that are split over different ranks.
    """
    found = {ranks for ranks in models if ranks is not None}
    if len(found) > 1:
        sizes = " and ".join(str(ranks.count) for ranks in found)
        raise ValueError(f"target and draft must be split over the same processes, got groups of {sizes}")
    return found.pop() if found else None
