"""What tree attention should take on a GPU: the longer of reading keys and values, and of the tensor cores' work.

    bytes    4 Hkv D (L + N), of keys and values in 16 bits, at READ of a copy's bandwidth
    work     4 Hq N D (L + N / 2) operations, at TENSOR

Every node sees the whole prefix, and with groups each key is used by N Hq / Hkv queries. So work, which grows with the
nodes, is above reading from some 170 of them on: of 32 / 8 heads from 33 to 46 nodes on. An empty launch, its merge and
the first keys take AROUND.
"""

from typing import NamedTuple

from common import Row
from predict_step import BANDWIDTH, PICKS, Known, Pick

READ = Known(0.75, 0.85, 0.65, "judged: two stages of 32 KB in flight, one program a multiprocessor")
TENSOR = Known(
    450e12, 560e12, 380e12, "machine code for sm_90: of 1,775 cycles of a block of 64 keys, 1,024 are products, which "
    "wait for the softmax: at most 58% of the peak of 989 TFLOP/s",
)  # fmt: skip
AROUND = Known(3e-6, 2e-6, 5e-6, "a launch, the first keys, a ticket and the merge")
BYTES = 2


class Shape(NamedTuple):
    """A call: nodes, rows of the prefix, heads of queries and of keys, and columns of a head."""

    nodes: int
    prefix: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def nbytes(self) -> float:
        """Bytes of the keys and values that are read once."""
        return 2 * BYTES * self.kv_heads * self.head_dim * (self.prefix + self.nodes)

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products."""
        return 4 * self.heads * self.nodes * self.head_dim * (self.prefix + self.nodes / 2)


def bounds(shape: Shape, bandwidth: Known, pick: Pick) -> dict[str, float]:
    """Seconds of reading, and of the tensor cores."""
    return {"reading": shape.nbytes / (pick(bandwidth) * pick(READ)), "products": shape.operations / pick(TENSOR)}


def seconds(shape: Shape, bandwidth: Known, pick: Pick) -> float:
    """Seconds of a call."""
    return max(bounds(shape, bandwidth, pick).values()) + pick(AROUND)


SHAPES = [
    Shape(nodes, prefix, *heads)
    for heads in ((32, 32), (32, 8), (64, 8))
    for prefix in (2048, 8192, 32768, 131072)
    for nodes in (32, 64, 128)
]


def rows() -> list[Row]:
    """Microseconds of calls, what bounds them, and their range, by GPU."""
    found = []
    for gpu, bandwidth in BANDWIDTH.items():
        for shape in SHAPES:
            parts = bounds(shape, bandwidth, PICKS["likely"])
            row = {"gpu": gpu, "heads": f"{shape.heads}/{shape.kv_heads}", "nodes": shape.nodes, "prefix": shape.prefix}
            row |= {name: 1e6 * each for name, each in parts.items()}
            row |= {"bound": max(parts, key=lambda name: parts[name])}
            found.append(row | {name: 1e6 * seconds(shape, bandwidth, pick) for name, pick in PICKS.items()})
    return found
