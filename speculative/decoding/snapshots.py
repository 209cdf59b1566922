"""What the host learns of tensors that steps change on a device."""

from typing import Generic, TypeVar

import torch
from torch import Tensor

What = TypeVar("What")


class Snapshots(Generic[What]):
    """Copies of small tensors on the host: as they are after this step or, if `late`, as they were one step before.

    If the host waited for the step that a GPU is working at, the GPU would then have nothing to do until the host had
    looked and launched the next step. So the host looks at the step before the one under way.
    """

    def __init__(self, tensors: list[Tensor], late: bool):
        self._tensors, self._late = tensors, late
        self._taken: list[tuple[list[Tensor], torch.cuda.Event, What]] = []
        self._free = [[_on_host(tensor) for tensor in tensors] for _ in range(2 * late)]

    def take(self, what: What) -> tuple[list[Tensor], What] | None:
        """Copy the tensors. Returns what is known on the host, and the `what` that was given for it, as who was there.

        That is None if `late` and there was no step before.
        """
        if not self._late:
            return [tensor.cpu() for tensor in self._tensors], what
        copies, event = self._free.pop(), torch.cuda.Event()
        for copy, tensor in zip(copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event.record()
        self._taken.append((copies, event, what))
        if len(self._taken) < 2:
            return None
        copies, event, what = self._taken.pop(0)
        event.synchronize()
        self._free.append(copies)
        return copies, what


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a copy of a tensor, which a GPU can write to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
