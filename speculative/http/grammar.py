"""`response_format`: which texts an answer may be."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import Sampling
from heavypath.speculative.processors.grammar import Grammar


def grammar_of(request: Sampling, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> Grammar | None:
    """What holds the texts of a request to their format; None where any text will do.

    Raises Refusal for a schema that cannot be followed, and where the server has no grammars.
    """
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if request.ignore_eos:
        message = "response_format: such a text ends by an end-of-sequence token; leave ignore_eos out"
        raise Refusal(400, message, param="response_format")
    schema: dict[str, Any] = {"type": "object"}
    if wanted.json_schema is not None:
        schema = wanted.json_schema.definition
    try:
        return Grammar.json_schema(schema, tokenizer, eos_token_id=[*eos_token_ids] or None)
    except (ValueError, TypeError, ImportError) as error:
        message = f"response_format: {' '.join(str(error).split())}"
        raise Refusal(400, message, param="response_format") from error
