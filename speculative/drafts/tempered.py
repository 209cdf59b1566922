"""Drawing temperatures by depth, for drafts whose one pass gives the laws of all levels.

A deep law of such a draft knows little of the path above it. So it is flatter than the target's, and a token drawn from
it is seldom accepted. With T the temperature of sampling and tau_d a temperature of the depth, tokens are drawn from

    Q_d = softmax(logits_d / (T tau_d)), filtered as ever

and verified by the same law, so that any tau_d keep the target's. `calibrate` chooses them from TEMPERATURES, one depth
after another. Let x_0, x_1, ... be a text of the target, and P_d its law before x_d. Then

    tau_d = argmax E[w_d sum_x min(P_d(x), Q_d(x))],     w_0 = 1,  w_{d+1} = w_d min(1, Q_d(x_d) / P_d(x_d))

The mean is over texts. It is the chance that d + 1 tokens of a chain are accepted (Leviathan et al. 2023, corollary
3.6, for one of them), and no token has to be drafted to know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Feed

TEMPERATURES = (1.0, 0.7, 0.5, 0.25)


@dataclass(frozen=True)
class Tempered(LogitChange):
    """Divides a draft's logits by the temperature of their depth, from the root's children on; the last serves all."""

    temperatures: tuple[float, ...]

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """The draft of these logits."""
        return _TemperedDraft(draft, self.temperatures)


class _TemperedDraft(Draft):
    def __init__(self, draft: Draft, temperatures: Sequence[float]):
        self._draft, self._temperatures, self.laws = draft, temperatures, draft.laws

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        logits = self._draft(feed, cache)
        temperature = self._temperatures[min(feed.level, len(self._temperatures) - 1)]
        return logits if temperature == 1 else logits * (1 / temperature)


def fitted(common: Tensor, depths: int) -> tuple[float, ...]:
    """The temperature of each depth; none at all where 1 is the best one everywhere.

    common: fp64 [N, 2, temperatures, S], of N tokens of S texts, of which token n is at depth n % depths. It is
        sum_x min(P(x), Q(x)), and min(1, Q(x_n) / P(x_n)), by each of TEMPERATURES

    A depth keeps the temperature of the depth above it, at first 1, unless another one is better by more than the
    standard error of the difference.
    """
    weights, chosen, best = torch.ones_like(common[::depths, 0, 0]), [], 0  # [blocks, S]
    for depth in range(depths):
        overlaps, shares = common[depth::depths].unbind(1)  # [blocks, temperatures, S]
        weights = weights[: len(overlaps)]
        if weights.numel():
            gains = (weights[:, None] * (overlaps - overlaps[:, best, None])).transpose(0, 1).flatten(1)
            sure = gains.mean(1) - gains.std(1, correction=0) / gains.shape[1] ** 0.5
            best = int(sure.argmax()) if sure.max() > 0 else best
        weights = weights * shares[:, best]
        chosen.append(TEMPERATURES[best])
    return tuple(chosen) if min(chosen) < 1 else ()
