"""Calls of tools as models of three families write them: which format a template asks for, and how calls are read."""

import json
import time

import pytest

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.http.tool_calls import FORMATS, CallReader, call_source, calls_in, format_of
from heavypath.speculative.processors.grammar import Grammar

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
    assert [(call.name, json.loads(call.arguments)) for call in calls_in(text, form)[1]] == expected
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
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "<tool_call>" + 100_000 * "[",
    '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', '<tool_call>{"name": "f", "arguments": "[NaN]"}',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "<tool_call>[]</tool_call>",
    f"<tool_call>{json.dumps(A)}</tool_call><tool_call>{{oops</tool_call>",
])  # fmt: skip
def test_what_is_no_call_is_said_as_it_stands(text):
    reader = CallReader(FORMATS["hermes"])
    said = reader.add(text)
    rest, calls = reader.end()
    assert (said + rest, calls) == (text, [])


@pytest.mark.parametrize("text", [
    '{"name": "Bob", "age": 3}', '{"name": "f"}', '{"name": "Bob", "parameters": {}}',
    '{"name": ["f"], "parameters": {}}',
])  # fmt: skip
def test_an_answer_in_json_is_no_call(text):
    reader = CallReader(FORMATS["llama3"], offered=frozenset("f"))
    assert (reader.add(text) + reader.end()[0], reader.end()[1]) == (text, [])


def test_a_call_of_an_offered_tool_is_one_without_a_marker():
    reader = CallReader(FORMATS["llama3"], offered=frozenset("f"))
    assert reader.add(json.dumps(LLAMA)) == ""
    assert [call.name for call in reader.end()[1]] == ["f"]


@pytest.mark.parametrize(("after", "said"), [
    ("Done.", "Done."), ("\n5, or [1] {}", "5, or [1] {}"), (", and more", ", and more"), ("f{}", "f{}"),
])  # fmt: skip
def test_what_is_said_after_a_call_leaves_it_a_call(after, said):
    call = f"<tool_call>{json.dumps(A)}</tool_call>"
    for text, names in ((call + after, ["f"]), (call + after + call, ["f", "f"])):
        rest, calls = calls_in(text, FORMATS["hermes"])
        assert (rest, [each.name for each in calls]) == (said, names)


def test_only_the_first_call_is_told_where_one_is_asked_for():
    reader = CallReader(FORMATS["mistral"], parallel=False)
    reader.add(f"[TOOL_CALLS]{json.dumps([A, B])}")
    assert [each.name for each in reader.end()[1]] == ["f"]


@pytest.mark.parametrize("text", ["f" + 200_000 * " ", "f[ARGS]" + 200_000 * " ", "f" + 200_000 * " " + "[ARGS]"])
def test_spaces_after_a_name_take_no_time(text):
    begin = time.process_time()
    assert calls_in(f"[TOOL_CALLS]{text}", FORMATS["mistral"])[1] == []
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_references_of_each_tool_are_to_its_own_schemas(form, demo_pair):
    """As pydantic writes them. Text is written by each grammar as far as it lets itself be led."""
    pytest.importorskip("llguidance")

    def tool(name, kind):
        properties = {"p": {"$ref": "#/$defs/P"}, "again": {"$ref": "#"}, "$ref": {"const": {"$ref": "#/$defs/P"}}}
        schema = {"type": "object", "$defs": {"P": {"type": kind}}, "properties": properties, "required": ["p"]}
        return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})

    tokenizer = demo_pair.tokenizer
    source = call_source(form, [tool("one", "integer"), tool("two", "boolean")], tokenizer)
    held = Grammar(source, tokenizer, eos_token_id=tokenizer.eos_token_id)
    for name, arguments, fits in (
        ("one", {"p": 1}, True), ("two", {"p": True}, True), ("one", {"p": True}, False), ("two", {"p": 1}, False),
        ("two", {"p": True, "again": {"p": False, "$ref": {"$ref": "#/$defs/P"}}}, True),
        ("one", {"p": 1, "$ref": {"$ref": "#/$defs/0/$defs/P"}}, False),
    ):  # fmt: skip
        written = json.dumps({"name": name, form.arguments: arguments}, separators=(",", ":"))
        if not form.bare:
            written = f"{form.marker}\n{written}" if form.end else f"{form.marker}[{written}"
        assert held.matcher().consume_tokens(tokenizer(written).input_ids) == fits, (name, arguments)


def test_a_template_says_which_format_its_model_writes():
    tools = "{% if tools %}{{ tools }}{% endif %}"
    assert format_of(tools + "<tool_call>") is FORMATS["hermes"]
    assert format_of(tools + "[TOOL_CALLS]") is FORMATS["mistral"]
    assert format_of(tools + 'as {"name": n, "parameters": p}') is FORMATS["llama3"]
    assert format_of(tools) is format_of("<tool_call> without any") is None
