"""What the host sees of tensors that steps change on a device."""

import torch
from torch import Tensor


def host_sees(device: torch.device) -> bool:
    """Whether the host may look at a device's tensors at any time: on a CPU. A GPU would have to be waited for."""
    return device.type == "cpu"


class Snapshots:
    """Small tensors as they are after a step, or, if late, as they were a step before.

    To ask for what a GPU is still working at is to stop it: it would have nothing to do until the host has looked and
    launched the next step. So the host looks at the step before the one under way.
    """

    def __init__(self, *tensors: Tensor, late: bool):
        self._tensors, self._late = tensors, late
        self._taken: list[tuple[list[Tensor], torch.cuda.Event, int]] = []
        self._free = [[_on_host(tensor) for tensor in tensors] for _ in range(2 * late)]

    def take(self, slots: int) -> tuple[list[Tensor], int] | None:
        """The tensors on the host, and the `slots` given when they were such; None if there was no step before."""
        if not self._late:
            return [tensor.cpu() for tensor in self._tensors], slots
        copies, event = self._free.pop(), torch.cuda.Event()
        for copy, tensor in zip(copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event.record()
        self._taken.append((copies, event, slots))
        if len(self._taken) < 2:
            return None
        copies, event, slots = self._taken.pop(0)
        event.synchronize()
        self._free.append(copies)
        return copies, slots


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a copy of it that a GPU can write to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
