"""Apply the processors to the draft's logits before tokens are drawn from them.

Tokens are drawn from the processed distribution, and verified with it. So few tokens are drafted that the processed
target excludes. Static and growing trees are drafted by the same calls, one for each level. The `Feed` of a call
describes the tree: a node's number is its cache row minus the number of rows of the prefix.
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
    """Applies the logits processors of a batch to the logits of draft and target, as a `LogitChange`.

    Processors run on the host, so each step waits for the device.
    """

    def __init__(self, processors: BatchProcessors):
        self.processors = processors

    @classmethod
    def of(cls, request: "Request") -> "ProcessedSteps":
        """Make the change of a request. Raises ValueError if the request's processors do not fit its sequences."""
        processors = BatchProcessors()
        stops = request.stops.tolist()
        for member, own in enumerate(request.processors or ()):
            processors.begin(member, request.input_ids[member], own, stops, member)
        return cls(processors)

    def of_step(self, state: Any, lap: Callable[[str], object]) -> "_ProcessedStep":
        """Add the tokens of earlier steps to the sequences, and return the change for the next step.

        state: the batch's `Sequences`; lap: called with the name of a phase when it ends, to measure times
        """
        step = self.processors.step(state.member, state.produced, state.left, state.output)
        lap("processing")
        return _ProcessedStep(step, lap)


class _ProcessedStep(LogitChange):
    def __init__(self, step: StepProcessors, lap: Callable[[str], object]):
        self._step = step
        self._lap = lap

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        return ProcessedDraft(draft, self._step, self._lap)

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The processed logits [B, N, V]. Nodes below a node at which a processor's state changes are removed."""
        paths = drafted_paths(drafted.tokens, drafted.parents)
        logits = self._step.of_target(logits, paths)
        for slot, node in self._step.not_asked(paths):
            drafted.tokens[slot, node] = -1
        self._lap("processing")
        return logits

    def after_verifying(self, verified: Verified) -> None:
        self._step.accept(verified)


class ProcessedDraft(Draft):
    """A wrapper of a draft for one step: applies the processors to the draft's logits.

    An absent node is passed to a draft as a node of token 0. If token 0 could not have been drawn there, processors are
    not called for the node. Else they are called as for a drafted token 0, which does no harm.

    lap: called with "draft" when the draft's pass has ended, and with "processing" when the processors have run
    """

    def __init__(self, draft: Draft, step: StepProcessors, lap: Callable[[str], object]):
        self._draft = draft
        self._step = step
        self._lap = lap
        self.laws = draft.laws
        self._paths: list[dict[int, Path | None]] = []  # for each sequence: node number -> path
        self._columns: dict[int, int] = {}  # node number -> column of `_above`, for the nodes of the level above
        self._above = torch.empty(0, device="cpu")  # the processed logits of the level above

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The processed logits after the nodes of a level, fp32 [B, n, V].

        For the first feed, only the logits after the root are returned: [B, D, V] with D = the draft's `laws`.
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
        """Store the paths to the nodes of a level below the root. Returns the nodes' numbers, n for each sequence."""
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
