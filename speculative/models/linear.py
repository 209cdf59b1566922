"""Linear layers on a CPU: those with one input as one product, from weights in the order in which oneDNN reads them.

    [x W1' + b1, x W2' + b2, ...] = x [W1; W2; ...]' + [b1, b2, ...]

A step multiplies few rows by every weight, so its time is that of reading the weights. PyTorch hands such a product to
MKL, which reads at half of the memory's speed from 4 rows on; oneDNN, from a weight that lies in blocks of the form
that its code wants, at four fifths (`python bench/linear.py`). The reordered weights are a second copy, which a log
line names with its size. Where there is no memory for it, oneDNN reads the model's own weights, and a warning says so.

A copy does not see what is written into a weight later. So before each text a weight is compared with what it was: its
place, its version, which rises with every change in place, and, since a change through `.data` leaves that as it is,
SAMPLE numbers of each row, along a diagonal, such that rows and columns are all met. A change through `.data` of single
elements off that diagonal is not noticed.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heavypath.speculative.models.structure import has_hooks, version_of

logger = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]  # of [rows, K]
Products = Callable[[Tensor], Sequence[Tensor]]  # of [rows, K], one for each layer

FROM_MEMORY = 1 << 20  # a model of at most so many weights stays in a core's caches
ROWS = 16  # that weights are reordered for; any number may come, and 4 to 64 give the same blocks
SAMPLE = 16
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own

_packed: "weakref.WeakValueDictionary[tuple[int, ...], _Packed]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Linears:
    """The products of a model's linear layers, as functions. On a GPU, and for a small model, its own modules."""

    def __init__(self, whose: str, weights: Iterable[Tensor]):
        """weights: those that a forward pass reads; whose: they are, for the log."""
        weights = [weight for weight in weights if weight.is_cpu]
        has_one_dnn = torch.backends.mkldnn.is_available()
        self._from_memory = has_one_dnn and sum(weight.numel() for weight in weights) > FROM_MEMORY
        self._copied: list[_Packed] = []
        self._may_copy = False
        if self._from_memory:
            with _lock:  # another decoder's copies serve this one, too
                there = {id(each) for copied in _packed.values() if copied.is_current() for each in copied.parameters}
            needed, free = sum(weight.nbytes for weight in weights if id(weight) not in there), free_memory()
            self._may_copy = 2 * needed <= free
            sizes = f"{needed / 1e6:,.0f} MB beside {free / 1e6:,.0f} MB that are free"
            if self._may_copy:
                logger.info("%s: its weights are copied in another order, at most %s", whose, sizes)
            else:
                logger.warning("%s: no copy of its weights in another order (%s), which halves the speed", whose, sizes)

    def together(self, layers: Sequence[Any]) -> Products:
        """The products of layers with one input."""
        biased = {layer.bias is not None for layer in layers if _is_plain_linear(layer)}
        if not (self._may_copy and all(map(_is_plain_linear, layers)) and len(biased) == 1):
            apart = [self.one(layer) for layer in layers]
            return lambda hidden: [product(hidden) for product in apart]
        return self._copy_of(layers)

    def one(self, layer: Any) -> Product:
        """The product of one layer."""
        if not (self._from_memory and _is_plain_linear(layer)):
            return layer
        if not self._may_copy:
            return lambda hidden: _by_one_dnn(hidden, layer.weight, layer.bias)
        copied = self._copy_of([layer])
        return lambda hidden: copied(hidden)[0]

    def is_current(self) -> bool:
        """Whether all copies are still those of the weights."""
        return all(copied.is_current() for copied in self._copied)

    def _copy_of(self, layers: Sequence[nn.Linear]) -> "_Packed":
        """The copy of these layers' weights, one for all who need it."""
        key = tuple(id(layer.weight) for layer in layers)
        with _lock:
            copied = _packed.get(key)
            if copied is None or not copied.is_current():
                copied = _packed[key] = _Packed(layers)
        self._copied.append(copied)
        return copied


class _Packed:
    """The products of linear layers with one input by a reordered copy of all their weights."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.parameters = [each for layer in layers for each in (layer.weight, layer.bias) if each is not None]
        self._sizes = [len(layer.weight) for layer in layers]
        self._looks = [*map(_look_of, self.parameters)]
        with torch.inference_mode():
            weight = torch.cat([layer.weight for layer in layers])
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            self._bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        product = _by_one_dnn(hidden, self._weight, self._bias)
        return product.split(self._sizes, -1) if len(self._sizes) > 1 else (product,)

    def is_current(self) -> bool:
        """Whether the parameters still look as they did."""
        return all(map(_is_as_before, self.parameters, self._looks))


def _by_one_dnn(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden @ weight.T + bias.

    oneDNN generates code for each number of rows that it meets, which takes half a millisecond and 0.7 MB. So numbers
    of rows are rounded up, to four different ones between a power of two and the next.
    """
    rows = len(hidden)
    step = 1 << max(0, rows.bit_length() - 3)
    padded = pad(hidden, (0, 0, 0, -rows % step)) if rows % step else hidden
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:rows]


def _is_plain_linear(layer: Any) -> bool:
    """Whether oneDNN can do what a layer does: a linear one in a type that it multiplies, without hooks, on a CPU."""
    if type(layer) is not nn.Linear or has_hooks(layer):
        return False
    weight = layer.weight  # torchao quantises the weight, not the module
    in_its_types = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return type(weight) is nn.Parameter and weight.is_cpu and in_its_types and weight.is_contiguous()


def _look_of(parameter: Tensor) -> tuple[int, int, Tensor]:
    """Where a parameter [N] or [N, K] lies, its version, and some of its bits in each row."""
    bits = parameter.detach().view(torch.int32 if parameter.dtype.itemsize == 4 else torch.int16)
    if bits.ndim == 1:
        bits = bits.clone()
    else:
        rows, columns = bits.shape
        width = min(SAMPLE, columns)
        period = columns // width  # rows until the diagonal begins again
        whole = rows // period * period
        sizes, steps = (rows // period, period, width), (period * columns, columns + width, 1)
        begun = bits[whole:].as_strided((rows - whole, width), steps[1:])
        bits = torch.cat([bits.as_strided(sizes, steps).flatten(), begun.flatten()])
    return parameter.data_ptr(), version_of(parameter), bits


def _is_as_before(parameter: Tensor, look: tuple[int, int, Tensor]) -> bool:
    place, version, bits = _look_of(parameter)
    return (place, version) == look[:2] and bits.dtype == look[2].dtype and torch.equal(bits, look[2])


def free_memory() -> int:
    """Bytes that this process may still take, by Linux and by the limit of its control group, if it has one."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) << 10
    try:
        limit, used = ((CONTROL_GROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
