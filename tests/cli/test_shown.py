"""What a terminal shows of a text, what standard error says while a command works, and where models run."""

import json
import re
import sys
import time

import pytest
import torch
from command_line import assert_refused

from heavypath.speculative.cli import progress

PROMPT = "def read(self, size=-1):\n"
CODES = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Standard output seems to be a terminal."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: self is sys.stdout, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_statistics_are_one_line_and_all_of_them_with_v(heavypath):
    given = ("generate", PROMPT, "--max-new-tokens", 12)
    line = r"\[12 new tokens in \d+ steps, [\d.]+ tokens per step, \d+ tokens per second\]\n"
    assert re.fullmatch(line, heavypath(*given)[2])
    assert {"acceptance by depth", "tokens per second", "seconds, target"} <= {*table(heavypath(*given, "-v")[2])}
    lossy = heavypath(*given, "--method", "typical-lossy", "--temperature", 1)[2]
    assert lossy.endswith("; the output distribution is changed by typical acceptance, epsilon 0.09, delta 0.3]\n")


def table(text):
    return [line[:22].strip() for line in text.splitlines()]


def test_a_terminal_shows_the_prompt_dimmed_before_the_text_and_a_pipe_the_text_alone(heavypath, terminal, monkeypatch):
    given = ("generate", PROMPT, "--max-new-tokens", 12)
    shown = heavypath(*given)[1]
    assert shown.startswith("\x1b[2m")
    assert CODES.sub("", shown.partition("\x1b[0m")[0]) == PROMPT.rstrip()
    assert "\x1b" not in heavypath(*given, "--json")[1]
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: False)
    text = heavypath(*given)[1]
    assert CODES.sub("", shown) == PROMPT + text
    assert text.endswith("\n")


def test_the_tokens_in_colour_are_those_that_the_trace_has_as_drafted_and_accepted(heavypath, terminal, tmp_path):
    options = ("--max-new-tokens", 48, "--temperature", 0.8, "--seed", 5, "--trace", tmp_path / "run")
    code, shown, _ = heavypath("generate", PROMPT, *options, "--show-accepted")
    assert code == 0
    shown = shown[shown.index(":") :].partition("\n")[2]  # behind the prompt
    coloured, green = [], False
    for part in re.split(r"(\x1b\[\d*m)", shown):
        green = part == "\x1b[32m" if CODES.fullmatch(part) else green
        coloured += [] if CODES.fullmatch(part) else [(letter, green) for letter in part]
    steps = [json.loads(line) for line in (tmp_path / "run").read_text().splitlines()[1:]]
    expected = [
        (letter, place < step["length"])
        for step in steps[:-1]
        for place, piece in enumerate(step["pieces"])
        for letter in piece
    ]
    assert coloured[: len(expected)] == expected
    assert {green for _, green in expected} == {True, False}


def test_colours_are_refused_where_no_terminal_shows_them(heavypath):
    assert_refused(heavypath("generate", PROMPT, "--show-accepted"), 1, "--show-accepted colours a text on a terminal")


@pytest.mark.parametrize(
    "command", ["generate x", "chat", "compare x", "demo", "calibrate", "serve --port 0", "layers"]
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(heavypath, command):
    refused = heavypath(*command.split(), "--device", "cuda:7")
    assert_refused(refused, 1, r"--device must be one of cpu.* on this machine, got 'cuda:7'")


def test_threads_are_as_many_as_are_asked_for(heavypath):
    before = torch.get_num_threads()
    try:
        options = ("--max-new-tokens", 2, "--method", "autoregressive", "--device", "cpu", "--json")
        for threads in (2, 1):
            found = json.loads(heavypath("compare", "x", *options, "--threads", threads)[1])["environment"]
            assert (found["threads"], found["device"]) == (threads, "cpu") == (torch.get_num_threads(), "cpu")
    finally:
        torch.set_num_threads(before)


def test_long_work_is_said_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.progress("comparing", first=0.01) as report:
        time.sleep(0.1)
        report("prompt 1 of 2")
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["heavypath: comparing ...", "heavypath: comparing, still"]
    assert {"heavypath: comparing: prompt 1 of 2 ...", "heavypath: comparing: prompt 1 of 2, still"} <= {*lines}
    with progress.progress("comparing", first=0.01, quiet=True):
        time.sleep(0.05)
    with progress.progress("comparing", first=10.0):
        pass
    assert capsys.readouterr().err == ""
