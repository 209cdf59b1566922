"""Ask processors about some texts, one processor after the other, and hold them to what they must keep to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.processors.grammar import masked
from heavypath.speculative.processors.kinds import BATCHED, WARPERS, Processor, name_of
from heavypath.speculative.processors.matching import GrammarText, Path
from heavypath.speculative.processors.watched import WatchedCallable


class Change(NamedTuple):
    """An undone call that has changed what a processor keeps; ids: LongTensor[1, T'], scores: fp32 [1, V]."""

    processor: WatchedCallable
    ids: Tensor
    scores: Tensor

    def make_again(self) -> None:
        """Make the call, as one of the text; what it changes stays."""
        self.processor.keep(self.ids.clone(), self.scores.clone())


class AskedText(NamedTuple):
    """A text to be asked about: its processors, and what of it is drafted, for grammars, which know the rest.

    changes: the calls for this text that have changed what a processor keeps, noted while it is asked
    """

    processors: Sequence["Processor | GrammarText | WatchedCallable"]
    path: Path
    changes: list[Change]


def applied(rows: Sequence[AskedText], ids: Tensor, scores: Tensor, *, of_target: bool, twice: bool) -> Tensor:
    """The result of processors on scores fp32 [R, V] after the texts LongTensor[R, T'].

    A row that is -inf throughout is no distribution, which many processors cannot read. A draft's is shown to none: it
    proposes nothing. A target's, which another processor has left so, is shown to those that may raise a token.

    rows:      whose processors are the same, but for grammars, of which each text has its own in the same place
    of_target: whether the scores are the target's, or else a draft's
    twice:     whether those of unknown kind are asked again, in another order, to see if they answer alike

    Raises TypeError for an answer that is none, ValueError for a processor whose answers depend on earlier calls.
    """
    for place, processor in enumerate(rows[0].processors):
        if not of_target or type(processor) in WARPERS:
            shown = scores.amax(-1) != -torch.inf
            if not shown.all():
                numbers = shown.nonzero()[:, 0]
                own = [rows[row]._replace(processors=[rows[row].processors[place]]) for row in numbers.tolist()]
                if own:
                    found = applied(own, ids[numbers], scores[numbers], of_target=of_target, twice=twice)
                    scores = scores.index_copy(0, numbers, found)
                continue
        if isinstance(processor, GrammarText):
            own = [(row.processors[place], row.path) for row in rows]
            words = [each.words_after(path) for each, path in own if isinstance(each, GrammarText)]
            scores = masked(scores, torch.stack(words))
        elif type(processor) in BATCHED:
            scores = _answer(processor, ids, scores)
        else:
            answers = [_asked_about(place, ids, scores, rows, row) for row in range(len(rows))]
            if twice:
                for row in reversed(range(len(rows))):
                    again = _asked_about(place, ids, scores, rows, row, note=False)
                    if not torch.equal(again.nan_to_num(), answers[row].nan_to_num()):
                        raise ValueError(
                            f"the logits processor {name_of(_own(processor))} answered differently when it was asked "
                            "again about the same text and scores, and nothing that can be seen of it has changed: "
                            "along a tree its answer must depend on its arguments alone. Compute what it needs from "
                            "input_ids, which is the whole text; for a grammar take heavypath.speculative.Grammar"
                        )
            scores = torch.cat(answers)
    return scores


def _own(processor: "Processor | WatchedCallable") -> "Processor":
    return processor.processor if isinstance(processor, WatchedCallable) else processor


def _asked_about(
    place: int, ids: Tensor, scores: Tensor, rows: Sequence[AskedText], row: int, *, note: bool = True
) -> Tensor:
    """The answer about one row; copies are given, so that a processor may write into them."""
    processor: Any = rows[row].processors[place]
    ids, scores = ids[row : row + 1], scores[row : row + 1]
    if not isinstance(processor, WatchedCallable):
        return _answer(processor, ids.clone(), scores.clone())
    answer, changed = processor.ask(ids.clone(), scores.clone())
    if changed and note:
        rows[row].changes.append(Change(processor, ids, scores))
    return _checked(answer, processor.processor, scores)


def _answer(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    return _checked(processor(ids, scores), processor, scores)


def _checked(answer: object, processor: object, scores: Tensor) -> Tensor:
    """A processor's answer about scores [R, V], if it is one."""
    if not isinstance(answer, Tensor) or answer.shape != scores.shape or not answer.is_floating_point():
        given = f"{answer.dtype} {[*answer.shape]}" if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(
            f"the logits processor {name_of(processor)} must return scores [R, V] = {[*scores.shape]} as it is given "
            f"them, got {given}"
        )
    return answer.to(scores)
