"""Packing of a layer's tensors one after another in one memory: each begins where matrix products like it best.

In files tensors begin at multiples of 8 bytes; the products of a GPU are faster, and some only run, at multiples of 16.
"""

from collections.abc import Mapping

from torch import Tensor

from heavypath.speculative.streaming.source import Place

ALIGNMENT = 256  # bytes, as torch's own memory on a GPU is aligned


class Packing:
    """The places of tensors, given themselves or by their places in files, in memory of `nbytes` bytes."""

    def __init__(self, tensors: Mapping[str, Tensor | Place]):
        self._facts = {name: (one.dtype, (*one.shape,), one.nbytes) for name, one in tensors.items()}
        self.nbytes = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in self._facts.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors by their names, as views of memory uint8 [nbytes or more]."""
        views, begin = {}, 0
        for name, (dtype, shape, nbytes) in self._facts.items():
            views[name] = memory[begin : begin + nbytes].view(dtype).view(shape)
            begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return views
