"""All processors of a request in transformers' order: those that settings stand for, and those that a user gives.

A penalty and a least length alone, and temperature, top-k, top-p and min-p, are done by the decoder's own kernels.
Where there are other processors, the penalty and the least length are two of them, so that the order is that of
transformers and the draft is told. Where a model's config has warpers that the kernels do not have (typical_p, ...),
the filters before these become warpers, too, and the kernels sample at temperature 1.

As in transformers a user's processor takes the place of a setting's of its class.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import logits_process as theirs
from transformers.utils import logging

from heavypath.kernels.filtering import Filters
from heavypath.speculative.processors.kinds import Processor, lists_for

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class GivenProcessors:
    """The processors and settings that `generate` was given.

    config:   a model's, where its settings are asked, else None
    always:   whether penalties are processors where there are no others, too: in a batch of requests that differ
    """

    logits_processor: Sequence[Any] | None = None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    config: GenerationConfig | None = None
    always: bool = False


class Texts(NamedTuple):
    """The texts that processors are made for.

    input_ids: LongTensor[B, T], the prompts as they were given
    lengths:   LongTensor[B], without padding
    max_new_tokens, eos, vocab_size: of the texts; eos may be empty
    """

    input_ids: Tensor
    lengths: Tensor
    max_new_tokens: int
    eos: Sequence[int]
    vocab_size: int


class Penalties(NamedTuple):
    """The settings that the decoder does by itself, if it does them alone; 1 and 0 are none."""

    repetition_penalty: float = 1.0
    min_new_tokens: int = 0


class ProcessorChain(NamedTuple):
    """The changes of logits: by a list of processors for each sequence, or None; then by the filters."""

    lists: list[list[Processor]] | None
    filters: Filters


def chain_of(given: GivenProcessors, texts: Texts, penalties: Penalties, filters: Filters) -> ProcessorChain:
    """The processors of a request. Where there are lists, the penalties are in them.

    Raises TypeError or ValueError for what is no processor, and for one that cannot be asked along a tree.
    """
    own = lists_for(given.logits_processor, len(texts.input_ids))
    config = GenerationConfig() if given.config is None else given.config
    biases = _biases(config)
    others = _others(config, given.prefix_allowed_tokens_fn, texts, penalties.min_new_tokens)
    warpers, marks = _warpers(config, texts) if filters.temperature > 0 else [], _watermarks(config, texts)
    first = _penalties(penalties, texts)
    if not (any(own) or biases or others or warpers or marks or (given.always and any(first))):
        return ProcessorChain(None, filters)
    if filters.temperature > 0 and (warpers or marks):
        warpers, filters = _in_order(filters, warpers), Filters(1.0)
    behind = [*warpers, *marks]
    lists = [[*_merged([*biases, *one, *others], each), *behind] for one, each in zip(first, own, strict=True)]
    return ProcessorChain(lists_for(lists, len(lists)), filters)


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


def _penalties(penalties: Penalties, texts: Texts) -> list[list[Any]]:
    """The decoder's own penalties as processors of each sequence. Padding is no part of a text."""
    width, device = texts.input_ids.shape[1], str(texts.input_ids.device)
    found: list[list[Any]] = [[] for _ in texts.input_ids]
    if penalties.repetition_penalty != 1:
        padding = (width - texts.lengths).tolist()
        kinds = {each: theirs.RepetitionPenaltyLogitsProcessor(penalties.repetition_penalty, each) for each in padding}
        found = [[kinds[each]] for each in padding]
    if penalties.min_new_tokens > 0 and texts.eos:  # of which transformers makes two processors
        least, eos = penalties.min_new_tokens, list(texts.eos)
        by_width = theirs.MinLengthLogitsProcessor(width + least, eos, device)
        by_new = theirs.MinNewTokensLengthLogitsProcessor(width, least, eos, device)
        found = [[*each, by_width, by_new] for each in found]
    return found


def _biases(config: GenerationConfig) -> list[Any]:
    """The processors that transformers asks before the penalties."""
    bias = getattr(config, "sequence_bias", None)
    return [] if bias is None else [theirs.SequenceBiasLogitsProcessor(bias)]


def _others(
    config: GenerationConfig, allowed: Callable[[int, Tensor], list[int]] | None, texts: Texts, min_new_tokens: int
) -> list[Any]:
    """The processors that transformers asks after the penalties and before a user's processors, in its order."""
    width, device = texts.input_ids.shape[1], str(texts.input_ids.device)
    eos = torch.tensor(list(texts.eos), dtype=torch.long, device=device)

    def of(name: str) -> Any:
        return getattr(config, name, None)

    found: list[Any] = []
    if of("no_repeat_ngram_size"):
        found.append(theirs.NoRepeatNGramLogitsProcessor(of("no_repeat_ngram_size")))
    if of("bad_words_ids") is not None:
        found.append(theirs.NoBadWordsLogitsProcessor(of("bad_words_ids"), eos if texts.eos else None))
    if of("min_length") and not min_new_tokens and texts.eos:  # of the two transformers takes min_new_tokens
        found.append(theirs.MinLengthLogitsProcessor(of("min_length"), eos, device=device))
    if allowed is not None:
        found.append(theirs.PrefixConstrainedLogitsProcessor(allowed, 1))
    if of("forced_bos_token_id") is not None:
        found.append(theirs.ForcedBOSTokenLogitsProcessor(of("forced_bos_token_id")))
    if of("forced_eos_token_id") is not None:
        longest = width + texts.max_new_tokens
        found.append(theirs.ForcedEOSTokenLogitsProcessor(longest, of("forced_eos_token_id"), device=device))
    if of("remove_invalid_values") is True:
        found.append(theirs.InfNanRemoveLogitsProcessor())
    if of("exponential_decay_length_penalty") is not None:
        if not texts.eos:
            raise ValueError("exponential_decay_length_penalty raises end-of-sequence tokens; give eos_token_id")
        found.append(theirs.ExponentialDecayLengthPenalty(of("exponential_decay_length_penalty"), eos, width))
    if of("suppress_tokens") is not None:
        found.append(theirs.SuppressTokensLogitsProcessor(of("suppress_tokens"), device=device))
    if of("begin_suppress_tokens") is not None:
        begin = width + int(width == 1 and of("forced_bos_token_id") is not None)
        found.append(theirs.SuppressTokensAtBeginLogitsProcessor(of("begin_suppress_tokens"), begin, device=device))
    return found


def _warpers(config: GenerationConfig, texts: Texts) -> list[Any]:
    """The warpers that the decoder's kernels do not have, in transformers' order."""
    found: list[Any] = []
    for name, kind, off in (
        ("top_h", theirs.TopHLogitsWarper, None),
        ("typical_p", theirs.TypicalLogitsWarper, 1),
        ("epsilon_cutoff", theirs.EpsilonLogitsWarper, 0),
        ("eta_cutoff", partial(theirs.EtaLogitsWarper, device=str(texts.input_ids.device)), 0),
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


def _watermarks(config: GenerationConfig, texts: Texts) -> list[Any]:
    """The processors that transformers asks last."""
    watermark = getattr(config, "watermarking_config", None)
    if watermark is None:
        return []
    device = str(texts.input_ids.device)
    if type(watermark) is not WatermarkingConfig:
        return [watermark.construct_processor(texts.vocab_size, device)]
    own = copy.copy(_watermark(texts.vocab_size, device, tuple(sorted(watermark.to_dict().items()))))
    own.rng = torch.Generator(device)  # which each call seeds: texts of two threads must not share it
    return [own]


@lru_cache(maxsize=4)
def _watermark(vocab_size: int, device: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """A processor of a WatermarkingConfig, which draws a table of a million numbers when it is made."""
    return WatermarkingConfig(**dict(settings)).construct_processor(vocab_size, device)
