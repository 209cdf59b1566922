"""`stream_from`: a function of a user brings the weights of a layer each time that the layer computes."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.models.forward import is_plain
from heavypath.speculative.models.layer_weights import LayerWeights, StreamCounts, WeightStream, stream_of
from heavypath.speculative.ranks.peers import is_split
from heavypath.speculative.streaming.holds import LOOK_AGAIN, Hold
from heavypath.speculative.streaming.offloaded import layers_in
from heavypath.speculative.streaming.stream import check_layer

Read = Callable[[int], Mapping[str, Tensor]]  # from a layer's number to its weights by their names in the layer


def stream_from(model: PreTrainedModel, read: Read) -> WeightStream:
    """Make a stream for a model whose layers' weights a function of yours returns, from wherever they are.

    read: returns the parameters of layer number i by their names in it, such as {"mlp.up_proj.weight": ...}, with the
        shapes and dtypes that they have in the model, on any device. It is called for each layer in each pass, by the
        thread that decodes, which waits for it. The tensors are copied

    The model is changed: the parameters of all layers of one shape share one memory, so its own weights are freed. It
    may be on a CPU or a GPU, where steps are no CUDA graphs. `model.generate` uses the same stream. Layers that are on
    disk as safetensors files are read ahead by `load_streamed`.

    Raises ValueError for a model without a list of layers, one that is streamed already, or whose layers have quantised
    or shared weights, or are split over processes. While decoding, ValueError for weights with other names, shapes or
    dtypes, and for NaN or infinite weights; errors of `read` are passed on.
    """
    name, layers = layers_in(model)
    if stream_of(model) is not None:
        raise ValueError(f"the layers of this {type(model).__name__} are streamed already; load it again")
    weights = [weight for layer in layers for weight in layer.parameters()]
    if len({id(weight) for weight in weights}) < len(weights) or any(map(is_split, layers.modules())):
        raise ValueError(f"the weights of each layer in {name} must be its own, and in this process")
    if not all(map(is_plain, weights)):
        raise ValueError(f"the weights of {name} must be ordinary tensors, got quantised ones")
    return _OwnStream(list(layers), read)


class _OwnStream(WeightStream):
    """A stream that calls `read` for the weights of each layer when the layer is taken."""

    def __init__(self, layers: Sequence[nn.Module], read: Read):
        self.layers = len(layers)
        self.resident = frozenset()
        self.on_take = None
        self._read = read
        self._alone = threading.RLock()
        self._changed = threading.Condition()
        self._hold: Hold | None = None  # of the one layer that is taken
        self._counts = StreamCounts()
        self._unchecked = {*range(self.layers)}
        self._tensors: list[dict[str, Tensor]] = []
        memory: dict[tuple[object, ...], dict[str, Tensor]] = {}  # by the layout of a layer
        for number, layer in enumerate(layers):
            own = dict(layer.named_parameters())
            layout = tuple((name, weight.shape, weight.dtype) for name, weight in own.items())
            if layout not in memory:
                memory[layout] = {name: torch.empty_like(weight) for name, weight in own.items()}
            self._tensors.append(memory[layout])
            for name, weight in own.items():
                weight.data = memory[layout][name]
            LayerWeights(self, number).hook(layer)

    @property
    def is_fixed(self) -> bool:
        """False: each pass calls a function on the host."""
        return False

    def tensors(self, layer: int) -> dict[str, Tensor]:
        return self._tensors[layer]

    def take(self, layer: int) -> None:
        """Read a layer's weights into its tensors, in which other threads' layers wait until it is released.

        Raises ValueError for weights that are not those of the layer.
        """
        self.release(layer)  # of a pass that was interrupted
        hold = Hold.of_this_call(layer)
        with self._changed:
            while self._hold is not None and not self._hold.is_over:
                self._changed.wait(LOOK_AGAIN)
            self._hold = hold
        try:
            self._bring(layer)
        except BaseException:
            self.release(layer)
            raise

    def _bring(self, layer: int) -> None:
        if self.on_take is not None:
            self.on_take(layer)
        begin = time.perf_counter()
        given = self._read(layer)
        own = self._tensors[layer]
        self._check(layer, given)
        with torch.inference_mode():
            for name, weight in own.items():
                weight.copy_(given[name])
        seconds = time.perf_counter() - begin
        done = sum(weight.nbytes for weight in own.values())
        before = self._counts
        self._counts = StreamCounts(before.bytes_read + done, before.reading + seconds, before.waiting + seconds)
        if layer in self._unchecked:
            check_layer(layer, own)
            self._unchecked.discard(layer)

    def _check(self, layer: int, given: Mapping[str, Tensor]) -> None:
        own = self._tensors[layer]
        if {*given} != {*own}:
            wrong = ", ".join(sorted({*given} ^ {*own}))
            raise ValueError(f"read({layer}) must return the weights {', '.join(own)}; missing or unknown: {wrong}")
        for name, weight in own.items():
            found = given[name]
            if (found.shape, found.dtype) != (weight.shape, weight.dtype):
                raise ValueError(
                    f"read({layer}) must return {name} as {weight.dtype} {[*weight.shape]}, "
                    f"got {found.dtype} {[*found.shape]}"
                )

    def release(self, layer: int) -> None:
        """Allow other threads to overwrite the layer's memory, if this thread took it."""
        with self._changed:
            if self._hold is not None and self._hold.thread is threading.current_thread():
                self._hold = None
                self._changed.notify()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        with self._alone:
            try:
                yield
            finally:
                self.release(0)

    def counts(self) -> StreamCounts:
        """Bytes copied so far, and seconds in `read` and in copying, all of which passes waited for."""
        return self._counts
