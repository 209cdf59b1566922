"""Read batch files. A line is a batch line of OpenAI's API, the body of a request, or only a prompt.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
{"messages": [...]}, {"prompt": "..."}      the body of a request
"..."                                       a prompt
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

URLS = ("/v1/completions", "/v1/chat/completions")


class Line(NamedTuple):
    """A line of a batch file.

    number:    its index among the lines that are not empty, from 0
    custom_id: identifies the answer; by default the line's number
    url, body: path and JSON body of the request; empty if the line has an error
    error:     why the line is no valid request; empty if it is
    digest:    a hash of everything that the answer depends on
    """

    number: int
    custom_id: str
    url: str = ""
    body: bytes = b""
    error: str = ""
    digest: str = ""


def count_lines(path: Path) -> int:
    """The number of a file's lines that are not empty. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return sum(bool(line.strip()) for line in file)


def read_lines(path: Path, first: int, defaults: Mapping[str, Any], options: str = "") -> Iterator[Line]:
    """Parse the lines of a batch file that are not empty, from number `first` on; invalid lines have an error.

    defaults: values for fields that a body leaves out
    options:  what answers depend on besides the line, for the digests
    """
    with path.open("rb") as file:
        written = ((place, line) for place, line in enumerate(file, 1) if line.strip())
        for number, (place, text) in enumerate(written):
            if number >= first:
                yield parsed(number, text, defaults, options, place)


def parsed(number: int, text: bytes, defaults: Mapping[str, Any], options: str = "", place: int | None = None) -> Line:
    """Parse a line of a batch file; a line that is no valid request gets an error.

    The default seed is the line's number, so that the answer does not depend on when the line is decoded. A field that
    is null has its default.

    number:   the line's index among the lines that are not empty
    defaults: values for fields that the body leaves out
    options:  what answers depend on besides the line, for the digest
    place:    the line's index in the file, from 1, for errors (default: number + 1)
    """
    custom_id = str(number)
    try:
        given = json.loads(text)
        if isinstance(given, str):
            given = {"prompt": given}
        if not isinstance(given, dict):
            raise ValueError("expected a JSON object or a string")
        if given.get("custom_id") is not None:
            custom_id = str(given["custom_id"])
        if "url" in given:
            url = given["url"]
            body = given.get("body")
        else:
            body = {name: value for name, value in given.items() if name != "custom_id"}
            url = URLS["messages" in body]
        if url not in URLS:
            raise ValueError(f"url: expected {' or '.join(URLS)}, got {url!r:.80}")
        if given.get("method", "POST") != "POST":
            raise ValueError(f"method: expected 'POST', got {given['method']!r:.80}")
        if not isinstance(body, dict):
            raise ValueError("body: expected a JSON object")
        if body.get("stream"):
            raise ValueError("stream: an answer in a file is whole; leave it out")
    except (ValueError, RecursionError) as error:  # also text that is no UTF-8
        expected = "expected a request or a prompt as JSON: " if isinstance(error, json.JSONDecodeError) else ""
        error_of_line = f"line {place or number + 1}: {expected}{error}"
        return Line(number, custom_id, error=error_of_line, digest=_digest(options, "", text.strip()))
    if body.get("max_completion_tokens") is not None:  # another name of max_tokens
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
    defaults = {"seed": number, **defaults}
    stated = {name: value for name, value in body.items() if value is not None or name not in defaults}
    request = json.dumps({**defaults, **stated}).encode()
    return Line(number, custom_id, url, request, digest=_digest(options, url, request))


def _digest(options: str, url: str, request: bytes) -> str:
    return hashlib.sha256(b"\n".join([options.encode(), url.encode(), request])).hexdigest()[:16]
