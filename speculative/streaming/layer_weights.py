"""The link between a module that is a layer and the stream that has its weights.

It is a pair of hooks on the module, which take the weights before its forward pass and release them behind it. So
transformers' own code runs as it is, `generate` included. Who calls parts of the layer instead of the layer itself
enters the same object: `with weights_of(layer): ...`. Passes of a GPU begin and end: there the module that has the
layers gets a pair of hooks, too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from heavypath.speculative.streaming.device import DeviceStream
from heavypath.speculative.streaming.stream import LayerStream

WeightStream = LayerStream | DeviceStream
_ALWAYS_THERE = nullcontext()


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

    def __init__(self, stream: DeviceStream):
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
    """Whether a hook of a module does no more than to have its weights there."""
    return isinstance(getattr(hook, "__self__", None), LayerWeights | WholePass)


def streamed(layer: nn.Module) -> LayerWeights | None:
    """The weights of a module that a stream has; None if they are its own."""
    return next(filter(None, map(_owner, layer._forward_pre_hooks.values())), None)


def _owner(hook: object) -> LayerWeights | None:
    """The weights that a hook takes or releases; None for a hook of others."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, LayerWeights) else None


def weights_of(layer: nn.Module) -> AbstractContextManager[None]:
    """What has to be entered before a layer's weights are read."""
    return streamed(layer) or _ALWAYS_THERE


def stream_of(model: nn.Module) -> WeightStream | None:
    """The stream that has weights of a model's layers; None if there is none."""
    return next((weights.stream for weights in map(streamed, model.modules()) if weights is not None), None)
