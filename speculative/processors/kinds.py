"""Kinds of processors: those that can be asked along a tree, those that take many nodes at once, those refused.

A processor is asked about nodes in the order in which they are drafted, twice for each node, and about nodes that are
never accepted. Classes of transformers whose rows do not depend on each other are given all nodes of one depth in a
call. Any other callable is given one row at a time, and what it keeps between its calls is watched: see `watched`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from heavypath.speculative.processors.penalties import TextPenalties, TokenBias

if TYPE_CHECKING:
    from heavypath.speculative.processors.grammar import Grammar

Processor: TypeAlias = "Callable[..., Tensor] | Grammar"  # of input_ids LongTensor[R, T'] and scores fp32 [R, V]

# Of transformers' classes: those whose rows do not depend on each other, of these the ones that read scores alone, and
# of these the ones that read them as a distribution and leave out a part of it.
WARPERS = {
    theirs.EpsilonLogitsWarper,
    theirs.EtaLogitsWarper,
    theirs.LogitNormalization,
    theirs.MinPLogitsWarper,
    theirs.TemperatureLogitsWarper,
    theirs.TopHLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.TypicalLogitsWarper,
}
TEXTLESS = WARPERS | {theirs.InfNanRemoveLogitsProcessor, theirs.SuppressTokensLogitsProcessor}
BATCHED = TEXTLESS | {
    theirs.ExponentialDecayLengthPenalty,
    theirs.ForcedBOSTokenLogitsProcessor,
    theirs.ForcedEOSTokenLogitsProcessor,
    theirs.MinLengthLogitsProcessor,
    theirs.MinNewTokensLengthLogitsProcessor,
    theirs.NoBadWordsLogitsProcessor,
    theirs.NoRepeatNGramLogitsProcessor,
    theirs.PrefixConstrainedLogitsProcessor,
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.SequenceBiasLogitsProcessor,
    theirs.SuppressTokensAtBeginLogitsProcessor,
    theirs.WatermarkLogitsProcessor,
}

# Classes whose answers depend on their arguments alone, and on no function of a user's.
STATELESS = BATCHED - {theirs.PrefixConstrainedLogitsProcessor} | {TextPenalties, TokenBias}

_ENCODER = "it is made for the input of an encoder, and a decoder-only model has none; leave it out"
_CHANNELS = "its rows are not one text each; leave it out"
# By the names of classes, so that transformers may lack some of them: why, and what to do instead.
_REFUSED = {
    "SynthIDTextWatermarkLogitsProcessor": (
        "it keeps the texts of the calls before, which along a tree are other texts; WatermarkLogitsProcessor does not"
    ),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": (
        "it runs the model itself, token after token of one text; decode without guidance_scale, or by transformers"
    ),
    "ClassifierFreeGuidanceLogitsProcessor": "it takes two rows of logits for each text; decode by transformers",
    "DiaClassifierFreeGuidanceLogitsProcessor": _CHANNELS,
    "DiaEOSChannelFilterLogitsProcessor": _CHANNELS,
    "DiaEOSDelayPatternLogitsProcessor": _CHANNELS,
    "EncoderNoRepeatNGramLogitsProcessor": _ENCODER,
    "EncoderRepetitionPenaltyLogitsProcessor": _ENCODER,
    "WhisperNoSpeechDetection": "it keeps the logits of the first call; decode by transformers",
}
_OWN_GRAMMARS = "it advances its matcher by the last token of each call; take heavypath.speculative.Grammar"
_REFUSED_PACKAGES = {"xgrammar": _OWN_GRAMMARS, "outlines": _OWN_GRAMMARS, "outlines_core": _OWN_GRAMMARS}


def name_of(processor: object) -> str:
    """The name of a processor in messages."""
    return getattr(processor, "__name__", type(processor).__name__)


def lists_for(given: Sequence[Any] | None, batch: int) -> list[list[Processor]]:
    """The processors of each of `batch` sequences: the same for all, or of each its own.

    given: None for none; processors; or a list with an entry for each sequence, a list of processors or None

    Raises TypeError or ValueError for what is no processor, and for one that cannot be asked along a tree.
    """
    if given is None:
        return [[] for _ in range(batch)]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"logits_processor must be a list of processors, got {type(given).__name__}; put it into a list"
        )
    if not all(isinstance(each, Sequence) or each is None for each in given):  # a list within a list is callable
        nested = [[*each] if isinstance(each, LogitsProcessorList) else [each] for each in given]
        given = [processor for each in nested for processor in each]
    own = [isinstance(each, Sequence) or each is None for each in given]
    if len(given) > 0 and all(own):
        if len(given) != batch:
            raise ValueError(f"logits_processor must have a list for each sequence, got {len(given)} for {batch}")
        lists: list[list[Processor]] = [list(each or ()) for each in given]
    elif any(own):
        raise TypeError("logits_processor must be processors, or a list (or None) for each sequence; got some of both")
    else:
        lists = [list(given) for _ in range(batch)]
    for each in lists:
        for processor in each:
            _check(processor)
    return lists


def _check(processor: object) -> None:
    name = name_of(processor)
    if not callable(processor) or isinstance(processor, type):
        from heavypath.speculative.processors.grammar import Grammar

        if isinstance(processor, Grammar):
            return
        given = f"the class {name}; make an object of it" if isinstance(processor, type) else repr(processor)
        raise TypeError(f"a logits processor is called with (input_ids, scores) and returns scores, got {given}")
    if isinstance(processor, theirs.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        if not callable(allowed):
            raise TypeError(
                "prefix_allowed_tokens_fn is called with (sequence, its text LongTensor[T']) and returns a list of the "
                f"tokens that may follow, got {allowed!r}"
            )
    for kind in inspect.getmro(type(processor)):
        why = _REFUSED.get(kind.__name__) or _REFUSED_PACKAGES.get(kind.__module__.partition(".")[0])
        if why is not None:
            raise ValueError(f"the logits processor {name} cannot be asked along the paths of a tree: {why}")
