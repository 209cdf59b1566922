"""Which logits processors can be used in trees, which are called for many nodes at once, and which are refused.

A processor is called for nodes in the order in which they are drafted: once with the draft's logits and once with the
target's, also for nodes that are not accepted. Classes of transformers whose rows do not depend on each other get all
nodes of one depth in one call. Other callables get one row at a time, and `watched` observes their state.
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

Processor: TypeAlias = "Callable[..., Tensor] | Grammar"  # called with input_ids LongTensor[R, T'], scores fp32 [R, V]

# Three sets of transformers' classes, each a part of the next one:
# WARPERS read the scores as a distribution; TEXTLESS do not read input_ids; the rows of BATCHED do not depend on each
# other.
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

# Classes whose results depend on their arguments alone. They call no function of a user.
STATELESS = BATCHED - {theirs.PrefixConstrainedLogitsProcessor} | {TextPenalties, TokenBias}

_ENCODER = "it is made for the input of an encoder, and a decoder-only model has none; leave it out"
_CHANNELS = "several of its rows belong to one sequence; leave it out"
# Class name -> the reason, and what to do instead. By name, because a version of transformers may lack some of them.
_REFUSED = {
    "SynthIDTextWatermarkLogitsProcessor": (
        "it keeps the input_ids of earlier calls, which in a tree belong to other nodes; use "
        "WatermarkLogitsProcessor, which does not"
    ),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": (
        "it runs the model itself, one token after the other; decode without guidance_scale, or with transformers"
    ),
    "ClassifierFreeGuidanceLogitsProcessor": "it takes two rows of logits for each sequence; decode with transformers",
    "DiaClassifierFreeGuidanceLogitsProcessor": _CHANNELS,
    "DiaEOSChannelFilterLogitsProcessor": _CHANNELS,
    "DiaEOSDelayPatternLogitsProcessor": _CHANNELS,
    "EncoderNoRepeatNGramLogitsProcessor": _ENCODER,
    "EncoderRepetitionPenaltyLogitsProcessor": _ENCODER,
    "WhisperNoSpeechDetection": "it keeps the logits of the first call; decode with transformers",
}
_OWN_GRAMMARS = "it advances its matcher by the last token of each call; use heavypath.speculative.Grammar"
_REFUSED_PACKAGES = {"xgrammar": _OWN_GRAMMARS, "outlines": _OWN_GRAMMARS, "outlines_core": _OWN_GRAMMARS}


def name_of(processor: object) -> str:
    """The name of a processor for messages: of the function, or of its class."""
    return getattr(processor, "__name__", type(processor).__name__)


def lists_for(given: Sequence[Any] | None, batch: int) -> list[list[Processor]]:
    """A list of processors for each of `batch` sequences.

    given: None for no processors; a list of processors, which all sequences have; or a list with an entry for each
        sequence, which is a list of processors or None

    Raises TypeError or ValueError for an object that is no processor, for a processor that cannot be used in trees, and
    for lists of another number than `batch`.
    """
    if given is None:
        return [[] for _ in range(batch)]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"logits_processor must be a list of processors, got {type(given).__name__}; put it into a list"
        )
    # Some entry is a processor. In such a list, a LogitsProcessorList (which is callable) stands for its processors.
    if not all(isinstance(each, Sequence) or each is None for each in given):
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
                "prefix_allowed_tokens_fn must be a function that is called with (index of a sequence, its tokens "
                f"LongTensor[T']) and returns a list of the tokens that may follow, got {allowed!r}"
            )
    for kind in inspect.getmro(type(processor)):
        why = _REFUSED.get(kind.__name__) or _REFUSED_PACKAGES.get(kind.__module__.partition(".")[0])
        if why is not None:
            raise ValueError(f"the logits processor {name} cannot be used with trees: {why}")
