"""Calls of tools as models write them.

formats.py      the formats, and which one a chat template asks for
json_calls.py   calls that are JSON; tagged_calls.py: calls whose arguments stand between tags
arguments.py    values between tags, by the JSON schema of their tool
found.py        a call; and what is said of a text that is none, or none yet
reader.py       a text as it comes: what is said in it, and its calls
forcing.py      the grammar of an answer that must be a call
"""

from heavypath.speculative.http.tool_calls.forcing import call_source
from heavypath.speculative.http.tool_calls.formats import FORMATS, ToolFormat, format_of
from heavypath.speculative.http.tool_calls.found import Call
from heavypath.speculative.http.tool_calls.reader import CallReader, Calls, calls_in

__all__ = ["FORMATS", "Call", "CallReader", "Calls", "ToolFormat", "call_source", "calls_in", "format_of"]
