"""The link between a module that is a layer and the stream that has its weights.

It is a pair of hooks on the module, which take the weights before its forward pass and release them after it. So
transformers' own code runs as it is, `generate` included. Who calls parts of the layer instead of the layer itself
enters the same object: `with weights_of(layer): ...`. Passes of a GPU begin and end: there the module that has the
layers gets a pair of hooks, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

_ALWAYS_THERE = nullcontext()


class StreamCounts(NamedTuple):
    """Counts of a stream.

    bytes_read: from files; or, to a GPU, from the host's memory
    reading:    seconds in which at least one read was under way
    waiting:    seconds in which a pass waited for a layer
    untimed:    of bytes_read those that CUDA graphs copied, for which neither kind of seconds is known
    """

    bytes_read: int = 0
    reading: float = 0.0
    waiting: float = 0.0
    untimed: int = 0

    def since(self, before: "StreamCounts") -> "StreamCounts":
        """The counts since they were `before`."""
        return StreamCounts(
            bytes_read=self.bytes_read - before.bytes_read,
            reading=self.reading - before.reading,
            waiting=self.waiting - before.waiting,
            untimed=self.untimed - before.untimed,
        )

    @property
    def bandwidth(self) -> float:
        """Bytes a second, while it read; 0 if it did not, as far as that is known."""
        return (self.bytes_read - self.untimed) / self.reading if self.reading else 0.0


class WeightStream(ABC):
    """A stream that brings the weights of layers when they are needed; `streaming` has one for a CPU and one for a GPU.

    layers: how many; resident: those of them that stay; on_take: called with each layer that is taken
    """

    layers: int
    resident: frozenset[int]
    on_take: Callable[[int], None] | None

    @property
    def is_fixed(self) -> bool:
        """True if a pass asks the host for nothing, so that it may be captured in a CUDA graph."""
        return True

    @abstractmethod
    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by their names; they hold its weights while it is taken."""

    @abstractmethod
    def take(self, layer: int) -> None:
        """Have a layer in memory until it is released."""

    @abstractmethod
    def release(self, layer: int) -> None:
        """Allow a layer's memory to be filled with another one."""

    @abstractmethod
    def one_pass(self) -> AbstractContextManager[None]:
        """Have passes of other threads wait."""

    def ahead(self) -> AbstractContextManager[None]:
        """A block for a step before it drafts: the first layers may be brought meanwhile."""
        return nullcontext()

    def replay(self) -> AbstractContextManager[None]:
        """A block for launching a CUDA graph that takes its layers: it overwrites their places, whoever uses them."""
        return nullcontext()

    @abstractmethod
    def counts(self) -> StreamCounts:
        """The counts so far."""


class LayerWeights:
    """A layer's weights, which are in memory between entering and leaving."""

    def __init__(self, stream: WeightStream, index: int):
        self.stream, self.index = stream, index

    def hook(self, layer: nn.Module) -> None:
        """Have the module's forward pass enter and leave."""
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.behind, always_call=True)

    def before(self, module: nn.Module, given: Any) -> None:
        """Take the weights."""
        self.stream.take(self.index)

    def behind(self, module: nn.Module, given: Any, result: Any) -> None:
        """Release the weights."""
        self.stream.release(self.index)

    def __enter__(self) -> None:
        self.stream.take(self.index)

    def __exit__(self, *error: object) -> None:
        self.stream.release(self.index)


class WholePass:
    """A call of the module that has all the layers is one pass over them."""

    def __init__(self, stream: Any):
        self.stream = stream

    def hook(self, module: nn.Module) -> None:
        """Have the module's forward pass enter and leave."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.behind, always_call=True)

    def before(self, module: nn.Module, given: Any) -> None:
        """Begin a pass."""
        self.stream.enter()

    def behind(self, module: nn.Module, given: Any, result: Any) -> None:
        """End it."""
        self.stream.leave()


def is_own(hook: object) -> bool:
    """True if a hook of a module does no more than to bring its weights."""
    return isinstance(getattr(hook, "__self__", None), LayerWeights | WholePass)


def streamed(layer: nn.Module) -> LayerWeights | None:
    """The weights of a module that a stream has; None if they are its own."""
    return next(filter(None, map(_owner, layer._forward_pre_hooks.values())), None)


def _owner(hook: object) -> LayerWeights | None:
    """The weights that a hook takes or releases; None for a hook of others."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, LayerWeights) else None


def weights_of(layer: nn.Module) -> AbstractContextManager[None]:
    """A context to be entered before a layer's weights are read."""
    return streamed(layer) or _ALWAYS_THERE


def stream_of(model: nn.Module) -> WeightStream | None:
    """The stream that has weights of a model's layers; None if there is none."""
    return next((weights.stream for weights in map(streamed, model.modules()) if weights is not None), None)
