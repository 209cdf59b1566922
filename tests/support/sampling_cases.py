"""Helpers of tests/kernels/test_sampling.py and its neighbours."""

import torch


def same(kernel, reference) -> bool:
    return torch.equal(kernel.tokens, reference.tokens) and all(
        torch.allclose(a, b, atol=3e-6, rtol=3e-6, equal_nan=True)
        for a, b in zip(kernel[1:], reference[1:], strict=True)
    )
