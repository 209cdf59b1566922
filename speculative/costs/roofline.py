"""Estimate the time of a pass on a GPU from the device and the model; `gpu_step` has that of a step.

A forward pass over n tokens reads all weights once and multiplies them with n rows. The longer of these two times
counts most; if they are alike, each delays the other, which the root of the sum of their squares models. In addition,
small kernels run one after the other:

    t(n) = hypot(bytes / bandwidth, 2 n parameters / peak) + layers * small kernels of a layer * seconds of one

If a token uses k of E experts, n tokens read E (1 - (1 - k / E)^n) of them, as if each token chose independently. A
pass reads the states of recurrent layers, and the commit reads and writes them.

These are estimates, not measurements: so the tree depends on the models and the kind of GPU alone, and the same seed
gives the same output on every run. `heavypath calibrate` measures.
"""

import math
from typing import Any, NamedTuple

import torch

from heavypath.speculative.costs.estimates import Work

REACHED = 0.85  # share of the bandwidth that products of few rows reach
REACHED_PEAK = 0.6  # share of the peak that products reach
SMALL_KERNEL = 2e-6  # seconds of a kernel that does little, after another one in a CUDA graph
LAYER_KERNELS = 6  # small kernels of a layer, besides the four products of its weights
# Operations of a multiprocessor per cycle: in fp16 and bf16, by compute capability, and in fp32.
TENSOR_CORES = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
OTHER_TENSOR_CORES = 512
PLAIN_CORES = 256


class Device(NamedTuple):
    """The speed of a GPU.

    bandwidth: bytes of memory per second; tensor_peak, plain_peak: operations per second with and without tensor cores
    """

    bandwidth: float
    tensor_peak: float
    plain_peak: float

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The figures of a CUDA device, computed from its properties."""
        facts: Any = torch.cuda.get_device_properties(device)
        cycles = facts.multi_processor_count * facts.clock_rate * 1e3  # of all multiprocessors per second
        tensor = TENSOR_CORES.get((facts.major, facts.minor), OTHER_TENSOR_CORES)
        # Memory transfers data twice per cycle.
        return cls(
            2 * facts.memory_clock_rate * 1e3 * facts.memory_bus_width / 8, cycles * tensor, cycles * PLAIN_CORES
        )

    def pass_seconds(self, work: Work, tokens: int) -> float:
        """Estimated seconds of a pass over this many tokens, of all sequences together, on this GPU."""
        peak = REACHED_PEAK * (self.tensor_peak if work.itemsize <= 2 else self.plain_peak)
        unread = work.expert_bytes * (1 - work.chosen) ** tokens
        used = work.weights - work.expert_weights * (1 - work.chosen)
        reading = (work.weight_bytes - unread) / (REACHED * self.bandwidth)
        products = math.hypot(reading, 2 * tokens * used / peak)
        return products + work.layers * LAYER_KERNELS * SMALL_KERNEL
