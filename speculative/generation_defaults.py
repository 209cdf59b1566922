"""What a call of `generate` leaves out is taken from the target's generation_config, as transformers does.

What is not set there either is off: no end of sequence, greedy text, no filter, no penalty. (transformers' own generate
takes top_k=50 where nobody said anything.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import GenerationConfig

from heavypath.kernels.filtering import Filters

EosTokens = int | Sequence[int] | None | Literal["model"]
LEFT_OUT = {"eos_token_id": "model"}  # what stands for an argument that was left out, if it is not None

# Every argument that would be taken from a generation_config, but for temperature, at the value that does nothing.
NOTHING: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "eos_token_id": None,
}
# Settings of a generation_config that change the text and that `generate` does not have; the values that change nothing.
_UNSERVED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "min_length": (None, 0),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "max_time": (None,),
}
_UNSERVED_IN_SAMPLING = {
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "top_h": (None,),
}


@dataclass(frozen=True)
class Settings:
    """What `generate` was given; None, and "model" for the end of sequence, where it was left out."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    min_new_tokens: int | None
    eos_token_id: EosTokens
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None

    @property
    def filters(self) -> Filters:
        """How the target is sampled, with None for each filter that is off."""
        assert self.temperature is not None
        return Filters(
            self.temperature,
            None if self.top_k == 0 else self.top_k,
            None if self.top_p == 1 else self.top_p,
            None if self.min_p == 0 else self.min_p,
        )

    def filled_from(self, config: GenerationConfig | None) -> "Settings":
        """These settings, with what was left out taken from a model's config.

        Raises ValueError for a setting of the config that changes the text and that `generate` does not have. Where
        nothing but pad_token_id was left out, no other setting is looked at.
        """
        config = GenerationConfig() if config is None else config
        given = vars(self) | {"pad_token_id": config.pad_token_id if self.pad_token_id is None else self.pad_token_id}
        left_out = [name for name in ("temperature", *NOTHING) if given[name] == LEFT_OUT.get(name)]
        if not left_out:
            return Settings(**given)
        found = {name: getattr(config, name) for name in NOTHING}
        found["temperature"] = (1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0
        for name in left_out:
            given[name] = NOTHING[name] if found[name] is None else found[name]
        if self.stop_strings is None:
            given["stop_strings"] = config.stop_strings
        _check_served(config, sampled=given["temperature"] > 0)
        return Settings(**given)


def _check_served(config: GenerationConfig, sampled: bool) -> None:
    for name, without in (_UNSERVED | (_UNSERVED_IN_SAMPLING if sampled else {})).items():
        value = getattr(config, name, None)
        if value not in without:
            raise ValueError(
                f"the target's generation_config has {name}={value!r}, which SpeculativeDecoder does not have; set "
                f"target.generation_config.{name} = {without[-1]!r} to do without it"
            )
