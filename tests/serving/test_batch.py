"""`heavypath batch`: answers are the server's, in the order of the lines, and none is lost or twice after a kill."""

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from full_disk import file_size

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.cli.app import main
from heavypath.speculative.http.batches.lines import parsed, read_lines
from heavypath.speculative.http.batches.output import LineAnswer, Output
from heavypath.speculative.http.batches.running import answer_by
from heavypath.speculative.serving.service import Service

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def batch(tmp_path, capsys, loaded_once):
    def run(lines, *arguments, code=0):
        given = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in.jsonl").write_text("\n".join(given) + "\n")
        out = tmp_path / "out.jsonl"
        assert main(["batch", str(tmp_path / "in.jsonl"), "--out", str(out), *map(str, arguments)]) == code
        said = capsys.readouterr().err
        return ([], [], said) if code else (lines_of(out), lines_of(tmp_path / "out.errors.jsonl"), said)

    return run


def test_lines_of_all_kinds_are_answered_in_their_order_and_bad_ones_apart(batch, demo_pair, tmp_path):
    target, draft, tokenizer = demo_pair
    (tmp_path / "template").write_text(TEMPLATE)
    body = {"prompt": "class Stack:", "max_tokens": 4, "temperature": 0.8, "n": 2}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {"messages": [{"role": "user", "content": "read"}], "max_tokens": 5},
        json.dumps("def f(x):"),
        "{broken",
        {"custom_id": "b", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "c", "prompt": "import os", "frobnicate": 1},
        {"prompt": "import os", "seed": 5},
    ]
    good, bad, said = batch(lines, "--max-new-tokens", 6, "--temperature", 0.7, "--template", tmp_path / "template")
    assert "4 of 7 lines answered" in said
    assert "3 refused: " in said
    assert [(line["id"], line["custom_id"]) for line in good] == [
        ("line-0", "a"),
        ("line-1", "1"),
        ("line-2", "2"),
        ("line-6", "6"),
    ]
    assert [line["custom_id"] for line in bad] == ["3", "b", "c"]
    assert [(line["response"] or {}).get("status_code") for line in bad] == [None, None, 400]
    assert "line 4: expected a request or a prompt as JSON: Expecting" in bad[0]["error"]["message"]
    assert "frobnicate" in bad[2]["response"]["body"]["error"]["message"]
    decoder = SpeculativeDecoder(target, draft, "ersd")

    def text(prompt, count, temperature, seed):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        ends = {"eos_token_id": tokenizer.eos_token_id}
        out = decoder.generate(ids, count, temperature, sequence_ids=torch.tensor([seed]), **ends)
        return tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)

    bodies = [line["response"]["body"]["choices"][0] for line in good]
    assert bodies[0]["text"] == text("class Stack:", 4, 0.8, 0)
    assert bodies[1]["message"]["content"] == text("# read\n", 5, 0.7, 1)
    assert bodies[2]["text"] == text("def f(x):", 6, 0.7, 2)
    assert bodies[3]["text"] == text("import os", 6, 0.7, 5)
    assert len(good[0]["response"]["body"]["choices"]) == 2


def test_answers_go_on_after_a_cut_anywhere(tmp_path):
    """Each file is cut anywhere, as a kill, a full disk or a power failure leaves it."""
    made = random.Random(0)
    lines = [parsed(number, b'{"prompt": "a"}' if number % 3 else b"{", {}) for number in range(6)]

    def write(path, until):
        output = Output(path)
        output.check(lines, most_dropped=6)
        for line in lines[output.done : until]:
            output.write(line, LineAnswer(400, None) if line.error else LineAnswer(200, {"text": line.number}))
        output.close()
        return path.read_bytes(), output.errors.read_bytes()

    expected = write(tmp_path / "whole.jsonl", 6)
    for cut in range(1, 400):
        out = tmp_path / f"{cut}.jsonl"
        write(out, made.randint(3, 6))
        for path in (out, out.with_name(f"{cut}.errors.jsonl")):
            path.write_bytes(path.read_bytes()[: -made.randint(1, 150)] if made.random() < 0.7 else path.read_bytes())
        assert write(out, 6) == expected


def test_on_a_full_disk_it_ends_and_goes_on_when_there_is_room(tmp_path):
    lines, path = [parsed(number, b'"a"', {}) for number in range(40)], tmp_path / "out.jsonl"
    output = Output(path)

    def write(output):
        for line in lines[output.done :]:
            output.write(line, LineAnswer(200, {"text": "x" * 50}))

    with file_size(1000):
        with pytest.raises(OSError, match="File too large"):
            write(output)
        with pytest.raises(OSError, match="File too large"):
            output.close()
    assert 0 < output.done < 40
    assert path.stat().st_size == 1000, "the last line is cut"
    again = Output(path)
    assert again.done == output.done
    again.check(lines, most_dropped=0)
    write(again)
    again.close()
    assert [line["id"] for line in lines_of(path)] == [f"line-{number}" for number in range(40)]


def test_answers_to_other_lines_are_not_gone_on_with_and_one_process_writes_at_a_time(tmp_path, batch):
    output = Output(tmp_path / "out.jsonl")
    output.write(parsed(0, b'{"custom_id": "mine", "prompt": "a"}', {}), LineAnswer(200, {}))
    _, _, said = batch(["a", "b"], code=1)
    assert "another process writes" in said
    output.close()
    _, _, said = batch(['"a"', '"b"'], code=1)
    assert "has answers to other lines" in said


@pytest.mark.parametrize("other", ["notes without an end of line", "notes\n", '{"prompt": "x"}', '{"id": "line-1"}\n'])
def test_files_of_other_kinds_are_left_as_they_are(tmp_path, batch, other):
    (tmp_path / "out.jsonl").write_text(other)
    _, _, said = batch(['"a"'], code=1)
    assert "something else than answers" in said
    assert (tmp_path / "out.jsonl").read_text() == other
    assert not (tmp_path / "out.errors.jsonl").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_answers_are_not_written_over_the_requests(tmp_path, batch, name):
    (tmp_path / name).symlink_to(tmp_path / "in.jsonl")
    _, _, said = batch(['"a"'], code=1)
    assert "is the file of requests" in said
    assert (tmp_path / "in.jsonl").read_text() == '"a"\n'


@pytest.mark.parametrize("lost", ["out.jsonl", "out.errors.jsonl"])
def test_answers_are_kept_when_the_other_file_was_moved_away(tmp_path, batch, lost):
    lines = [json.dumps({"prompt": f"p{n}"}) if n % 2 else "{" for n in range(80)]
    output = Output(tmp_path / "out.jsonl")
    for number, line in enumerate(lines):
        parts = parsed(number, line.encode(), {})
        output.write(parts, LineAnswer(400, None) if parts.error else LineAnswer(200, {}))
    output.close()
    (tmp_path / lost).unlink()
    left = next(tmp_path.glob("out*"))
    before = left.read_bytes()
    _, _, said = batch(lines, code=1)
    assert f"{tmp_path / lost!s}' was moved away or cut" in said
    assert left.read_bytes() == before


def test_answers_to_a_changed_file_or_by_other_options_are_not_gone_on_with(batch):
    lines = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 1}, "{"]
    batch(lines)
    assert "2 of 3 lines" in batch(lines)[2]
    for changed in ([lines[0], {"prompt": "c", "max_tokens": 1}, "{"], [*lines[:2], "{{"], [lines[1], lines[0], "{"]):
        assert "answers to other lines, or by other options" in batch(changed, code=1)[2]
    for option in (("--seed", 1), ("--temperature", 0.3), ("--method", "autoregressive")):
        assert "answers to other lines, or by other options" in batch(lines, *option, code=1)[2]
    assert "2 of 3 lines" in batch(lines, "--slots", 2)[2]


def test_a_length_by_its_other_name_gets_no_default_beside_it():
    def body(**given):
        line = parsed(0, json.dumps({"messages": [], **given}).encode(), {"max_tokens": 128})
        return json.loads(line.body)

    assert body(max_completion_tokens=3) == {"seed": 0, "messages": [], "max_completion_tokens": 3}
    assert body()["max_tokens"] == 128


def test_a_field_that_is_null_has_its_default():
    """So the seed is the line's number, and the same text comes after an interruption."""
    given = {"prompt": "a", "seed": None, "max_tokens": None, "stop": None, "top_p": 0.5}
    line = parsed(3, json.dumps(given | {"custom_id": None}).encode(), {"max_tokens": 128})
    assert json.loads(line.body) == given | {"seed": 3, "max_tokens": 128}
    assert line.custom_id == "3"


def test_an_error_names_the_line_of_the_file_empty_ones_counted(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('\n"a"\n\n{broken\n')
    good, bad = read_lines(path, 0, {})
    assert (good.number, good.error) == (0, "")
    assert (bad.number, bad.custom_id) == (1, "1")
    assert bad.error.startswith("line 4: expected a request or a prompt as JSON: Expecting")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lines_under_way_when_the_service_fails_are_asked_again(batch, monkeypatch, tmp_path):
    lines = [{"prompt": "def f(", "max_tokens": count} for count in (1, 1, 20, 20)]
    advance, steps = Service._advance, itertools.count()

    def fail(service):
        if next(steps) == 4:
            raise RuntimeError("no memory")
        return advance(service)

    with monkeypatch.context() as patched:
        patched.setattr(Service, "_advance", fail)
        assert "the service has ended" in batch(lines, code=1)[2]
    assert len(lines_of(tmp_path / "out.jsonl")) < 4
    assert not (tmp_path / "out.errors.jsonl").exists()
    good, bad, _ = batch(lines)
    assert [line["response"]["status_code"] for line in good] == [200] * 4
    assert not bad


@pytest.mark.parametrize(("changes", "ended"), [(0, False), (3, False), (99, True)])
def test_a_line_is_asked_again_where_the_model_changed_meanwhile(changes, ended):
    """The application says so with status 503."""
    asked = []

    async def app(scope, receive, send):
        asked.append(await receive())
        changed = len(asked) <= changes
        body = {"error": {"code": "model_changed"}} if changed else {"choices": []}
        await send({"type": "http.response.start", "status": 503 if changed else 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    line = parsed(0, b'"def"', {})
    if ended:
        with pytest.raises(ConnectionError, match="the models changed while a line was answered, 10 times"):
            asyncio.run(answer_by(app, line))
    else:
        assert asyncio.run(answer_by(app, line)) == LineAnswer(200, {"choices": []})
        assert len(asked) == changes + 1


@pytest.mark.integration
def test_a_thousand_lines_with_ten_kills_are_answered_once_each(tmp_path):
    made, source, out = random.Random(1), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for number in range(1000):
            line = {"custom_id": f"c{number}", "prompt": f"def f{number}(", "max_tokens": made.randint(1, 12)}
            file.write("{\n" if number % 97 == 13 else json.dumps(line) + "\n")
    command = [sys.executable, "-m", "heavypath.speculative", "batch", str(source), "--out", str(out), "--threads", "1"]
    kills = 0
    for _ in range(40):
        running = subprocess.Popen([*command, "--temperature", "0.8"], stderr=subprocess.PIPE)
        begin, before = time.monotonic(), len(lines_safely(out))
        until = before + made.randint(1, 120)
        while (
            kills < 10 and running.poll() is None and len(lines_safely(out)) < until and time.monotonic() < begin + 120
        ):
            time.sleep(made.uniform(0, 0.05))
        if kills < 10 and running.poll() is None:
            running.send_signal(signal.SIGKILL)
            kills += 1
        running.communicate()
        if running.returncode == 0:
            break
    assert (kills, running.returncode) == (10, 0)
    good, bad = lines_of(out), lines_of(tmp_path / "out.errors.jsonl")
    assert [line["id"] for line in bad] == [f"line-{number}" for number in range(13, 1000, 97)]
    expected = [f"c{number}" for number in range(1000) if number % 97 != 13]
    assert [line["custom_id"] for line in good] == expected


def lines_safely(path):
    return path.read_bytes().splitlines() if path.exists() else []
