"""Stop strings and transformers' stopping criteria, which are called after each new token.

The tokens that a step accepts are cut where plain decoding would have stopped: after the first token for which a
criterion returns True. Criteria are called as transformers calls them: with the prompt as it was given (and its left
padding), and the new tokens up to this one. But they get one sequence at a time, LongTensor[1, T + new], so that the
end of a sequence does not depend on the rest of the batch.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from heavypath.speculative.processors.watched import WatchedCallable, WatchedOnes, is_promised

_STATELESS = {StopStringCriteria, MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria}
STRINGS_KEPT = 16  # the last sets of stop strings that are kept for each tokenizer
_lock = threading.Lock()
_made: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, OrderedDict[object, StopStringCriteria]]" = (
    weakref.WeakKeyDictionary()
)


class Stopping:
    """The stopping criteria of a batch, which are called for each new token of each sequence.

    In a batch of several sequences, a user's criterion has a state for each sequence (see `watched`).

    input_ids: LongTensor[B, T], the prompts as they were given
    keeping:   the criteria that may keep state

    Raises ValueError if the state of a user's criterion cannot be read.
    """

    def __init__(self, input_ids: Tensor, criteria: StoppingCriteriaList):
        self._input_ids = input_ids
        watched = WatchedOnes()
        several = len(input_ids) > 1
        self._of_each: list[list[Any]] = []
        self.keeping = [each for each in criteria if not (type(each) in _STATELESS or is_promised(each))]
        for _ in input_ids:
            own = watched.of([(each, each) for each in self.keeping]) if several else []
            found = {id(each.kept): each for each in own}
            self._of_each.append([found.get(id(each), each) for each in criteria])

    def kept(self, sequence: int, new: Tensor, before: int) -> int | None:
        """Check new tokens of a sequence. Returns the number of new tokens with which it ends; None if it goes on.

        sequence: its index in the batch
        new: LongTensor[any], its new tokens
        before: how many of them have been checked before, and do not end the sequence
        """
        ids = torch.cat([self._input_ids[sequence], new])[None]
        width = self._input_ids.shape[1]
        for end in range(before + 1, len(new) + 1):
            ends = False
            for each in self._of_each[sequence]:  # all of them are called, as in transformers
                call = each.keep if isinstance(each, WatchedCallable) else each
                answer = call(ids[:, : width + end], None)
                if answer is None:
                    raise TypeError(f"a stopping criterion must return whether a text ends, got None of {call!r}")
                ends |= bool(answer)
            if ends:
                return end
        return None


def stopping_of(
    input_ids: Tensor,
    stop_strings: str | Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    stopping_criteria: Sequence[StoppingCriteria] | None,
) -> Stopping | None:
    """The stopping criteria of a request, or None if there are none.

    input_ids: LongTensor[B, T], the prompts as they were given
    stop_strings, tokenizer, stopping_criteria: arguments of `generate`; stop strings need the tokenizer

    Raises TypeError or ValueError for arguments of another kind.
    """
    criteria = StoppingCriteriaList()
    if stop_strings is not None:
        strings = list(stop_strings)
        if isinstance(stop_strings, str):
            strings = [stop_strings]
        if not strings or not all(isinstance(string, str) and string for string in strings):
            raise ValueError(f"stop_strings must be one or more strings that are not empty, got {stop_strings!r}")
        if tokenizer is None:
            raise ValueError(
                "stop_strings need tokenizer=, to find the tokens that spell them; got None. transformers' generate "
                "keeps its tokenizer: there pass custom_generate=functools.partial(decoder, tokenizer=tokenizer)"
            )
        criteria.append(_of_strings(tokenizer, strings))
    if stopping_criteria is not None:
        if not isinstance(stopping_criteria, Sequence) or not all(map(callable, stopping_criteria)):
            raise TypeError(f"stopping_criteria must be a StoppingCriteriaList, got {stopping_criteria!r}")
        for criterion in stopping_criteria:
            if isinstance(criterion, ConfidenceCriteria):
                raise ValueError("ConfidenceCriteria needs the scores of each step, which are not kept")
            criteria.append(criterion)
    return Stopping(input_ids, criteria) if criteria else None


def _of_strings(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> StopStringCriteria:
    """transformers' criterion for these strings: a copy of a cached one.

    Making one reads the whole vocabulary, which takes seconds if it is large. A tokenizer that has changed since gets a
    new one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    how_tokens_are_spelled = None
    if hasattr(decoder, "__getstate__"):
        how_tokens_are_spelled = decoder.__getstate__()
    key = len(tokenizer), how_tokens_are_spelled, tuple(strings)
    with _lock:
        made = _made.setdefault(tokenizer, OrderedDict())
        if key not in made:
            made[key] = StopStringCriteria(tokenizer, list(strings))
        made.move_to_end(key)
        if len(made) > STRINGS_KEPT:
            made.popitem(last=False)
        return copy.copy(made[key])  # a copy, because a call moves the tensors to the device of its input_ids
