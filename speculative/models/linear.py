"""Linear layers on a CPU: layers that share an input are one product, from weights repacked in the order of reading.

    [x W1' + b1, x W2' + b2, ...] = x [W1; W2; ...]' + [b1, b2, ...]

A step multiplies few rows by every weight, so its time is the time to read the weights. PyTorch uses MKL for such a
product, which from 2 rows on reads at a third of the memory's speed. `heavypath.kernels.native` reads at four fifths,
from a weight stored in blocks; a block has as many outputs as there are registers for sums
(bench/kernels/bench_linear.py). The blocks are a second copy of the weights, and a log line states its size. If there
is no memory for the copy, or no compiler for the kernels, a warning says so and the original weights are used. Those in
fp32 are multiplied by oneDNN, which takes a third to nine tenths of MKL's time.

A copy does not notice a later change of its weight. So before each generation the weight is compared with its former
state: address, version (which rises with every change in place), and, because a change through `.data` keeps the
version, `SAMPLE` numbers of each row along a diagonal that meets all rows and columns. A change through `.data` of
single elements off that diagonal is not noticed.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from heavypath.kernels.native.library import library
from heavypath.kernels.native.products import TYPES, Blocks, product
from heavypath.speculative.models.structure import has_hooks, version_of

logger = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]  # from an input [rows, K]
Products = Callable[[Tensor], Sequence[Tensor]]  # from an input [rows, K], one output for each layer

CONTROL_GROUP = Path("/sys/fs/cgroup")  # version 2, where a container sees its own group
SAMPLE = 16
_SILU = {type(ACT2FN[name]) for name in ("silu", "swish")}

_packed: "weakref.WeakValueDictionary[tuple[object, ...], Packed]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Linears:
    """Makes functions that multiply hidden states [rows, K] by a model's linear layers.

    On a CPU they use reordered copies of the weights, on a GPU `gpu_product`, otherwise the modules themselves.

    can_copy: whether weights can be copied: they are on a CPU, and there are kernels for copies, and enough memory
    """

    def __init__(self, whose: str, weights: Iterable[Tensor]):
        """weights: the weights that a forward pass reads; whose: the model's name in the log."""
        weights = [weight for weight in weights if weight.is_cpu and weight.dtype in TYPES]
        self._copied: list[Packed] = []
        self.can_copy = bool(weights) and library() is not None
        if not self.can_copy:
            return
        shared = _copied_of({id(weight) for weight in weights})
        needed = sum(weight.nbytes for weight in weights if id(weight) not in shared)
        free = free_memory()
        self.can_copy = 2 * needed <= free
        sizes = f"{needed / 1e6:,.0f} MB beside {free / 1e6:,.0f} MB that are free"
        if self.can_copy:
            logger.info("%s: its weights are copied in another order, at most %s", whose, sizes)
        else:
            logger.warning(
                "%s: no copy of its weights in another order (%s), which makes it several times slower", whose, sizes
            )

    def together(self, layers: Sequence[Any]) -> Products:
        """A function from hidden states [rows, K] to the outputs [rows, n_i] of layers that share this input."""
        if not (self.can_copy and are_plain(layers)):
            return each_alone([as_it_lies(layer) for layer in layers])
        copied = self.copy_of(layers)
        sizes = [len(layer.weight) for layer in layers]

        def multiply(hidden: Tensor) -> Sequence[Tensor]:
            outputs = product(hidden, copied.blocks)  # [rows, sum of n_i]
            return outputs.split(sizes, -1)

        return multiply

    def one(self, layer: Any) -> Product:
        """A function from hidden states [rows, K] to the output [rows, n] of a single layer."""
        if not (self.can_copy and are_plain([layer])):
            return as_it_lies(layer)
        copied = self.copy_of([layer])
        return lambda hidden: product(hidden, copied.blocks)

    def is_current(self) -> bool:
        """Whether no weight has changed since it was copied; a few changes through `.data` are not noticed."""
        return all(copied.is_current() for copied in self._copied)

    def copy_of(self, layers: Sequence[Any], paired: bool = False) -> "Packed":
        """The copy of these layers' weights and biases, shared by all forward passes in which the same layers are.

        paired: whether rows of two weights, gate and up, alternate in the copy, see `Blocks`
        """
        key = paired, *(id(layer.weight) for layer in layers)
        with _lock:
            copied = _packed.get(key)
            if copied is None or not copied.is_current():
                copied = _packed[key] = Packed(layers, paired)
        self._copied.append(copied)
        return copied


def _copied_of(weights: set[int]) -> set[int]:
    """The ids among `weights` of those of which a decoder has a current copy."""
    found: set[int] = set()
    with _lock:
        for copied in _packed.values():
            copies = weights.intersection(map(id, copied.parameters))
            if copies and copied.is_current():
                found |= copies
    return found


def each_alone(products: Sequence[Product]) -> Products:
    """One function for several: it gives each function the same hidden states, and returns the list of outputs."""
    return lambda hidden: [product(hidden) for product in products]


def as_it_lies(layer: Any) -> Product:
    """The fastest function for the output of a single layer that reads its weight in place, without a copy.

    That is the layer itself, oneDNN for fp32 on a CPU, or `gpu_product` for an fp8 weight on a GPU.
    """
    if is_linear(layer, "Float8Tensor") and layer.weight.is_cuda and layer.bias is None:
        from heavypath.speculative.models.gpu_product import product_of

        return product_of(layer)
    is_fp32 = are_plain([layer]) and layer.weight.dtype == torch.float32
    if not is_fp32 or not torch.backends.mkldnn.is_available():
        return layer
    multiply = torch.ops.mkldnn._linear_pointwise  # torch.compile uses it for linear layers, too
    return lambda hidden: multiply(hidden, layer.weight, layer.bias, "none", [], "")


class Packed:
    """A copy of the weights and biases of linear layers that share an input, reordered for compiled products.

    paired: whether rows of two layers, gate and up, alternate in the copy
    """

    def __init__(self, layers: Sequence[Any], paired: bool):
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        self.parameters = [each for each in (*weights, *biases) if each is not None]
        self._looks: list[_Look] = []
        for parameter in self.parameters:
            look = _look_of(parameter)
            self._looks.append(look._replace(bits=look.bits.clone()))
        self.blocks = Blocks.of(weights, biases, paired)

    def is_current(self) -> bool:
        """Whether no weight has changed since it was copied; a few changes through `.data` are not noticed."""
        return all(map(_is_as_before, self.parameters, self._looks))


def are_plain(layers: Sequence[Any]) -> bool:
    """Whether the compiled kernels can compute these layers: linear, on a CPU, all of one supported dtype."""
    dtypes = set()
    for layer in layers:
        if not is_linear(layer) or not layer.weight.is_cpu:
            return False
        dtypes.add(layer.weight.dtype)
    return len(dtypes) == 1 and dtypes <= TYPES.keys()


def is_linear(layer: Any, *others: str) -> bool:
    """Whether a layer is PyTorch's nn.Linear without hooks, with a plain weight or one of a class named in `others`."""
    if type(layer) is not nn.Linear or has_hooks(layer):
        return False
    kind = type(layer.weight)
    return kind in (nn.Parameter, Tensor) or kind.__name__ in others


def is_silu(activation: nn.Module) -> bool:
    """Whether an activation is SiLU by transformers' own module, without hooks."""
    return type(activation) in _SILU and not has_hooks(activation)


class _Look(NamedTuple):
    """What a change of a parameter [N] or [N, K] alters. bits: those of the numbers that are compared, as integers."""

    address: int
    version: int
    bits: Tensor


def _look_of(parameter: Tensor) -> _Look:
    integers = torch.int32 if parameter.dtype.itemsize == 4 else torch.int16
    bits = parameter.detach().view(integers)
    if bits.ndim > 1:
        bits = _diagonals(bits)
    return _Look(parameter.data_ptr(), version_of(parameter), bits)


def _diagonals(bits: Tensor) -> Tensor:
    """Up to `SAMPLE` entries of each row of a tensor [N, K], along diagonals that meet all columns."""
    rows, columns = bits.shape
    width = min(SAMPLE, columns)
    step = columns + width  # to the entries of the next row
    period = columns // width  # rows until the diagonal begins again
    count, left = divmod(rows, period)
    diagonals = bits.as_strided((count, period, width), (period * columns, step, 1))
    if left == 0:
        return diagonals
    begun = bits[rows - left :]
    begun = begun.as_strided((left, width), (step, 1))
    return torch.cat([diagonals.flatten(), begun.flatten()])


def _is_as_before(parameter: Tensor, before: _Look) -> bool:
    now = _look_of(parameter)
    if now.address != before.address or now.version != before.version:
        return False
    return now.bits.dtype == before.bits.dtype and torch.equal(now.bits, before.bits)


def free_memory() -> int:
    """Bytes that this process can still allocate, from Linux and from the limit of its control group, if it has one."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    facts = dict(line.split(":") for line in lines)
    kibibytes, _ = facts["MemAvailable"].split()
    free = int(kibibytes) << 10
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text()
        used = (CONTROL_GROUP / "memory.current").read_text()
    except OSError:
        return free
    limit = limit.strip()
    if limit == "max":
        return free
    left = max(0, int(limit) - int(used))
    return min(free, left)
