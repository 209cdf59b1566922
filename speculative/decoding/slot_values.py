"""What a growing tree's slots and nodes are worth, from the draft's probabilities alone.

A slot of a tree (a slot of a batch is something else) is a place for the next draw below a node. With Q the draft's
distribution after a node, x_1, x_2, ... its children in draw order, R_k = 1 - Q(x_1) - ... - Q(x_{k-1}) and c_k the
chance that x_k is accepted once x_1 .. x_{k-1} are rejected, let

    worth(root) = 1,    worth(child x_k) = worth(node) (1 - c_1) ... (1 - c_{k-1}) c_k
    value(slot k below a node) = worth(node) (1 - c_1) ... (1 - c_{k-1}) e_k

    DySpec (Xiong et al. 2024, algorithm 1)    c_k = Q(x_k) / R_k,                   e_k = 1
    by measured confidence                     c_k = base_k + slope_k Q(x_k) / R_k,  e_k = E[c_k | x_1 .. x_{k-1}]
                                                   = base_k + slope_k sum_v Q(v)^2 / R_k^2 over v not drawn yet

DySpec's products telescope: a slot is worth worth(node) R_k. But a drawn token is accepted far more often than with its
draft probability (in the paper's figure 2 the line has neither slope 1 nor passes through 0), so DySpec's trees are too
wide where the draft is flat. The second form takes the line as it is measured, and a slot's value is what it is
expected to add to the tokens of a step.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

TINY = 1e-300


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

    def of(self, children: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Base and slope of the first `children` children, fp64 [children] each."""
        return _lines(self, children, device)


@lru_cache(maxsize=64)  # copied to a device once, before a CUDA graph reads them there
def _lines(confidence: Confidence, children: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = torch.arange(children).clamp(max=len(confidence.base) - 1)
    lines = torch.tensor([confidence.base, confidence.slope], dtype=torch.float64)[:, index].to(device)
    return lines[0], lines[1]


# Measured on the demo pair at temperature 0.6, with children drawn without replacement.
DEFAULT_CONFIDENCE = Confidence((0.41, 0.16, 0.12, 0.09, 0.08), (0.5, 0.5, 0.4, 0.3, 0.3))


def values(probs: Tensor, squares: Tensor | None, confidence: Confidence | None) -> tuple[Tensor, Tensor]:
    """The values of the slots below a node of worth 1, and the worth of the children drawn there; fp64 [..., K] each.

    probs:   fp64 [..., K], Q of the children in draw order, 0 for an absent one
    squares: fp64 [..., 1], the sum of Q(v)^2 over all tokens; needed with a confidence, else None
    confidence: None for DySpec's own values
    """
    before = pad(probs[..., :-1], (1, 0))
    remaining = (1 - before.cumsum(-1)).clamp(min=0)  # R_k
    if confidence is None:
        return remaining, torch.minimum(probs, remaining)  # a probability exceeds what remains by rounding alone
    assert squares is not None
    base, slope = confidence.of(probs.shape[-1], probs.device)
    accept = base + slope * (probs / remaining.clamp(min=TINY)).clamp(max=1)
    expected = base + slope * ((squares - (before**2).cumsum(-1)) / remaining.clamp(min=TINY) ** 2).clamp(0, 1)
    reached = (1 - pad(accept[..., :-1], (1, 0))).cumprod(-1)
    return (reached * expected).where(remaining > 0, 0), reached * accept


def sum_of_squares(logits: Tensor, temperature: float) -> Tensor:
    """The sum over tokens of squared probabilities, fp64 [..., 1], for logits [..., V] at a temperature."""
    scores = logits.float() / temperature
    total = scores.logsumexp(-1, keepdim=True).double()
    return ((2 * scores).logsumexp(-1, keepdim=True).double() - 2 * total).exp().nan_to_num()
