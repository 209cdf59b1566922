"""Estimate the costs of a step with streamed target layers from the models, for decoders without a profile.

A pass reads S bytes of weights from a disk or from host memory, while its layers compute and while trees are drafted.
It takes as long as reading them, or as the same pass with all weights in memory (`estimates`, `roofline`), whichever is
longer:

    t(n) = max(S / LINK, t_resident(n)) + t_draft(n) - t_draft(1)

As long as reading takes longer, a tree's products cost nothing. Beyond N* nodes the products take longer. On a CPU that
reads nearly all weights from a disk, N* is about 200 in fp32 with two or more threads; it is less if more layers stay
in memory. The draft's products are added: all its levels together have n rows.

These are estimates, not measurements: LINK is a constant for each kind of device. So the trees depend on the models,
the memory that the target was given, and on a CPU the number of threads. `heavypath calibrate` measures.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from heavypath.speculative.costs.estimates import DISK, Work, host_costs, pass_seconds
from heavypath.speculative.costs.gpu_step import estimated_costs
from heavypath.speculative.costs.roofline import Device
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward

PCIE_4 = 31.5e9  # bytes per second of 16 lanes in one direction
LINK_REACHED = 0.85  # share of this that copies of pinned memory reach
LINK = {"cpu": DISK, "cuda": LINK_REACHED * PCIE_4}  # bytes per second, from a disk and from pinned memory
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # nodes of the trees that are estimated


class StreamFacts(Protocol):
    """The attributes of a stream that are needed here.

    layers: number of layers
    resident: indices of the layers that stay in memory
    """

    layers: int
    resident: frozenset[int]

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """A layer's tensors: name -> tensor."""
        ...


def streamed_bytes(stream: StreamFacts) -> int:
    """The bytes of weights that each pass reads again."""
    passing = {*range(stream.layers)} - stream.resident
    return sum(tensor.nbytes for index in passing for tensor in stream.tensors(index).values())


def streamed_costs(
    target: Forward, drafting: Sequence[Drafting], batch: int = 1, sizes: Sequence[int] = SIZES
) -> Costs:
    """The estimated costs of steps and levels for a target with a stream, and `batch` sequences decoded together."""
    assert target.stream is not None
    kind = target.device.type
    reading = streamed_bytes(target.stream) / LINK[kind]
    if kind == "cuda":
        device = Device.of(target.device)
        resident = estimated_costs(target, drafting, device, batch, sizes)
        drafted = {
            size: [device.pass_seconds(Work.of(model), batch * size) for model in drafting] for size in {1, *sizes}
        }
    else:
        resident = host_costs(target, drafting, batch, sizes)
        drafted = {size: [pass_seconds(Work.of(model), size, batch) for model in drafting] for size in {1, *sizes}}
    step = {
        size: max(reading, seconds) + sum(drafted[size]) - sum(drafted[1]) for size, seconds in resident.step.items()
    }
    return Costs(step, resident.level)
