"""The texts of a batch as processors are shown them, between steps and along the trees of one step.

A text is the prompt as it was given, left padding included, then the new tokens. Sequences are known by their `member`,
which they keep when they take another slot of the batch; another text may begin under the member of one that has ended.
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

PathsOf = Sequence[Sequence[Path | None]]  # of nodes, for each sequence; None for an absent one


@dataclass
class _Text:
    """One sequence: what is asked about it, and what it is so far, LongTensor[T'], of which `produced` are new.

    stops: the tokens that end it; nobody is asked what follows them
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
        """True if a processor keeps what cannot be seen, so that it can be called once for each token alone."""
        return any(isinstance(each, WatchedCallable) and each.unseen for each in self.processors)

    @property
    def is_asked_twice(self) -> bool:
        """True in its first step, and then more and more rarely."""
        return not self.is_unseen and self.steps & (self.steps - 1) == 0

    def together(self, path: Path) -> tuple[object, int]:
        """Rows of which this is equal can be asked about in one call."""
        return self._alike, 0 if self._textless else len(self.ids) + len(path)

    def with_path(self, paths: Sequence[Path]) -> Tensor:
        """The texts down to nodes of one depth, LongTensor[n, T']; none of a text that nobody reads."""
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
    """The processors of a batch, each sequence with its own, and the texts so far."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._watched = WatchedOnes()

    def begin(
        self, member: int, prompt: Tensor, processors: Sequence[Processor], stops: Iterable[int], number: int
    ) -> None:
        """The sequence `member` begins a text after its prompt LongTensor[T], as it was given.

        stops: the tokens that end it; number: of the sequence in its request

        Raises ValueError for a grammar whose end does not end the text, and for a processor that several texts have and
        of which cannot be seen what it keeps.
        """
        self._texts.pop(member, None)
        ends = frozenset(stops)
        for processor in processors:
            if isinstance(processor, Grammar) and ends and not ends.issuperset(processor.eos_token_ids):
                raise ValueError(
                    f"the grammar's texts end by a token of {[*processor.eos_token_ids]}, and this text by "
                    f"{sorted(ends)}; give Grammar eos_token_id=, or generate"
                )
        if processors:
            own = tuple(self._of_sequence(each, number) for each in processors)
            self._texts[member] = _Text(own, prompt, ends)

    def end(self, member: int) -> None:
        """The text of a sequence has ended."""
        self._texts.pop(member, None)

    def _of_sequence(self, processor: Any, number: int) -> "Processor | GrammarText | WatchedCallable":
        """A processor as it is to be asked about one sequence of its batch alone."""
        kind = type(processor)
        if isinstance(processor, Grammar):
            return GrammarText(processor)
        if kind is PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            of_one = PrefixConstrainedLogitsProcessor(lambda _, text: allowed(number, text), 1)
            return of_one if is_promised(allowed) else self._watched.of(of_one, allowed)
        if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, int(processor.prompt_ignore_length[number]))
        if kind in STATELESS or kind is GrammarProcessor or is_promised(processor):
            return processor
        return self._watched.of(processor)

    def step(self, member: Tensor, produced: Tensor, left: Tensor, output: Tensor) -> "StepProcessors":
        """The texts before a step, brought up to date; this waits for the device.

        member, produced, left: LongTensor[b], of each slot; see `kernels.commit`
        output: LongTensor[B, M], the new tokens of each member
        """
        members, counts, lefts = torch.stack([member, produced, left]).tolist()
        texts = [self._texts.get(each) if more > 0 else None for each, more in zip(members, lefts, strict=True)]
        behind = [(text, each, count) for text, each, count in zip(texts, members, counts, strict=True) if text]
        if behind:
            first = min(text.produced for text, _, _ in behind)
            new = output[:, first : max(count for _, _, count in behind)].tolist()
            for text, each, count in behind:
                text.advance(new[each][text.produced - first : count - first])
        return StepProcessors(texts, lefts)


def _kind_of(processor: "Processor | GrammarText | WatchedCallable") -> object:
    """What is equal of processors that can be asked in one call."""
    if isinstance(processor, GrammarText):
        return GrammarText
    return id(processor.shared if isinstance(processor, WatchedCallable) else processor)


class StepProcessors:
    """The processors' answers about the nodes of one step's trees.

    texts: of each slot, None where nothing is asked; left: tokens that each may still write
    """

    def __init__(self, texts: list[_Text | None], left: list[int]):
        self._texts, self._left = texts, left
        self._dead: list[tuple[int, int]] = []
        self._changes: dict[tuple[int, int], list[Change]] = {}  # that the target's nodes would make

    def of_draft(self, logits: Tensor, paths: PathsOf) -> Tensor:
        """The draft's logits [B, n, V] after nodes, processed, fp32; -inf where none may be below: where a text ends.

        That is also where a processor's state would be another one, and everywhere where it cannot be seen. What was
        -inf and of which a processor makes NaN stays -inf: the draft does not propose it.
        """
        unseen = [text is not None and text.is_unseen for text in self._texts]
        asked = [() if alone else own for alone, own in zip(unseen, paths, strict=True)]
        out, changes = self._processed(logits, asked, of_target=False)
        out = out.masked_fill(out.isnan() & (logits == -torch.inf), -torch.inf)
        self._check("draft", out, paths)
        ended = [
            [alone or (text is not None and path is not None and not text.stops.isdisjoint(path[-1:])) for path in each]
            for text, each, alone in zip(self._texts, paths, unseen, strict=True)
        ]
        for slot, column in changes:
            ended[slot][column] = True
        if any(map(any, ended)):
            out = out.masked_fill(torch.tensor(ended, device=out.device)[..., None], -torch.inf)
        return out

    def of_target(self, logits: Tensor, paths: PathsOf) -> Tensor:
        """The target's logits [B, N, V] after nodes, processed, fp32.

        Where processors leave no token, the logits stay what they were: `accept` says whether that matters.
        """
        out, self._changes = self._processed(logits, paths, of_target=True)
        largest = self._check("target", out, paths)
        self._dead = (largest == -torch.inf).nonzero().tolist()
        if self._dead:
            out = torch.where((largest == -torch.inf)[..., None], logits.float(), out)
        return out

    def not_asked(self, paths: PathsOf) -> list[tuple[int, int]]:
        """The slots and columns of the nodes below one at which a processor's state changes: not to be accepted."""
        found = []
        for slot, changed in self._changed_paths(self._changes, paths).items():
            below = [column for column, path in enumerate(paths[slot]) if path is not None and _is_below(path, changed)]
            found += [(slot, column) for column in below]
        return found

    def accept(self, verified: Verified) -> None:
        """Make the calls of accepted nodes that change what a processor keeps.

        Raises ValueError if a token was chosen where the processors had left none.
        """
        if not self._dead and not self._changes:
            return
        paths, lengths = verified.path.tolist(), verified.length.tolist()
        for (slot, node), changes in self._changes.items():
            if node in paths[slot][: lengths[slot] + 1]:
                for change in changes:
                    change.make_again()
        for slot, node in self._dead:
            text = self._texts[slot]
            place = paths[slot].index(node) if node in paths[slot][: lengths[slot] + 1] else None
            if text is not None and place is not None and place < self._left[slot]:
                names = ", ".join(_names(text.processors))
                raise ValueError(
                    f"the logits processors {names} leave no token behind the {text.produced + place} new tokens of a "
                    "text: what they ask for cannot be met"
                )

    def _processed(
        self, logits: Tensor, paths: PathsOf, *, of_target: bool
    ) -> tuple[Tensor, dict[tuple[int, int], list[Change]]]:
        """The logits, and by slot and column the changes that calls would make."""
        out = logits.float().clone()
        groups: dict[object, list[tuple[int, int, _Text, Path]]] = {}
        for slot, (text, own) in enumerate(zip(self._texts, paths, strict=True)):
            for column, path in enumerate(own):
                if text is not None and path is not None and self._goes_on(text, slot, path):
                    groups.setdefault(text.together(path), []).append((slot, column, text, path))
        changes: dict[tuple[int, int], list[Change]] = {}
        for group in sorted(groups.values(), key=lambda rows: len(rows[0][3])):  # parents before their children
            changed = self._changed_paths(changes, paths)
            rows = [row for row in group if not _is_below(row[3], changed.get(row[0], set()))]
            if not rows:
                continue
            slots, columns = torch.tensor([row[:2] for row in rows], device=out.device).T
            each = groupby(rows, key=lambda row: row[0])
            ids = [text.with_path([row[3] for row in part]) for slot, part in each if (text := self._texts[slot])]
            asked = [AskedText(text.processors, path, []) for _, _, text, path in rows]
            twice = of_target and any(text.is_asked_twice for _, _, text, _ in rows)
            found = applied(asked, torch.cat(ids), out[slots, columns], of_target=of_target, twice=twice)
            out[slots, columns] = found
            for (slot, column, *_), row in zip(rows, asked, strict=True):
                if row.changes:
                    changes[slot, column] = row.changes
        return out, changes

    @staticmethod
    def _changed_paths(changes: Iterable[tuple[int, int]], paths: PathsOf) -> dict[int, set[Path]]:
        """The paths to the nodes of some slots and columns, by slot."""
        found: dict[int, set[Path]] = {}
        for slot, column in changes:
            path = paths[slot][column]
            assert path is not None
            found.setdefault(slot, set()).add(path)
        return found

    def _goes_on(self, text: _Text, slot: int, path: Path) -> bool:
        """True if any token can follow a node."""
        return len(path) < self._left[slot] and text.stops.isdisjoint(path)

    def _check(self, whose: str, out: Tensor, paths: PathsOf) -> Tensor:
        """The largest of each row [B, n]; ValueError for NaN and +inf."""
        largest = out.amax(-1)
        wrong = largest.isnan() | (largest == torch.inf)
        if wrong.any():
            slot, column = wrong.nonzero()[0].tolist()
            text, path = self._texts[slot], paths[slot][column]
            if text is not None and path is not None:  # else it is what the model gave
                names, place = ", ".join(_names(text.processors)), text.produced + len(path)
                raise ValueError(
                    f"the logits processors {names} make NaN or +inf of the {whose}'s logits behind {place} new tokens"
                )
        return largest


def _is_below(path: Path, changed: set[Path]) -> bool:
    return bool(changed) and any(path[:depth] in changed for depth in range(len(path)))


def _names(processors: Sequence["Processor | GrammarText | WatchedCallable"]) -> list[str]:
    own = [each.processor if isinstance(each, WatchedCallable) else each for each in processors]
    return ["Grammar" if isinstance(each, GrammarText) else name_of(each) for each in own]


def drafted_paths(tokens: Tensor, parents: Tensor) -> list[list[Path | None]]:
    """The paths to the nodes of trees.

    tokens: LongTensor[B, N], -1 for an absent node; parents: LongTensor[N] or [B, N], each before its children
    """
    found = []
    for own, above in zip(tokens.tolist(), parents.expand_as(tokens).tolist(), strict=True):
        paths: list[Path | None] = [()]
        for token, parent in zip(own[1:], above[1:], strict=True):
            before = paths[parent]
            paths.append(None if token < 0 or before is None else (*before, token))
        found.append(paths)
    return found
