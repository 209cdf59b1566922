"""Sampling options in a request: those of `SamplingOptions`, with vLLM's names.

They are declared there. This file adds tighter bounds where the decoder's own bounds allow useless values.
"""

from typing import Annotated, Any, get_type_hints

from pydantic import Field, create_model, field_validator

from heavypath.speculative.http.bodies.fields import Body, Token
from heavypath.speculative.options import SamplingOptions

# Options that the server sets itself, or that have other fields: ignore_eos, stop_token_ids and stop.
_OF_SERVER = ("eos_token_id", "pad_token_id", "stop_strings")
_NAMES = {name: name for name in SamplingOptions.__annotations__ if name not in _OF_SERVER}
_NAMES["min_new_tokens"] = "min_tokens"
_BOUNDS: dict[str, Any] = {
    "top_k": Field(ge=-1),
    "top_p": Field(gt=1e-30, le=1),  # smaller values may become 0 in float32
    "min_p": Field(ge=0, le=1),
    "repetition_penalty": Field(ge=0.01, le=100),
    "min_new_tokens": Field(ge=0),
}
_DECLARED: dict[str, Any] = {
    _NAMES[name]: (Annotated[kind, _BOUNDS.get(name, Field())], None)
    for name, kind in get_type_hints(SamplingOptions).items()
    if name in _NAMES
}
SharedOptions: type[Body] = create_model("SharedOptions", __base__=Body, **_DECLARED)

MOST_BIASES = 1024
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingFields(SharedOptions):
    """The sampling fields of a request: those of `SamplingOptions`, and further ones of OpenAI's and vLLM's APIs.

    top_k:        0 and -1 are off
    frequency_penalty: subtracted from a token's logit for each time that it occurs in the new text
    presence_penalty: subtracted once from the logit of a token that occurs in the new text
    logit_bias:   values to add to the logits of tokens; the tokens are given as strings, because JSON keys are strings
    stop_token_ids: further tokens that end the text; they cannot occur before min_tokens
    ignore_eos:   whether end-of-sequence tokens do not end the text
    """

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias] | None = None
    stop_token_ids: list[Token] | None = Field(None, max_length=64)
    ignore_eos: bool = False

    @field_validator("top_k", check_fields=False)
    @classmethod
    def _zero_is_off(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_BIASES:  # checked before the entries are
            raise ValueError(f"expected at most {MOST_BIASES} tokens, got {len(value)}")
        return value

    def shared(self) -> dict[str, Any]:
        """The fields of `SamplingOptions` that were given, with its names."""
        given = {name: getattr(self, field) for name, field in _NAMES.items()}
        return {name: value for name, value in given.items() if value is not None}
