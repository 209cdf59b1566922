"""Answers that a tokenizer's own response template describes, which transformers' parser reads."""

import copy
import json

import pytest
from http_server import NAME, post, with_template
from played_service import served

from heavypath.speculative.http.template_answers import TemplateAnswer, check_response_template, closes_of

JSON_CALLS = {
    "start_anchor": "# assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|done|>", "content": "text"},
    },
}  # fmt: skip
TAGGED = copy.deepcopy(JSON_CALLS)
TAGGED["fields"]["tool_calls"] = {
    "open_pattern": r"\s*<call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</call>",
    "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}  # fmt: skip
CHANNELS = {
    "start_anchor": "# assistant: ",
    "fields": {
        "thinking": {"open": "<analysis>", "close": "<end>", "content": "text"},
        "content": {"open": "<final>", "close": "<end>", "content": "text"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
ONE = '{"name": "f", "arguments": {"x": 1}}'
CALL = f"<call>{ONE}</call>"
TAGS = "<call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</call>"


def read(template, text, size=1, prompt="# assistant: ", tools=TOOLS, parallel=True):
    answer = TemplateAnswer(template, prompt, tools, parallel=parallel)
    parts = [answer.add(text[place : place + size]) for place in range(0, len(text), size)]
    parts.append(answer.end(stopped=True))
    calls = [(call.name, json.loads(call.arguments)) for each in parts for call in each.calls]
    return "".join(each.thought for each in parts), "".join(each.said for each in parts), calls, answer.begin


@pytest.mark.parametrize(("template", "prompt", "text", "thought", "said", "calls"), [
    (JSON_CALLS, "# assistant: ", "<think>\na b\n</think>\n\nc d", "a b", "c d", 0),
    (JSON_CALLS, "<think> # assistant: <think>\n", "a < b</think>c <b>", "a < b", "c <b>", 0),
    (JSON_CALLS, "# assistant: <think>\n", "a b", "a b", "", 0),
    (JSON_CALLS, "# assistant: <think></think>", f"a {CALL}\n{CALL}", "", "a", 2),
    (JSON_CALLS, "# assistant: ", f"a <call> b {CALL}", "", "a <call> b", 1),
    (JSON_CALLS, "# assistant: ", f"a <call>{{oops</call>\n\n<call>[]</call>{CALL} b", "",
     "a <call>{oops</call>\n\n<call>[]</call> b", 1),
    (JSON_CALLS, "# assistant: ", f"<call>{ONE}", "", "", 1),
    (JSON_CALLS, "# assistant: ", "a <call>{", "", "a <call>{", 0),
    (JSON_CALLS, "# assistant: <think>", f"{CALL} no</think>a", f"{CALL} no", "a", 0),
    (TAGGED, "# assistant: ", f"a <call> b {TAGS}\n{TAGS}", "", "a <call> b", 2),
    (TAGGED, "# assistant: ", f"<think>a</think>\n{TAGS}", "a", "", 1),
    (CHANNELS, "# assistant: ", "<analysis>a<end><final>b <call> c<end>", "a", "b <call> c", 0),
    (CHANNELS, "# assistant: ", f"<analysis>a<end>{CALL}", "a", "", 1),
    (CHANNELS, "# assistant: ", "<analysis>a<end><call>oops</call> b", "a", "<call>oops</call> b", 0),
])  # fmt: skip
def test_regions_are_told_apart_in_pieces_of_any_size(template, prompt, text, thought, said, calls):
    for size in (1, 4, 1000):
        found = read(template, text, size, prompt)
        assert (found[0], found[1], found[2]) == (thought, said, calls * [("f", {"x": 1})])


def test_without_tools_calls_are_text_and_one_alone_where_they_are_not_parallel():
    assert read(JSON_CALLS, f"a {CALL}", tools=None)[1] == f"a {CALL}"
    assert len(read(JSON_CALLS, f"{CALL}\n{CALL}", parallel=False)[2]) == 1


def test_where_text_is_said_the_first_time_is_known():
    for text, begin in (
        ("<think>a</think>\n\nb", 18), ("b", 0), ("<think>a", None), (f"<think>a</think>{CALL}", 16), (CALL, 0),
    ):  # fmt: skip
        assert {read(JSON_CALLS, text, size)[3] for size in (1, 5, 100)} == {begin}


def test_a_template_that_transformers_does_not_read_is_refused_by_its_name():
    assert closes_of(CHANNELS) == ("<end>",)
    for wrong in ({}, {"fields": {}}, {"start_anchor": "a", "fields": {"content": {"content": "html"}}}, "text"):
        with pytest.raises(ValueError, match="response_template cannot be read, --reasoning none"):
            check_response_template(wrong)


@pytest.mark.parametrize("reasoning", ["auto", "none"])
def test_a_tokenizer_with_a_response_template_is_asked_by_it(demo_pair, tmp_path, reasoning):
    own = copy.deepcopy(demo_pair.tokenizer)
    own.response_template = JSON_CALLS
    template = "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    tokenizer = with_template(own, template + "{% if add_generation_prompt %}# assistant: <think>{% endif %}", tmp_path)
    assert tokenizer.response_template == JSON_CALLS

    def play(completion):
        for token in tokenizer(f"a</think>b\n{CALL}").input_ids:
            completion.emit([token])
        return "stop"

    with served(play, tokenizer, reasoning=reasoning) as (_, base):
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 90}
        status, answer = post(base, body, "/v1/chat/completions")
    if reasoning == "none":
        assert (status, answer["code"]) == (400, "no_tools")
        return
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "b")
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["f"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
