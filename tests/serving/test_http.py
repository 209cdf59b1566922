"""The HTTP server, asked by OpenAI's own client: its texts are the decoder's, in OpenAI's shapes."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from http_server import NAME, ask, client_of, eventually, metrics, post, running, with_template

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.exchange import APART, sequence_id

PROMPT = "def read_lines(path):"
BODY = {"model": NAME, "prompt": PROMPT, "temperature": 0}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "# {{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def decoder(demo_pair):
    return SpeculativeDecoder(demo_pair.target, demo_pair.draft, "ersd")


@pytest.fixture(scope="module")
def tokenizer(demo_pair, tmp_path_factory):
    """The shipped tokenizer with a chat template, from a folder."""
    return with_template(demo_pair.tokenizer, TEMPLATE, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(decoder, tokenizer):
    with decoder.serve(slots=4, max_tokens=256) as service, running(service, tokenizer) as base:
        yield base


@pytest.fixture(scope="module")
def client(base):
    with client_of(base) as client:
        yield client


@pytest.fixture(scope="module")
def alone(decoder, tokenizer):
    """The text that the decoder gives a prompt, alone."""

    def text(prompt, count, temperature=0.0, seed=0, index=0, **options):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        name = torch.tensor([sequence_id(seed, index)])
        out = decoder.generate(ids, count, temperature, sequence_ids=name, **({"eos_token_id": None} | options))
        return tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)

    return text


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(model=NAME, prompt=prompt, **({"max_tokens": 24, "temperature": 0} | options))


def chat(client, content="read", **options):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(**({"model": NAME, "messages": messages, "temperature": 0} | options))


def test_a_completion_is_the_decoders_text_with_its_usage(client, alone, tokenizer):
    answer = complete(client)
    (choice,) = answer.choices
    assert choice.text == alone(PROMPT, 24)
    assert choice.finish_reason == "length"
    short = client.completions.create(model=NAME, prompt=PROMPT, temperature=0)
    assert short.choices[0].text == alone(PROMPT, 16), "without a length it has sixteen tokens"
    assert (answer.object, answer.model, answer.system_fingerprint) == ("text_completion", NAME, "fingerprint")
    prompt_tokens = len(tokenizer(PROMPT).input_ids)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": prompt_tokens, "completion_tokens": 24, "total_tokens": prompt_tokens + 24,
    }  # fmt: skip


def test_a_stream_is_the_whole_text_in_pieces_and_ends_with_done(base, client, alone):
    events = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == alone(PROMPT, 24)
    assert sum(bool(event.choices[0].text) for event in events[:-1]) > 3
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 24
    assert len({event.id for event in events}) == 1
    _, headers, content = ask(base, "POST", "/v1/completions", BODY | {"max_tokens": 4, "stream": True})
    assert headers["Content-Type"].startswith("text/event-stream")
    *events, done, rest = content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(event["object"], event.get("usage")) for event in events} == {("text_completion", None)}


def test_a_chat_goes_through_the_tokenizers_template(client, alone, tokenizer):
    answer = chat(client, max_completion_tokens=12)
    assert answer.choices[0].message.content == alone("# user: read\n# assistant: ", 12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert chat(client, extra_body={"ignore_eos": True}).usage.total_tokens == 256, "all the room there is"
    again = [{"role": "user", "content": "read"}, answer.choices[0].message, {"role": "user", "content": "on"}]
    text = f"# user: read\n# assistant: {answer.choices[0].message.content}\n# user: on\n# assistant: "
    second = client.chat.completions.create(model=NAME, messages=again, temperature=0, max_tokens=6)
    assert second.choices[0].message.content == alone(text, 6)
    parts = [{"type": "text", "text": "re"}, {"type": "text", "text": "ad"}]
    assert chat(client, parts, max_tokens=12).choices[0].message.content == answer.choices[0].message.content


def test_a_chat_streams_its_role_and_then_its_text(client, alone):
    events = list(chat(client, max_tokens=12, stream=True, n=2, stream_options={"include_usage": True}))
    assert [event.choices[0].delta.role for event in events[:2]] == ["assistant", "assistant"]
    texts = ["", ""]
    for event in events[2:-1]:
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == 2 * [alone("# user: read\n# assistant: ", 12)]
    assert sorted(event.choices[0].finish_reason or "" for event in events[:-1])[-2:] == ["length", "length"]
    assert events[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(client, alone, stream):
    whole = alone(PROMPT, 24)
    stop = whole[10:13]
    answer = complete(client, stop=["never there", stop], stream=stream)
    events = list(answer) if stream else [answer]
    assert "".join(event.choices[0].text for event in events) == whole[: whole.index(stop)]
    assert events[-1].choices[0].finish_reason == "stop"
    if not stream:  # usage counts tokens up to the one that completed the stop string
        count = answer.usage.completion_tokens
        assert stop in alone(PROMPT, count)
        assert stop not in alone(PROMPT, count - 1)


def test_an_end_of_sequence_token_ends_the_text_unless_it_is_to_be_ignored(decoder, tokenizer, alone):
    ids = tokenizer(alone(PROMPT, 24)).input_ids
    with decoder.serve(slots=1, max_tokens=64) as service, running(service, tokenizer, eos=[ids[8]]) as base:
        first, whole = (post(base, BODY | {"max_tokens": 24} | more)[1] for more in ({}, {"ignore_eos": True}))
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] < 24
    assert whole["choices"][0]["text"] == alone(PROMPT, 24)


def test_a_seed_repeats_a_text_which_is_that_of_generate(client, alone):
    first, second, other = (
        complete(client, temperature=0.8, top_p=0.9, seed=seed).choices[0].text for seed in (7, 7, 8)
    )
    assert first == second == alone(PROMPT, 24, 0.8, 7, top_p=0.9)
    assert other == alone(PROMPT, 24, 0.8, 8, top_p=0.9) != first
    for seed, counted in ((-5, 2**27 - 5), (2**70 + 3, 3)):  # any size is taken
        assert complete(client, temperature=1, seed=seed).choices[0].text == alone(PROMPT, 24, 1.0, counted)


def test_several_texts_of_a_prompt_differ_and_repeat(client, alone, tokenizer):
    answer = complete(client, n=3, temperature=0.9, seed=3)
    texts = [choice.text for choice in answer.choices]
    assert texts == [alone(PROMPT, 24, 0.9, 3, index) for index in range(3)]
    assert len({*texts}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 72
    assert answer.usage.prompt_tokens == len(tokenizer(PROMPT).input_ids), "a prompt counts once"
    assert len({sequence_id(5, index) for index in range(1000)}) == 1000
    assert APART % 2


def test_several_prompts_are_answered_in_their_order_as_text_or_tokens(client, alone, tokenizer):
    prompts = [PROMPT, "import os\n"]
    expected = [alone(prompt, 8) for prompt in prompts for _ in range(2)]
    texts = [choice.text for choice in complete(client, prompts, n=2, max_tokens=8).choices]
    assert texts == expected
    tokens = tokenizer(prompts).input_ids
    assert [choice.text for choice in complete(client, tokens, n=2, max_tokens=8).choices] == expected
    assert complete(client, tokens[1], max_tokens=8).choices[0].text == expected[2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client, alone, tokenizer, stream):
    for prompt in (PROMPT, tokenizer(PROMPT).input_ids):
        answer = complete(client, prompt, echo=True, max_tokens=8, stream=stream)
        events = list(answer) if stream else [answer]
        assert "".join(event.choices[0].text for event in events) == PROMPT + alone(PROMPT, 8)


def test_settings_are_those_of_generate_and_what_asks_for_nothing_is_taken(client, alone):
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, seed=4).choices[0].text
    assert text == alone(PROMPT, 24, 1.0, 4), "the temperature that the server was told"
    more = {"repetition_penalty": 1.3}
    assert complete(client, extra_body=more).choices[0].text == alone(PROMPT, 24, **more)
    assert complete(client, extra_body={"min_tokens": 24}).usage.completion_tokens == 24
    nothing = {"logprobs": None, "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}}
    nothing |= {"suffix": None, "user": "someone", "response_format": {"type": "text"}, "n": 1, "stop": None}
    for n in (1, None):
        assert complete(client, extra_body=nothing | {"n": n}).choices[0].text == alone(PROMPT, 24)


def test_models_are_listed_and_others_are_not_there(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "heavypath"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-other' here"):
        client.models.retrieve("gpt-other")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="/etc/passwd", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


REFUSED = {
    "logprobs": (21, "less than or equal to 20"), "best_of": (0, "greater than or equal to 1"),
    "frequency_penalty": (2.5, "less than or equal to 2"), "presence_penalty": (-3, "greater than or equal to -2"),
    "logit_bias": ({"5000": 1}, "expected tokens below 1024, got 5000"), "suffix": ("behind", "does not have it"),
    "frobnicate": (1, "does not know this field"), "guided_grammar": ("", "does not know this field"),
    "stop_token_ids": ([-1], "greater than or equal to 0"),
    "response_format": ({"type": "xml"}, "json_object"), "repetition_penalty": (0, "greater than or equal to 0.01"),
    "temperature": (-1, "greater than or equal to 0"), "top_p": (0, "greater than"),
    "top_k": (-2, "greater than or equal to -1"), "max_tokens": ("5", "valid integer"), "n": (17, "at most 16 texts"),
    "seed": (1.5, "valid integer"), "stop": (list("abcde"), "at most 4"), "prompt": ("", "empty prompt"),
    "stream_options": ({"include_usage": True}, "only where stream is true"),
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_the_server_does_not_have_is_refused_by_name(base, field):
    value, message = REFUSED[field]
    status, error = post(base, BODY | {field: value})
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"].startswith(field)
    assert message in error["message"]


@pytest.mark.parametrize(("body", "message"), [
    (b"{", "the body is not what is expected"),
    (b"[]", "the body is not what is expected"),
    (b"", "the body"),
    (b'{"model": "shipped", "prompt": "\\ud800"}', "unexpected end of hex escape"),
    (b'{"model": "shipped", "prompt": "a", "temperature": NaN}', "finite"),
    ({"prompt": []}, "empty"),
    ({"prompt": [[1], []]}, "empty prompt"),
    ({"prompt": [1, -3]}, "greater than or equal to 0"),
    ({"prompt": [1 << 20]}, "prompt: expected tokens of at most 1023, got 1048576"),
    ({"max_tokens": 8, "min_tokens": 20}, "min_tokens: expected at most as many as max_tokens, which is 8, got 20"),
    ({"prompt": [1 << 80]}, "less than"),
    ({"stop_token_ids": [3, 1 << 20]}, "stop_token_ids: expected tokens below 1024, got 1048576"),
    ({"prompt": [True]}, "valid"),
    ({"prompt": 20 * [PROMPT]}, "at most 16 texts"),
    ({"stop": ""}, "1 to 256 characters"),
    ({"stop": 300 * "a"}, "1 to 256 characters"),
    (b'{"prompt": "a", "n": 2, "best_of": 1}', "best_of: expected at least n, which is 2"),
    ({"best_of": 2, "stream": True}, "best_of: which texts are the best is known at their ends"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage: this server does not know this field"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice ask for two"),
    ({"max_tokens": 250}, "there is room for 256 tokens"),
    ({"prompt": 300 * "def "}, "there is room for 256 tokens"),
    (b'{"model": "shipped"}', "prompt: Field required"),
    (b'{"promt": "a"}', "promt: this server does not know this field"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_openais_shape(base, body, message):
    status, error = post(base, body if isinstance(body, bytes) else BODY | body)
    assert status == 400
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("field", "value"), [
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("top_logprobs", 2), ("logprobs", 3),
    ("modalities", ["audio"]), ("reasoning_effort", "high"), ("store", True), ("messages", []),
])  # fmt: skip
def test_what_a_chat_does_not_have_is_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(("message", "text"), [
    ({"role": "robot", "content": "a"}, r"messages\[0\].role: Input should be 'system', "),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        r"messages\[0\].content\[0\]: this server reads text alone, got a part of type 'image_url'",
    ),
    ({"role": "user", "content": "a", "audio": "b"}, r"messages\[0\].audio: this server does not have it"),
    ({"role": "assistant"}, r"messages\[0\]: expected content, or tool_calls"),
    ({"role": "developer", "content": "a"}, "no developers here"),
])  # fmt: skip
def test_a_message_that_the_template_does_not_write_is_refused(client, message, text):
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        client.chat.completions.create(model=NAME, messages=[message])
    assert caught.value.param == "messages"


def test_two_lengths_of_a_chat_must_agree(client):
    assert chat(client, max_tokens=3, max_completion_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="another name of it"):
        chat(client, max_tokens=3, max_completion_tokens=4)


def test_a_tokenizer_without_a_template_continues_texts_alone(decoder, demo_pair):
    without = copy.deepcopy(demo_pair.tokenizer)
    without.chat_template = None
    with decoder.serve(slots=1, max_tokens=64) as service, running(service, without) as base:
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        status, error = post(base, body, "/v1/chat/completions")
    assert (status, error["code"]) == (400, "no_chat_template")


def test_metrics_are_prometheus_and_count_what_clients_got(decoder, tokenizer):
    with decoder.serve(slots=1, max_tokens=64) as service, running(service, tokenizer) as base:
        for more in ({}, {"stream": True}, {"stop": "e"}, {"n": 100}):
            ask(base, "POST", "/v1/completions", BODY | {"max_tokens": 10} | more)
        ask(base, "GET", "/somewhere/else")
        eventually(lambda: metrics(base)["heavypath_running"] == 0)
        found = {name.removeprefix("heavypath_"): value for name, value in metrics(base).items()}
    expected = {
        "http_requests_total{path=/v1/completions},{status=200}": 3,
        "http_requests_total{path=/v1/completions},{status=400}": 1,
        "http_requests_total{path=other},{status=404}": 1,
        "completions_total{outcome=length}": 2, "completions_total{outcome=stop}": 1,
        "prompt_tokens_total": 3 * len(tokenizer(PROMPT).input_ids), "time_to_first_token_seconds_count": 3,
        "tokens_per_step_count": 2, "running": 0, "waiting": 0, "service_submitted_total": 3,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert 20 < found["new_tokens_total"] <= 30
    assert 0 < found["time_between_tokens_seconds_count"] < 30
    assert found["tokens_per_step_sum"] >= 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_service_itself_fails_nobody_waits_for_ever_and_the_server_is_not_healthy(decoder, tokenizer, caplog):
    def broken():
        raise ArithmeticError("beyond any request")

    with decoder.serve(slots=1, max_tokens=256) as service, running(service, tokenizer) as base:
        body = BODY | {"max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(post, base, body) for _ in range(3)]
            eventually(lambda: service.stats().running == 1 and service.stats().waiting == 2)
            service._end_interrupted = broken
            assert [answer.result()[0] for answer in answers] == [500, 500, 500]
        assert (post(base, body)[0], ask(base, "GET", "/health")[0]) == (503, 503)
    assert "beyond any request" in caplog.text


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


@pytest.mark.parametrize(("response_format", "message"), [
    (formatted({"type": "nothing"}), "JSON schema"),
    ({"type": "json_schema"}, "only there"),
    ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "only there"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "more": 1}}, "does not know"),
    (formatted({"type": "null"}), "leave ignore_eos out"),
    (formatted({"type": "null"}), "leave min_tokens out"),
])  # fmt: skip
def test_a_response_format_that_cannot_be_followed_is_refused(client, response_format, message):
    pytest.importorskip("llguidance")
    more = {name: 6 if name == "min_tokens" else True for name in ("ignore_eos", "min_tokens") if name in message}
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(client, response_format=response_format, extra_body=more)
    assert more or caught.value.param == "response_format"
