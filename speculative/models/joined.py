"""Compute linear layers that share an input as one matrix product, over the model's own weights.

    [x W1' + b1, x W2' + b2, ...] = x [W1; W2; ...]' + [b1, b2, ...]

A GPU reads a weight at full speed only if many programs share it, and every launch costs microseconds. So queries, keys
and values are one product there, and gate and up another. The joined matrix is not a second copy: the weights are moved
into it, and each parameter becomes a view of its own rows. It stays the same object with the same name, values and
version. It may be saved, copied or trained, and a change of it in place changes the product. Weights move layer by
layer, so at most one layer is in memory twice. When the product is no longer used, each parameter gets memory of its
own again.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.layers.gated import silu_product
from heavypath.speculative.models.forward import is_plain
from heavypath.speculative.models.linear import Products
from heavypath.speculative.models.structure import has_hooks
from heavypath.speculative.ranks.peers import local_of

# The parameters joined now, by the identity of the first one. All forward passes of a model share them.
_shared: weakref.WeakValueDictionary[int, "_Together"] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Joining:
    """Joins linear layers of a model that share an input, if they are plain, on a GPU, and nothing else uses them."""

    def __init__(self, model: nn.Module):
        self._uses = Counter(id(local_of(weight)) for _, weight in model.named_parameters(remove_duplicate=False))

    def products(self, layers: Sequence[nn.Module]) -> Products | None:
        """A function from hidden states [rows, K] to the outputs of these layers; None if they cannot be joined.

        Their weights are moved into one matrix, see the module.
        """
        plain = [layer for layer in layers if type(layer) is nn.Linear and not has_hooks(layer)]
        if len(plain) < len(layers):
            return None
        weights = [layer.weight for layer in plain]
        biases = [layer.bias for layer in plain if layer.bias is not None]
        if len(biases) not in (0, len(layers)) or choose_impl("products", "auto", weights[0]) != "triton":
            return None
        together = self._together(weights)
        if together is None:
            return None
        added = self._together(biases) if biases else None
        return None if biases and added is None else JoinedProducts(together, added)

    def _together(self, parameters: Sequence[Tensor]) -> "_Together | None":
        first = parameters[0]
        with _lock:
            known = _shared.get(id(first))
            if known is not None and known.holds(parameters):
                return known
            movable = all(
                is_plain(one)
                and self._uses[id(one)] == 1
                and one.is_contiguous()
                and one.untyped_storage().nbytes() == one.nbytes  # not a view of a larger tensor
                and (one.shape[1:], one.dtype, one.device) == (first.shape[1:], first.dtype, first.device)
                and one.is_inference() == first.is_inference()
                for one in parameters
            )
            if not movable:
                return None
            made = _shared[id(first)] = _Together(parameters)
            return made


class _Together:
    """Parameters [n_i, ...] whose rows lie one after another in one tensor, for as long as this object exists.

    It does not hold that tensor. The memory belongs to the parameters, and is freed when they move, say to another
    device.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = parameters
        self.sizes = [len(one) for one in parameters]
        with _writing(parameters[0]):
            rows = parameters[0].new_empty(sum(self.sizes), *parameters[0].shape[1:])
            for one, own in zip(parameters, rows.split(self.sizes), strict=True):
                own.copy_(one)
                one.data = own
        weakref.finalize(self, _separate, parameters, _storage_of(rows)).atexit = False

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether this object joins exactly these parameters, and they have not moved since."""
        same = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        return same and rows_of(parameters) is not None

    def rows(self) -> Tensor:
        """All rows as one tensor, a view of the parameters' memory."""
        first = self._parameters[0]
        return first.as_strided((sum(self.sizes), *first.shape[1:]), first.stride())


class JoinedProducts:
    """A function from hidden states [rows, K] to their products with several weights, computed as one product.

    then: called after the product is launched, and before silu is; None for no call
    """

    then: Callable[[], None] | None = None

    def __init__(self, weights: _Together, biases: _Together | None):
        from heavypath.kernels.layers.few_rows import few_rows_product  # only needed on GPUs
        from heavypath.kernels.layers.measured import is_faster

        self._weights = weights
        self._biases = biases
        self._multiply = few_rows_product
        self._is_faster = is_faster

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        """The product [rows, n_i] with each weight i."""
        weight = self._weights.rows()
        biases = self._biases
        product = self._multiply(hidden, weight) if biases is None else linear(hidden, weight, biases.rows())
        if self.then is not None:
            self.then()
        return product.split(self._weights.sizes, -1)

    def gated(self, hidden: Tensor) -> Tensor:
        """silu(first product) * second product, [rows, F], for two weights: gate and up of an MLP."""
        weight = self._weights.rows()
        if self._biases is None and (self.then is None or self._is_faster(hidden, weight, gated=True)):
            return self._multiply(hidden, weight, gated=True)
        return silu_product(*self(hidden))


def rows_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """All rows [sum of n_i, ...] of parameters [n_i, ...] as one tensor, if they lie one after another from the start
    of one memory; None if they do not.
    """
    first = parameters[0]
    sizes = [len(one) for one in parameters]
    storages = {_storage_of(one) for one in parameters}
    starts = [sum(sizes[:index]) * first.stride(0) for index in range(len(sizes))]
    if len(storages) > 1 or [one.storage_offset() for one in parameters] != starts:
        return None
    return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """The address and size of a tensor's storage, equal for all tensors that share it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@contextmanager
def _writing(parameter: Tensor) -> Iterator[None]:
    """A context in which a parameter's memory can be replaced, whether it was made under inference_mode or not."""
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        yield


def _separate(parameters: Sequence[Tensor], storage: tuple[int, int]) -> None:
    """Copy each parameter that still lies in this joined storage into memory of its own."""
    try:
        with _writing(parameters[0]):
            for one in parameters:
                if _storage_of(one) == storage:
                    one.data = one.detach().clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return  # they stay joined, which changes no value
