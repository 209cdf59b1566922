"""Connect a layer's module with the stream that loads its weights (see `streaming`).

Hooks on the module take the weights before its forward pass and release them after it. So transformers' own code runs
unchanged, including its `generate`. Code that calls parts of the layer instead of the layer itself enters the same
object: `with weights_of(layer): ...`. Passes on a GPU begin and end, so there the module that contains the layers gets
a pair of hooks, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

_ALWAYS_THERE = nullcontext()


class StreamCounts(NamedTuple):
    """Counters of a stream.

    bytes_read: from files; for a GPU, from the host's memory
    reading:    seconds in which at least one read was under way
    waiting:    seconds in which a pass waited for a layer
    untimed:    the part of bytes_read that CUDA graphs copied, whose reading and waiting times are unknown
    """

    bytes_read: int = 0
    reading: float = 0.0
    waiting: float = 0.0
    untimed: int = 0

    def since(self, before: "StreamCounts") -> "StreamCounts":
        """The difference from an earlier reading of the counters."""
        return StreamCounts(
            bytes_read=self.bytes_read - before.bytes_read,
            reading=self.reading - before.reading,
            waiting=self.waiting - before.waiting,
            untimed=self.untimed - before.untimed,
        )

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the timed reads; 0 if nothing was read, or no times are known."""
        if not self.reading:
            return 0.0
        timed = self.bytes_read - self.untimed
        return timed / self.reading


class WeightStream(ABC):
    """Loads the weights of layers when they are needed; `streaming` has a stream for a CPU and one for a GPU.

    layers:   how many layers there are
    resident: the layers that stay in memory
    on_take:  called with the number of each layer that is taken
    """

    layers: int
    resident: frozenset[int]
    on_take: Callable[[int], None] | None

    @property
    def is_fixed(self) -> bool:
        """Whether a pass makes no request to the host, so that it may be captured in a CUDA graph."""
        return True

    @abstractmethod
    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by name. They hold its weights while the layer is taken."""

    @abstractmethod
    def take(self, layer: int) -> None:
        """Wait until a layer is in memory, and keep it there until it is released."""

    @abstractmethod
    def release(self, layer: int) -> None:
        """Allow a layer's memory to be overwritten by another layer."""

    @abstractmethod
    def one_pass(self) -> AbstractContextManager[None]:
        """A context for one pass over the layers. Passes of other threads wait until it is left."""

    def ahead(self) -> AbstractContextManager[None]:
        """A context for a step of decoding, entered before drafting: the first layers may be loaded while it drafts."""
        return nullcontext()

    def replay(self) -> AbstractContextManager[None]:
        """A context for launching a CUDA graph that loads layers.

        Other passes wait, since the graph overwrites the buffers.
        """
        return nullcontext()

    @abstractmethod
    def counts(self) -> StreamCounts:
        """The values of the counters so far, since the stream was made."""


class LayerWeights:
    """A context manager: a layer's weights are in memory while it is entered."""

    def __init__(self, stream: WeightStream, index: int):
        self.stream = stream
        self.index = index

    def hook(self, layer: nn.Module) -> None:
        """Make the module's forward pass enter and leave this context."""
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.behind, always_call=True)

    def before(self, module: nn.Module, given: Any) -> None:
        """A forward pre-hook: wait until the layer's weights are in memory."""
        self.stream.take(self.index)

    def behind(self, module: nn.Module, given: Any, result: Any) -> None:
        """A forward hook: allow the layer's memory to be used for another layer."""
        self.stream.release(self.index)

    def __enter__(self) -> None:
        self.stream.take(self.index)

    def __exit__(self, *error: object) -> None:
        self.stream.release(self.index)


class WholePass:
    """Hooks for the module that contains all streamed layers: a call of the module is one pass over them.

    stream: a `WeightStream` whose passes begin with `enter` and end with `leave`, as on a GPU
    """

    def __init__(self, stream: Any):
        self.stream = stream

    def hook(self, module: nn.Module) -> None:
        """Make the module's forward pass begin and end a pass."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.behind, always_call=True)

    def before(self, module: nn.Module, given: Any) -> None:
        """A forward pre-hook: begin a pass of the stream."""
        self.stream.enter()

    def behind(self, module: nn.Module, given: Any, result: Any) -> None:
        """A forward hook: end the pass of the stream."""
        self.stream.leave()


def is_own(hook: object) -> bool:
    """Whether a hook of a module only loads or releases its weights."""
    return isinstance(getattr(hook, "__self__", None), LayerWeights | WholePass)


def streamed(layer: nn.Module) -> LayerWeights | None:
    """The `LayerWeights` of a module whose weights are streamed; None for other modules."""
    for hook in layer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, LayerWeights):
            return owner
    return None


def weights_of(layer: nn.Module) -> AbstractContextManager[None]:
    """A context to enter before reading a layer's weights. It does nothing for layers that are not streamed."""
    return streamed(layer) or _ALWAYS_THERE


def stream_of(model: nn.Module) -> WeightStream | None:
    """The stream that loads the weights of a model's layers; None if there is none."""
    for layer in model.modules():
        weights = streamed(layer)
        if weights is not None:
            return weights.stream
    return None
