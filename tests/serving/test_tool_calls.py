"""Calls of tools as models of three families write them: which format a template asks for, and how calls are read."""

import json

import pytest

from heavypath.speculative.http.tool_calls import FORMATS, CallReader, calls_in, format_of

A, B = {"name": "f", "arguments": {"x": [1, {"y": "}"}]}}, {"name": "g.h", "arguments": {}}
LLAMA = {"name": "f", "parameters": A["arguments"]}
WRITTEN = [
    ("hermes", f"<tool_call>\n{json.dumps(A)}\n</tool_call>", [A]),
    ("hermes", f"<tool_call>{json.dumps(A)}</tool_call>\n<tool_call>{json.dumps(B)}</tool_call>", [A, B]),
    ("hermes", f"<tool_call>{json.dumps(A)}", [A]),  # the end was a special token, or never came
    ("llama3", json.dumps(LLAMA), [A]),
    ("llama3", f"<|python_tag|>{json.dumps(LLAMA)}; {json.dumps(LLAMA)}", [A, A]),
    ("mistral", f"[TOOL_CALLS]{json.dumps([A, B])}", [A, B]),
    ("mistral", f"[TOOL_CALLS] [{json.dumps(A)}]", [A]),
    ("mistral", '[TOOL_CALLS]f{"x": [1, {"y": "}"}]}[TOOL_CALLS]g.h[ARGS]{}', [A, B]),
    ("hermes", '<tool_call>{"name": "g.h"}</tool_call>', [B]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": [1, {\\"y\\": \\"}\\"}]}"}</tool_call>', [A]),
]


@pytest.mark.parametrize(("name", "text", "expected"), WRITTEN)
def test_calls_are_read_from_whole_texts_and_from_pieces_of_any_size(name, text, expected):
    form = FORMATS[name]
    expected = [(each["name"], each["arguments"]) for each in expected]
    assert [(call.name, json.loads(call.arguments)) for call in calls_in(text, form)] == expected
    before = "" if form.bare and text.startswith("{") else "Well [TOOL <tool <|py: "
    for size in (1, 3, 1000):
        reader, whole = CallReader(form), before + text
        said = "".join(reader.add(whole[place : place + size]) for place in range(0, len(whole), size))
        rest, calls = reader.end()
        assert said + rest == before
        assert [(call.name, json.loads(call.arguments)) for call in calls] == expected


@pytest.mark.parametrize("text", [
    "<tool_call>", "<tool_call>{", '<tool_call>{"name": 5}</tool_call>', "<tool_call>[1]</tool_call>",
    "plain <tool_cal",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', f"<tool_call>{json.dumps(A)}</tool_call> and more",
    "<tool_call>" + 100_000 * "[",
])  # fmt: skip
def test_what_is_no_call_is_said_as_it_stands(text):
    reader = CallReader(FORMATS["hermes"])
    said = reader.add(text)
    rest, calls = reader.end()
    assert (said + rest, calls) == (text, [])


def test_a_template_says_which_format_its_model_writes():
    tools = "{% if tools %}{{ tools }}{% endif %}"
    assert format_of(tools + "<tool_call>") is FORMATS["hermes"]
    assert format_of(tools + "[TOOL_CALLS]") is FORMATS["mistral"]
    assert format_of(tools + 'as {"name": n, "parameters": p}') is FORMATS["llama3"]
    assert format_of(tools) is format_of("<tool_call> without any") is None
