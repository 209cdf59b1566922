"""All processors of a request in transformers' order: those that settings stand for, and those that a user gives.

A penalty and a least length alone, and temperature, top-k, top-p and min-p, are done by the decoder's own kernels.
Where there are other processors, the penalty and the least length are two of them, so that the order is that of
transformers and the draft is told. Where a model's config has warpers that the kernels do not have (typical_p, ...),
the filters before these become warpers, too, and the kernels sample at temperature 1.

As in transformers a user's processor takes the place of a setting's of its class.
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
    """A request with its processors. Its penalties are among them, and filters where these have another order.

    options: `logits_processor` and `prefix_allowed_tokens_fn` of `RequestOptions`
    config: a model's, where its settings are asked
    penalties: whether these are processors where there are no others, too
    Raises TypeError or ValueError for what is no processor, and for one that cannot be asked along a tree.
    """
    own = lists_for(options.get("logits_processor"), len(request.input_ids))
    config = GenerationConfig() if config is None else config
    filters, eos = request.filters, request.stops.tolist()
    biases = _biases(config)
    others = _others(config, options.get("prefix_allowed_tokens_fn"), request, eos)
    marks = _watermarks(config, vocab_size, request.input_ids.device)
    warpers = _warpers(config, request.input_ids.device) if filters.temperature > 0 else []
    first = _penalties(request, eos)
    if not (any(own) or biases or others or warpers or marks or (penalties and any(first))):
        return request
    if filters.temperature > 0 and (warpers or marks):
        warpers, filters = _in_order(filters, warpers), Filters(1.0)
    last = [*warpers, *marks]
    lists = [[*_merged([*biases, *one, *others], each), *last] for one, each in zip(first, own, strict=True)]
    return replace(request, processors=lists_for(lists, len(lists)), filters=filters, processing=None)


def _merged(settings: list[Any], own: Sequence[Any]) -> list[Any]:
    """The processors of settings, and a user's own: as `GenerationMixin._merge_criteria_processor_list` makes them."""
    first = {type(each): each for each in reversed(own)}
    for each in settings:
        if type(each) in first:
            name = type(each).__name__
            logger.info(f"a {name} is given as a logits processor and as a setting: the setting is not asked")
    merged = [first.get(type(each), each) for each in settings]
    for each in own:
        if each not in merged:
            merged.append(each)
    return merged


def _penalties(request: "Request", eos: list[int]) -> list[list[Any]]:
    """The decoder's own penalties as processors of each sequence. Padding is no part of a sequence."""
    width, device, given = request.input_ids.shape[1], str(request.input_ids.device), request.processing
    found: list[list[Any]] = [[] for _ in request.input_ids]
    if given is None:
        return found
    if given.repetition_penalty != 1:
        padding = (width - request.lengths).tolist()
        kinds = {each: theirs.RepetitionPenaltyLogitsProcessor(given.repetition_penalty, each) for each in padding}
        found = [[kinds[each]] for each in padding]
    if given.min_new_tokens > 0 and eos:  # of which transformers makes two processors
        by_width = theirs.MinLengthLogitsProcessor(width + given.min_new_tokens, eos, device)
        by_new = theirs.MinNewTokensLengthLogitsProcessor(width, given.min_new_tokens, eos, device)
        found = [[*each, by_width, by_new] for each in found]
    return found


def _biases(config: GenerationConfig) -> list[Any]:
    """The processors that transformers asks before the penalties."""
    bias = getattr(config, "sequence_bias", None)
    return [] if bias is None else [theirs.SequenceBiasLogitsProcessor(bias)]


def _others(
    config: GenerationConfig,
    allowed: Callable[[int, Tensor], list[int]] | None,
    request: "Request",
    eos_tokens: list[int],
) -> list[Any]:
    """The processors that transformers asks after the penalties and before a user's processors, in its order."""
    width, device = request.input_ids.shape[1], str(request.input_ids.device)
    eos = torch.tensor(eos_tokens, dtype=torch.long, device=device)
    has_least = request.processing is not None and request.processing.min_new_tokens > 0

    def of(name: str) -> Any:
        return getattr(config, name, None)

    found: list[Any] = []
    if of("no_repeat_ngram_size"):
        found.append(theirs.NoRepeatNGramLogitsProcessor(of("no_repeat_ngram_size")))
    if of("bad_words_ids") is not None:
        found.append(theirs.NoBadWordsLogitsProcessor(of("bad_words_ids"), eos if eos_tokens else None))
    if of("min_length") and not has_least and eos_tokens:  # of the two transformers takes min_new_tokens
        found.append(theirs.MinLengthLogitsProcessor(of("min_length"), eos, device=device))
    if allowed is not None:
        found.append(theirs.PrefixConstrainedLogitsProcessor(allowed, 1))
    if of("forced_bos_token_id") is not None:
        found.append(theirs.ForcedBOSTokenLogitsProcessor(of("forced_bos_token_id")))
    if of("forced_eos_token_id") is not None:
        longest = width + request.max_new_tokens
        found.append(theirs.ForcedEOSTokenLogitsProcessor(longest, of("forced_eos_token_id"), device=device))
    if of("remove_invalid_values") is True:
        found.append(theirs.InfNanRemoveLogitsProcessor())
    if of("exponential_decay_length_penalty") is not None:
        if not eos_tokens:
            raise ValueError("exponential_decay_length_penalty raises end-of-sequence tokens; give eos_token_id")
        found.append(theirs.ExponentialDecayLengthPenalty(of("exponential_decay_length_penalty"), eos, width))
    if of("suppress_tokens") is not None:
        found.append(theirs.SuppressTokensLogitsProcessor(of("suppress_tokens"), device=device))
    if of("begin_suppress_tokens") is not None:
        begin = width + int(width == 1 and of("forced_bos_token_id") is not None)
        found.append(theirs.SuppressTokensAtBeginLogitsProcessor(of("begin_suppress_tokens"), begin, device=device))
    return found


def _warpers(config: GenerationConfig, device: torch.device) -> list[Any]:
    """The warpers that the decoder's kernels do not have, in transformers' order."""
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
    """Filters and further warpers, in transformers' order: temperature, top-h, top-k, top-p, min-p, and the others."""
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
    """The processors that transformers asks last."""
    watermark = getattr(config, "watermarking_config", None)
    if watermark is None:
        return []
    device = str(on)
    if type(watermark) is not WatermarkingConfig:
        return [watermark.construct_processor(vocab_size, device)]
    own = copy.copy(_watermark(vocab_size, device, tuple(sorted(watermark.to_dict().items()))))
    own.rng = torch.Generator(device)  # which each call seeds: texts of two threads must not share it
    return [own]


@lru_cache(maxsize=4)
def _watermark(vocab_size: int, device: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """A processor of a WatermarkingConfig, which draws a table of a million numbers when it is made."""
    return WatermarkingConfig(**dict(settings)).construct_processor(vocab_size, device)
