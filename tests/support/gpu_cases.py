"""Helpers of tests/gpu/test_on_gpu.py and its neighbours."""

import pytest
import torch
from tiny_models import assert_alike

from heavypath.speculative import SpeculativeDecoder

__all__ = ["GPU", "MINIATURE", "Captured", "assert_alike", "prompts", "pytestmark", "size"]

GPU = torch.cuda.is_available()
MINIATURE = GPU and torch.cuda.get_device_name() == "a GPU that is only played"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")]


def size(real, miniature):
    return miniature if MINIATURE else real


def prompts(batch, length, seed=0):
    return torch.randint(7, 49, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()


class Captured(SpeculativeDecoder):
    """A decoder whose steps must be CUDA graphs, since the text of one whose steps cannot be captured is right, too."""

    def generate(self, *args, **kwargs):
        out = super().generate(*args, **kwargs)
        assert len(self.runner.idle.launcher.graphs) > 0
        assert not self.runner._warned, "a step cannot be captured"
        return out
