"""How the draft's probabilities tell what is accepted, which is what a growing tree's slots are worth.

DySpec takes a token's draft probability for its chance of being accepted. A drawn token is accepted more often than
that where the draft is flat: on the shipped pair at temperature 0.6 at a rate of 0.42 where it has 0.03, and of 0.91
where it has 0.97 (bench/theory.py, draft-probability). So DySpec's trees are too wide there. Here the line is taken as
it is measured, and a slot's value is what it is expected to add to the tokens of a step: `kernels.growing` has the
formulas.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Confidence:
    """How the draft's probabilities tell acceptance: c_k = base[k] + slope[k] q.

    c_k is the chance that child k is accepted once its elder siblings are rejected, where q is the draft's probability
    of the child among the tokens not yet drawn. The last entries serve all further children too.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]

    def __post_init__(self) -> None:
        lines = list(zip(self.base, self.slope, strict=False))
        if len(self.base) != len(self.slope) or not lines or not all(0 <= b <= b + s <= 1 for b, s in lines):
            raise ValueError(f"confidence must rise within [0, 1] for each child, got {self.base} and {self.slope}")

        object.__setattr__(self, "_lines", {})  # beside the fields, which alone are compared and written to profiles

    def lines(self, children: int, device: torch.device) -> Tensor:
        """Base and slope of the first `children` children, fp64 [2, children].

        They are copied to a device once, and kept as long as this object: a CUDA graph reads them there.
        """
        kept: dict[tuple[int, torch.device], Tensor] = self.__dict__["_lines"]
        if (children, device) not in kept:
            index = torch.arange(children).clamp(max=len(self.base) - 1)
            lines = torch.tensor([self.base, self.slope], dtype=torch.float64)
            kept[children, device] = lines[:, index].to(device)
        return kept[children, device]


# Measured on the demo pair at temperature 0.6, with children drawn without replacement.
DEFAULT_CONFIDENCE = Confidence((0.41, 0.16, 0.12, 0.09, 0.08), (0.5, 0.5, 0.4, 0.3, 0.3))
