"""Apply the processors of a batch's sequences in every step, to the logits of draft and target.

A processor gets the prompt as it was given, with its left padding, and then the new tokens. Tokens are drawn from the
processed distribution, and verified with it. So few tokens are drafted that the processed target excludes.

Static and growing trees are drafted by the same calls, one for each level. The `Feed` of a call describes the tree: a
node's number is its cache row minus the number of rows of the prefix.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.processors.applying import AskedText, applied
from heavypath.speculative.processors.grammar import Grammar, GrammarProcessor
from heavypath.speculative.processors.kinds import STATELESS, Processor
from heavypath.speculative.processors.matching import GrammarText, Path
from heavypath.speculative.processors.sequence_state import SequenceState, names_of
from heavypath.speculative.processors.watched import Change, WatchedOnes, is_promised, keep_all

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request

PathsOf = Sequence[Sequence[Path | None]]  # for each sequence, the paths to some nodes; None for an absent node


class ProcessedSteps(LogitChange):
    """The logits processors of a batch, and the tokens of each sequence up to its last committed token.

    A sequence has a number, its `member`, which it keeps when it moves to another slot of the batch. After its end,
    another sequence may get the same number. Processors run on the host, so each step waits for the device.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceState] = {}
        self._watched = WatchedOnes()

    @classmethod
    def of(cls, request: "Request") -> "ProcessedSteps":
        """Make the change of a request. Raises ValueError if the request's processors do not fit its sequences."""
        processors = cls()
        stops = request.stops.tolist()
        lists = request.processors or []
        criteria = criteria_of(request)
        watched = [[kept for each in own if (kept := _watched_in(each)) is not None] for own in lists]
        states = processors._watched.together(watched)
        for member, own in enumerate(lists):
            processors.begin(member, request.input_ids[member], own, stops, member, criteria)
        del states  # which the sequences hold now
        return processors

    def begin(
        self,
        member: int,
        prompt: Tensor,
        processors: Sequence[Processor],
        stops: Iterable[int],
        number: int,
        criteria: Sequence[object],
    ) -> None:
        """Add a sequence.

        member: the sequence's number; a sequence that had it before is removed
        prompt: LongTensor[T], as it was given
        stops: the tokens that end the sequence
        number: index of the sequence in its request, the first argument of `prefix_allowed_tokens_fn`
        criteria: those of the request's stopping criteria that may keep state

        Raises ValueError for a grammar with an end-of-sequence token that does not end the sequence, and for a
        processor that several sequences share if its state cannot be read.
        """
        self._sequences.pop(member, None)
        ends = frozenset(stops)
        for processor in processors:
            if isinstance(processor, Grammar) and ends and not ends.issuperset(processor.eos_token_ids):
                raise ValueError(
                    f"the grammar's end-of-sequence tokens are {[*processor.eos_token_ids]}, and this sequence ends by "
                    f"one of {sorted(ends)}; give Grammar eos_token_id=, or generate"
                )
        if not processors:
            return
        pairs = [(_of_sequence(each, number), _watched_in(each)) for each in processors]
        watched = iter(self._watched.of([(called, kept) for called, kept in pairs if kept is not None], criteria))
        own = tuple(called if kept is None else next(watched) for called, kept in pairs)
        self._sequences[member] = SequenceState(own, prompt, ends)

    def end(self, member: int) -> None:
        """Remove a sequence."""
        self._sequences.pop(member, None)

    def of_step(self, state: Any, lap: Callable[[str], object]) -> "StepProcessors":
        """Append the tokens of earlier steps to the sequences, and return the change for the next step.

        state: the batch's `Sequences`; lap: called with the name of a phase when it ends, to measure times
        """
        members, counts, lefts = torch.stack([state.member, state.produced, state.left]).tolist()
        sequences = [self._sequences.get(each) if more > 0 else None for each, more in zip(members, lefts, strict=True)]
        unfinished = [
            (sequence, each, count)
            for sequence, each, count in zip(sequences, members, counts, strict=True)
            if sequence
        ]
        if unfinished:
            first = min(sequence.produced for sequence, _, _ in unfinished)
            new = state.output[:, first : max(count for _, _, count in unfinished)].tolist()
            for sequence, each, count in unfinished:
                sequence.advance(new[each][sequence.produced - first : count - first])
        lap("processing")
        return StepProcessors(sequences, lefts, lap)


def criteria_of(request: "Request") -> Sequence[object]:
    """The stopping criteria of a request that may keep state."""
    return () if request.stopping is None else request.stopping.keeping


def _of_sequence(processor: Any, number: int) -> "Processor | GrammarText":
    """What is called for one sequence: the processor itself, or a form that knows this sequence alone."""
    kind = type(processor)
    if isinstance(processor, Grammar):
        return GrammarText(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        prompt = number // processor._num_beams  # of each prompt transformers may generate several texts
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty, int(processor.prompt_ignore_length[number]))
    return processor


def _watched_in(processor: Any) -> object:
    """The user's object in a processor whose state is watched; None if there is none."""
    kind = type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return None if is_promised(allowed) else allowed
    if isinstance(processor, Grammar) or kind in STATELESS or kind is GrammarProcessor or is_promised(processor):
        return None
    return processor


class StepProcessors(LogitChange):
    """Applies processors to the draft's and the target's logits for the nodes of one step's trees.

    sequences: one for each slot; None for a slot without processors
    left: for each slot the number of tokens that its sequence may still produce
    lap: called with the name of a phase when it ends
    """

    def __init__(self, sequences: list[SequenceState | None], left: list[int], lap: Callable[[str], object]):
        self.lap = lap
        self._sequences = sequences
        self._left = left
        self._dead: list[tuple[int, int]] = []
        self._changes: dict[tuple[int, int], list[Change]] = {}  # (slot, node) -> changes to make if it is accepted

    def before_drawing(self, draft: Draft, state: Any) -> Draft:
        """Wrap the draft, so that its logits are processed."""
        return ProcessedDraft(draft, self)

    def of_draft(self, logits: Tensor, paths: PathsOf) -> Tensor:
        """The draft's logits after n nodes of each sequence, processed, fp32 [B, n, V]. paths: to these nodes.

        A node that must not have children gets a row of -inf: one whose token ends the sequence, one at which a
        processor's state changes, and every node if a processor's state cannot be read. If processors make NaN or +inf
        of -inf, the result is -inf.

        Raises ValueError if processors make other NaN or +inf.
        """
        unseen = [sequence is not None and sequence.is_unseen for sequence in self._sequences]
        shown = [() if alone else own for alone, own in zip(unseen, paths, strict=True)]
        out, changes = self._processed(logits, shown, of_target=False)
        is_wrong = out.isnan() | (out == torch.inf)
        out = out.masked_fill(is_wrong & (logits == -torch.inf), -torch.inf)
        self._check("draft", out, paths)
        ended = [
            [
                alone or (sequence is not None and path is not None and not sequence.stops.isdisjoint(path[-1:]))
                for path in each
            ]
            for sequence, each, alone in zip(self._sequences, paths, unseen, strict=True)
        ]
        for slot, column in changes:
            ended[slot][column] = True
        if any(map(any, ended)):
            out = out.masked_fill(torch.tensor(ended, device=out.device)[..., None], -torch.inf)
        return out

    def before_verifying(self, logits: Tensor, drafted: Any, state: Any) -> Tensor:
        """The target's logits after the N nodes of each tree, processed, fp32 [B, N, V].

        Nodes below a node at which a processor's state changes are removed. If processors exclude all tokens after a
        node, its logits are returned unchanged, and `after_verifying` raises an error if the node is accepted.

        Raises ValueError if processors make NaN or +inf.
        """
        paths = _drafted_paths(drafted.tokens, drafted.parents)
        out, self._changes = self._processed(logits, paths, of_target=True)
        largest = self._check("target", out, paths)
        self._dead = (largest == -torch.inf).nonzero().tolist()
        if self._dead:
            out = torch.where((largest == -torch.inf)[..., None], logits.float(), out)
        for slot, changed in self._changed_paths(self._changes, paths).items():
            for node, path in enumerate(paths[slot]):
                if path is not None and _is_below(path, changed):
                    drafted.tokens[slot, node] = -1
        self.lap("processing")
        return out

    def after_verifying(self, verified: Verified) -> None:
        """Repeat, for accepted nodes, the calls that change a processor's state.

        If this raises, all states are those before the step, which is not committed and may be repeated.

        Raises ValueError if a token was sampled after a node after which processors had excluded all tokens, and any
        error of a repeated call.
        """
        if not self._dead and not self._changes:
            return
        paths = verified.path.tolist()
        lengths = verified.length.tolist()
        for slot, node in self._dead:
            sequence = self._sequences[slot]
            depth = paths[slot].index(node) if node in paths[slot][: lengths[slot] + 1] else None
            if sequence is not None and depth is not None and depth < self._left[slot]:
                names = names_of(sequence.processors)
                count = sequence.produced + depth
                raise ValueError(
                    f"the logits processors {names} leave no token after the {count} new tokens of a sequence: they "
                    "exclude the whole vocabulary; remove one of them, or let it exclude fewer tokens"
                )
        accepted = [self._changes[key] for key in self._changes if key[1] in paths[key[0]][: lengths[key[0]] + 1]]
        keep_all([change for changes in accepted for change in changes])

    def _processed(
        self, logits: Tensor, paths: PathsOf, *, of_target: bool
    ) -> tuple[Tensor, dict[tuple[int, int], list[Change]]]:
        """The logits [B, n, V] after all processors, and the calls that changed a state, by (slot, column) of nodes."""
        out = logits.float().clone()
        groups: dict[object, list[tuple[int, int, SequenceState, Path]]] = {}
        for slot, (sequence, own) in enumerate(zip(self._sequences, paths, strict=True)):
            for column, path in enumerate(own):
                if sequence is None or path is None:
                    continue
                if len(path) < self._left[slot] and sequence.stops.isdisjoint(path):  # the sequence goes on after it
                    groups.setdefault(sequence.together(path), []).append((slot, column, sequence, path))
        changes: dict[tuple[int, int], list[Change]] = {}
        for group in sorted(groups.values(), key=lambda rows: len(rows[0][3])):  # parents before their children
            changed = self._changed_paths(changes, paths)
            rows = [row for row in group if not _is_below(row[3], changed.get(row[0], set()))]
            if not rows:
                continue
            slots, columns = torch.tensor([row[:2] for row in rows], device=out.device).T
            each = groupby(rows, key=lambda row: row[0])
            ids = [
                sequence.with_path([row[3] for row in part])
                for slot, part in each
                if (sequence := self._sequences[slot])
            ]
            nodes = [AskedText(sequence.processors, path, [], []) for _, _, sequence, path in rows]
            twice = of_target and any(sequence.is_asked_twice for _, _, sequence, _ in rows)
            found = applied(nodes, torch.cat(ids), out[slots, columns], of_target=of_target, twice=twice)
            out[slots, columns] = found
            for (slot, column, *_), row in zip(rows, nodes, strict=True):
                if row.changes:
                    changes[slot, column] = row.changes
        return out, changes

    @staticmethod
    def _changed_paths(changes: Iterable[tuple[int, int]], paths: PathsOf) -> dict[int, set[Path]]:
        """For each slot, the paths to its nodes in `changes`, which are given as (slot, column)."""
        found: dict[int, set[Path]] = {}
        for slot, column in changes:
            path = paths[slot][column]
            assert path is not None
            found.setdefault(slot, set()).add(path)
        return found

    def _check(self, whose: str, out: Tensor, paths: PathsOf) -> Tensor:
        """The maximum of each row [B, n]. Raises ValueError for NaN and +inf that processors have made."""
        largest = out.amax(-1)
        wrong = largest.isnan() | (largest == torch.inf)
        if wrong.any():
            slot, column = wrong.nonzero()[0].tolist()
            sequence = self._sequences[slot]
            path = paths[slot][column]
            if sequence is not None and path is not None:  # else the model itself has returned it
                names = names_of(sequence.processors)
                count = sequence.produced + len(path)
                raise ValueError(
                    f"the logits processors {names} make NaN or +inf of the {whose}'s logits after {count} new tokens"
                )
        return largest


class ProcessedDraft(Draft):
    """A wrapper of a draft for one step: applies the processors to the draft's logits.

    An absent node is passed to a draft as a node of token 0. If token 0 could not have been drawn there, processors are
    not called for the node. Else they are called as for a drafted token 0, which does no harm.

    Its pass is the phase "draft", the processors' calls are the phase "processing".
    """

    def __init__(self, draft: Draft, step: StepProcessors):
        self._draft = draft
        self._step = step
        self.root_distributions = draft.root_distributions
        self._paths: list[dict[int, Path | None]] = []  # for each sequence: node number -> path
        self._columns: dict[int, int] = {}  # node number -> column of `_above`, for the nodes of the level above
        self._above = torch.empty(0, device="cpu")  # the processed logits of the level above

    def __call__(self, feed: Feed, cache: Any) -> Tensor:
        """The processed logits after the nodes of a level, fp32 [B, n, V].

        For the first feed, only the logits after the root are returned: [B, D, V], with D of the draft's
        `root_distributions`.
        """
        after = self._draft(feed, cache)
        self._step.lap("draft")
        if feed.level == 0:
            after = after[:, -self.root_distributions :]
            self._paths = [{0: ()} for _ in after]
            self._columns = {0: 0}
            nodes = [[0] * self.root_distributions] * len(after)
        else:
            nodes = self._note(feed)
            self._columns = {node: column for column, node in enumerate(nodes[0])}
        paths = [[own[node] for node in each] for own, each in zip(self._paths, nodes, strict=True)]
        self._above = after = self._step.of_draft(after, paths)
        self._step.lap("processing")
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


def _is_below(path: Path, changed: set[Path]) -> bool:
    return bool(changed) and any(path[:depth] in changed for depth in range(len(path)))


def _drafted_paths(tokens: Tensor, parents: Tensor) -> list[list[Path | None]]:
    """The path to each node of each tree [B][N]; None for an absent node and for the nodes below it.

    tokens: LongTensor[B, N], -1 for an absent node
    parents: LongTensor[N] or [B, N], the index of each node's parent, which is smaller than the node's own index
    """
    found = []
    for own, above in zip(tokens.tolist(), parents.expand_as(tokens).tolist(), strict=True):
        paths: list[Path | None] = [()]
        for token, parent in zip(own[1:], above[1:], strict=True):
            before = paths[parent]
            paths.append(None if token < 0 or before is None else (*before, token))
        found.append(paths)
    return found
