"""Parts of a model's weights in this process, as forward passes and drafts see them.

Where the weights are whole, `Parts` changes nothing. `ranks.shards` has those of a model that is split.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Product = Callable[[Tensor], Tensor]  # of [rows, K]


class Parts:
    """All of the weights.

    ranks: the processes that they are split over, a `Ranks`; None for one process
    """

    ranks: Any = None

    def knows_hook_of(self, module: nn.Module) -> bool:
        """True if a module's hook or patch is known as one that splits it."""
        return False

    def are_usual(self, model: Any) -> bool:
        """True if a Llama is split in a way that its forward pass knows."""
        return True

    def heads(self, count: int) -> int:
        """The number of heads of attention in this process, of so many in all."""
        return count

    def of(self, module: Any) -> Any:
        """A linear layer over what is here of a linear layer's weights."""
        return module

    def summed(self, module: Any, product: Product) -> Product:
        """The product of a layer that is split by columns, given that of its part."""
        return product

    def joined(self, module: Any, product: Product) -> Product:
        """The product of a layer that is split by rows, given that of its part."""
        return product

    def embedded(self, module: Any) -> Callable[[Tensor], Tensor]:
        """The embeddings [N, H] of tokens LongTensor[N]."""
        return module


WHOLE = Parts()


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process: all of it, unless it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_owned(tensor: Tensor) -> float:
    """The part of a tensor that each rank has; it is the same for all, even where one has a row more."""
    return 1 / tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1.0


def is_split(module: nn.Module) -> bool:
    """True if the module's own weights are split over ranks."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False))
