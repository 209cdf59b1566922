"""The ranks of a model: processes that each hold a part of its weights, and the collectives between them.

A rank waits for another one until the timeout of the process group, which is set where the group is made. A process
that ends closes its connections, which the others notice at once.
"""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from heavypath.speculative.ranks.communication import Communication

T = TypeVar("T")

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


class Ranks(Communication):
    """The collectives between the processes of a torch.distributed group, over which transformers has split a model."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.count = group.size()

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which have one shape. If `part` is contiguous, the sum overwrites it."""
        part = part.contiguous()
        dist.all_reduce(part, group=self.group)
        return part

    def largest(self, numbers: Tensor) -> Tensor:
        """Replace each of these numbers by its maximum over all ranks, and return the tensor."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def joined(self, part: Tensor, columns: int) -> Tensor:
        """The columns of all ranks side by side, [rows, columns].

        Columns are split as by `torch.chunk`: each rank has ceil(columns / ranks), except the last ones, which may have
        fewer.

        part: this rank's columns, [rows, own]; columns: how many all ranks have together
        """
        rows = len(part)
        widest = -(-columns // self.count)
        if part.shape[1] < widest:
            part = nn.functional.pad(part, (0, widest - part.shape[1]))
        every = part.new_empty(self.count * rows, widest)
        _all_gather(every, part.contiguous(), group=self.group)
        by_row = every.view(self.count, rows, widest).transpose(0, 1)  # [rows, ranks, widest]
        return by_row.reshape(rows, -1)[:, :columns]

    def exchange(self, what: T) -> list[T]:
        """Send an object that can be pickled to all ranks. Returns the objects of all ranks, by rank."""
        every: list[T] = [what] * self.count
        dist.all_gather_object(every, what, group=self.group)
        return every


def ranks_of(model: nn.Module, name: str) -> Ranks | None:
    """The ranks over which transformers or FSDP has split a model's weights; None if this process has all weights.

    name: the model's name for messages

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
    """The ranks of several models that decode together; None if this process has the weights of all.

    models: the ranks of each model; None for a model that is not split

    Raises ValueError for models that are split over different ranks.
    """
    found: dict[dist.ProcessGroup, Ranks] = {}
    for ranks in models:
        if ranks is not None:
            found[ranks.group] = ranks
    if len(found) > 1:
        sizes = " and ".join(str(ranks.count) for ranks in found.values())
        raise ValueError(f"target and draft must be split over the same processes, got groups of {sizes}")
    return next(iter(found.values()), None)
