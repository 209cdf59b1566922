"""What the host may ask of a device while steps run there."""

import torch


def host_can_read(device: torch.device) -> bool:
    """Whether the host may read a device's tensors at any time, as on a CPU; for a GPU's tensors it would wait."""
    return device.type == "cpu"
