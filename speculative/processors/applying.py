"""Ask processors about some texts, one processor after the other, and hold them to what they must keep to."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.processors.grammar import masked
from heavypath.speculative.processors.kinds import BATCHED, WARPERS, Processor, name_of
from heavypath.speculative.processors.matching import GrammarText, Path


class AskedText(NamedTuple):
    """A text to be asked about: its processors, and what of it is drafted, for grammars, which know the rest."""

    processors: Sequence["Processor | GrammarText"]
    path: Path


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
                own = [AskedText([rows[row].processors[place]], rows[row].path) for row in numbers.tolist()]
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
            answers = [_asked_about(processor, ids, scores, row) for row in range(len(rows))]
            if twice:
                for row in reversed(range(len(rows))):
                    again = _asked_about(processor, ids, scores, row)
                    if not torch.equal(again.nan_to_num(), answers[row].nan_to_num()):
                        raise ValueError(
                            f"the logits processor {name_of(processor)} answered differently when it was asked again "
                            "about the same text and scores: along a tree its answer must depend on its arguments "
                            "alone, not on the calls before. Compute what it needs from input_ids, which is the whole "
                            "text; for a grammar take heavypath.speculative.Grammar"
                        )
            scores = torch.cat(answers)
    return scores


def _asked_about(processor: Processor, ids: Tensor, scores: Tensor, row: int) -> Tensor:
    """The answer about one row; copies are given, so that a processor may write into them."""
    return _answer(processor, ids[row : row + 1].clone(), scores[row : row + 1].clone())


def _answer(processor: Processor, ids: Tensor, scores: Tensor) -> Tensor:
    answer = processor(ids, scores)  # pyright: ignore[reportCallIssue]
    if not isinstance(answer, Tensor) or answer.shape != scores.shape or not answer.is_floating_point():
        given = f"{answer.dtype} {[*answer.shape]}" if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(
            f"the logits processor {name_of(processor)} must return scores [R, V] = {[*scores.shape]} as it is given "
            f"them, got {given}"
        )
    return answer.to(scores)
