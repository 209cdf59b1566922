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
    """What decoding does together with other processes that hold parts of the model; here nothing, for one process.

    is_alone: whether there is only one process. With several, absent nodes stay in a tree, so that sizes are the same
    """

    is_alone: bool = True

    def begin_text(self, facts: Mapping[str, object], target: Any) -> None:
        """Called before a generation: check that all processes do the same. facts: by name, the same in all of them."""

    def of_first(self, streamers: list[Any], trace: str | Path | None) -> tuple[list[Any], str | Path | None]:
        """The streamers that this process calls, and the file of the trace that it writes."""
        return streamers, trace

    def tell(self) -> None:
        """Called before a step: signal the other processes if this one must stop after it."""

    def check(self, drafted: Any, logits: Tensor, verified: Verified, left: Tensor) -> None:
        """Called at the end of a step: stop all sequences if the results of the processes differ, or one must stop.

        logits: the target's, [B, N, V]; left: `StateField.LEFT`, LongTensor[b], which is written to stop sequences
        """

    def error(self, left: int, step: int) -> BaseException | None:
        """The error to raise after step number `step` if `check` set `left` to a value that means one; else None."""
        return None

    def end(self) -> None:
        """Called after the last step of a generation: raise if one of the processes had to stop in it."""

    def holding(self) -> AbstractContextManager[object]:
        """A context that keeps exceptions of code that one process alone runs, until all have reached the same step."""
        return nullcontext()

    def interruptible(self) -> AbstractContextManager[object]:
        """A context in which Ctrl-C stops all processes after the same step."""
        return nullcontext()

    def decided(self, by: Callable[[], Answer]) -> Answer:
        """The result of the function `by` in the first process, for a function that may differ between processes."""
        return by()

    def any(self, fact: bool) -> bool:
        """Whether `fact` is true in any of the processes."""
        return fact


ALONE = Peers()


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
    if isinstance(tensor, DTensor):
        return 1 / tensor.device_mesh.size()
    return 1.0


def is_split(module: nn.Module) -> bool:
    """Whether the module's own weights are split over ranks."""
    return any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False))
