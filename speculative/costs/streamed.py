"""Costs of a step where layers of the target are streamed, estimated from the models, for decoders without a profile.

A pass reads S bytes of weights anew, while its layers compute and while trees are drafted. So it takes the longer of
two times: that of reading, and that of the same pass with all weights in memory (`host`, `roofline`):

    t(n) = max(S / LINK, t_resident(n)) + t_draft(n) - t_draft(1)

A tree costs nothing as long as its products are hidden. Beyond N* nodes it costs as much as they do. N* is 240 in fp32
on a CPU before its disk if little of the target stays in memory, and in proportion fewer if more of it does. Besides,
the draft multiplies as many rows: its levels together have n.

An estimate, and no measurement: LINK is a constant for each kind of device. So the trees follow from the models and the
memory that the target was given, and the same call does the same on every machine. `heavypath calibrate` measures.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from heavypath.speculative.costs.estimates import DISK, host_costs, pass_seconds
from heavypath.speculative.costs.roofline import Device, Work, estimated_costs
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward

PCIE_4 = 31.5e9  # bytes a second of 16 lanes in one direction
LINK_REACHED = 0.85  # of PCIe, by copies of pinned memory
LINK = {"cpu": DISK, "cuda": LINK_REACHED * PCIE_4}  # bytes a second, from a disk and from pinned memory
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # nodes of the trees that are estimated


class StreamFacts(Protocol):
    """The facts about a stream: its layers, those that stay, and the tensors of each."""

    layers: int
    resident: frozenset[int]

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors by their names."""
        ...


def streamed_bytes(stream: StreamFacts) -> int:
    """Bytes that a pass reads anew."""
    passing = {*range(stream.layers)} - stream.resident
    return sum(tensor.nbytes for index in passing for tensor in stream.tensors(index).values())


def streamed_costs(
    target: Forward, drafting: Sequence[Drafting], batch: int = 1, sizes: Sequence[int] = SIZES
) -> Costs:
    """The costs of steps and levels, where `batch` sequences are decoded together by a target with a stream."""
    assert target.stream is not None
    kind = target.device.type
    reading = streamed_bytes(target.stream) / LINK[kind]
    if kind == "cuda":
        device = Device.of(target.device)
        resident = estimated_costs(target, drafting, device, batch, sizes)
        drafted = {size: [Work.of(model).seconds(batch * size, device) for model in drafting] for size in {1, *sizes}}
    else:
        resident = host_costs(target, drafting, batch, sizes)
        drafted = {
            size: [pass_seconds(Work.of(model), model.dtype, size, batch) for model in drafting]
            for size in {1, *sizes}
        }  # fmt: skip
    step = {
        size: max(reading, seconds) + sum(drafted[size]) - sum(drafted[1]) for size, seconds in resident.step.items()
    }
    return Costs(step, resident.level)
