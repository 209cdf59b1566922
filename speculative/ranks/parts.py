"""Which part of a model's weights this process has: the interface for forward passes and drafts.

`Parts` is for whole weights, and changes nothing. `ranks.shards` is for a model that is split.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Product = Callable[[Tensor], Tensor]  # from an input [rows, K]


class Parts:
    """Builds a model's layers from the weights that this process has: all of them, or for `Shards` a part.

    ranks: the processes over which the weights are split, a `Ranks`; None if this process has all weights
    """

    ranks: Any = None

    def knows_hook_of(self, module: nn.Module) -> bool:
        """Whether a module's hook or patch comes from splitting it over ranks. If so, this object replaces it."""
        return False

    def are_usual(self, model: Any) -> bool:
        """Whether a Llama is whole, or split over ranks in the way that `LlamaForward` supports."""
        return True

    def heads(self, count: int) -> int:
        """How many of `count` attention heads this process has."""
        return count

    def of(self, module: Any) -> Any:
        """A linear layer with this process's part of the weights."""
        return module

    def summed(self, module: Any, product: Product) -> Product:
        """The product of a layer split by columns, the sum of all parts'. product: of this process's part."""
        return product

    def joined(self, module: Any, product: Product) -> Product:
        """The product of a layer split by rows, all parts' outputs side by side. product: of this process's part."""
        return product

    def embedded(self, module: Any) -> Callable[[Tensor], Tensor]:
        """A function from tokens LongTensor[N] to embeddings [N, H], for an embedding layer."""
        return module


WHOLE = Parts()


def local_of(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, as an ordinary tensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_owned(tensor: Tensor) -> float:
    """The fraction of a tensor that each rank has: 1 / ranks for a DTensor, even if one has a row more; otherwise 1."""
    return 1 / tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1.0


def is_split(module: nn.Module) -> bool:
    """Whether the module's own weights are split over ranks."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False))
