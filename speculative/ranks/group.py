"""The ranks of a model: processes that each hold a part of its weights, and the collectives between them.

All ranks must call the same collectives in the same order, with tensors of the same shapes. So the calls must not
depend on anything that may differ between ranks, such as a clock or a user's function. `decided` lets rank 0 decide.

A rank waits for another one until the timeout of the process group, which is set where the group is made. A process
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

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


class RankFailedError(RuntimeError):
    """Another rank has raised an exception, or was interrupted, during a common operation."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, seen from one of them."""

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
        """The sum of all ranks' tensors of the same shape; written to the rank's own tensor if that is contiguous."""
        part = part.contiguous()
        dist.all_reduce(part, group=self.group)
        return part

    def largest(self, numbers: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, in place."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def joined(self, part: Tensor, columns: int) -> Tensor:
        """All ranks' columns side by side, [rows, columns], from this rank's [rows, own].

        Columns are split as by `torch.chunk`: each rank has ceil(columns / ranks), except the last ones, which may have
        fewer.
        """
        rows, widest = len(part), -(-columns // self.count)
        if part.shape[1] < widest:
            part = nn.functional.pad(part, (0, widest - part.shape[1]))
        every = part.new_empty(self.count * rows, widest)
        _all_gather(every, part.contiguous(), group=self.group)
        return every.view(self.count, rows, widest).transpose(0, 1).reshape(rows, -1)[:, :columns]

    def all_of(self, numbers: Tensor) -> Tensor:
        """The tensors of all ranks, [ranks, ...]."""
        every = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(every, numbers, group=self.group)
        return torch.stack(every)

    def told(self, what: T) -> list[T]:
        """Exchange objects that can be pickled: returns those of all ranks."""
        every: list[T] = [what] * self.count
        dist.all_gather_object(every, what, group=self.group)
        return every

    def decided(self, by: Callable[[], T]) -> T:
        """The result of a function that only rank 0 calls.

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
        """Call a function without collectives on each rank, and return its result; if it raises on one rank, all raise.

        A rank raises its own exception; the others raise RankFailedError with its message.
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
    """An exception as one line."""
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def ranks_of(model: nn.Module, name: str) -> Ranks | None:
    """The ranks that a model's weights are split over; None if this process has all weights.

    Raises ValueError for weights that are split in more than one way.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # FSDP leaves the outermost module's weights gathered after a pass
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
    """The ranks of several models that decode together; None if this process has all weights.

    Raises ValueError for models that are split over different ranks.
    """
    found = {ranks for ranks in models if ranks is not None}
    if len(found) > 1:
        sizes = " and ".join(str(ranks.count) for ranks in found)
        raise ValueError(f"target and draft must be split over the same processes, got groups of {sizes}")
    return found.pop() if found else None
