"""Thinking before an answer: what clients get apart from it, in answers and streams, beside calls, stops and counts."""

import copy
import json

import pytest
from http_server import NAME, ask, client_of, post, running, with_template
from played_service import Service, served

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.reasoning import REASONING, ReasoningReader
from heavypath.speculative.serving.logprobs import TokenLogprob

# As Qwen3's: thinking is opened in the prompt, or closed there.
TEMPLATE = (
    "{% if tools %}tools <tool_call>: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}"
    "{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What does <think> mean?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
OPENED, CLOSED = {"opens": True}, {"enable_thinking": False}


@pytest.fixture(scope="module")
def tokenizer(demo_pair, tmp_path_factory):
    return with_template(demo_pair.tokenizer, TEMPLATE, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def answered(tokenizer):
    """What a server answers whose model writes a text: the message, how it ends and what was counted, of both ways."""

    def answer(text, reason="stop", *, tokenizer=tokenizer, step=2, kind=Service, reasoning="auto", **body):
        tokens = tokenizer(text, add_special_tokens=False).input_ids

        def play(completion):
            for begin in range(0, len(tokens), step):
                completion.emit(tokens[begin : begin + step])
            return reason

        with served(play, tokenizer, slots=2, kind=kind, reasoning=reasoning) as (_, base), client_of(base) as client:
            asked = {"messages": MESSAGES, "max_tokens": 100} | body
            status, whole = post(base, asked, "/v1/chat/completions")
            assert status == 200, whole
            choice = whole["choices"][0]
            streamed = {"content": "", "reasoning_content": "", "tool_calls": []}
            extra = {name: value for name, value in asked.items() if name not in ("messages", "max_tokens")}
            events = client.chat.completions.create(
                model=NAME, messages=asked["messages"], max_tokens=100, stream=True, extra_body=extra
            )
            for event in events:
                delta = event.choices[0].delta.model_dump()
                for name in streamed:
                    streamed[name] += delta.get(name) or type(streamed[name])()
            assert event.choices[0].finish_reason == choice["finish_reason"]
        message = choice["message"]
        calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or []]
        assert [each["index"] for each in streamed["tool_calls"]] == [*range(len(calls))]
        assert [(each["function"]["name"], each["function"]["arguments"]) for each in streamed["tool_calls"]] == calls
        assert streamed["reasoning_content"] == (message.get("reasoning_content") or "")
        assert streamed["content"].strip() == (message["content"] or "").strip()
        return message, choice["finish_reason"], whole["usage"]

    return answer


@pytest.mark.parametrize(("text", "kwargs", "thought", "said"), [
    ("<think>\na b\n</think>\n\nc", {}, "a b", "c"),
    ("a\n\nb\n</think>\n\nc <think>d</think>", OPENED, "a\n\nb", "c <think>d</think>"),
    ("<think>\na</think>c", OPENED, "a", "c"),  # the marker of the prompt again
    ("</think>c", OPENED, None, "c"),
    ("<think></think>\nc", {}, None, "c"),
    ("a < b, </thin", OPENED, "a < b, </thin", None),
    ("  <think>a", {}, "a", None),
    ("c <think>d</think>", {}, None, "c <think>d</think>"),
    ("c </think>", {}, None, "c </think>"),
    ("<think>d</think>c", CLOSED, None, "<think>d</think>c"),
    ("a <think> b</think>c", OPENED, "a <think> b", "c"),
    ("\n c", {}, None, "\n c"),
])  # fmt: skip
@pytest.mark.parametrize("step", [1, 1000])
def test_thinking_is_told_apart(answered, text, kwargs, thought, said, step):
    message, reason, _ = answered(text, chat_template_kwargs=kwargs, step=step)
    assert (message["reasoning_content"], message["content"] or None, reason) == (thought, said, "stop")


def test_what_is_cut_off_in_thinking_is_all_thinking(answered, tokenizer):
    message, reason, usage = answered("I think that <", "length", chat_template_kwargs=OPENED)
    assert (message["reasoning_content"], message["content"], reason) == ("I think that <", None, "length")
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == usage["completion_tokens"] == len(tokenizer("I think that <").input_ids)


def test_tokens_of_thinking_are_counted(answered, tokenizer):
    _, _, usage = answered("a b c</think>\n\nd", chat_template_kwargs=OPENED)
    count = len(tokenizer("a b c</think>\n\n").input_ids)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    assert answered("d")[2]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_none_leaves_thinking_in_the_text(answered):
    text = "<think>a</think>b"
    message, _, usage = answered(text, reasoning="none")
    assert message["content"] == text
    assert "reasoning_content" not in message
    assert "completion_tokens_details" not in usage


@pytest.mark.parametrize(("text", "thought", "said", "calls"), [
    (f"I use <tool_call> now.</think>\n\n{CALL}", "I use <tool_call> now.", None, 1),
    (f"I could {CALL} but no.</think>\n\nHello.", f"I could {CALL} but no.", "Hello.", 0),
    (f"a</think>b <tool_call> c {CALL}\n{CALL} d", "a", "b <tool_call> c d", 2),
    (f"I call it.\n{CALL}", "I call it.", None, 1),  # thinking that ends in a call
])  # fmt: skip
def test_calls_are_read_beside_thinking(answered, text, thought, said, calls):
    message, reason, _ = answered(text, tools=[TOOL], chat_template_kwargs=OPENED)
    found = [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or []]
    assert found == calls * [{"x": 1}]
    assert (message["reasoning_content"].strip(), message["content"]) == (thought, said)
    assert reason == ("tool_calls" if calls else "stop")


def test_a_call_in_thinking_that_was_cut_off_is_no_call(answered):
    text = f"I could {CALL}"
    message, reason, _ = answered(text, "length", tools=[TOOL], chat_template_kwargs=OPENED)
    assert (message["reasoning_content"], message["content"], reason) == (text, None, "length")


@pytest.mark.parametrize(("text", "thought", "said"), [
    ("a b</think>c STOP d", "a b", "c "), ("a STOP b</think>c", "a", None),
])  # fmt: skip
def test_stop_strings_end_thinking_and_text_alike(answered, text, thought, said):
    message, reason, _ = answered(text, chat_template_kwargs=OPENED, stop="STOP")
    assert (message["reasoning_content"], message["content"], reason) == (thought, said, "stop")


@pytest.mark.parametrize("name", REASONING)
def test_markers_may_be_special_tokens(answered, demo_pair, name):
    """And others are left out of texts as ever."""

    class Wider(Service):
        vocab_size = 2048

    form = REASONING[name]
    own = copy.deepcopy(demo_pair.tokenizer)
    own.add_special_tokens({"additional_special_tokens": [form.open, form.close, "<|other|>"]})
    own.chat_template = TEMPLATE.replace("<think>", form.open).replace("</think>", form.close)
    for opened, text in ((OPENED, f"a<|other|> b{form.close}c<|other|>"), ({}, f"{form.open}a b{form.close}c")):
        message, _, _ = answered(text, tokenizer=own, kind=Wider, step=1, chat_template_kwargs=opened)
        assert (message["reasoning_content"], message["content"]) == ("a b", "c")


def test_earlier_thinking_is_handed_to_the_template(answered, tokenizer):
    for name in ("reasoning_content", "reasoning"):
        earlier = [*MESSAGES, {"role": "assistant", "content": "b", name: "a"}, *MESSAGES]
        written = tokenizer.apply_chat_template(
            [*MESSAGES, {"role": "assistant", "content": "b", "reasoning_content": "a"}, *MESSAGES],
            add_generation_prompt=True,
        )["input_ids"]
        assert answered("c", messages=earlier)[2]["prompt_tokens"] == len(written)
    alone = [*MESSAGES, {"role": "assistant", "content": None, "reasoning_content": "a"}, *MESSAGES]
    assert answered("c", messages=alone)[0]["content"] == "c"


def test_only_an_assistant_has_thought(tokenizer):
    with served(lambda completion: "stop", tokenizer) as (_, base):
        body = {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}
        status, error = post(base, body, "/v1/chat/completions")
    assert (status, error["param"]) == (400, "messages")
    assert "reasoning_content is of an assistant's messages" in error["message"]


def test_a_text_held_to_a_form_without_an_end_of_thinking_is_the_answer(answered):
    pytest.importorskip("llguidance")
    asked = {"chat_template_kwargs": OPENED, "structured_outputs": {"choice": ["yes", "no"]}}
    assert answered("yes", **asked)[0] == {
        "role": "assistant", "content": "yes", "refusal": None, "reasoning_content": None,
    }  # fmt: skip
    asked["structured_outputs"] = {"choice": ["a</think>yes"]}
    assert answered("a</think>yes", **asked)[0]["reasoning_content"] == "a"


def test_a_chat_that_asks_for_two_forms_is_refused(tokenizer):
    body = {"messages": MESSAGES, "guided_regex": "a", "guided_choice": ["b"]}
    with served(lambda completion: "stop", tokenizer) as (_, base):
        status, error = post(base, body, "/v1/chat/completions")
    assert status == 400
    assert "guided_regex and guided_choice ask for two" in error["message"]


def test_where_a_text_is_said_the_first_time_is_known():
    for is_open, text, begin in (
        (True, "a</think>\n\nbc", 11), (None, " <think> a </think> b", 20), (None, "abc", 0), (False, "<think>", 0),
        (True, "abc", None), (True, "a</think>\n", None),
    ):  # fmt: skip
        for size in (1, 3, 100):
            reader = ReasoningReader(REASONING["think"], is_open=is_open)
            for place in range(0, len(text), size):
                reader.add(text[place : place + size])
            reader.end()
            assert reader.begin == begin, (text, size)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_thinking_stand_apart_from_those_of_the_text(demo_pair, tokenizer, stream):
    pytest.importorskip("llguidance")
    decoder = SpeculativeDecoder(demo_pair.target, demo_pair.draft, "ersd")
    eos = [tokenizer.eos_token_id]
    with (
        decoder.serve(slots=1, max_tokens=128) as service,
        running(service, tokenizer, eos=eos) as base,
        client_of(base) as client,
    ):
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=60, logprobs=True, top_logprobs=1, temperature=0, stream=stream,
            extra_body={
                "chat_template_kwargs": OPENED, "structured_outputs": {"choice": ["def a</think>\n\nimport b"]},
            },
        )  # fmt: skip
        choices = [event.choices[0] for event in (answer if stream else [answer])]
    scored = {"content": "", "reasoning_content": ""}
    for each in choices:
        if each.logprobs is not None:
            for name, found in each.logprobs.model_dump().items():
                scored[name] = scored.get(name) or ""
                scored[name] += "".join(one["token"] for one in found or [])
    assert scored["content"].removesuffix(tokenizer.eos_token) == "import b"
    assert scored["reasoning_content"] == "def a</think>\n\n"


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(("said", "stop"), [("é b", []), (" b é", []), ("ab", ["abc"]), ("\n\nb", ["x"])])
def test_logprobs_are_of_thinking_or_text_whatever_a_step_brings(said, stop, step, tokenizer):
    """A token of the text may begin with a space, bring a part of a character, or be held back for a stop string."""
    tokens = tokenizer(f"a</think>{said}", add_special_tokens=False).input_ids

    def play(completion):
        for begin in range(0, len(tokens), step):
            some = tokens[begin : begin + step]
            completion.emit(some, [TokenLogprob(token, -1.0, []) for token in some])
        return "stop"

    body = {"messages": MESSAGES, "chat_template_kwargs": OPENED, "logprobs": True, "stop": stop, "max_tokens": 100}
    with served(play, tokenizer, slots=2) as (_, base):
        _, whole = post(base, body, "/v1/chat/completions")
        _, _, events = ask(base, "POST", "/v1/chat/completions", body | {"stream": True})
    choice = whole["choices"][0]
    pieces = [json.loads(event[6:])["choices"][0]["logprobs"] for event in events.decode().split("\n\n")[:-2]]
    thought = "a</think>\n\n" if said.startswith("\n") else "a</think>"
    for name, text in (("reasoning_content", thought), ("content", said.lstrip("\n"))):
        assert b"".join(bytes(one["bytes"]) for one in choice["logprobs"][name]).decode() == text
        assert [one for piece in pieces if piece for one in piece[name]] == choice["logprobs"][name]
    count = len(choice["logprobs"]["reasoning_content"])
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
