"""While a layer's small kernels run, request the weight that the next product reads.

    product                  what runs after it             whose weight is requested meanwhile
    queries, keys, values    rotary embedding, attention    output projection
    output projection        sum and norm                   gate and up
    gate and up              silu                           down
    down                     sum and norm                   the next layer's queries, keys and values

The first columns of the weight come into the GPU's second cache (L2) while the memory would be idle; see
`kernels.layers.prefetch`. The requests are launched on a second stream, as branches of a CUDA graph. So they delay no
other kernel, and change no value.

They are made only while a graph is captured. Captures are made one at a time, so no other thread uses the second stream
then.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heavypath.kernels.layers.measured import amounts_ahead
from heavypath.kernels.layers.prefetch import prefetch_weight
from heavypath.speculative.models.forward import is_plain
from heavypath.speculative.models.joined import JoinedProducts, rows_of
from heavypath.speculative.models.linear import Product


def request_ahead(layers: Sequence[Any], device: torch.device) -> None:
    """Make each product of these layers request the weight of the next product, where that was measured to be faster.

    layers: all layers of a forward pass, in order, with the attributes of `llama._LlamaLayer`; their functions are
            replaced. Products whose weights are not joined make no request.
    """
    amounts = amounts_ahead(device)
    if amounts is None:
        return
    for layer in layers:  # compiles the kernel, and loads it: a capture must not do that
        for module in layer.linears:
            if is_plain(module.weight):
                prefetch_weight(module.weight, 1)
    second = SecondStream(device)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer.project, JoinedProducts):
            layer.project.then = partial(second.request, [layer.mixing], amounts.attention)
        layer.mix = followed_by(layer.mix, partial(second.request, layer.gates, amounts.small))
        if isinstance(layer.gate_products, JoinedProducts):
            layer.gate_products.then = partial(second.request, [layer.last], amounts.small)
        if following is None:
            layer.down = followed_by(layer.down, second.join)
        else:
            layer.down = followed_by(layer.down, partial(second.request, following.projections, amounts.small))


def followed_by(product: Product, then: Callable[[], None]) -> Product:
    """The same function, which then makes a call."""

    def call(hidden: Tensor) -> Tensor:
        result = product(hidden)
        then()
        return result

    return call


class SecondStream:
    """A stream of a device, on which weights are requested while a graph is captured."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def request(self, modules: Sequence[nn.Module], nbytes: int) -> None:
        """Request `nbytes` bytes of the weights of linear layers; nothing of quantised weights."""
        weights: list[Any] = [module.weight for module in modules]
        if not torch.cuda.is_current_stream_capturing() or not all(map(is_plain, weights)):
            return
        joined = rows_of(weights)
        parts = weights if joined is None else [joined]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for weight in parts:
                prefetch_weight(weight, max(1, nbytes // len(parts)))

    def join(self) -> None:
        """Let the captured work that follows wait for the requests: a capture may end with no open branch."""
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)
