"""`model.generate(..., custom_generate=decoder)`: run a decoder through transformers' own generate.

transformers prepares the inputs, the settings, the logits processors and the stopping criteria, and calls

    decoder(model, input_ids, logits_processor=, stopping_criteria=, generation_config=, **model_kwargs)

Processors that do the same as the decoder's own penalties and filters are converted back to its options; all others
stay processors. Every other setting means what it means in transformers, or is refused by name. Images and other inputs
that the model's processor makes of a prompt become `model_inputs` of the decoder's generate.

seed, tokenizer and trace can be passed to `generate`, too. Without a seed, one is drawn from torch's generator, so
torch.manual_seed makes the output reproducible. transformers does not pass its tokenizer on, so bind one for
stop_strings and trace: custom_generate=functools.partial(decoder, tokenizer=tokenizer).

With return_dict_in_generate=True the result is a `SpeculativeOutput`: transformers' own output with another field,
`stats`, and a TextCache as cache (named past_key_values before transformers 5.24). To continue, pass this cache under
that name, with the whole sequence as input_ids.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.models.prompt_inputs import given_inputs
from heavypath.speculative.models.text_cache import CACHE_NAME, TextCache
from heavypath.speculative.options import ANOTHER_WAY, NOTHING, UNSERVED, unknown_settings
from heavypath.speculative.output.watchers import Streamer
from heavypath.speculative.ranks.peers import ALONE, Peers

# Settings that create no processor or criterion and are not supported, with the values that have no effect.
_UNSUPPORTED = UNSERVED | ANOTHER_WAY
# Arguments of a model's forward pass that the decoder handles; all others are inputs of the prompt.
_SERVED = ("attention_mask", "position_ids", CACHE_NAME, "logits_to_keep", "use_cache", "cache_position")

# Processors that the decoder implements as options: penalties, applied first, and filters, applied last in this order.
_PENALTIES = (
    RepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
_FILTERS: dict[type, int] = {
    TemperatureLogitsWarper: 0,
    TopKLogitsWarper: 1,
    TopPLogitsWarper: 2,
    MinPLogitsWarper: 3,
    LogitNormalization: 4,  # changes no probability; `answer` applies it to returned scores
}


class _OneByOne:
    """A streamer that passes tokens to another one as transformers does, one in each call.

    has_prompt: whether the other streamer has got the prompt already, so that it is not passed again
    """

    def __init__(self, streamer: Streamer, has_prompt: bool):
        self._streamer = streamer
        self._has_prompt = has_prompt
        self._began = False

    def put(self, value: Tensor) -> None:
        if self._began:
            for token in value.flatten():
                self._streamer.put(token[None])
        elif not self._has_prompt:
            self._streamer.put(value)
        self._began = True

    def end(self) -> None:
        self._streamer.end()


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of transformers' `generate` with return_dict_in_generate, and the decoder's statistics, `stats`.

    Pickling or copying it drops the cache.
    """

    stats: Statistics | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SpeculativeOutput, **{name: self[name] for name in self if name != CACHE_NAME}), ()


@dataclass(frozen=True)
class GenerateCall:
    """One call of a decoder by transformers' `generate`: its arguments, under transformers' own names.

    seed: an argument of the decoder; None to draw one from torch's generator
    model_kwargs: all arguments that are not fields, most of them for the model's forward pass
    """

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    generation_config: GenerationConfig | None = None
    streamer: Streamer | None = None
    seed: int | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, input_ids: Tensor, seed: int | None, given: dict[str, Any]) -> "GenerateCall":
        """Make the record of a call. given: its keyword arguments; those that are not fields become model_kwargs."""
        names = ("logits_processor", "stopping_criteria", "generation_config", "streamer")
        own = {name: given.pop(name) for name in names if name in given}
        return cls(model, input_ids, seed=seed, model_kwargs=given, **own)

    def arguments(self, target: PreTrainedModel, peers: Peers = ALONE) -> dict[str, Any]:
        """The keyword arguments by which the decoder's own `generate` does what the call asks.

        target: the decoder's target, which must be the model of the call
        peers: ranks of a split target; the first one draws the seed if none is given

        Raises ValueError for another model, and for any setting that is not supported and would change the result.
        """
        if self.model is not target:
            raise ValueError(
                f"custom_generate: the decoder's target is another model than this {type(self.model).__name__}"
            )
        config = self._config
        attention_mask = self.model_kwargs.get("attention_mask")
        inputs = given_inputs({name: value for name, value in self.model_kwargs.items() if name not in _SERVED})
        if inputs and self.model_kwargs.get("position_ids") is not None:
            inputs["position_ids"] = self.model_kwargs["position_ids"]
        _check_settings(config, self.input_ids, self.model_kwargs, inputs)
        caller = _generate_call(self.input_ids)
        if caller.get("assistant_model") is not None:
            raise _unsupported("assistant_model", "the decoder has a draft of its own")
        if caller.get("synced_gpus") and peers.is_alone:
            raise _unsupported("synced_gpus", "one process decodes")
        streamer = self.streamer
        has_prompt = False
        if streamer is None and caller.get("streamer") is not None:
            streamer = caller["streamer"]
            has_prompt = True

        width = self.input_ids.shape[1]
        options = NOTHING | _from_criteria(self.stopping_criteria or [], width)
        processors = [*(self.logits_processor or ())]
        first = _own_first(processors, set(options["eos_token_id"] or ()), attention_mask, config)
        # At temperature 0 the decoder has no filters, and they change no token; but transformers' scores show them.
        shown = (LogitNormalization,) if self._returns("output_scores") and not config.do_sample else tuple(_FILTERS)
        options |= _from_processors(processors, first, _own_last(processors, shown), config, width)
        if "max_new_tokens" not in options:
            raise _unsupported("a stopping_criteria without MaxLengthCriteria", "say max_new_tokens or max_length")
        options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])  # transformers has warned
        vocabulary = range(target.config.get_text_config(decoder=True).vocab_size)
        stops = options["eos_token_id"] or ()
        options["eos_token_id"] = [token for token in stops if token in vocabulary]  # no other token can come
        seed = self.seed
        if seed is None:
            seed = peers.decided(_drawn_seed) if options["temperature"] > 0 else 0
        pad = getattr(config, "_pad_token_tensor", config.pad_token_id)
        past = self.model_kwargs.get(CACHE_NAME)
        return options | {
            "past": past if isinstance(past, TextCache) else None,
            "model_inputs": inputs or None,
            "input_ids": self.input_ids,
            # transformers passes None for a mask of ones, which it has been given or has made.
            "attention_mask": torch.ones_like(self.input_ids) if attention_mask is None else attention_mask,
            "seed": seed,
            "pad_token_id": None if pad is None or len(self.input_ids) == 1 else int(pad),  # one text has no padding
            "streamer": None if streamer is None else _OneByOne(streamer, has_prompt),
            "output_scores": self._returns("output_scores"),
            "output_logits": self._returns("output_logits"),
        }

    def answer(
        self,
        sequences: Tensor,
        cache: TextCache,
        stats: Statistics,
        scores: tuple[Tensor, ...] | None,
        logits: tuple[Tensor, ...] | None,
    ) -> "Tensor | SpeculativeOutput":
        """The result in the form of transformers' `generate`: the sequences, or with return_dict_in_generate all of it.

        sequences: LongTensor[B, T + new]; scores, logits: for each new token [B, V], None if not requested
        """
        if self._config.return_dict_in_generate:
            if scores is not None and self.logits_processor and type(self.logits_processor[-1]) is LogitNormalization:
                scores = tuple(
                    each.log_softmax(-1).where((stats.tokens_of > place)[:, None].to(each.device), 0)
                    for place, each in enumerate(scores)
                )
            fields: dict[str, Any] = {"scores": scores, "logits": logits, CACHE_NAME: cache, "stats": stats}
            return SpeculativeOutput(sequences=sequences, **fields)  # pyright: ignore[reportArgumentType]
        return sequences

    def _returns(self, name: str) -> bool:
        """Whether an optional output is requested; as in transformers, only with return_dict_in_generate."""
        return bool(self._config.return_dict_in_generate and getattr(self._config, name, False))

    @property
    def _config(self) -> GenerationConfig:
        config = self.generation_config or self.model.generation_config
        assert config is not None
        return config


def _drawn_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _unsupported(what: str, why: str) -> ValueError:
    return ValueError(f"custom_generate=SpeculativeDecoder does not support {what}: {why}")


def _check_settings(
    config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any], inputs: dict[str, Any]
) -> None:
    for name, without in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value not in without:
            raise _unsupported(f"{name}={value!r}", f"leave it at {without[-1]!r}")
    for name, value in unknown_settings(config).items():
        raise _unsupported(f"{name}={value!r}", "it is a setting of a later transformers; leave it out")
    if not input_ids.shape[1] and "inputs_embeds" in inputs:
        raise _unsupported("inputs_embeds alone", "give as input_ids the tokens that they stand for: drafts read these")
    if model_kwargs.get("use_cache") is False:
        raise _unsupported("use_cache=False", "the decoder has caches of its own")
    cache: Any = model_kwargs.get(CACHE_NAME)
    is_foreign = not isinstance(cache, TextCache | None)
    if is_foreign and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        why = f"it takes the {CACHE_NAME} that it returned, with return_dict_in_generate=True"
        raise _unsupported(f"{CACHE_NAME} of type {type(cache).__name__}", why)
    positions = model_kwargs.get("position_ids")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.ne(0).int().diff(dim=-1) < 0).any():
        why = "without a mask transformers makes one, where pad tokens are zeros; give torch.ones_like(input_ids)"
        raise _unsupported("an attention_mask with zeros after ones", f"{why} if they are part of the text")
    for given in (positions, mask):
        if isinstance(cache, TextCache) and given is not None and given.shape[-1] != input_ids.shape[1]:
            why = "give the whole text as input_ids; what the cache has of it is found and not computed again"
            raise _unsupported(f"input_ids that begin behind {CACHE_NAME}", why)
    if positions is not None and not inputs:
        mask = torch.ones_like(input_ids) if mask is None else mask.long()
        counted = mask.cumsum(-1) - 1
        if isinstance(cache, TextCache) and cache.seen is not None:
            counted = counted + cache.seen.offsets  # how transformers counts positions after images
        if not ((counted == positions) | (mask == 0)).all():
            raise _unsupported("position_ids", "text is counted from its first token, 0, 1, 2, ...")


def _generate_call(input_ids: Tensor) -> dict[str, Any]:
    """Arguments of transformers' generate that it does not pass on; an empty dictionary if it is not the caller.

    These are streamer, assistant_model and synced_gpus, which are read from generate's own stack frame. A streamer has
    received the prompt by then, and its reader would wait forever if it were ignored.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            given = frame.f_locals if frame.f_locals.get("input_ids") is input_ids else {}
            return {name: given.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back
    return {}


def _own_first(processors: list[Any], stops: set[int], mask: Tensor | None, config: GenerationConfig) -> int:
    """How many processors at the beginning of the list are penalties that the decoder implements.

    0 if another processor of these classes follows later: it would replace the first one, not add to it.

    stops: the end-of-sequence tokens; mask: LongTensor [B, T], 0 for padding, or None
    """
    is_padded = mask is not None and bool((mask == 0).any())
    kinds: list[type] = []
    for processor in processors:
        match processor:
            case RepetitionPenaltyLogitsProcessor():
                own = type(processor) not in kinds and _is_all_penalised(processor.prompt_ignore_length, mask)
                # A user's penalty reads padding, too; before transformers 5.23 also the one made of the setting does.
                own = own and not (is_padded and processor.penalty != config.repetition_penalty)
            case MinLengthLogitsProcessor() | MinNewTokensLengthLogitsProcessor():
                own = set(processor.eos_token_id.tolist()) == stops
            case _:
                own = False
        if not own or type(processor) not in _PENALTIES:
            break
        kinds.append(type(processor))
    return 0 if any(type(each) in _PENALTIES for each in processors[len(kinds) :]) else len(kinds)


def _own_last(processors: list[Any], kinds: tuple[type, ...]) -> int:
    """The index from which on all processors are filters of these kinds, in the decoder's order."""
    place = len(processors)
    before = len(_FILTERS)
    for processor in reversed(processors):
        order = _FILTERS[type(processor)] if type(processor) in kinds else before
        as_usual = getattr(processor, "filter_value", -torch.inf) == -torch.inf
        if order >= before or not as_usual or getattr(processor, "min_tokens_to_keep", 1) != 1:
            break
        place -= 1
        before = order
    return place


def _from_processors(
    processors: list[Any], first: int, last: int, config: GenerationConfig, width: int
) -> dict[str, Any]:
    """The decoder's options for a list of processors.

    first, last: processors before index `first` and from index `last` on become options; others stay processors
    width: length of the prompts with padding
    """
    options: dict[str, Any] = {"temperature": 1.0, "min_new_tokens": 0}
    for processor in processors[:first] + processors[last:]:
        match processor:
            case RepetitionPenaltyLogitsProcessor():
                options["repetition_penalty"] = processor.penalty
            case MinLengthLogitsProcessor():
                options["min_new_tokens"] = max(options["min_new_tokens"], processor.min_length - width)
            case MinNewTokensLengthLogitsProcessor():
                least = processor.min_new_tokens + processor.prompt_length_to_skip - width
                options["min_new_tokens"] = max(options["min_new_tokens"], least)
            case TemperatureLogitsWarper():
                options["temperature"] = processor.temperature
            case TopKLogitsWarper():
                options["top_k"] = processor.top_k
            case TopPLogitsWarper():
                options["top_p"] = processor.top_p
            case MinPLogitsWarper():
                options["min_p"] = processor.min_p
    options["logits_processor"] = processors[first:last] or None
    if not config.do_sample:
        options["temperature"] = 0.0  # no filter changes the likeliest token
    return options


def _is_all_penalised(ignored: int | Tensor | None, mask: Tensor | None) -> bool:
    """Whether a repetition penalty covers the whole sequence except padding.

    ignored: the processor's `prompt_ignore_length`: the lengths of the padding, or None before transformers 5.23, which
        treats padding as text
    mask: LongTensor [B, T], 0 for padding; None without padding
    """
    if isinstance(ignored, Tensor):
        padding = 0 if mask is None else (mask != 0).int().argmax(1)
        return bool((ignored == padding).all())
    return not ignored


def _from_criteria(criteria: list[Any], width: int) -> dict[str, Any]:
    """The decoder's options for stopping criteria; those that it does not implement stay `stopping_criteria`.

    width: length of the prompts with padding
    """
    options: dict[str, Any] = {}
    others = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            most = criterion.max_length - width
            options["max_new_tokens"] = min(most, options.get("max_new_tokens", most))
        elif type(criterion) is EosTokenCriteria:
            options["eos_token_id"] = options.get("eos_token_id", []) + criterion.eos_token_id.tolist()
        else:
            others.append(criterion)
    return options | {"stopping_criteria": others or None}
