"""Calls of tools as models of three families write them: which format a template asks for, and how calls are read."""

import json

import pytest

from heavypath.speculative.http.bodies.messages import Tool
from heavypath.speculative.http.tool_calls import FORMATS, CallReader, call_source, format_of
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


def ended(reader):
    """What is left of a text at its end, and the calls that have not been told before."""
    return reader.end(), reader.new_calls()


def calls_in(text, form):
    reader = CallReader(form)
    said = reader.add(text)
    rest, calls = ended(reader)
    return said + rest, calls


@pytest.mark.parametrize(("name", "text", "expected"), WRITTEN)
def test_calls_are_read_from_whole_texts_and_from_pieces_of_any_size(name, text, expected):
    form = FORMATS[name]
    expected = [(each["name"], each["arguments"]) for each in expected]
    assert [(call.name, json.loads(call.arguments)) for call in calls_in(text, form)[1]] == expected
    before = "" if form.bare and text.startswith("{") else "Well [TOOL <tool <|py: "
    for size in (1, 3, 1000):
        reader, whole = CallReader(form), before + text
        said = "".join(reader.add(whole[place : place + size]) for place in range(0, len(whole), size))
        rest, calls = ended(reader)
        assert said + rest == before
        assert [(call.name, json.loads(call.arguments)) for call in calls] == expected


@pytest.mark.parametrize("text", [
    "<tool_call>", "<tool_call>{", '<tool_call>{"name": 5}</tool_call>', "<tool_call>[1]</tool_call>",
    "plain <tool_cal",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "<tool_call>" + 100_000 * "[",
    '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', '<tool_call>{"name": "f", "arguments": "[NaN]"}',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "<tool_call>[]</tool_call>",
])  # fmt: skip
def test_what_is_no_call_is_said_as_it_stands(text):
    reader = CallReader(FORMATS["hermes"])
    said = reader.add(text)
    rest, calls = ended(reader)
    assert (said + rest, calls) == (text, [])


@pytest.mark.parametrize("text", [
    '{"name": "Bob", "age": 3}', '{"name": "f"}', '{"name": "Bob", "parameters": {}}',
    '{"name": ["f"], "parameters": {}}',
])  # fmt: skip
def test_an_answer_in_json_is_no_call(text):
    reader = CallReader(FORMATS["llama3"], offered=frozenset("f"))
    said = reader.add(text)
    rest, calls = ended(reader)
    assert (said + rest, calls) == (text, [])


@pytest.mark.parametrize(("after", "said"), [
    ("Done.", "Done."), ("\n5, or [1] {}", "5, or [1] {}"), (", and more", ", and more"), ("f{}", "f{}"),
])  # fmt: skip
def test_what_is_said_after_a_call_leaves_it_a_call(after, said):
    call = f"<tool_call>{json.dumps(A)}</tool_call>"
    for text, names in ((call + after, ["f"]), (call + after + call, ["f", "f"])):
        rest, calls = calls_in(text, FORMATS["hermes"])
        assert (rest, [each.name for each in calls]) == (said, names)


@pytest.mark.parametrize("size", [1, 13, 1000])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.end])
def test_an_end_marker_that_is_written_twice_is_no_content_whatever_the_pieces(name, size):
    form = FORMATS[name]
    inner = json.dumps(A)
    if form.tags is not None:
        inner = f"{form.tags.name[0]}f{form.tags.name[1]}\n{form.tags.end}"
    text = f"{form.marker}\n{inner}\n{form.end}\n{form.end}Done."
    reader = CallReader(form, ["f"])
    said = "".join(reader.add(text[place : place + size]) for place in range(0, len(text), size))
    rest, calls = ended(reader)
    assert (said + rest, [each.name for each in calls]) == ("Done.", ["f"])


@pytest.mark.timeout(600)  # where each space looks at those behind it, this takes hours
@pytest.mark.parametrize("text", ["f{}", "f[ARGS]{}", "f{}[ARGS]"])
def test_spaces_after_a_name_are_read_once(text):
    text = text.format(4_000_000 * " ")
    assert calls_in(f"[TOOL_CALLS]{text}", FORMATS["mistral"])[1] == []


@pytest.mark.parametrize("form", [each for each in FORMATS.values() if each.tags is None], ids=lambda each: each.marker)
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


@pytest.mark.parametrize("parameters", [
    None, {}, {"properties": {"x": {"type": "integer"}}}, {"anyOf": [{"properties": {"x": {"type": "integer"}}}, {}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {}}}}},
])  # fmt: skip
@pytest.mark.parametrize("form", [each for each in FORMATS.values() if each.tags is None], ids=lambda each: each.marker)
def test_arguments_of_a_forced_call_are_an_object_also_by_a_schema_without_a_type(form, parameters, demo_pair):
    """A call with other arguments would be read as content."""
    pytest.importorskip("llguidance")
    given = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    tokenizer = demo_pair.tokenizer
    tools = [Tool.model_validate({"type": "function", "function": given})]
    held = Grammar(call_source(form, tools, tokenizer), tokenizer, eos_token_id=tokenizer.eos_token_id)
    for arguments, fits in ({}, True), ({"x": 1}, True), ("text", False), ([], False), (None, False):
        written = json.dumps({"name": "f", form.arguments: arguments}, separators=(",", ":"))
        if not form.bare:
            written = f"{form.marker}\n{written}" if form.end else f"{form.marker}[{written}"
        assert held.matcher().consume_tokens(tokenizer(written).input_ids) == fits, arguments


X, Y = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "xy")


@pytest.mark.parametrize(("parameters", "fitting", "others"), [
    ({**X, "allOf": [Y]}, [{"x": 1, "y": 2}], [{"x": 1}, {"y": 2}]),
    ({**X, "$ref": "#/$defs/Y", "$defs": {"Y": Y}}, [{"x": 1, "y": 2}], [{"x": 1}, {"y": 2}]),
    ({"properties": X["properties"], "anyOf": [X, Y]}, [{"x": 1}, {"y": 2}], [{}, {"x": "1"}]),
    ({"type": ["object", "null"], **X}, [{"x": 1}], [None, {"x": 1, "y": 2}]),
])  # fmt: skip
@pytest.mark.parametrize("form", [each for each in FORMATS.values() if each.tags is None], ids=lambda each: each.marker)
def test_a_forced_call_in_json_has_the_arguments_of_all_that_its_schema_joins(
    form, parameters, fitting, others, demo_pair
):
    pytest.importorskip("llguidance")
    tokenizer = demo_pair.tokenizer
    tools = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})]
    held = Grammar(call_source(form, tools, tokenizer), tokenizer, eos_token_id=tokenizer.eos_token_id)
    for arguments in fitting + others:
        written = json.dumps({"name": "f", form.arguments: arguments}, separators=(",", ":"))
        if not form.bare:
            written = f"{form.marker}\n{written}\n{form.end}" if form.end else f"{form.marker}[{written}]"
        matcher = held.matcher()
        read = matcher.consume_tokens(tokenizer(written).input_ids) and matcher.is_accepting()
        assert read == (arguments in fitting), arguments


def test_a_template_says_which_format_its_model_writes():
    tools = "{% if tools %}{{ tools }}{% endif %}"
    assert format_of(tools + "<tool_call>") is FORMATS["hermes"]
    assert format_of(tools + "<tool_call>\\n<function=f>\\n<parameter=p>\\nv") is FORMATS["qwen3_coder"]
    assert (
        format_of(tools + "{{- '<tool_call><function=' + f + '>' }}{{- '<parameter=' + p + '>' }}")
        is (FORMATS["qwen3_coder"])
    )
    assert format_of(tools + "<tool_call>{f}\n<arg_key>{k}</arg_key>") is FORMATS["glm4"]
    assert format_of(tools + "<seed:tool_call>\n<function=f>\n<parameter=p>v") is FORMATS["seed_oss"]
    assert format_of(tools + "[TOOL_CALLS]") is FORMATS["mistral"]
    assert format_of(tools + 'as {"name": n, "parameters": p}') is FORMATS["llama3"]
    assert format_of(tools) is format_of("<tool_call> without any") is None


ONE = '{"name": "f", "arguments": {"x": 1}}'
CALL = f"<tool_call>{ONE}</tool_call>"
LLAMA_ONE = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(("name", "text", "said", "names"), [
    ("hermes", f"<think>I should use <tool_call> now.</think>{CALL}", "<think>I should use <tool_call> now.</think>",
     "f"),
    ("hermes", f"a <tool_call> b <tool_call> c {CALL} d <tool_call>", "a <tool_call> b <tool_call> c d <tool_call>",
     "f"),
    ("hermes", f"Like `<tool_call>`:\n```\n<tool_call>\n```\n{CALL}", "Like `<tool_call>`:\n```\n<tool_call>\n```\n",
     "f"),
    ("hermes", f'He said "<tool_call>" and {{"k": "<tool_call>"}}. {CALL}',
     'He said "<tool_call>" and {"k": "<tool_call>"}. ', "f"),
    ("hermes", f"<tool_call>{ONE[:-1]}</tool_call>{CALL}", f"<tool_call>{ONE[:-1]}</tool_call>", "f"),
    ("hermes", f"<tool_call>{CALL}{CALL}", "<tool_call>", "ff"),
    ("hermes", f"<tool_call>{{oops</tool_call>{CALL}<tool_call>[]</tool_call>{CALL} end",
     "<tool_call>{oops</tool_call><tool_call>[]</tool_call>end", "ff"),
    ("hermes", f"{CALL}<tool_call>{{oops</tool_call>", "<tool_call>{oops</tool_call>", "f"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call><tool_call>{}"}}</tool_call>', "", "f"),
    ("mistral", f"as [TOOL_CALLS], or [TOOL_CALLS] {{oops [TOOL_CALLS][{ONE}]",
     "as [TOOL_CALLS], or [TOOL_CALLS] {oops ", "f"),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}', "", "f"),
    ("llama3", f"I call {LLAMA_ONE} now", "I call now", "f"),
    ("llama3", f'A {{ b }}, {{"k": {LLAMA_ONE}}}: <|python_tag|>no <|python_tag|>{LLAMA_ONE}',
     f'A {{ b }}, {{"k": {LLAMA_ONE}}}: <|python_tag|>no ', "f"),
    ("llama3", f"{LLAMA_ONE}; {LLAMA_ONE}\n{LLAMA_ONE}", "", "fff"),
    ("qwen3_coder", "Use <tool_call> or <function=. <tool_call><function=f>\n</function>\n</tool_call>",
     "Use <tool_call> or <function=. ", "f"),
    ("qwen3_coder",
     f"<tool_call>{ONE}</tool_call><function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
     f"<tool_call>{ONE}</tool_call>", "f"),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>\n1", "<tool_call><function=f><parameter=x>\n1", ""),
    ("glm4",
     "I <tool_call> it: <tool_call>f</tool_call>\n"
     "<tool_call>g.h\n<arg_key>x</arg_key>\n<arg_value>1</arg_value></tool_call>",
     "I <tool_call> it: ", ["f", "g.h"]),
    ("glm4", "<tool_call>nothing</tool_call> <tool_call>f <arg_key>x</arg_key>",
     "<tool_call>nothing</tool_call> <tool_call>f <arg_key>x</arg_key>", ""),
])  # fmt: skip
def test_behind_a_marker_that_is_no_call_the_search_goes_on(name, text, said, names):
    for size in (1, 2, 5, 1000):
        reader = CallReader(FORMATS[name], ("f", "g.h"))
        told = "".join(reader.add(text[place : place + size]) for place in range(0, len(text), size))
        rest, calls = ended(reader)
        assert told + rest == said
        assert [each.name for each in calls] == [*names]


def test_a_call_is_told_once_it_is_complete_and_text_before_what_may_be_one():
    reader = CallReader(FORMATS["hermes"])
    assert reader.add("Use <tool_call> now. <tool_") == "Use <tool_call> now. "
    assert reader.add(f"call>{ONE}") == ""
    assert [each.name for each in reader.new_calls()] == ["f"]
    assert (reader.add("</tool_call> So"), reader.new_calls()) == ("So", [])


PARAMETERS = {
    "$defs": {"Kind": {"enum": ["a", "b"]}, "Size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "properties": {
        "i": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}, "n": {"type": "null"},
        "o": {"type": "object"}, "l": {"type": "array", "items": {"type": "integer"}}, "s": {"type": "string"},
        "u": {"type": ["integer", "string"]}, "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "k": {"$ref": "#/$defs/Kind"}, "z": {"$ref": "#/$defs/Size"}, "e": {"enum": [1, 2]}, "c": {"const": True},
        "r": {"anyOf": [{"$ref": "#/properties/r"}, {"$ref": "#/properties/i"}]}, "d": {"enum": ["1", 2, "null", None]},
    },
    "additionalProperties": {"type": "boolean"},
}  # fmt: skip
VALUES = [
    ("i", "12", 12), ("i", "-3.0", -3), ("i", "12a", "12a"), ("f", "1.5", 1.5), ("f", "2", 2), ("f", "1e3", 1000.0),
    ("f", "nan", "nan"), ("b", "True", True), ("b", "false", False), ("b", "maybe", "maybe"), ("n", "None", None),
    ("o", '{"x": [1, null]}', {"x": [1, None]}), ("o", "[1]", "[1]"), ("l", "[1, 2]", [1, 2]), ("l", "[1", "[1"),
    ("s", "12", "12"), ("s", '{"x": 1}', '{"x": 1}'), ("s", "null", "null"), ("s",
     " a\n\n b </x> <parameter=i>\n", None),
    ("u", "12", 12), ("u", "a", "a"), ("m", "null", None), ("m", "5", "5"), ("k", "a", "a"), ("z", "7", 7),
    ("z", "null", None), ("e", "2", 2), ("c", "true", True), ("r", "4", 4), ("other", "true", True),
    ("d", "1", "1"), ("d", "2", 2), ("d", "null", "null"), ("d", "None", None), ("u", "٣", "٣"), ("f", "٣.5", "٣.5"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm4"])
def test_values_between_tags_have_the_types_of_their_schema(name):
    form = FORMATS[name]
    for key, value, expected in VALUES:
        if key == "s" and expected is None:
            expected = value
        line = "\n" if form.tags.lines else ""
        if name == "glm4":
            inner = f"f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        else:
            inner = f"\n<function=f>\n<parameter={key}>{line}{value}{line}</parameter>\n</function>\n"
        text = f"{form.marker}{inner}{form.end}"
        reader = CallReader(form, ("f",), schemas={"f": PARAMETERS})
        assert reader.add(text) == ""
        ((function, arguments),) = ended(reader)[1]
        assert (function, json.loads(arguments)) == ("f", {key: expected}), (key, value)


@pytest.mark.parametrize(("name", "expected"), [("qwen3_coder", ["1", "a b", "[1]"]), ("glm4", [1, "a b", [1]])])
def test_without_a_schema_values_stay_text_or_are_json_as_templates_write_them(name, expected):
    form = FORMATS[name]
    for value, read in zip(("1", "a b", "[1]"), expected, strict=True):
        inner = f"<function=f><parameter=x>{value}</parameter></function>"
        if name == "glm4":
            inner = f"f<arg_key>x</arg_key><arg_value>{value}</arg_value>"
        assert json.loads(calls_in(f"<tool_call>{inner}</tool_call>", form)[1][0].arguments) == {"x": read}


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm4"])
def test_a_forced_call_between_tags_follows_its_schema(name, demo_pair):
    pytest.importorskip("llguidance")
    parameters = {
        "type": "object", "required": ["s", "i"], "$defs": {"P": {"type": "integer"}},
        "properties": {
            "s": {"type": "string", "maxLength": 4}, "i": {"$ref": "#/$defs/P"}, "k": {"enum": ["a", 1]},
            "l": {"type": "array", "items": {"$ref": "#/$defs/P"}},
        },
    }  # fmt: skip
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}}),
        Tool.model_validate({"type": "function", "function": {"name": "g"}}),
    ]
    form, tokenizer = FORMATS[name], demo_pair.tokenizer
    held = Grammar(call_source(form, tools, tokenizer), tokenizer, eos_token_id=tokenizer.eos_token_id)
    line = "\n" if form.tags.lines else ""

    def written(function, arguments):
        if name == "glm4":
            given = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
            return f"<tool_call>{function}\n{''.join(given)}\n</tool_call>"
        given = [f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in arguments.items()]
        return f"{form.marker}{line}<function={function}>\n{''.join(given)}</function>\n{form.end}"

    for function, arguments, fits in (
        ("f", {"s": "a\n</", "i": 5}, True), ("f", {"s": "", "i": -5, "k": "a", "l": "[1,2]"}, True), ("g", {}, True),
        ("f", {"s": "abcde", "i": 5}, False), ("f", {"s": "a", "i": "x"}, False), ("f", {"s": "a"}, False),
        ("f", {"s": "a", "i": 1, "k": "b"}, False), ("h", {}, False), ("g", {"s": "a"}, False),
    ):  # fmt: skip
        text = written(function, arguments)
        matcher = held.matcher()
        assert (matcher.consume_tokens(tokenizer(text).input_ids) and matcher.is_accepting()) == fits, (text, fits)
        if fits:
            schemas = {each.function.name: each.function.parameters for each in tools}
            reader = CallReader(form, schemas, schemas=schemas)
            reader.add(text)
            assert [each.name for each in ended(reader)[1]] == [function]


def tagged(form, arguments):
    """A call of f as a model writes it that puts arguments between tags."""
    line = "\n" if form.tags.lines else ""
    (key, key_end), (value, value_end) = form.tags.key, form.tags.value
    between = "\n" if value else ""
    given = [f"{key}{each}{key_end}{between}{value}{line}{text}{line}{value_end}\n" for each, text in arguments.items()]
    name, name_end = form.tags.name
    return f"{form.marker}{line}{name}f{name_end}\n{''.join(given)}{form.tags.end}\n{form.end}"


def one(**schema):
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


COLOURS = {"C": {"type": "string", "enum": ["red", "blue"]}}
NAMED = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OTHER = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}


@pytest.mark.parametrize(("parameters", "fitting", "others"), [
    (one(allOf=[{"$ref": "#/$defs/C"}], description="of pydantic 1") | {"$defs": COLOURS},
     [{"x": "red"}], [{"x": "green"}, {}]),
    ({"$ref": "#/$defs/A", "$defs": {"A": NAMED}}, [{"x": "1"}], [{"x": "one"}, {}]),
    ({"allOf": [NAMED, OTHER]}, [{"x": "1", "y": "2"}], [{"x": "1"}, {"y": "2"}, {}]),
    ({"anyOf": [NAMED, OTHER]}, [{"x": "1"}, {"y": "2"}], [{"x": "1", "y": "2"}, {}]),
    (one(type="integer", anyOf=[{"minimum": 3}, {"maximum": 1}]), [{"x": "3"}], [{"x": "2"}, {"x": "abc"}]),
    (one(type=["string", "null"], anyOf=[{"minLength": 3}, {"enum": ["a"]}, {"type": "null"}]),
     [{"x": "abc"}, {"x": "a"}, {"x": "null"}], [{"x": "ab"}]),
    (one(anyOf=[{"$ref": "#/properties/x"}, {"enum": ["a"]}]), [{"x": "a"}], [{"x": "b"}]),
    (one(type="string", pattern=r"^\d{2}\/\d{2}/\d$"), [{"x": "12/34/5"}], [{"x": "12-34/5"}, {"x": " 12/34/5"}]),
    (one(type="string", pattern=r"^\d+\$"), [{"x": "12$"}, {"x": "12$ each"}], [{"x": "12"}, {"x": "$12$"}]),
    (one(type="string", pattern=r"^a|[|]b$|(c|d)"), [{"x": "a "}, {"x": " |b"}, {"x": " d "}], [{"x": "b"}]),
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm4"])
def test_a_forced_call_between_tags_follows_what_a_schema_joins(name, parameters, fitting, others, demo_pair):
    """By allOf, anyOf, references and patterns, also of all arguments."""
    pytest.importorskip("llguidance")
    form, tokenizer = FORMATS[name], demo_pair.tokenizer
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    held = Grammar(call_source(form, [tool], tokenizer), tokenizer, eos_token_id=tokenizer.eos_token_id)
    for arguments in fitting + others:
        text = tagged(form, arguments)
        matcher = held.matcher()
        assert (matcher.consume_tokens(tokenizer(text).input_ids) and matcher.is_accepting()) == (arguments in fitting)


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm4"])
def test_values_between_tags_have_the_types_of_all_that_a_schema_joins(name):
    for parameters in (
        {"$ref": "#/$defs/A", "$defs": {"A": NAMED}},
        {"allOf": [OTHER, NAMED]},
        {"anyOf": [NAMED, OTHER]},
    ):
        reader = CallReader(FORMATS[name], ("f",), schemas={"f": parameters})
        reader.add(tagged(FORMATS[name], {"x": "5"}))
        ((_, arguments),) = ended(reader)[1]
        assert json.loads(arguments) == {"x": 5}


@pytest.mark.timeout(600)  # where each reference to the schema itself is followed, this takes years
@pytest.mark.parametrize("parameters", [
    one(anyOf=20 * [{"$ref": "#/properties/x"}]),
    one(allOf=20 * [{"anyOf": [{"minLength": 1}, {"maxLength": 9}]}]),
    one(type="array", description="of x" * 50_000, items={"$ref": "#/properties/x"}),
    {"$ref": "#"}, one(allOf=[{"type": "string"}, {"type": "integer"}]),
], ids=["of itself", "2**20 alternatives", "long", "no arguments", "no value"])  # fmt: skip
def test_a_schema_that_a_forced_call_between_tags_cannot_follow_is_refused_soon(parameters, demo_pair):
    pytest.importorskip("llguidance")
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    with pytest.raises(ValueError, match=r"cannot be (followed|forced)|follows? its schema"):
        call_source(FORMATS["glm4"], [tool], demo_pair.tokenizer)


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm4"])
@pytest.mark.parametrize("key", ["a{end}b", "a\nb", " a", 257 * "a"])
def test_an_argument_that_tags_cannot_name_is_refused_where_a_call_is_forced(name, key, demo_pair):
    """It would be read as another argument."""
    pytest.importorskip("llguidance")
    form = FORMATS[name]
    parameters = {"type": "object", "properties": {key.format(end=form.tags.key[1]): {"type": "boolean"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    with pytest.raises(ValueError, match="in tags, and cannot write"):
        call_source(form, [tool], demo_pair.tokenizer)
