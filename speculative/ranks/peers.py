"""What decoding asks of several processes that decode together, as one process alone answers it.

A process that is alone has nobody to agree with, so the methods of `Peers` do nothing. `ranks.agreement` implements
them for several processes. `Parts` says which part of a model's weights this process has: all of them. `ranks.shards`
is for a model that is split.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from heavypath.kernels.nodes import Verified

Answer = TypeVar("Answer")
Product = Callable[[Tensor], Tensor]  # from an input [rows, K]


class Peers:
    """This process alone.

    is_alone: whether there is only one process. With several, trees have a fixed size, even where they differ
    """

    is_alone: bool = True

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Begin a generation; facts: {name: value} that must be the same on all ranks."""

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers and the trace that this process writes."""
        return streamers, trace

    def tell(self) -> None:
        """Before a step: signal the other processes if this one must stop."""

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """After a step: stop all sequences, by `left` (`StateField.LEFT`), if the results of the processes differ.

        drafted: a `Drafted`; logits: [B, N, V], all logits of the target
        """

    def error(self, left: int, step: int) -> BaseException | None:
        """The error to raise after step number `step` if `left`, a value of `LEFT`, stands for one; else None."""
        return None

    def end(self) -> None:
        """End a generation."""

    def holding(self) -> AbstractContextManager[object]:
        """Defer exceptions of code that only one process runs until all have reached the same step."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[object]:
        """A context in which Ctrl-C stops all processes after the same step."""
        return nullcontext()

    def decided(self, by: Callable[[], Answer]) -> Answer:
        """The result of a function that may return different values in different processes."""
        return by()

    def any(self, fact: bool) -> bool:
        """Whether `fact` is true in any of the processes."""
        return fact


ALONE = Peers()


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
