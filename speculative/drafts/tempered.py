"""Drawing temperatures by depth, for drafts that give the distributions of all levels in one pass.

At deeper levels such a draft hardly depends on the path above. So its distribution is flatter than the target's, and a
token drawn from it is rarely accepted. With the sampling temperature T and a temperature tau_d for each depth, tokens
are drawn from

    Q_d = softmax(logits_d / (T tau_d)), then filtered as usual

and verified with the same distribution, so the output is lossless for any tau_d. `calibrate` chooses them from
TEMPERATURES, one depth after another. Let x_0, x_1, ... be a sequence of the target, and P_d its distribution before
x_d. Then

    tau_d = argmax E[w_d sum_x min(P_d(x), Q_d(x))],     w_0 = 1,  w_{d+1} = w_d min(1, Q_d(x_d) / P_d(x_d))

The mean is over sequences. It is the probability that d + 1 tokens of a chain are accepted (Leviathan et al. 2023,
corollary 3.6, for one of them), computed without drafting.
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
    """Divides a draft's logits by a temperature for each depth.

    temperatures: the root's children first; deeper levels than there are temperatures get the last one
    """

    temperatures: tuple[float, ...]

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """The draft, wrapped so that its logits are divided."""
        return _TemperedDraft(draft, self.temperatures)


class _TemperedDraft(Draft):
    def __init__(self, draft: Draft, temperatures: Sequence[float]):
        self._draft = draft
        self._temperatures = temperatures
        self.root_distributions = draft.root_distributions

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        logits = self._draft(feed, cache)
        temperature = self._temperatures[min(feed.level, len(self._temperatures) - 1)]
        return logits if temperature == 1 else logits * (1 / temperature)


def fitted(common: Tensor, depths: int) -> tuple[float, ...]:
    """Choose the temperature of each depth by measured overlaps; the result is empty if 1 is best at all depths.

    common: fp64 [N, 2, temperatures, S], for N tokens of S sequences; token n is at depth n % depths. The two values
        are sum_x min(P(x), Q(x)), and min(1, Q(x_n) / P(x_n)), for each of TEMPERATURES

    A depth keeps the temperature of the depth above it (at first 1), unless another one is better by more than the
    standard error of the difference.
    """
    weights = torch.ones_like(common[::depths, 0, 0])  # [blocks, S]
    chosen = []
    best = 0
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
