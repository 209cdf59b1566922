"""All options of a decoder and of a call, and how a target's generation_config fills in those left out.

An option that is left out is taken from the target's generation_config, as transformers does. If it is not set there
either, it is off: no end-of-sequence token, greedy decoding, no filter, no penalty. (transformers' own generate takes
top_k=50 in that case.)
"""

from collections.abc import Callable, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from heavypath.kernels.numbers import real, whole

if TYPE_CHECKING:
    from heavypath.speculative.decoding.rules import Verifier
    from heavypath.speculative.models.text_cache import TextCache
    from heavypath.speculative.output.watchers import Streamer
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.ranks.communication import Communication
    from heavypath.speculative.tree_policy import TreePolicy
    from heavypath.speculative.trees.growth import Confidence
    from heavypath.speculative.trees.rates import Acceptance
    from heavypath.speculative.trees.tree import TokenTree

EosTokens = int | Sequence[int] | None | Literal["model"]
_LEFT_OUT = {"eos_token_id": "model"}  # the value that means "left out", for options where that is not None

# Every option, except temperature, that a generation_config may set, with the value that turns it off.
NOTHING: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "eos_token_id": None,
}
# Settings of a generation_config that create a logits processor, and the values with which they create none.
PROCESSORS: dict[str, tuple[Any, ...]] = {
    "sequence_bias": (None,),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "top_h": (None,),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "watermarking_config": (None,),
}
# Settings of a generation_config that neither `generate` nor custom_generate supports, and the values with which they
# have no effect. `_UNSERVED` below adds those that custom_generate gets as a processor or as a criterion.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "assistant_ensemble_weight": (None,),
}
# Settings that `generate` supports: as an option, as a logits processor, or as an option with another name.
SERVED = {
    *("temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty", "stop_strings", "eos_token_id"),
    *("pad_token_id", "min_new_tokens", "max_new_tokens", "max_length", "output_scores", "output_logits"),
    *PROCESSORS,
}
# Settings that cannot change a decoder's output, and are ignored: for beam search and encoders, which it does not have;
# for transformers' own drafting, caching and compiling; the form of the result; and transformers' own notes.
HARMLESS = {
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "decoder_start_token_id", "bos_token_id"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "cache_config", "max_cache_len"),
    *("compile_config", "disable_compile", "continuous_batching_config", "renormalize_logits"),
    *("return_dict_in_generate", "transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash"),
}
# Settings that ask for another way to compute the same output: custom_generate refuses them.
ANOTHER_WAY: dict[str, tuple[Any, ...]] = {
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
_UNSERVED: dict[str, tuple[Any, ...]] = UNSERVED | {
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "max_time": (None,),
}


class TreeOptions(TypedDict, total=False):
    """Options for the trees of a decoder. Each but tree_size applies to some methods only; the others refuse it.

    tree_size: nodes of the drafted tree, root included. A method that cannot have exactly that size takes the next
        smaller one. Default: the size and depth that are fastest for one sequence, by the costs that
        `costs.estimates` estimates from the device and the models. At temperature 0, and for ersd, the default follows
        the batch size, because the output does not depend on the tree: larger batches have smaller trees, down to plain
        decoding, and the trees grow again while the batch shrinks
    tree: a TokenTree to use instead, for methods whose trees do not grow
    acceptance: [child] or [depth, child], the probability that child j of an accepted node is accepted, for planned
        trees
    max_depth: most levels of planned and grown trees (default: with `acceptance` no limit, else by the number of nodes)
    width: for specinfer and spectr the number of sequences, for rsd-c the children of a node, for grown trees the nodes
        of a level
    branching: for rsd-c: children of a node at each level (default: the numbers that are best by `acceptance`)
    threshold: for chain, dyspec, eagle-2: slots whose value is below it stay empty; see `decoding.growing`
    confidence: for dyspec: how acceptance is predicted from the draft's probabilities, as a `Confidence` (default:
        growth.DEFAULT_CONFIDENCE); or "draft" as in the paper, which takes the draft's probability for the acceptance
    profile: the measurements of `heavypath calibrate`, as a file or a `Profile`, instead of all options above. Each
        step takes the tree with which decoding is expected to be fastest at the current batch size. So the same seed
        and sequence id can give another sample of the same distribution in another batch, except with ersd. If that
        must not happen, calibrate with batch_sizes=[1]
    trees: a `TreePolicy`, which chooses the tree of each step, instead of all options above
    replan: with a profile: choose the tree again every few steps, by the acceptance in this sequence so far, see
        `tree_by_profile`
    """

    tree: "TokenTree | None"
    tree_size: int | None
    acceptance: "Acceptance | None"
    max_depth: int | None
    width: int | None
    branching: Sequence[int] | None
    threshold: float | None
    confidence: 'Confidence | Literal["draft"] | None'
    profile: "Profile | str | Path | None"
    trees: "TreePolicy | None"
    replan: bool


class RuleOptions(TypedDict, total=False):
    """Options for how the draft is sampled, how its nodes are verified, and what a lossy method accepts.

    verifier: the rule that accepts or rejects drafted nodes. The methods with recursive rejection (chain, specinfer,
        sequoia, dyspec, rsd-c, rsd-s) take "rejection", or a rule that accepts more of the same trees: "held" holds
        siblings back (`heavypath.kernels.verifying.held`), "traversal" tries leaves before the nodes above them
        (`.traversal`), and "held_traversal" does both, for trees that do not grow. Default:
        `methods.DEFAULT_VERIFIERS`. Or, for any method and at any temperature, a callable that follows `Verifier`, such
        as `top_down(rule)`. It must keep the target's distribution itself. It cannot be combined with a profile, which
        measures the built-in rules
    draft_temperature, draft_top_k, draft_top_p, draft_min_p: how the draft is sampled; None takes the target's setting.
        If the method takes the draft's likeliest tokens, draft_temperature only scales the probabilities by which trees
        grow (default: 0.6)
    epsilon, delta: for typical-lossy when it samples: a drafted token is accepted if P > min(epsilon, delta
        exp(-H(P))), with H the entropy (default: 0.09 and 0.3)
    """

    verifier: "Verifier | str | None"
    epsilon: float | None
    delta: float | None
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    draft_min_p: float | None


class DecoderOptions(TreeOptions, RuleOptions, total=False):
    """All options of a decoder: trees, sampling and verification, and how steps run.

    cuda_graphs: replay each step as one CUDA graph (default: on a GPU). False runs the same step eagerly, for a
        debugger or a profiler. With graphs the decoder keeps their memory, caches included, for the next call
    communication: for models that you have split over processes yourself, a `Communication` between these
        processes, which all make the same calls
    """

    cuda_graphs: bool | None
    communication: "Communication | None"


class SamplingOptions(TypedDict, total=False):
    """How the target is sampled, besides its temperature.

    At temperature 0 decoding is greedy, and the filters are ignored.

    top_k, top_p, min_p: filters; top_k=0, min_p=0 and top_p=1 turn them off.
    repetition_penalty: 1 is none; above 1 makes the tokens of the sequence so far, prompt included, less likely.
    min_new_tokens: no end-of-sequence token is generated before this many new tokens.
    eos_token_id: end of sequence, one token or several; None never stops early.
    pad_token_id: fills the output after the end of a sequence (default: the first eos_token_id).
    stop_strings: a sequence ends with the token that completes one of them; needs the tokenizer.

    Options left out, and the temperature, are taken from target.generation_config; without do_sample there, the
    temperature is 0. What is not set there either is off. A setting there that would change the output and is not
    supported here is an error. max_length and max_new_tokens there are ignored.
    """

    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    min_new_tokens: int | None
    eos_token_id: EosTokens
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None


class RequestOptions(SamplingOptions, total=False):
    """Further options of a request: tokenizer, stopping criteria, and changes of the logits.

    tokenizer: needed for stop_strings, and for text in a trace.
    stopping_criteria: those of transformers or your own, called after each new token of each sequence, with [1, T +
        new].
    logits_processor: transformers' processors, `Grammar`s, and functions of (input_ids LongTensor[R, T'], scores fp32
        [R, V]). They are applied in order to the logits of both models, before the filters. In a batch, the list may
        also hold one list (or None) for each sequence. input_ids is the prompt as given and the tokens on the path to a
        node. Classes other than transformers' own are called with one row at a time. State that a processor keeps
        between calls is watched: trees end where it changes, and each sequence has its own. Set keeps_no_state = True
        on a processor whose results do not depend on earlier calls. Processors run on the host in each step, so on a
        GPU no CUDA graph is used.
    prefix_allowed_tokens_fn: a function of (sequence index, its tokens LongTensor[T']) that returns the tokens that may
        follow.
    """

    tokenizer: PreTrainedTokenizerBase | None
    stopping_criteria: Sequence[StoppingCriteria] | None
    logits_processor: Sequence[Any] | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None


class GenerateOptions(RequestOptions, total=False):
    """All options of `generate`.

    seed: the same seed gives the same output, for each sequence on its own (default: 0).
    attention_mask: [B, T], with zeros for left padding.
    sequence_ids: LongTensor[B] in 0 .. 2**27 - 1 (default 0 .. B - 1). Each id selects its own random numbers, so a
        sequence decoded alone with its id gets the same output as in the batch; but see `profile` of the decoder.
    streamer: a transformers streamer for one sequence, or a list with one streamer for each sequence.
    trace: a file to write what each step drafted and why it was accepted or not; with a tokenizer, as text too.
    output_scores, output_logits: also return what each token was sampled from, and the model's own logits, as
        transformers does. The host then waits for each step, and memory for B x new tokens x V numbers is needed.
    past: the .cache of an earlier generation with this target, by this decoder or another. The longest prefix that a
        prompt shares with any of its sequences is not computed again. input_ids are still the whole prompts. The cache
        is not modified. The output is the same with and without it, up to ties within rounding error.
    model_inputs: further inputs of the prompt, as a transformers processor returns them: {"pixel_values": ...}. Only
        the target reads them. A `past` made from such prompts includes their images: prompt b must continue its
        sequence b.
    """

    seed: int
    attention_mask: Tensor | None
    sequence_ids: Tensor | None
    streamer: "Streamer | Sequence[Streamer] | None"
    trace: str | Path | None
    output_scores: bool
    output_logits: bool
    past: "TextCache | None"
    model_inputs: Mapping[str, Any] | None


HABITS = {  # arguments of transformers' generate, with what to use instead here
    "do_sample": "temperature above 0 samples, 0 takes the likeliest token",
    "max_length": "max_new_tokens counts the new tokens",
    "num_beams": "a text is not searched for by beams",
    "num_return_sequences": "repeat the prompt, each row of a batch is a sample of its own",
    "inputs_embeds": "give input_ids, and beside them model_inputs={'inputs_embeds': ...}",
    "adapter_names": "one adapter decodes a batch: choose it by set_adapter(name), and decode those of another apart",
    "assistant_model": "the draft is an argument of SpeculativeDecoder",
    "prompt_lookup_num_tokens": "SpeculativeDecoder(target, PromptLookup()) looks up the prompt",
    "generation_config": "give its settings one by one, or set target.generation_config",
    "use_cache": "the decoder has caches of its own",
    "past_key_values": "past= takes the .cache of what an earlier generate returned",
    "cache": "past= takes the .cache of what an earlier generate returned",
    "max_time": "stopping_criteria=[MaxTimeCriteria(seconds)] ends a text by time",
}
NUMBERS: dict[str, Callable[[str, object], float]] = {  # options that are numbers, with the function that checks them
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "pad_token_id", "seed", "top_k", "draft_top_k"), whole),
    **dict.fromkeys(("tree_size", "max_depth", "width", "logprobs", "prompt_logprobs"), whole),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "threshold", "epsilon", "delta"), real),
    **dict.fromkeys(("draft_temperature", "draft_top_p", "draft_min_p", "deadline"), real),
}
_FLAGS = ("output_scores", "output_logits", "cuda_graphs", "replan")


def checked_options(what: str, given: Mapping[str, Any], has: Any, *named: str) -> dict[str, Any]:
    """The given options as plain Python values; None means left out.

    what: the name of the function, for messages
    has: the TypedDict of its options
    named: names of its further parameters, for messages

    Raises TypeError for an unknown option, and for a value of the wrong type, with the option's name.
    """
    for name in given:
        if name not in has.__annotations__:
            names = [*named, *has.__annotations__]
            close = get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"
            hint = HABITS.get(name, hint)
            raise TypeError(f"{what} has no option {name!r}; {hint}")
    return {name: _as_python_has_it(name, value) for name, value in given.items()}


def _as_python_has_it(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in NUMBERS:
        return NUMBERS[name](name, value)
    if name in _FLAGS and not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    if name == "eos_token_id" and isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if name == "eos_token_id" and isinstance(value, Set):
        return sorted(value)
    if name == "stop_strings" and not isinstance(value, str | Sequence):
        raise TypeError(f"stop_strings must be a text or a list of texts, got {value!r}")
    if name == "tokenizer" and not callable(getattr(value, "decode", None)):
        raise TypeError(f"tokenizer must be one of transformers, got {value!r}")
    return value


def with_generation_config(
    options: Mapping[str, Any], temperature: float | None, config: GenerationConfig | None, vocab_size: int
) -> dict[str, Any]:
    """All of `SamplingOptions`, and the temperature, with those left out taken from the model's config.

    options: those of `SamplingOptions`; others are ignored

    Tokens in the config that the model does not have are ignored. The result has another key, "processors": the config
    if some of its settings create logits processors, else None.

    Raises ValueError for a setting of the config that would change the output and is not supported. If every option
    except pad_token_id was given, the config's other settings are ignored.
    """
    config = GenerationConfig() if config is None else config
    found: dict[str, Any] = {}
    for name in SamplingOptions.__annotations__:
        found[name] = options.get(name, _LEFT_OUT.get(name))
    found["temperature"] = temperature
    found["processors"] = None
    if found["pad_token_id"] is None and config.pad_token_id in range(vocab_size):
        found["pad_token_id"] = config.pad_token_id
    left_out = [name for name in ("temperature", *NOTHING) if found[name] == _LEFT_OUT.get(name)]
    if not left_out:
        return found
    theirs = {name: getattr(config, name) for name in NOTHING}
    ends = config.eos_token_id
    if not isinstance(ends, Sequence):
        ends = [ends]
    theirs["eos_token_id"] = [token for token in ends if token in range(vocab_size)]
    theirs["temperature"] = 0.0
    if config.do_sample:
        theirs["temperature"] = 1.0 if config.temperature is None else config.temperature
    for name in left_out:
        value = theirs[name]
        found[name] = NOTHING[name] if value is None else value
    if found["stop_strings"] is None:
        found["stop_strings"] = config.stop_strings
    _check_served(config)
    for name, off in PROCESSORS.items():
        if getattr(config, name, None) not in off:
            found["processors"] = config
    return found


def unknown_settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings of a newer transformers that this package does not know, if this config changes their default."""
    known = SERVED | HARMLESS | {*ANOTHER_WAY, *_UNSERVED}
    changed = {}
    for name, default in vars(GenerationConfig()).items():
        value = getattr(config, name, None)
        if name not in known and value not in (None, False, default):
            changed[name] = value
    return changed


def _check_served(config: GenerationConfig) -> None:
    for name, value in unknown_settings(config).items():
        raise ValueError(
            f"the target's generation_config has {name}={value!r}, a setting of a later transformers that is not known "
            f"here; set target.generation_config.{name} = None to do without it"
        )
    for name, without in _UNSERVED.items():
        value = getattr(config, name, None)
        if value not in without:
            raise ValueError(
                f"the target's generation_config has {name}={value!r}, which SpeculativeDecoder does not have; set "
                f"target.generation_config.{name} = {without[-1]!r} to do without it"
            )
