"""What a call of `generate` leaves out is taken from the target's generation_config, as transformers does.

What is not set there either is off: no end of sequence, greedy text, no filter, no penalty. (transformers' own generate
takes top_k=50 where nobody said anything.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import GenerationConfig

from heavypath.kernels.filtering import Filters

EosTokens = int | Sequence[int] | None | Literal["model"]
_LEFT_OUT = {"eos_token_id": "model"}  # what stands for an argument that was left out, if it is not None

# Every argument that would be taken from a generation_config, but for temperature, at the value that does nothing.
NOTHING: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "eos_token_id": None,
}
# Settings of a generation_config that `generate` does not have, and the values with which they change no text.
_UNSERVED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "max_time": (None,),
}


class Settings(NamedTuple):
    """Settings with nothing left out; see `SpeculativeDecoder.generate`. A filter that is off is None.

    config: whose settings of logits processors are in force, too; None for none
    """

    filters: Filters
    repetition_penalty: float
    min_new_tokens: int
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None
    config: GenerationConfig | None = None


@dataclass(frozen=True)
class GivenSettings:
    """What `generate` was given; None, and "model" for the end of sequence, where it was left out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    eos_token_id: EosTokens = "model"
    pad_token_id: int | None = None
    stop_strings: str | Sequence[str] | None = None

    def filled_from(self, config: GenerationConfig | None, vocab_size: int) -> Settings:
        """These settings, with what was left out taken from a model's config.

        Tokens of the config that the model does not have end no text, and are no padding.

        Raises ValueError for a setting of the config that changes the text and that `generate` does not have. Where
        nothing but pad_token_id was left out, no other setting is looked at.
        """
        config = GenerationConfig() if config is None else config
        given: dict[str, Any] = dict(vars(self))
        if self.pad_token_id is None and config.pad_token_id in range(vocab_size):
            given["pad_token_id"] = config.pad_token_id
        left_out = [name for name in ("temperature", *NOTHING) if given[name] == _LEFT_OUT.get(name)]
        if left_out:
            found = {name: getattr(config, name) for name in NOTHING}
            eos = config.eos_token_id
            ends = eos if isinstance(eos, Sequence) else [eos]
            found["eos_token_id"] = [token for token in ends if token in range(vocab_size)]
            temperature = 1.0 if config.temperature is None else config.temperature
            found["temperature"] = temperature if config.do_sample else 0.0
            for name in left_out:
                given[name] = NOTHING[name] if found[name] is None else found[name]
            if self.stop_strings is None:
                given["stop_strings"] = config.stop_strings
            _check_served(config)
            given["config"] = config
        filters = {name: given.pop(name) for name in ("top_k", "top_p", "min_p")}
        filters = {name: None if value == NOTHING[name] else value for name, value in filters.items()}
        return Settings(Filters(given.pop("temperature"), **filters), **given)


def _check_served(config: GenerationConfig) -> None:
    for name, without in _UNSERVED.items():
        value = getattr(config, name, None)
        if value not in without:
            raise ValueError(
                f"the target's generation_config has {name}={value!r}, which SpeculativeDecoder does not have; set "
                f"target.generation_config.{name} = {without[-1]!r} to do without it"
            )
