"""Find tool calls in texts, in the formats that models write.

formats.py      the formats, and how to choose one by the chat template
json_calls.py   calls in JSON; tagged_calls.py: calls whose arguments are between tags
arguments.py    convert argument values to the types of the tool's JSON schema
found.py        a call; exceptions for no call, and for a call that is not complete yet
reader.py       split a text that arrives piece by piece into content and calls
forcing.py      a grammar that forces a call; alternatives.py: what a JSON schema leaves to a value
"""

from heavypath.speculative.http.tool_calls.forcing import call_source
from heavypath.speculative.http.tool_calls.formats import FORMATS, ToolFormat, format_of
from heavypath.speculative.http.tool_calls.found import Call
from heavypath.speculative.http.tool_calls.reader import CallReader, Calls

__all__ = ["FORMATS", "Call", "CallReader", "Calls", "ToolFormat", "call_source", "format_of"]
