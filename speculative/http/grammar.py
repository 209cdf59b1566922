"""`response_format`: which texts an answer may be."""

from typing import Any

from transformers import LogitsProcessor, PreTrainedTokenizerBase

from heavypath.speculative.http.errors import Refusal


def processors_of(
    response_format: dict[str, Any] | None, tokenizer: PreTrainedTokenizerBase
) -> list[LogitsProcessor] | None:
    """What holds the text to a format, for `logits_processor` of `Service.submit`; None where any text will do.

    Raises Refusal for a format that is not there: all but {"type": "text"}.
    """
    if response_format is None or response_format == {"type": "text"}:
        return None
    raise Refusal(
        400,
        f"response_format: this server holds no text to a format, so expected {{'type': 'text'}}, "
        f"got {response_format!r:.80}",
        param="response_format",
    )
