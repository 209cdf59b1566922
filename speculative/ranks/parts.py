"""Which part of a model's weights this process has: the interface for forward passes and drafts.

`Parts` is for whole weights, and changes nothing. `ranks.shards` is for a model that is split.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Product = Callable[[Tensor], Tensor]  # from an input [rows, K]


class Parts:
    """All weights are in this process.

    ranks: the processes that the weights are split over, a `Ranks`; None for one process
    """

    ranks: Any = None

    def knows_hook_of(self, module: nn.Module) -> bool:
        """Whether a module's hook or patch is one that splits it over ranks."""
        return False

    def are_usual(self, model: Any) -> bool:
        """Whether a Llama is split in a way that `LlamaForward` supports."""
        return True

    def heads(self, count: int) -> int:
        """How many of `count` attention heads this process has."""
        return count

    def of(self, module: Any) -> Any:
        """A linear layer with this process's part of the weights."""
        return module

    def summed(self, module: Any, product: Product) -> Product:
        """The product of a layer that is split by columns, from the product of this process's part."""
        return product

    def joined(self, module: Any, product: Product) -> Product:
        """The product of a layer that is split by rows, from the product of this process's part."""
        return product

    def embedded(self, module: Any) -> Callable[[Tensor], Tensor]:
        """A function from tokens LongTensor[N] to their embeddings [N, H]."""
        return module


WHOLE = Parts()


def local_of(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, unless it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_owned(tensor: Tensor) -> float:
    """The share of a tensor that each rank has, the same number for all ranks even if one has a row more."""
    return 1 / tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1.0


def is_split(module: nn.Module) -> bool:
    """Whether the module's own weights are split over ranks."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False))
