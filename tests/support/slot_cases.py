"""Helpers of tests/kernels/test_slots.py and its neighbours."""

import torch

LINES = torch.tensor([[0.41, 0.16, 0.12, 0.09, 0.08], [0.5, 0.5, 0.4, 0.3, 0.3]], dtype=torch.float64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIELDS = ("parents", "ranks", "depths", "tokens", "values", "worths", "keys")


def lines_of(children: int, base: float = 0.0) -> torch.Tensor:
    """A confidence for so many children; base: of all of them, where slopes are to be 0, so that values tie."""
    if base:
        return torch.tensor([[base], [0.0]], dtype=torch.float64).expand(2, children).contiguous()
    return LINES[:, torch.arange(children).clamp(max=4)].contiguous()


def flat(field):
    return field if isinstance(field, tuple) else (field,)
