"""Pack a layer's tensors one after another into one buffer, each aligned for fast matrix products.

In files tensors begin at multiples of 8 bytes. Matrix products on a GPU are faster at multiples of 16, and some need
them.
"""

from collections.abc import Mapping

from torch import Tensor

from heavypath.speculative.streaming.source import Place

ALIGNMENT = 256  # bytes, as for torch's allocations on a GPU


class Packing:
    """The layout of some tensors in one buffer, in their order, each at a multiple of 256 bytes.

    tensors: the tensors or their places in files, by name; only dtypes and shapes matter
    nbytes:  the size of the buffer
    """

    def __init__(self, tensors: Mapping[str, Tensor | Place]):
        self._facts = {name: (one.dtype, (*one.shape,), one.nbytes) for name, one in tensors.items()}
        self.nbytes = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in self._facts.values())

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of the buffer `memory`, uint8 [at least nbytes]."""
        views = {}
        begin = 0
        for name, (dtype, shape, nbytes) in self._facts.items():
            views[name] = memory[begin : begin + nbytes].view(dtype).view(shape)
            begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return views
