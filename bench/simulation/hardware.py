"""Machines as numbers: what a device reads, computes and tells others in a second.

Peaks are those of data sheets; how much of them is reached is said apart, and is the same for all machines of a kind.
`python bench/simulate.py --device NAME` takes one of them.
"""

from dataclasses import dataclass
from types import MappingProxyType

from heavypath.speculative.costs import estimates as host
from heavypath.speculative.costs.roofline import REACHED, REACHED_PEAK
from heavypath.speculative.costs.streamed import LINK_REACHED, PCIE_4

PCIE_3, PCIE_5 = 15.8e9, 63.0e9  # bytes a second of 16 lanes in one direction
COLLECTIVE = 10e-6  # seconds of a collective of few bytes between two ranks; an assumption


@dataclass(frozen=True)
class Hardware:
    """A device, the link that weights come through, and the wire between devices.

    memory:     bytes of the device
    bandwidth:  bytes a second of that memory
    peak:       operations a second, of products in the weights' precision
    link:       bytes a second from where weights lie that the device has no room for: a host's memory, or a disk
    wire:       bytes a second that a device sends to others while it receives as many; 0 for a device alone
    collective: seconds of a collective of few bytes, for each doubling of the ranks
    reached:    shares of bandwidth, peak and link that are reached
    source:     where the figures come from
    """

    memory: float
    bandwidth: float
    peak: float
    link: float
    wire: float = 0.0
    collective: float = COLLECTIVE
    reached: tuple[float, float, float] = (REACHED, REACHED_PEAK, LINK_REACHED)
    source: str = ""

    def __post_init__(self) -> None:
        positive = {name: getattr(self, name) for name in ("memory", "bandwidth", "peak", "link")}
        wrong = {name: value for name, value in positive.items() if not value > 0}
        wrong |= {name: getattr(self, name) for name in ("wire", "collective") if not getattr(self, name) >= 0}
        wrong |= {} if all(0 < share <= 1 for share in self.reached) else {"reached": self.reached}
        if wrong:
            raise ValueError(f"expected figures above 0 and shares in (0, 1], got {wrong}")

    @property
    def reads(self) -> float:
        """Bytes of its memory that are read in a second."""
        return self.bandwidth * self.reached[0]

    @property
    def computes(self) -> float:
        """Operations in a second."""
        return self.peak * self.reached[1]

    @property
    def brings(self) -> float:
        """Bytes that come through the link in a second."""
        return self.link * self.reached[2]


# A GeForce's tensor cores are given for sums in fp32, which products of fp16 and bf16 in PyTorch have.
DEVICES = MappingProxyType(
    {
        "rtx-2080-ti": Hardware(
            11e9, 616e9, 53.8e12, PCIE_3, source="NVIDIA Turing GPU architecture, 2018, appendix; PCIe 3.0"
        ),
        "rtx-4090": Hardware(
            24e9, 1008e9, 165.2e12, PCIE_4, source="NVIDIA Ada GPU architecture, 2022, appendix A; PCIe 4.0"
        ),
        "l40": Hardware(48e9, 864e9, 181.05e12, PCIE_4, source="NVIDIA L40 data sheet; PCIe 4.0"),
        "a100-40gb": Hardware(
            40e9, 1555e9, 312e12, PCIE_4, wire=300e9, source="NVIDIA A100 data sheet; PCIe 4.0, NVLink 3"
        ),
        "a100-80gb": Hardware(
            80e9, 2039e9, 312e12, PCIE_4, wire=300e9, source="NVIDIA A100 data sheet, SXM; PCIe 4.0, NVLink 3"
        ),
        "h100": Hardware(
            80e9, 3350e9, 989.5e12, PCIE_5, wire=450e9, source="NVIDIA H100 data sheet, SXM; PCIe 5.0, NVLink 4"
        ),
        "h200": Hardware(
            141e9, 4800e9, 989.5e12, PCIE_5, wire=450e9, source="NVIDIA H200 data sheet, SXM; PCIe 5.0, NVLink 4"
        ),
        "cpu": Hardware(
            16e9, host.MEMORY, host.PEAK, host.DISK, reached=(1.0, 1.0, 1.0),
            source="two threads in fp32, and a disk, as costs/estimates.py has them",
        ),
    }
)  # fmt: skip
