"""All processors of a request in transformers' order: those made from generation settings, and the user's.

The decoder's kernels do temperature, top-k, top-p and min-p. They also do the repetition penalty and the minimal length
if there are no other processors. Else these two become processors, so that they keep transformers' order and also apply
to the draft's logits. If a model's config has a warper that the kernels lack (typical_p, ...), or a watermark, all
filters become warpers, and the kernels sample at temperature 1.

As in transformers, a user's processor replaces the one of the same class that was made from a setting.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, WatermarkingConfig
from transformers.generation import logits_process as theirs

from heavypath.kernels.filtering import Filters
from heavypath.speculative.processors.kinds import lists_for

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request

# Settings that do not apply to a decoder-only model without guidance, or are made into processors separately.
_LEFT_OUT = (
    "guidance_scale",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "repetition_penalty",
    "min_new_tokens",
    "watermarking_config",
)
_WARPERS = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}  # that the kernels lack: value for off


class _Generation(GenerationMixin):
    """What transformers' functions that make processors need of a model."""

    config = PreTrainedConfig(is_encoder_decoder=False)


_generation: Any = _Generation()


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
    config = GenerationConfig() if config is None else copy.copy(config)
    if options.get("min_new_tokens") is not None or config.min_new_tokens is not None:  # 0 is a number, too
        config.min_length = None  # over which min_new_tokens has precedence
    allowed = options.get("prefix_allowed_tokens_fn")
    filters = request.filters
    width = request.input_ids.shape[1]
    marks = _watermarks(config, vocab_size, request.input_ids.device)
    has_warpers = any(getattr(config, name, None) not in (None, off) for name, off in _WARPERS.items())
    warps = filters.temperature > 0 and (has_warpers or len(marks) > 0)
    if not (any(own) or warps or marks or penalties or _of_settings(config, request, allowed, penalties=False)):
        return request
    settings = _of_settings(config, request, allowed, penalties=True)
    padding = (width - request.lengths).tolist()
    first = {count: _without_padding(settings, count) for count in padding}
    last = marks
    if warps:
        last = [*_warpers(config, filters, request.input_ids.device), *marks]
        filters = Filters(1.0)
    merged = _generation._merge_criteria_processor_list
    lists = [[*merged(first[count], each), *last] for count, each in zip(padding, own, strict=True)]
    return replace(request, processors=lists_for(lists, len(lists)), filters=filters, processing=None)


def _of_settings(
    config: GenerationConfig,
    request: "Request",
    allowed: Callable[[int, Tensor], list[int]] | None,
    *,
    penalties: bool,
) -> list[Any]:
    """The processors that transformers makes of settings, and calls before a user's and before warpers.

    allowed: the request's `prefix_allowed_tokens_fn`
    penalties: also the request's repetition penalty and minimal length, of which transformers makes two processors
    """
    width = request.input_ids.shape[1]
    own = copy.copy(config)
    for name in _LEFT_OUT:
        setattr(own, name, None)
    given = request.processing
    if given is not None and given.min_new_tokens > 0:
        own.min_length = width + given.min_new_tokens if penalties else None  # transformers sets both
        own.min_new_tokens = given.min_new_tokens if penalties else None
    if given is not None and penalties:
        own.repetition_penalty = given.repetition_penalty
    own.do_sample = False
    own.num_beams = 1
    own.num_return_sequences = 1
    own.max_length = width + request.max_new_tokens
    own._eos_token_tensor = request.stops if len(request.stops) else None
    if own.exponential_decay_length_penalty is not None and own._eos_token_tensor is None:
        raise ValueError("exponential_decay_length_penalty raises end-of-sequence tokens; give eos_token_id")
    device = str(request.input_ids.device)
    return _generation._get_logits_processor(own, width, prefix_allowed_tokens_fn=allowed, device=device)


def _without_padding(settings: list[Any], padding: int) -> list[Any]:
    """The processors for a sequence that begins with padding, which a repetition penalty must not read."""
    kind = theirs.RepetitionPenaltyLogitsProcessor
    return [kind(each.penalty, padding) if isinstance(each, kind) else each for each in settings]


def _warpers(config: GenerationConfig, filters: Filters, device: torch.device) -> list[Any]:
    """All filters as warpers, with those of a generation config that the kernels lack."""
    own = GenerationConfig(do_sample=True)
    for name in _WARPERS:
        setattr(own, name, getattr(config, name, None))
    own.temperature = float(filters.temperature)
    own.top_k = filters.top_k
    own.top_p = filters.top_p
    own.min_p = filters.min_p or None
    return _generation._get_logits_processor(own, device=str(device))


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
