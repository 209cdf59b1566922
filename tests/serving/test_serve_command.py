"""`heavypath serve`: what it says, how it stops, and what it refuses before it loads anything."""

import os
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import PATIENCE, ask, client_of, eventually, is_listening, open_stream

from heavypath.speculative.cli import serve as command
from heavypath.speculative.cli import support
from heavypath.speculative.cli.app import main
from heavypath.speculative.loading import Pair

pytestmark = pytest.mark.usefixtures("loaded_once")


def served(*arguments, during):
    """Run the command in this process, and `during(base)` in a thread beside it, which has to end it: the exit code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base, over = f"http://127.0.0.1:{port}", threading.Event()

    def ask_when_it_listens():
        try:
            eventually(lambda: over.is_set() or is_listening(base))
            during(base)
        except BaseException:
            if not over.is_set():
                end(signal.SIGTERM)
            raise

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_when_it_listens)
        code = main(["serve", "--port", str(port), *map(str, arguments)])
        over.set()
        asked.result(PATIENCE)
    return code


def end(number):
    os.kill(os.getpid(), number)


def test_the_command_serves_the_shipped_pair_and_ends_streams_before_it_stops_by_sigterm(capsys):
    def during(base):
        assert ask(base, "GET", "/v1/models", headers={"Host": "evil.example"})[0] == 421
        with client_of(base) as client:
            asked = {"model": client.models.list().data[0].id, "prompt": "def read_lines(path):", "temperature": 0}
            first = client.completions.create(**asked, max_tokens=24)
            assert first.system_fingerprint.endswith("-ersd-0")
            stream = client.completions.create(**asked, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
            pieces = [next(stream).choices[0].text]
            end(signal.SIGTERM)
            events = list(stream)
            stream.close()
        assert "".join([*pieces, *(event.choices[0].text for event in events)]).startswith(first.choices[0].text)
        assert events[-1].choices[0].finish_reason == "length"
        said.append(base)

    said = []
    assert served("--max-tokens", 256, "--slots", 2, during=during) == 0
    out, err = capsys.readouterr()
    assert out == ""
    expected = rf"heavypath: serving heavypath-demo by ersd at {said[0]}/v1, --seed \d+\nheavypath: stopped\n"
    assert re.fullmatch(expected, re.sub(r"heavypath: warming up.*\n", "", err)), "but for what takes long when busy"


@pytest.mark.slow
def test_servers_answer_requests_without_a_seed_independently_and_those_with_one_alike(capsys):
    def during(base):
        with client_of(base) as client:

            def answers(**more):
                asked = client.completions.create(model="heavypath-demo", prompt="def", max_tokens=16, n=2, **more)
                return [choice.text for choice in asked.choices]

            said.append((answers(), answers(), answers(seed=7), answers(seed=7)))
        end(signal.SIGTERM)

    said, options = [], ("--method", "autoregressive", "--max-tokens", 64)
    assert served(*options, during=during) == 0
    number = re.search(r"--seed (\d+)\n", capsys.readouterr().err)[1]
    assert served(*options, during=during) == 0
    assert served(*options, "--seed", number, during=during) == 0
    (*first, seven, again), (*second, of_another, _), repeated = said
    unseeded = [text for texts in (*first, *second) for text in texts]
    assert len({*unseeded}) == len(unseeded)
    assert seven == again == of_another
    assert repeated == said[0]


def test_texts_that_take_longer_than_the_grace_are_cut_off_and_the_command_ends_all_the_same():
    def during(base):
        body = {"model": "heavypath-demo", "prompt": "def", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        with open_stream(base, body) as connection:
            assert connection.recv(100)
            end(signal.SIGINT)
            while part := connection.recv(10_000):
                assert b"[DONE]" not in part

    assert served("--slots", 1, "--grace", 0, during=during) == 0


def test_a_server_that_others_reach_says_so_and_asks_for_the_key(caplog, monkeypatch):
    def during(base):
        assert ask(base, "GET", "/v1/models")[0] == 401
        status, _, content = ask(base, "GET", "/v1/models", headers={"Authorization": "Bearer s3cret"})
        assert status == 200
        assert b'"mine"' in content
        end(signal.SIGINT)

    monkeypatch.setenv("KEY", "s3cret")
    assert served("--host", "0.0.0.0", "--api-key-env", "KEY", "--name", "mine", "--slots", 1, during=during) == 0
    assert "other machines reach this server on 0.0.0.0, with its key; it does not encrypt" in caplog.messages


def refused(capsys, *arguments):
    assert main(["serve", *map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_served_is_said_in_one_line_before_models_are_loaded(capsys, monkeypatch):
    monkeypatch.setattr(support, "load", lambda *_, **__: pytest.fail("loads models"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in refused(capsys, "--port", port)
    monkeypatch.setenv("EMPTY", "")
    assert "'EMPTY', which is empty or not there" in refused(capsys, "--api-key-env", "EMPTY")
    monkeypatch.setenv("LINES", "a\nb\n")
    assert "characters that a header cannot have" in refused(capsys, "--api-key-env", "LINES")
    assert "--max-choices must be at most" in refused(capsys, "--max-choices", 9)
    assert "here 2; got 3" in refused(capsys, "--max-choices", 3, "--queue", 5)
    assert "--method must be one of" in refused(capsys, "--method", "fastest")
    assert "nowhere" in refused(capsys, "--target", "nowhere")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install '.[serve]'` in a checkout" in refused(capsys)


def test_a_temperature_that_nobody_gave_is_the_models_own_or_one(demo_pair, monkeypatch):
    pair = Pair(demo_pair.target, demo_pair.draft, demo_pair.tokenizer)
    config = demo_pair.target.generation_config
    for sampled, own, expected in ((True, 0.6, 0.6), (False, 0.6, 1.0), (True, None, 1.0), (None, None, 1.0)):
        monkeypatch.setattr(config, "do_sample", sampled)
        monkeypatch.setattr(config, "temperature", own)
        assert command.default_temperature(pair) == expected


def test_a_model_has_the_name_that_it_was_given_or_that_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine" / "file.gguf").touch()
    given = (None, str(tmp_path / "mine"), ".", "../mine/", "org/model", "file.gguf")
    assert [command.name_of(each) for each in given] == ["heavypath-demo", "mine", "mine", "mine", "org/model", "file"]
