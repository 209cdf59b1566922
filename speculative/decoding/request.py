"""Requests: the arguments of `generate`, checked before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.decoding.sequences import MAX_SEQUENCES
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.names import load
from heavypath.speculative.options import NOTHING, with_generation_config

if TYPE_CHECKING:
    from heavypath.speculative.decoding.processing import Processing
    from heavypath.speculative.models.prompt_inputs import PromptInputs, Seen
    from heavypath.speculative.processors.stopping import Stopping


@dataclass(frozen=True)
class Request:
    """The checked arguments of a call of `generate`: prompts without left padding, and how to continue them.

    prompt:       LongTensor[B, T], right-padded
    lengths:      LongTensor[B], tokens of each prompt
    filters:      temperature and filters of the target
    sequence_ids: LongTensor[B], which select the sequences' noise
    stops:        LongTensor[any], end-of-sequence tokens
    pad:          the padding token after a sequence has ended
    processing:   repetition penalty and min_new_tokens, applied before the filters; None for neither
    processors:   a list of logits processors for each sequence, for target and draft, before the filters; None for none
    input_ids:    LongTensor[B, T], the prompts as given by the caller, which processors get
    stopping:     other criteria that end a sequence; None for none
    past:         cached sequences whose prefixes prompts may share; None for none
    inputs:       inputs of the prompts besides tokens (images ...), of this call or of `past`; None for none
    """

    prompt: Tensor
    lengths: Tensor
    max_new_tokens: int
    filters: Filters
    seed: int
    sequence_ids: Tensor
    stops: Tensor
    pad: int
    processing: "Processing | None"
    processors: list[list[Any]] | None
    input_ids: Tensor
    stopping: "Stopping | None"
    past: TextCache | None
    inputs: "PromptInputs | Seen | None"

    @classmethod
    def of(
        cls,
        target: Forward,
        drafting: Sequence[Drafting],
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float | None,
        options: Mapping[str, Any],
        *,
        seed: int = 0,
        penalties_as_processors: bool = False,
    ) -> "Request":
        """Make a request from the arguments of a call of `generate`, with defaults from the target's generation_config.

        drafting: the forward passes of the models that draft, for checks
        input_ids: LongTensor[B, T], with left padding; temperature: None for the default
        options: by name, all of `GenerateOptions` except the seed
        penalties_as_processors: make penalties logits processors even if there are no others, for a batch in which
            requests differ

        Raises TypeError or ValueError for invalid arguments, and for requests that a model does not support.
        """
        temperature = None if temperature is None else real("temperature", temperature)
        vocab_size = target.vocab_size
        settings = with_generation_config(options, temperature, target.model.generation_config, vocab_size)
        filters = filters_of(settings).check()
        seed = whole("seed", seed)
        max_new_tokens = whole("max_new_tokens", max_new_tokens)
        _check_tokens(input_ids, options.get("model_inputs"), target)
        _check_past(options.get("past"), target)
        lengths = _prompt_lengths(input_ids, options.get("attention_mask"))
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if options.get("min_new_tokens") is None:  # as in transformers, the model's own may be more than fit
            settings["min_new_tokens"] = min(settings["min_new_tokens"], max_new_tokens)
        _check_positions(target, drafting, lengths, max_new_tokens)
        eos, pad = _stop_tokens(settings["eos_token_id"], settings["pad_token_id"], vocab_size)
        stopping = _stopping(input_ids, settings["stop_strings"], options)
        batch, width = input_ids.shape
        if stopping is not None and batch > 1 and not eos and settings["pad_token_id"] is None:
            raise ValueError("sequences of a batch that stop early need pad_token_id or eos_token_id, got neither")
        device = input_ids.device
        padding = width - lengths  # on the left
        columns = torch.arange(int(lengths.max()), device=device) + padding[:, None]
        columns = columns.clamp(max=width - 1)
        request = cls(
            prompt=input_ids.gather(1, columns),
            lengths=lengths,
            max_new_tokens=max_new_tokens,
            filters=filters,
            seed=seed,
            sequence_ids=_checked_sequence_ids(options.get("sequence_ids"), batch, device),
            stops=torch.tensor(eos, dtype=torch.long, device=device),
            pad=pad,
            processing=_processing(settings, max_new_tokens, eos, vocab_size),
            processors=None,
            input_ids=input_ids,
            stopping=stopping,
            past=options.get("past"),
            inputs=_inputs(input_ids, lengths, target, max_new_tokens, options),
        )
        config = settings["processors"]
        given = [config, options.get("logits_processor"), options.get("prefix_allowed_tokens_fn")]
        penalties = penalties_as_processors and request.processing is not None
        if penalties or any(each is not None for each in given):
            return load("with_processors")(request, options, config, vocab_size=vocab_size, penalties=penalties)
        return request

    @property
    def most_tokens(self) -> int:
        """The most tokens that a sequence may have, prompt included."""
        return self.prompt.shape[1] + self.max_new_tokens

    @property
    def looks_padded(self) -> bool:
        """Whether some prompts, but not all, begin with the padding token; reads tokens on the host."""
        padded = self.input_ids[:, 0] == self.pad
        return bool(padded.any() and not padded.all())

    def to_compare(self) -> dict[str, object]:
        """Return the values, by name, that must be equal on all ranks, so that all of them take the same steps."""
        return {
            "prompt": self.prompt,
            "lengths of prompts": self.lengths,
            "max_new_tokens": self.max_new_tokens,
            "sampling": (self.filters, self.processing),
            "seed": self.seed,
            "sequence_ids": self.sequence_ids,
            "eos_token_id": self.stops,
            "stopping criteria": self.stopping is None,
            "past": None if self.past is None else self.past.tokens,
        }


def filters_of(settings: Mapping[str, Any]) -> Filters:
    """Return filters from settings by name: the temperature and all of `SamplingOptions`. None turns a filter off."""
    on = {}
    for name in ("top_k", "top_p", "min_p"):
        if settings[name] != NOTHING[name]:
            on[name] = settings[name]
    return Filters(settings["temperature"], **on)


def _inputs(
    input_ids: Tensor, lengths: Tensor, target: Forward, new: int, options: Mapping[str, Any]
) -> "PromptInputs | Seen | None":
    """Return the prompts' inputs besides tokens, of this call or of the past; None if there are none.

    input_ids: LongTensor[B, T], with left padding; lengths: LongTensor[B]; new: max_new_tokens
    """
    given = options.get("model_inputs")
    past = options.get("past")
    if given is None and (past is None or past.seen is None):
        return None
    return load("inputs_of")(given, input_ids, lengths, target, new, past)


def _stopping(
    input_ids: Tensor, stop_strings: str | Sequence[str] | None, options: Mapping[str, Any]
) -> "Stopping | None":
    """Return the criteria that end a sequence besides end-of-sequence tokens and length; None if there are none."""
    if stop_strings is None and options.get("stopping_criteria") is None:
        return None
    return load("stopping_of")(input_ids, stop_strings, options.get("tokenizer"), options.get("stopping_criteria"))


def _stop_tokens(
    eos_token_id: int | Sequence[int] | None, pad_token_id: int | None, vocab_size: int
) -> tuple[list[int], int]:
    """Return the end-of-sequence tokens, and the padding token: by default the first of them, or else 0."""
    if isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str):
        eos = [whole("eos_token_id", token) for token in eos_token_id]
    else:
        eos = [] if eos_token_id is None else [whole("eos_token_id", eos_token_id)]
    pad = eos[0] if eos else 0
    if pad_token_id is not None:
        pad = whole("pad_token_id", pad_token_id)
    for name, tokens in (("eos_token_id", eos), ("pad_token_id", [pad])):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} must be in 0 .. {vocab_size - 1}, got {token}")
    return eos, pad


def _processing(
    settings: Mapping[str, Any], max_new_tokens: int, eos: Sequence[int], vocab_size: int
) -> "Processing | None":
    """Return repetition penalty and min_new_tokens as a `Processing`; None if they change nothing."""
    repetition_penalty = real("repetition_penalty", settings["repetition_penalty"])
    min_new_tokens = whole("min_new_tokens", settings["min_new_tokens"])
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise ValueError(f"min_new_tokens must be in 0 .. max_new_tokens = {max_new_tokens}, got {min_new_tokens}")
    early = min_new_tokens if eos else 0
    if repetition_penalty == 1 and early < 1:
        return None
    return load("Processing").of(float(repetition_penalty), early, eos, vocab_size)


def _check_tokens(input_ids: object, model_inputs: object, target: Forward) -> None:
    if not isinstance(input_ids, Tensor):
        how = "; pass tokenizer(text, return_tensors='pt').input_ids, or the whole with ** before it"
        raise ValueError(f"input_ids must be a LongTensor [B, T], got {type(input_ids).__name__}{how}")
    if input_ids.dim() != 2 or input_ids.dtype != torch.long:
        how = "; give input_ids[None] for one prompt" if input_ids.dim() == 1 else ""
        raise ValueError(f"input_ids must be a LongTensor [B, T], got {input_ids.dtype} {[*input_ids.shape]}{how}")
    if 0 in input_ids.shape:
        given = f"got input_ids of shape {[*input_ids.shape]}"
        if isinstance(model_inputs, Mapping) and "inputs_embeds" in model_inputs:
            given += " and inputs_embeds; give the tokens that they stand for, too: a draft reads tokens alone"
        raise ValueError(f"the prompt must have at least one token, {given}")
    if input_ids.device != target.device:
        raise ValueError(f"input_ids must be on {target.device} like the models, got {input_ids.device}")
    least = int(input_ids.min())
    largest = int(input_ids.max())
    if least < 0 or largest >= target.vocab_size:
        raise ValueError(f"input_ids must be in 0 .. {target.vocab_size - 1}, got {least} .. {largest}")


def _check_past(past: object, target: Forward) -> None:
    if past is None:
        return
    if not isinstance(past, TextCache):
        raise TypeError(f"past must be the .cache of what an earlier generate returned, got {type(past).__name__}")
    past.check(target)


def _prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the number of tokens of each prompt, LongTensor[B], from the mask, [B, T]; all T without a mask.

    Raises TypeError for a mask that is no tensor, and ValueError for one that is not left padding.
    """
    if attention_mask is None:
        return torch.full_like(input_ids[:, 0], input_ids.shape[1])
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    is_token = attention_mask.ne(0)
    wrong = attention_mask[is_token != attention_mask]
    if len(wrong):
        raise ValueError(f"attention_mask must have zeros (left padding) and ones alone, got {wrong[0].item()}")
    mask = is_token.to(input_ids)
    if mask.shape != input_ids.shape or (mask.diff(dim=1) < 0).any() or not mask[:, -1].all():
        got = attention_mask.tolist() if mask.numel() <= 64 else [*mask.shape]
        raise ValueError(
            f"attention_mask must be zeros (left padding) then ones, {[*input_ids.shape]} like input_ids, "
            f"got {got}; a tokenizer pads so with padding_side='left'"
        )
    return mask.sum(1)


def _check_positions(target: Forward, drafting: Sequence[Drafting], lengths: Tensor, new: int) -> None:
    """Raise ValueError if a model lacks positions for `new` tokens after these prompts; the last one needs none."""
    shortest = int(lengths.min())
    longest = int(lengths.max())
    target.check_positions(longest + new - 1, f"({longest} + {new} - 1: the last is not read)")
    for model in (target, *drafting):
        _check_rotary_lengths(model, shortest, longest, new)


def _check_rotary_lengths(model: Drafting, shortest: int, longest: int, new: int) -> None:
    limit = model.rope_limit
    if limit is not None and shortest <= limit < longest + new - 1:
        lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        raise ValueError(
            f"{model.name}'s rotary embeddings (longrope) change for all tokens where a text becomes longer than "
            f"{limit} tokens: prompt and new tokens, less the last, must fit into these, or every prompt must be "
            f"longer; got prompts of {lengths} tokens and {new} new ones"
        )


def _checked_sequence_ids(sequence_ids: Tensor | None, batch: int, device: torch.device) -> Tensor:
    if sequence_ids is None:
        return torch.arange(batch, device=device)
    if not isinstance(sequence_ids, Tensor):
        raise TypeError(f"sequence_ids must be a LongTensor [{batch}], got {type(sequence_ids).__name__}")
    if sequence_ids.dtype != torch.long or sequence_ids.shape != (batch,):
        given = f"{sequence_ids.dtype} {[*sequence_ids.shape]}"
        raise ValueError(f"sequence_ids must be a LongTensor [{batch}], got {given}")
    if sequence_ids.min() < 0 or sequence_ids.max() >= MAX_SEQUENCES:
        raise ValueError(f"sequence_ids must be in 0 .. {MAX_SEQUENCES - 1}, got {sequence_ids.tolist()}")
    return sequence_ids.to(device)
