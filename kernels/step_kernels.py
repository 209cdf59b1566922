"""The work of a step between forward passes, by the implementation that is chosen once for a device.

The public functions check their arguments and choose in every call. A decoder made its tensors itself, and does neither
in a step: on a CPU the checks alone would take about 20% of its time.
"""

import torch

from heavypath.kernels.cache_compaction import COMPACT
from heavypath.kernels.commit import COMMIT
from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.native.steps import copy_rows
from heavypath.kernels.sampling import DRAW
from heavypath.kernels.trees.levels import ALIKE, FIRST_NODES, PLACE
from heavypath.kernels.verification import VERIFY


class StepKernels:
    """The functions of one implementation.

    draw, verify, compact: of `gumbel_topk`, `verify_tree` and `compact_cache`, without their checks. On a GPU keys and
    logprobs that `draw` returns may be those before top-p. copy_rows: to[:, places] = rows, with (rows, to, places)
    """

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.draw, self.verify, self.compact, self.commit = DRAW[impl], VERIFY[impl], COMPACT[impl], COMMIT[impl]
        self.first_nodes, self.place, self.alike = FIRST_NODES[impl], PLACE[impl], ALIKE[impl]
        self.copy_rows = copy_rows if impl == "native" else lambda rows, to, places: to.index_copy_(1, places, rows)


_CHOSEN: dict[str, StepKernels] = {}  # by the type of device


def step_kernels(device: torch.device) -> StepKernels:
    """The functions for tensors on a device."""
    if device.type not in _CHOSEN:
        impl = choose_impl("a step", "auto", torch.empty(0, dtype=torch.float32, device=device), native=True)
        _CHOSEN[device.type] = StepKernels(impl)
    return _CHOSEN[device.type]
