"""The work of a step between forward passes, by the implementation that is chosen once for a device.

The public functions check their arguments and choose in every call. A decoder made its tensors itself, and does neither
in a step: on a CPU the checks alone would take about 20% of its time.

`FUNCTIONS` says where each implementation is. A module is imported when a function in it is first used: on a CPU with a
compiler no Triton kernel and no reference is loaded, and for a tree of fixed shape nothing that grows trees.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl

if TYPE_CHECKING:
    from heavypath.kernels.commit import State
    from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
    from heavypath.kernels.sampling import TopK
    from heavypath.kernels.trees.assembly import Assembled
    from heavypath.kernels.trees.levels import CommonNodes, Drawn, First, NodeInputs, Trees
    from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

FUNCTIONS = {  # name in `StepKernels` -> implementation -> module in this folder, and name there
    "draw": {
        "triton": "nucleus.launch_draw",
        "native": "native.sampling.draw",
        "torch": "sampling.reference",
    },
    "verify": {
        "triton": "verifying.launches.verify",
        "native": "native.verification.verify",
        "torch": "verification.reference",
    },
    "compact": {
        "triton": "cache_compaction.launch",
        "native": "native.steps.compact",
        "torch": "cache_compaction.reference",
    },
    "commit": {
        "triton": "commit.launch",
        "native": "native.steps.commit",
        "torch": "commit.reference",
    },
    "first_nodes": {
        "triton": "trees.levels_kernel.first_nodes",
        "native": "native.steps.first_nodes",
        "torch": "trees.levels.first_nodes",
    },
    "place": {
        "triton": "trees.levels_kernel.place",
        "native": "native.steps.place",
        "torch": "trees.levels.place_by_torch",
    },
    "alike": {
        "triton": "trees.levels_kernel.alike",
        "native": "native.steps.alike",
        "torch": "trees.levels.alike",
    },
    "copy_rows": {
        "triton": "step_kernels.copy_rows",
        "native": "native.steps.copy_rows",
        "torch": "step_kernels.copy_rows",
    },
    "grow": {
        "triton": "trees.growing_kernel.grow",
        "native": "native.growth.grow",
        "torch": "trees.growing.grow",
    },
    "assemble": {
        "triton": "trees.assembly.launch",
        "native": "native.growth.assemble",
        "torch": "trees.assembly.assemble",
    },
    "sequence_scores": {
        "triton": "sequence_scores.launch",
        "native": "native.sampling.sequence_scores",
        "torch": "sequence_scores.reference",
    },
}


class StepKernels:
    """The functions of one implementation, without the checks of the public functions.

    draw:      tokens, keys and logprobs of `gumbel_topk`; on a GPU keys and logprobs may be those before top-p
    verify, compact, commit, place, sequence_scores: of `verify_tree`, `compact_cache` and the functions of these names
    first_nodes, alike: of `trees.levels`
    copy_rows: to[:, places] = rows, with (rows, to, places)
    grow, assemble: of `trees.growing` and `trees.assembly`
    """

    draw: "Callable[..., tuple[Tensor, Tensor, Tensor]]"
    verify: "Callable[[VerifyInputs], Verified]"
    compact: "Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], None]"
    commit: "Callable[[State, Nodes, Tensor, Verified, int], None]"
    first_nodes: "Callable[[Tensor, Tensor, Tensor, int], First]"
    place: "Callable[[Trees, Drawn | None, CommonNodes, bool], NodeInputs]"
    alike: "Callable[[Trees, CommonNodes], Tensor]"
    copy_rows: "Callable[[Tensor, Tensor, Tensor], None]"
    grow: "Callable[[Slots, Level, TopK, Tensor, Roots, Policy], tuple[Level, NodeInputs]]"
    assemble: "Callable[[Slots, Roots, Level, int, bool], Assembled]"
    sequence_scores: "Callable[[Tensor, Tensor], Tensor]"

    def __init__(self, impl: str) -> None:
        self.impl = impl

    def __getattr__(self, name: str) -> object:
        """Import a function at its first use, and keep it as an attribute."""
        if name not in FUNCTIONS:
            raise AttributeError(f"StepKernels has no function {name!r}")
        module, _, function = FUNCTIONS[name][self.impl].rpartition(".")
        found = getattr(import_module(f"{__package__}.{module}"), function)
        setattr(self, name, found)
        return found


def copy_rows(rows: Tensor, to: Tensor, places: Tensor) -> None:
    """Set to[b, places[i]] = rows[b, i], for rows [B, n, V], to [B, N, V] and places LongTensor[n]."""
    to.index_copy_(1, places, rows)


@cache
def kernels_by(impl: str) -> StepKernels:
    """The functions of an implementation that `choose_impl` returned."""
    return StepKernels(impl)


_CHOSEN: dict[str, StepKernels] = {}  # by the type of device


def step_kernels(device: torch.device) -> StepKernels:
    """The functions for tensors on a device."""
    if device.type not in _CHOSEN:
        impl = choose_impl("a step", "auto", torch.empty(0, dtype=torch.float32, device=device), native=True)
        _CHOSEN[device.type] = kernels_by(impl)
    return _CHOSEN[device.type]
