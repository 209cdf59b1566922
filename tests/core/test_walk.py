"""The walk of a calibration counts each text's ranks, and by them what was accepted and reached."""

import torch
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS
from heavypath.speculative.calibration import Extent, Way, walk
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.llama import LlamaForward


def test_calibration_notes_the_ranks_that_it_counts():
    target = LlamaForward(tiny_llama(1))
    way, depth, children = Way(METHODS["sequoia"].kind(1.0), None), 3, 4
    counts = walk(
        target, as_draft(tiny_llama(2, layers=1), target, None), [torch.tensor([1, 2])], way, Filters(1.0),
        Extent(tokens=30, sequences=20, depth=depth, children=children), seed=0,
    )  # fmt: skip
    (ranks,) = counts.ranks
    accepted, reached = torch.zeros(depth, children, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for text in ranks.tolist():
        at = 0
        for rank in text:
            assert (rank == -2) == (at == depth)
            if at < depth:
                reached[at] += 1
            if rank >= 0:
                accepted[at, rank] += 1
            at = at + 1 if rank >= 0 else 0
    assert torch.equal(accepted, counts.accepted)
    assert torch.equal(reached, counts.reached)
