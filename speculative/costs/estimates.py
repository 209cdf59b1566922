"""The costs of a step that are estimated for a machine, where nobody has measured them."""

from collections.abc import Sequence

import torch

from heavypath.speculative.costs.host import SIZES, host_costs
from heavypath.speculative.costs.roofline import Device, estimated_costs
from heavypath.speculative.costs.streamed import streamed_bytes, streamed_costs
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward


def estimates(target: Forward, drafting: Sequence[Drafting], batch: int = 1, sizes: Sequence[int] = SIZES) -> Costs:
    """The costs of a step of `batch` sequences.

    drafting: the draft's models; sizes: of trees, for a target on a CPU whose weights are not streamed
    """
    if target.stream is not None:
        return streamed_costs(target, drafting, batch)
    if target.device.type == "cuda":
        return estimated_costs(target, drafting, Device.of(target.device), batch)
    return host_costs(target, drafting, batch, sizes)


def estimated_for(target: Forward) -> str:
    """The models and device of the estimate, in words."""
    if target.stream is not None:
        return f"{streamed_bytes(target.stream) / 1e9:.3g} GB that each pass reads"
    return torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "a CPU"
