"""Show a draft's logits to the processors before anything is drawn from them.

What is drawn, and what a verification weighs it by, is the processed distribution: so little is drafted that the
processed target would refuse. Static and growing trees are drafted through the same call, a level at a time, whose
`Feed` tells the tree: a node's number is its cache row after the prefix.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.processors.matching import Path
from heavypath.speculative.processors.texts import BatchProcessors, StepProcessors, drafted_paths

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request


class ProcessedSteps(LogitChange):
    """The processors of a batch, as a change of each step's logits; it asks the host."""

    def __init__(self, processors: BatchProcessors):
        self.processors = processors

    @classmethod
    def of(cls, request: "Request") -> "ProcessedSteps":
        """Those of a request. Raises ValueError for processors that do not fit its sequences."""
        processors, stops = BatchProcessors(), request.stops.tolist()
        for member, own in enumerate(request.processors or ()):
            processors.begin(member, request.input_ids[member], own, stops, member)
        return cls(processors)

    def of_step(self, state: Any, lap: Callable[[str], object]) -> "_ProcessedStep":
        """With the texts before the step brought up to date."""
        asked = self.processors.step(state.member, state.produced, state.left, state.output)
        lap("processing")
        return _ProcessedStep(asked, lap)


class _ProcessedStep(LogitChange):
    def __init__(self, asked: StepProcessors, lap: Callable[[str], object]):
        self._asked, self._lap = asked, lap

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """See `ProcessedDraft`."""
        return ProcessedDraft(draft, self._asked, self._lap)

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The logits, processed; nodes below one at which a processor's state changes become absent."""
        paths = drafted_paths(drafted.tokens, drafted.parents)
        logits = self._asked.of_target(logits, paths)
        for slot, node in self._asked.not_asked(paths):
            drafted.tokens[slot, node] = -1
        self._lap("processing")
        return logits

    def after_verifying(self, verified: Verified) -> None:
        """See `StepProcessors.accept`."""
        self._asked.accept(verified)


class ProcessedDraft(Draft):
    """A draft, for one step, whose logits are processed.

    An absent node is given to a draft as a node of token 0. Where token 0 could not have been drawn, nobody is asked
    about such a text; elsewhere that text might as well have been drafted.

    lap: told "draft" when the draft's pass ends, and "processing"
    """

    def __init__(self, draft: Draft, step: StepProcessors, lap: Callable[[str], object]):
        self._draft, self._step, self._lap = draft, step, lap
        self.laws = draft.laws
        self._paths: list[dict[int, Path | None]] = []  # of each sequence, by the numbers of nodes
        self._columns: dict[int, int] = {}  # of nodes of the level above, in its logits
        self._above = torch.empty(0, device="cpu")

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The logits [B, n, V] after the nodes of a level, processed, fp32; of the first feed after the root alone.

        Of a draft of D `laws` [B, D, V] after the root.
        """
        after = self._draft(feed, cache)
        self._lap("draft")
        if feed.level == 0:
            after = after[:, -self.laws :]
            self._paths = [{0: ()} for _ in after]
            self._columns = {0: 0}
            nodes = [[0] * self.laws] * len(after)
        else:
            nodes = self._note(feed)
            self._columns = {node: column for column, node in enumerate(nodes[0])}
        paths = [[own[node] for node in each] for own, each in zip(self._paths, nodes, strict=True)]
        self._above = after = self._step.of_draft(after, paths)
        self._lap("processing")
        return after

    def _note(self, feed: Feed) -> list[list[int]]:
        """Note the paths to the nodes of a level below the root; their numbers."""
        numbers, parents = (rows - feed.prefix_lengths[:, None] for rows in (feed.cache_rows, feed.parent_rows))
        nodes, above, tokens = torch.stack([numbers, parents, feed.tokens]).tolist()
        columns = torch.tensor([[self._columns[parent] for parent in own] for own in above], device=feed.tokens.device)
        slot = torch.arange(len(nodes), device=feed.tokens.device)[:, None]
        each = self._above[:, None] if feed.level > 1 else self._above[:, :, None]  # [B, D, n, V]
        drawable = (each[slot, :, columns, feed.tokens] > -torch.inf).any(-1).tolist()
        for own, *level in zip(self._paths, nodes, above, tokens, drawable, strict=True):
            for node, parent, token, could in zip(*level, strict=True):
                before = own[parent]
                own[node] = (*before, token) if could and before is not None else None
        return nodes
