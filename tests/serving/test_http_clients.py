"""The HTTP server: what clients of OpenAI's and vLLM's API send besides prompts and lengths."""

import copy
import json
import threading

import pytest
import torch
from http_server import NAME, ask, client_of, metrics, post, running, with_template
from rounding import rounding_of

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.http.logprobs import Spelling
from heavypath.speculative.http.requests import CompletionRequest
from heavypath.speculative.options import SamplingOptions

PROMPT = "def read_lines(path):"
BODY = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
# With tools as Qwen's templates have them.
TEMPLATE = (
    "{% if tools %}tools <tool_call>: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments.path }}>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if thinking is defined %}thinking={{ thinking }}\n{% endif %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 6}, "lines": {"type": "integer"}},
            "required": ["path", "lines"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "read"}]


@pytest.fixture(scope="module")
def decoder(demo_pair):
    return SpeculativeDecoder(demo_pair.target, demo_pair.draft, "ersd")


@pytest.fixture(scope="module")
def tokenizer(demo_pair, tmp_path_factory):
    return with_template(demo_pair.tokenizer, TEMPLATE, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(decoder, tokenizer):
    eos = [tokenizer.eos_token_id]
    with (
        decoder.serve(slots=4, max_tokens=512) as service,
        running(service, tokenizer, eos=eos, measured=True, origins=["https://page.example"], max_tokens=512) as base,
    ):
        yield base


@pytest.fixture(scope="module")
def client(base):
    with client_of(base) as client:
        yield client


@pytest.fixture(scope="module")
def alone(decoder, tokenizer):
    """The tokens that the decoder gives a prompt, alone."""

    def tokens(prompt, count, temperature=0.0, **options):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"eos_token_id": tokenizer.eos_token_id} | options
        return decoder.generate(ids, count, temperature, **options).sequences[0, ids.shape[1] :].tolist()

    return tokens


@pytest.fixture(scope="module")
def law(demo_pair, tokenizer):
    """log softmax of the target's logits before each token of a text, by transformers itself, and what ours may differ.

    fp64 [T - 1, V], and a float, by transformers' own error in fp32
    """
    precise = copy.deepcopy(demo_pair.target).double()

    def logprobs(tokens):
        with torch.inference_mode():
            usual, exact = (
                model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for model in (demo_pair.target, precise)
            )
        return exact, rounding_of(usual, exact)

    return logprobs


def content(base, **more):
    status, answer = post(base, BODY | more)
    assert status == 200, answer
    return answer["choices"][0]


def chat(base, **more):
    status, answer = post(
        base, {"messages": MESSAGES, "temperature": 0, "max_tokens": 48} | more, "/v1/chat/completions"
    )
    assert status == 200, answer
    return answer["choices"][0]


def test_every_option_of_sampling_is_a_field_of_requests():
    fields = {*CompletionRequest.model_fields} | {"min_new_tokens", "eos_token_id", "pad_token_id", "stop_strings"}
    assert {*SamplingOptions.__annotations__} <= fields


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"temperature": 0.9, "seed": 3}, {"stream": True}], ids=str)
def test_logprobs_of_prompt_and_text_are_the_targets_log_softmax(base, tokenizer, law, more):
    asked = {"echo": True, "logprobs": 3} | more
    if "stream" in more:
        lines = ask(base, "POST", "/v1/completions", BODY | asked)[2].decode().split("\n\n")
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        text = "".join(each["text"] for each in choices)
        scored = [each["logprobs"] for each in choices if each["logprobs"]]
        found = {name: [value for each in scored for value in each[name]] for name in scored[0]}
    else:
        choice = content(base, **asked)
        text, found = choice["text"], choice["logprobs"]
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(tokenizer(PROMPT).input_ids) + asked.get("max_tokens", 12), "the text has these tokens"
    expected, within = law(tokens)
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    own = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:]).double(), own, rtol=0, atol=within)
    best = expected.topk(3)
    for row, (values, numbers) in enumerate(zip(best.values, best.indices, strict=True), 1):
        for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
            assert found["top_logprobs"][row][tokenizer.decode([number])] == pytest.approx(value, abs=within)
    assert found["tokens"] == [tokenizer.decode([token]) for token in tokens]
    assert [
        text[offset:][: len(token)] for offset, token in zip(found["text_offset"], found["tokens"], strict=True)
    ] == (found["tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_many_logprobs_do_not_stop_the_event_loop(base, monkeypatch, stream):
    threads, make = set(), Spelling._by_text

    def noted(*arguments):
        threads.add(threading.current_thread().name)
        return make(*arguments)

    monkeypatch.setattr(Spelling, "_by_text", noted)
    body = BODY | {"prompt": 10 * PROMPT, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": stream}
    status, _, answer = ask(base, "POST", "/v1/completions", body)
    assert (status, answer.count(b"top_logprobs")) == (200, 1)
    assert threads == {"writing_0"}


def test_a_text_of_no_tokens_reads_the_prompt_alone(base):
    status, answer = post(base, BODY | {"max_tokens": 0, "echo": True})
    assert (status, answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (200, PROMPT, 0)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_a_chat_have_bytes_and_alternatives(client, alone, tokenizer, law):
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    scored = answer.choices[0].logprobs.content
    assert "".join(each.token for each in scored) == answer.choices[0].message.content
    text = "# user: read\n# assistant: "
    prompt = tokenizer(text).input_ids
    expected, within = law(prompt + alone(text, 6))
    for each, row in zip(scored, expected[len(prompt) - 1 :], strict=True):
        assert each.logprob == pytest.approx(row.max().item(), abs=within), "greedy"
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=within)
        assert bytes(each.bytes).decode() == each.token


def test_bytes_of_tokens_make_up_characters_that_tokens_divide(base):
    pytest.importorskip("llguidance")
    scored = chat(base, logprobs=True, top_logprobs=1, guided_choice=["é 漢 😀"])["logprobs"]["content"]
    assert any(one["token"] == "\N{REPLACEMENT CHARACTER}" for one in scored)
    assert b"".join(bytes(one["bytes"]) for one in scored).decode().startswith("é 漢 😀")


def penalised(frequency, presence, length):
    """OpenAI's formula, token by token."""

    def processor(ids, scores):
        scores = scores.clone()
        for row, text in enumerate(ids.tolist()):
            for token in {*text[length:]}:
                scores[row, token] -= frequency * text[length:].count(token) + presence
        return scores

    return processor


@pytest.mark.parametrize("seed", [0, 1])
def test_penalties_and_biases_are_openais(base, alone, tokenizer, seed):
    length, plain = len(tokenizer(PROMPT).input_ids), alone(PROMPT, 24)
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": seed, "frequency_penalty": 1.5, "presence_penalty": -0.5}
    expected = alone(
        PROMPT, 24, 0.8, sequence_ids=torch.tensor([seed]), logits_processor=[penalised(1.5, -0.5, length)]
    )
    assert content(base, **asked)["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    banned = {str(token): -100 for token in plain[:2]}
    found = content(base, logit_bias=banned, max_tokens=24)["text"]
    assert not {*plain[:2]}.intersection(tokenizer(found).input_ids)
    assert content(base, logit_bias={str(plain[3]): 100}, max_tokens=3)["text"] == tokenizer.decode([plain[3]] * 3)


def test_further_ends_and_filters(base, alone, tokenizer):
    text = alone(PROMPT, 12)
    place = next(place for place, token in enumerate(text) if place > 3 and token not in text[:place])
    stopped = content(base, stop_token_ids=[text[place]])
    assert (stopped["text"], stopped["finish_reason"]) == (tokenizer.decode(text[:place]), "stop")
    off, zero = (content(base, top_k=top_k, temperature=0.9, seed=1)["text"] for top_k in (-1, 0))
    assert off == zero
    special = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "ignore_eos": True, "max_tokens": 2}
    assert content(base, **special)["text"] == ""
    assert content(base, **special, skip_special_tokens=False)["text"] == 2 * tokenizer.eos_token


def test_the_best_of_several_texts_has_the_likeliest_tokens(base, law, tokenizer):
    asked = {"temperature": 1.2, "seed": 5, "n": 4, "logprobs": 0, "max_tokens": 8}
    texts = [choice["text"] for choice in post(base, BODY | asked)[1]["choices"]]

    def mean(text):
        begin = len(tokenizer(PROMPT).input_ids) - 1
        tokens = tokenizer(PROMPT).input_ids + tokenizer(text).input_ids
        rows = law(tokens)[0][begin:]
        return rows.gather(1, torch.tensor(tokens[begin + 1 :])[:, None]).mean().item()

    ranked = sorted(texts, key=mean, reverse=True)
    best = post(base, BODY | asked | {"n": 2, "best_of": 4, "logprobs": None})[1]["choices"]
    assert [choice["text"] for choice in best] == ranked[:2]
    assert [choice["index"] for choice in best] == [0, 1]


@pytest.mark.parametrize(("form", "fits"), [
    ({"guided_choice": ["yes: \"a\"", "no"]}, lambda text: text in ("yes: \"a\"", "no")),
    ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[:3].isdigit()),
    ({"guided_json": {"type": "integer", "maximum": 9, "minimum": 0}}, lambda text: int(text) in range(10)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}}},
     lambda text: text == "7"),
    ({"structured_outputs": {"json": '{"enum": [7]}'}}, lambda text: text == "7"),
    ({"structured_outputs": {"choice": ["é\n"]}}, lambda text: text == "é\n"),
])  # fmt: skip
def test_texts_have_the_form_that_openais_and_vllms_clients_ask_for(base, form, fits):
    pytest.importorskip("llguidance")
    for seed in range(3):
        choice = content(base, **form, temperature=1, seed=seed, max_tokens=40)
        assert fits(choice["text"])
        assert choice["finish_reason"] == "stop"
    assert content(base, response_format={"type": "json_object"})["text"].lstrip().startswith("{")


@pytest.mark.parametrize("least", ["min_length", "min_new_tokens"])
def test_a_form_is_complete_also_where_the_model_has_a_least_length(least, demo_pair, decoder, tokenizer, monkeypatch):
    pytest.importorskip("llguidance")
    eos = [tokenizer.eos_token_id]
    monkeypatch.setattr(demo_pair.target.generation_config, least, 40)
    with decoder.serve(slots=1, max_tokens=256) as service, running(service, tokenizer, eos=eos) as base:
        assert content(base, guided_choice=["yes"], max_tokens=9)["text"] == "yes"
        assert post(base, BODY | {"max_tokens": 3})[0] == 200


def test_events_have_the_numbers_so_far_where_they_are_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(client.completions.create(**BODY, stream=True, stream_options=options))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 12


def test_the_template_gets_tools_messages_of_tools_and_variables(base, alone, tokenizer):
    function = TOOL["function"]
    call = {"id": "a", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "x"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "y"}]})
    shown = json.dumps([{"type": "function", "function": function}])
    written = f"tools <tool_call>: {shown}\n# user: read\n# assistant: <read_file x>\n# tool: y\nthinking=False\n"
    written += "# assistant: "
    asked = {"messages": messages, "tools": [TOOL], "max_tokens": 6, "chat_template_kwargs": {"thinking": False}}
    assert chat(base, **asked)["message"]["content"] == tokenizer.decode(alone(written, 6))
    without = chat(base, tools=[TOOL], tool_choice="none", max_tokens=6, add_generation_prompt=False)
    assert without["message"]["content"] == tokenizer.decode(alone("# user: read\n", 6))
    refused = {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    status, error = post(base, refused, "/v1/chat/completions")
    assert (status, error["message"]) == (
        400,
        "chat_template_kwargs.chat_template: it is no variable of a chat template",
    )
    bad = [{"role": "assistant", "tool_calls": [call | {"function": {"name": "a", "arguments": "[]"}}]}]
    status, error = post(base, {"messages": bad}, "/v1/chat/completions")
    assert error["message"] == "messages[0].tool_calls[0].function.arguments: expected a JSON object, as text"


def told(client, stream=False, **asked):
    """What a chat with tools answers, in pieces where it streams, and how it ends."""
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=120, stream=stream, **asked)
    choices = [event.choices[0] for event in answer if event.choices] if stream else [answer.choices[0]]
    return [each.delta if stream else each.message for each in choices], choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "read_file"}}], ids=["any", "one"]
)
def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(client, stream, choice):
    pytest.importorskip("llguidance")
    other = {"type": "function", "function": {"name": "stop"}}
    tools = [TOOL, other] if isinstance(choice, dict) else [TOOL]
    parts, reason = told(client, stream, tools=tools, tool_choice=choice, temperature=1, seed=2)
    (call,) = [call for each in parts for call in each.tool_calls or []]
    assert reason == "tool_calls"
    assert "".join(each.content or "" for each in parts) == ""
    assert call.function.name == "read_file"
    assert json.loads(call.function.arguments).keys() == {"path", "lines"}
    assert call.id


CALL = '<tool_call>{"name": "read_file", "arguments": {"path": "a"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "more", "said", "count"), [
    (f"so < {CALL}\n{CALL}", {}, "so < ", 2), (f"so {CALL} Done.", {}, "so Done.", 1),
    ("so <tool_call>{oops</tool_call>", {}, "so <tool_call>{oops</tool_call>", 0),
    (f"{CALL}\n{CALL}", {"parallel_tool_calls": False}, "", 1),
])  # fmt: skip
def test_what_is_said_before_calls_is_content_and_what_is_no_call_is_said(client, stream, text, more, said, count):
    """Texts are held to what they are, as a model of another size would write them by itself."""
    pytest.importorskip("llguidance")
    parts, reason = told(client, stream, tools=[TOOL], extra_body={"structured_outputs": {"choice": [text]}}, **more)
    assert "".join(each.content or "" for each in parts).strip() == said.strip()
    assert [call.function.name for each in parts for call in each.tool_calls or []] == count * ["read_file"]
    assert reason == ("tool_calls" if count else "stop")


def test_an_answer_says_what_drafts_brought_and_metrics_sum_it_up_by_vllms_names(base, decoder, tokenizer):
    before = metrics(base)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    stats = decoder.generate(ids, 24, 0.9, sequence_ids=torch.tensor([4]), eos_token_id=None).stats
    asked = BODY | {"max_tokens": 24, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    status, answer = post(base, asked)
    assert status == 200
    found = answer["metrics"]["speculative_decoding"]
    assert found["num_spec_steps"] <= stats.steps <= found["num_spec_steps"] + 1, "the last step may draft nothing"
    assert found["num_accepted_draft_tokens"] + stats.steps == 24
    histogram = {int(length): count for length, count in found["acceptance_histogram"].items()}
    assert sum(histogram.values()) == found["num_spec_steps"]
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    deeper = [sum(count for length, count in histogram.items() if length > place) for place in range(max(histogram))]
    assert found["per_position_acceptance_rate"] == [count / found["num_spec_steps"] for count in deeper]
    after = metrics(base)
    for name, expected in (
        ("drafts", found["num_spec_steps"]), ("draft_tokens", found["num_draft_tokens"]),
        ("accepted_tokens", found["num_accepted_draft_tokens"]),
    ):  # fmt: skip
        name = f"vllm:spec_decode_num_{name}_total"
        assert after[name] - before.get(name, 0) == expected
    for place, count in enumerate(deeper):
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"
        assert after[name] - before.get(name, 0) == count
    assert post(base, BODY | {"n": 2})[1]["metrics"] == {"speculative_decoding": None}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _, _ = ask(base, "POST", "/v1/completions", asked | options)[2].decode().split("\n\n")
    assert json.loads(last[6:])["metrics"]["speculative_decoding"] == found


def test_a_model_need_not_be_named_and_pages_of_allowed_sites_may_ask(base):
    body = {name: value for name, value in BODY.items() if name != "model"}
    status, headers, _ = ask(base, "POST", "/v1/completions", body, {"Origin": "https://page.example"})
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://page.example")
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert ask(base, "OPTIONS", "/v1/completions", headers=asked)[0] == 200
    for origin in ("https://evil.example", "null"):
        given = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        status, headers, _ = ask(base, "OPTIONS", "/v1/completions", headers=given)
        assert (status, headers.get("Access-Control-Allow-Origin")) == (400, None)
