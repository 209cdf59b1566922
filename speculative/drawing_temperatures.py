"""Drawing temperatures: by what a draft's logits are divided at each depth, so that most tokens are accepted.

They are fitted to the overlap of the draft's and the target's distribution along sequences that the target generates,
see `drafts.tempered`.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative.decoding.sequences import Sequences, root_rows
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.tempered import TEMPERATURES, fitted
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.walking import Extent, ReadPrompts, Report, along, parts_of


def drawing_temperatures(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], samplings: Sequence[Filters], extent: Extent, seed: int,
    report: Report,
) -> dict[Filters, tuple[float, ...]]:  # fmt: skip
    """Fit, for each depth, the number by which the logits of a draft are divided, so that most tokens are accepted.

    This is for drafts that give the distributions of all levels in one pass; for others the result is empty. It has an
    entry for each sampling with temperature above 0, fitted on its own sequences: the temperatures by depth
    (`drafts.tempered`), empty if 1 is best at all depths.

    samplings: filters of the target; report: called with lines of text about the progress
    """
    drawn = [each for each in samplings if each.temperature > 0]
    levels = draft.levels
    if not (drawn and levels and draft.forward is not None and draft.forward.drafts_at_once):
        return {}
    begin = time.perf_counter()
    levels = min(levels, extent.tokens)
    found: list[list[Tensor]] = [[] for _ in drawn]
    for number, (first, count) in enumerate(parts_of(extent.sequences)):
        left = extent.seconds - (time.perf_counter() - begin)
        if number and left < 0:
            break
        report(f"drawing temperatures of {levels} depths, pass {number + 1}")
        part = extent._replace(sequences=count, seconds=left, depth=levels)
        chosen = [prompts[(first + place) % len(prompts)] for place in range(count)]
        made = [partial(_Common, filters, levels, seed + number) for filters in drawn]
        read = ReadPrompts(target, draft, chosen, part)
        for own, each in zip(found, along(read, made, part, seed + number, report), strict=True):
            own.append(torch.stack(each.common))
    shortest = [min(map(len, own)) for own in found]
    common = [torch.cat([each[:tokens] for each in own], -1) for own, tokens in zip(found, shortest, strict=True)]
    return {filters: fitted(own, levels) for filters, own in zip(drawn, common, strict=True)}


class _Common:
    """Observes the sequences of one sampling: at each token, how much the draft's distribution overlaps the target's.

    The depth of tokens runs from 0 to `depths` - 1, again and again, whatever the draft proposes.

    common: for each token, the overlaps by drawing temperature, as `fitted` takes them
    """

    def __init__(self, filters: Filters, depths: int, seed: int, state: Sequences):
        self._filters = filters
        self._depths = depths
        self._seed = seed
        self._state = state
        self.at = torch.zeros_like(state.lengths)
        self.common: list[Tensor] = []  # for each token, see `fitted`

    def go_on(self, after: Tensor, logits: Tensor) -> None:
        state = self._state
        filters = self._filters
        logits = logits[:, 0].float()
        noise = root_rows(state.noise, state.lengths)
        token = gumbel_topk(logits, 1, **filters._asdict(), seed=self._seed, rows=noise).tokens
        of_target = filtered_logprobs(logits, filters)
        found = []
        for each in TEMPERATURES:
            drawn = filters._replace(temperature=each * filters.temperature)
            of_draft = filtered_logprobs(after.float(), drawn).nan_to_num(-torch.inf)
            overlap = of_target.minimum(of_draft).exp().sum(1)
            found.append(torch.stack([overlap, (of_draft - of_target).gather(1, token)[:, 0].exp().clamp(max=1)]))
        self.common.append(torch.stack(found, 1).cpu())
        self.at = (self.at + 1) % self._depths
        state.previous.copy_(state.root)
        state.root.copy_(token[:, 0])
        state.lengths.add_(1)
