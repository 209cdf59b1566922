"""Apply a list of processors to the logits of several sequences, and check each processor's result."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.processors.grammar import masked
from heavypath.speculative.processors.kinds import BATCHED, WARPERS, Processor, name_of
from heavypath.speculative.processors.matching import GrammarText, Path
from heavypath.speculative.processors.state import KeptState
from heavypath.speculative.processors.watched import Change, WatchedCallable, undone


class AskedText(NamedTuple):
    """A sequence that ends at a node, for which processors are called.

    processors: the sequence's processors, in the order of the calls
    path: the drafted tokens of the sequence. Grammars read these alone, because they have read the other tokens before
    changes: `applied` appends a `Change` for each call that changed a processor's state
    states: the state after such a call, until the next processor is called
    """

    processors: Sequence["Processor | GrammarText | WatchedCallable"]
    path: Path
    changes: list[Change]
    states: list[KeptState]


def applied(rows: Sequence[AskedText], ids: Tensor, scores: Tensor, *, of_target: bool, twice: bool) -> Tensor:
    """The scores [R, V] after all processors of the sequences have been applied, one after the other.

    Many processors cannot read a row that is -inf throughout, because it is no distribution. Such a row of a draft is
    not passed to any processor: it proposes nothing. Such a row of the target, which an earlier processor has made, is
    passed to all processors except `WARPERS`, because they may raise the logit of a token.

    rows:      the R sequences. All have the same processors, except that a grammar has a state for each sequence
    ids:       LongTensor[R, T'], the tokens of the sequences
    scores:    fp32 [R, V], the logits after them
    of_target: whether the scores are the target's; else they are a draft's
    twice:     whether processors that are called for one row at a time are called twice, the second time in reverse
               order, to find those whose results depend on earlier calls

    Raises TypeError if a processor does not return scores of this shape, and ValueError if two calls with the same
    arguments give different results.
    """
    watched = [each for each in rows[0].processors if isinstance(each, WatchedCallable)]
    if len(watched) < 2:
        return _in_turn(rows, ids, scores, of_target=of_target, twice=twice)
    found = []
    for row, one in enumerate(rows):  # each processor finds what those before it have changed for the same node
        with undone([each for each in one.processors if isinstance(each, WatchedCallable)]):
            place = slice(row, row + 1)
            found.append(_in_turn([one], ids[place], scores[place], of_target=of_target, twice=twice, goes_on=True))
    return torch.cat(found)


def _in_turn(
    rows: Sequence[AskedText], ids: Tensor, scores: Tensor, *, of_target: bool, twice: bool, goes_on: bool = False
) -> Tensor:
    """`applied`. goes_on: whether a state that a call has changed stays changed for the processors after it."""
    for index, processor in enumerate(rows[0].processors):
        if not of_target or type(processor) in WARPERS:
            shown = scores.amax(-1) != -torch.inf
            if not shown.all():
                numbers = shown.nonzero()[:, 0]
                own = []
                for row in numbers.tolist():
                    of_row = rows[row]
                    own.append(of_row._replace(processors=[of_row.processors[index]]))
                if own:
                    found = _in_turn(
                        own, ids[numbers], scores[numbers], of_target=of_target, twice=twice, goes_on=goes_on
                    )
                    scores = scores.index_copy(0, numbers, found)
                continue
        if isinstance(processor, GrammarText):
            words = []
            for asked in rows:
                grammar = asked.processors[index]
                assert isinstance(grammar, GrammarText)
                words.append(grammar.words_after(asked.path))
            scores = masked(scores, torch.stack(words))
        elif type(processor) in BATCHED:
            scores = _answer(processor, ids, scores)
        else:
            answers = [_call_for_row(index, ids, scores, rows, row) for row in range(len(rows))]
            if twice:
                for row in reversed(range(len(rows))):
                    again = _call_for_row(index, ids, scores, rows, row, note=False)
                    if not torch.equal(again.nan_to_num(), answers[row].nan_to_num()):
                        raise ValueError(
                            f"the logits processor {name_of(_own(processor))} answered differently when it was called "
                            "twice with the same input_ids and scores, though no change of its state was found: in a "
                            "tree its result must depend on its arguments alone. Compute what it needs from "
                            "input_ids, which is the whole sequence; for a grammar use heavypath.speculative.Grammar"
                        )
            scores = torch.cat(answers)
            if goes_on and rows[0].states and isinstance(processor, WatchedCallable):
                processor.shared.go_on(rows[0].states.pop())
    return scores


def _own(processor: "Processor | WatchedCallable") -> "Processor":
    return processor.processor if isinstance(processor, WatchedCallable) else processor


def _call_for_row(
    index: int, ids: Tensor, scores: Tensor, rows: Sequence[AskedText], row: int, *, note: bool = True
) -> Tensor:
    """A processor's result for one row. It gets copies of the arguments, so it may write into them."""
    processor: Any = rows[row].processors[index]
    ids = ids[row : row + 1]
    scores = scores[row : row + 1]
    if not isinstance(processor, WatchedCallable):
        return _answer(processor, ids.clone(), scores.clone())
    answer, after = processor.ask(ids.clone(), scores.clone())
    if after is not None and note:
        rows[row].changes.append(Change(processor, ids.clone(), scores.clone()))
        rows[row].states[:] = [after]
    return _checked(answer, processor.processor, scores)


def _answer(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    return _checked(processor(ids, scores), processor, scores)


def _checked(answer: object, processor: object, scores: Tensor) -> Tensor:
    """A processor's answer, in the dtype and on the device of the scores [R, V] that were passed to it."""
    if not isinstance(answer, Tensor) or answer.shape != scores.shape or not answer.is_floating_point():
        given = f"{answer.dtype} {[*answer.shape]}" if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(
            f"the logits processor {name_of(processor)} must return scores [R, V] = {[*scores.shape]} of a "
            f"floating-point dtype, got {given}"
        )
    return answer.to(scores)
