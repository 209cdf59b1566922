"""All processors of a request in transformers' order: those made from generation settings, and the user's.

The decoder's kernels do temperature, top-k, top-p and min-p. They also do the repetition penalty and the minimal length
if there are no other processors. Else these two become processors, so that they keep transformers' order and also apply
to the draft's logits. If a model's config has a warper that the kernels lack (typical_p, ...), or a watermark, all
filters become warpers, and the kernels sample at temperature 1.

As in transformers, a user's processor replaces the one of the same class that was made from a setting.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import logits_process as theirs
from transformers.utils import logging

from heavypath.kernels.filtering import Filters
from heavypath.speculative.processors.kinds import lists_for

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request

logger = logging.get_logger(__name__)


def with_processors(
    request: "Request",
    options: Mapping[str, Any],
    config: GenerationConfig | None,
    *,
    vocab_size: int,
    penalties: bool,
) -> "Request":
    """The request with all its processors, in transformers' order; the same request if there are none.

    If there are any, its repetition penalty and minimal length become processors, and with a warper or a watermark its
    filters do, too.

    options: `logits_processor` and `prefix_allowed_tokens_fn` of `RequestOptions`
    config: a model's generation config, if its settings apply
    vocab_size: number of logits, for watermarks
    penalties: whether penalties become processors even if there are no other processors

    Raises TypeError or ValueError for an object that is no processor, and for a processor that cannot be used in trees.
    """
    own = lists_for(options.get("logits_processor"), len(request.input_ids))
    config = GenerationConfig() if config is None else config
    filters = request.filters
    eos = request.stops.tolist()
    biases = _biases(config)
    others = _others(config, options.get("prefix_allowed_tokens_fn"), request, eos)
    marks = _watermarks(config, vocab_size, request.input_ids.device)
    warpers = _warpers(config, request.input_ids.device) if filters.temperature > 0 else []
    first = _penalties(request, eos)
    if not (any(own) or biases or others or warpers or marks or (penalties and any(first))):
        return request
    if filters.temperature > 0 and (warpers or marks):
        warpers = _in_order(filters, warpers)
        filters = Filters(1.0)
    last = [*warpers, *marks]
    lists = [[*_merged([*biases, *one, *others], each), *last] for one, each in zip(first, own, strict=True)]
    return replace(request, processors=lists_for(lists, len(lists)), filters=filters, processing=None)


def _merged(settings: list[Any], own: Sequence[Any]) -> list[Any]:
    """Processors made from settings, then a user's. A user's replaces, in its position, one of the same class.

    So does `GenerationMixin._merge_criteria_processor_list`.
    """
    first = {type(each): each for each in reversed(own)}
    for each in settings:
        if type(each) in first:
            name = type(each).__name__
            logger.info(f"a {name} is given as a logits processor and as a setting: the setting is not used")
    merged = [first.get(type(each), each) for each in settings]
    for each in own:
        if each not in merged:
            merged.append(each)
    return merged


def _penalties(request: "Request", eos: list[int]) -> list[list[Any]]:
    """For each sequence, its repetition penalty and minimal length as processors. Padding is not penalised."""
    width = request.input_ids.shape[1]
    device = str(request.input_ids.device)
    given = request.processing
    found: list[list[Any]] = [[] for _ in request.input_ids]
    if given is None:
        return found
    if given.repetition_penalty != 1:
        padding = (width - request.lengths).tolist()
        kinds = {each: theirs.RepetitionPenaltyLogitsProcessor(given.repetition_penalty, each) for each in padding}
        found = [[kinds[each]] for each in padding]
    if given.min_new_tokens > 0 and eos:  # transformers makes two processors of this setting
        by_width = theirs.MinLengthLogitsProcessor(width + given.min_new_tokens, eos, device)
        by_new = theirs.MinNewTokensLengthLogitsProcessor(width, given.min_new_tokens, eos, device)
        found = [[*each, by_width, by_new] for each in found]
    return found


def _biases(config: GenerationConfig) -> list[Any]:
    """The processors of a generation config that transformers calls before the penalties."""
    bias = getattr(config, "sequence_bias", None)
    return [] if bias is None else [theirs.SequenceBiasLogitsProcessor(bias)]


def _others(
    config: GenerationConfig,
    allowed: Callable[[int, Tensor], list[int]] | None,
    request: "Request",
    eos_tokens: list[int],
) -> list[Any]:
    """The processors of a generation config that transformers calls between the penalties and a user's, in its order.

    allowed: the request's `prefix_allowed_tokens_fn`; eos_tokens: tokens that end a sequence
    """
    width = request.input_ids.shape[1]
    device = str(request.input_ids.device)
    eos = torch.tensor(eos_tokens, dtype=torch.long, device=device)
    has_least = request.processing is not None and request.processing.min_new_tokens > 0

    def setting(name: str) -> Any:
        return getattr(config, name, None)

    found: list[Any] = []
    if setting("no_repeat_ngram_size"):
        found.append(theirs.NoRepeatNGramLogitsProcessor(setting("no_repeat_ngram_size")))
    if setting("bad_words_ids") is not None:
        found.append(theirs.NoBadWordsLogitsProcessor(setting("bad_words_ids"), eos if eos_tokens else None))
    if setting("min_length") and not has_least and eos_tokens:  # in transformers min_new_tokens has precedence
        found.append(theirs.MinLengthLogitsProcessor(setting("min_length"), eos, device=device))
    if allowed is not None:
        found.append(theirs.PrefixConstrainedLogitsProcessor(allowed, 1))
    if setting("forced_bos_token_id") is not None:
        found.append(theirs.ForcedBOSTokenLogitsProcessor(setting("forced_bos_token_id")))
    if setting("forced_eos_token_id") is not None:
        longest = width + request.max_new_tokens
        found.append(theirs.ForcedEOSTokenLogitsProcessor(longest, setting("forced_eos_token_id"), device=device))
    if setting("remove_invalid_values") is True:
        found.append(theirs.InfNanRemoveLogitsProcessor())
    if setting("exponential_decay_length_penalty") is not None:
        if not eos_tokens:
            raise ValueError("exponential_decay_length_penalty raises end-of-sequence tokens; give eos_token_id")
        found.append(theirs.ExponentialDecayLengthPenalty(setting("exponential_decay_length_penalty"), eos, width))
    if setting("suppress_tokens") is not None:
        found.append(theirs.SuppressTokensLogitsProcessor(setting("suppress_tokens"), device=device))
    if setting("begin_suppress_tokens") is not None:
        begin = width + int(width == 1 and setting("forced_bos_token_id") is not None)
        found.append(
            theirs.SuppressTokensAtBeginLogitsProcessor(setting("begin_suppress_tokens"), begin, device=device)
        )
    return found


def _warpers(config: GenerationConfig, device: torch.device) -> list[Any]:
    """The warpers of a generation config that the decoder's kernels do not have, in transformers' order."""
    found: list[Any] = []
    for name, kind, off in (
        ("top_h", theirs.TopHLogitsWarper, None),
        ("typical_p", theirs.TypicalLogitsWarper, 1),
        ("epsilon_cutoff", theirs.EpsilonLogitsWarper, 0),
        ("eta_cutoff", partial(theirs.EtaLogitsWarper, device=str(device)), 0),
    ):
        value = getattr(config, name, None)
        if value not in (None, off):
            found.append(kind(value))
    return found


def _in_order(filters: Filters, warpers: list[Any]) -> list[Any]:
    """All filters as warpers, in transformers' order: temperature, top-h, top-k, top-p, min-p, and the others."""
    own: list[Any] = []
    if filters.temperature != 1:
        own.append(theirs.TemperatureLogitsWarper(float(filters.temperature)))
    own += [each for each in warpers if isinstance(each, theirs.TopHLogitsWarper)]
    if filters.top_k:
        own.append(theirs.TopKLogitsWarper(filters.top_k))
    if filters.top_p is not None and filters.top_p < 1:
        own.append(theirs.TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        own.append(theirs.MinPLogitsWarper(filters.min_p))
    return own + [each for each in warpers if not isinstance(each, theirs.TopHLogitsWarper)]


def _watermarks(config: GenerationConfig, vocab_size: int, on: torch.device) -> list[Any]:
    """The processor of a generation config's watermark, which transformers calls last; an empty list without one."""
    watermark = getattr(config, "watermarking_config", None)
    if watermark is None:
        return []
    device = str(on)
    if type(watermark) is not WatermarkingConfig:
        return [watermark.construct_processor(vocab_size, device)]
    own = copy.copy(_watermark(vocab_size, device, tuple(sorted(watermark.to_dict().items()))))
    own.rng = torch.Generator(device)  # each call seeds it: requests of two threads must not share it
    return [own]


@lru_cache(maxsize=4)
def _watermark(vocab_size: int, device: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """The processor of a WatermarkingConfig. It is cached, because making one draws a table of a million numbers."""
    return WatermarkingConfig(**dict(settings)).construct_processor(vocab_size, device)
