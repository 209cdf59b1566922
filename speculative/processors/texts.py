"""Call each sequence's processors in every step: `BatchProcessors` keeps the sequences, `StepProcessors` has one step.

A processor gets the prompt as it was given, with its left padding, and then the new tokens. A sequence has a number,
its `member`, which it keeps when it moves to another slot of the batch. After its end, another sequence may get the
same number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

from heavypath.kernels.nodes import Verified
from heavypath.speculative.processors.applying import AskedText, Change, applied
from heavypath.speculative.processors.grammar import Grammar, GrammarProcessor
from heavypath.speculative.processors.kinds import STATELESS, TEXTLESS, Processor, name_of
from heavypath.speculative.processors.matching import GrammarText, Path
from heavypath.speculative.processors.watched import WatchedCallable, WatchedOnes, is_promised

PathsOf = Sequence[Sequence[Path | None]]  # for each sequence, the paths to some nodes; None for an absent node


@dataclass
class _SequenceState:
    """One sequence and its processors.

    processors: the objects to call for this sequence, in order
    ids: LongTensor[T'], the prompt and the new tokens so far
    stops: the tokens that end the sequence; processors are not called after them
    produced: number of new tokens
    steps: number of steps that have added tokens
    """

    processors: tuple["Processor | GrammarText | WatchedCallable", ...]
    ids: Tensor
    stops: frozenset[int]
    produced: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self._alike = tuple(map(_kind_of, self.processors))
        self._textless = all(isinstance(each, GrammarText) or type(each) in TEXTLESS for each in self.processors)

    @property
    def is_unseen(self) -> bool:
        """Whether a processor has state that cannot be read: then it may be called only once for each token."""
        return any(isinstance(each, WatchedCallable) and each.unseen for each in self.processors)

    @property
    def is_asked_twice(self) -> bool:
        """Whether the next step calls processors twice, as a check: steps 0, 1, 2, 4, 8, ..."""
        return not self.is_unseen and self.steps & (self.steps - 1) == 0

    def together(self, path: Path) -> tuple[object, int]:
        """A key for a node, given the path to it: nodes with equal keys can be processed in one call."""
        return self._alike, 0 if self._textless else len(self.ids) + len(path)

    def with_path(self, paths: Sequence[Path]) -> Tensor:
        """The sequence up to each of n nodes of one depth, LongTensor[n, T']; [n, 0] if no processor reads tokens.

        paths: the drafted tokens from the root's child to each node
        """
        if self._textless:
            return self.ids.new_empty(len(paths), 0)
        drafted = torch.tensor(paths, dtype=torch.long, device=self.ids.device)
        return torch.cat([self.ids.expand(len(paths), -1), drafted], 1)

    def advance(self, new: list[int]) -> None:
        self.ids = torch.cat([self.ids, self.ids.new_tensor(new)])
        self.produced += len(new)
        self.steps += 1
        for processor in self.processors:
            if isinstance(processor, GrammarText):
                processor.advance(new)


class BatchProcessors:
    """The processors of a batch's sequences, and the tokens of each sequence up to its last committed token."""

    def __init__(self) -> None:
        self._sequences: dict[int, _SequenceState] = {}
        self._watched = WatchedOnes()

    def begin(
        self, member: int, prompt: Tensor, processors: Sequence[Processor], stops: Iterable[int], number: int
    ) -> None:
        """Add a sequence.

        member: the sequence's number; a sequence that had it before is removed
        prompt: LongTensor[T], as it was given
        stops: the tokens that end the sequence
        number: index of the sequence in its request, the first argument of `prefix_allowed_tokens_fn`

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
        if processors:
            own = tuple(self._of_sequence(each, number) for each in processors)
            self._sequences[member] = _SequenceState(own, prompt, ends)

    def end(self, member: int) -> None:
        """Remove a sequence."""
        self._sequences.pop(member, None)

    def _of_sequence(self, processor: Any, number: int) -> "Processor | GrammarText | WatchedCallable":
        """The object to call for one sequence: the processor itself, or a form that knows this sequence alone."""
        kind = type(processor)
        if isinstance(processor, Grammar):
            return GrammarText(processor)
        if kind is PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            of_one = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(number, ids), 1)
            return of_one if is_promised(allowed) else self._watched.of(of_one, allowed)
        if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, int(processor.prompt_ignore_length[number]))
        if kind in STATELESS or kind is GrammarProcessor or is_promised(processor):
            return processor
        return self._watched.of(processor)

    def step(self, member: Tensor, produced: Tensor, left: Tensor, output: Tensor) -> "StepProcessors":
        """Append the tokens of earlier steps to the sequences. Returns the processors for the next step.

        This waits for the device.

        member:   LongTensor[b], for each slot the number of its sequence
        produced: LongTensor[b], how many new tokens this sequence has
        left:     LongTensor[b], how many it may still get
        output:   LongTensor[B, M], the new tokens of each member
        """
        members, counts, lefts = torch.stack([member, produced, left]).tolist()
        sequences = [self._sequences.get(each) if more > 0 else None for each, more in zip(members, lefts, strict=True)]
        unfinished = [
            (sequence, each, count)
            for sequence, each, count in zip(sequences, members, counts, strict=True)
            if sequence
        ]
        if unfinished:
            first = min(sequence.produced for sequence, _, _ in unfinished)
            new = output[:, first : max(count for _, _, count in unfinished)].tolist()
            for sequence, each, count in unfinished:
                sequence.advance(new[each][sequence.produced - first : count - first])
        return StepProcessors(sequences, lefts)


def _kind_of(processor: "Processor | GrammarText | WatchedCallable") -> object:
    """A key: processors with equal keys can be called together for several sequences."""
    if isinstance(processor, GrammarText):
        return GrammarText
    return id(processor.shared if isinstance(processor, WatchedCallable) else processor)


class StepProcessors:
    """Applies processors to the draft's and the target's logits for the nodes of one step's trees.

    sequences: one for each slot; None for a slot without processors
    left: for each slot the number of tokens that its sequence may still produce
    """

    def __init__(self, sequences: list[_SequenceState | None], left: list[int]):
        self._sequences = sequences
        self._left = left
        self._dead: list[tuple[int, int]] = []
        self._changes: dict[tuple[int, int], list[Change]] = {}  # (slot, node) -> changes to make if it is accepted

    def of_draft(self, logits: Tensor, paths: PathsOf) -> Tensor:
        """The draft's logits after n nodes of each sequence, processed, fp32 [B, n, V]. paths: to these nodes.

        A node that must not have children gets a row of -inf: one whose token ends the sequence, one at which a
        processor's state changes, and every node if a processor's state cannot be read. If a processor makes NaN of
        -inf, the result is -inf.

        Raises ValueError if processors make other NaN or +inf.
        """
        unseen = [sequence is not None and sequence.is_unseen for sequence in self._sequences]
        shown = [() if alone else own for alone, own in zip(unseen, paths, strict=True)]
        out, changes = self._processed(logits, shown, of_target=False)
        out = out.masked_fill(out.isnan() & (logits == -torch.inf), -torch.inf)
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

    def of_target(self, logits: Tensor, paths: PathsOf) -> Tensor:
        """The target's logits after the N nodes of each tree, processed, fp32 [B, N, V]. paths: to these nodes.

        If processors exclude all tokens after a node, its logits are returned unchanged. `accept` raises an error if
        the node is accepted. Raises ValueError if processors make NaN or +inf.
        """
        out, self._changes = self._processed(logits, paths, of_target=True)
        largest = self._check("target", out, paths)
        self._dead = (largest == -torch.inf).nonzero().tolist()
        if self._dead:
            out = torch.where((largest == -torch.inf)[..., None], logits.float(), out)
        return out

    def not_asked(self, paths: PathsOf) -> list[tuple[int, int]]:
        """The (slot, column) of each node below one at which a processor's state changes; it must not be accepted."""
        found = []
        for slot, changed in self._changed_paths(self._changes, paths).items():
            below = [column for column, path in enumerate(paths[slot]) if path is not None and _is_below(path, changed)]
            found += [(slot, column) for column in below]
        return found

    def accept(self, verified: Verified) -> None:
        """Repeat, for accepted nodes, the calls that change a processor's state.

        Raises ValueError if a token was sampled after a node after which processors had excluded all tokens.
        """
        if not self._dead and not self._changes:
            return
        paths = verified.path.tolist()
        lengths = verified.length.tolist()
        for (slot, node), changes in self._changes.items():
            if node in paths[slot][: lengths[slot] + 1]:
                for change in changes:
                    change.make_again()
        for slot, node in self._dead:
            sequence = self._sequences[slot]
            depth = paths[slot].index(node) if node in paths[slot][: lengths[slot] + 1] else None
            if sequence is not None and depth is not None and depth < self._left[slot]:
                names = ", ".join(_names(sequence.processors))
                count = sequence.produced + depth
                raise ValueError(
                    f"the logits processors {names} leave no token after the {count} new tokens of a sequence: they "
                    "exclude the whole vocabulary; remove one of them, or let it exclude fewer tokens"
                )

    def _processed(
        self, logits: Tensor, paths: PathsOf, *, of_target: bool
    ) -> tuple[Tensor, dict[tuple[int, int], list[Change]]]:
        """The logits [B, n, V] after all processors, and the calls that changed a state, by (slot, column) of nodes."""
        out = logits.float().clone()
        groups: dict[object, list[tuple[int, int, _SequenceState, Path]]] = {}
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
            nodes = [AskedText(sequence.processors, path, []) for _, _, sequence, path in rows]
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
                names = ", ".join(_names(sequence.processors))
                count = sequence.produced + len(path)
                raise ValueError(
                    f"the logits processors {names} make NaN or +inf of the {whose}'s logits after {count} new tokens"
                )
        return largest


def _is_below(path: Path, changed: set[Path]) -> bool:
    return bool(changed) and any(path[:depth] in changed for depth in range(len(path)))


def _names(processors: Sequence["Processor | GrammarText | WatchedCallable"]) -> list[str]:
    own = [each.processor if isinstance(each, WatchedCallable) else each for each in processors]
    return ["Grammar" if isinstance(each, GrammarText) else name_of(each) for each in own]


def drafted_paths(tokens: Tensor, parents: Tensor) -> list[list[Path | None]]:
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
