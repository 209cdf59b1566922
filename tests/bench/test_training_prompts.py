"""bench/real/prompts.py: enough prompts of each kind, other ones than those that a draft is measured with."""

import json
import sys
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from heavypath.speculative.suite.prompts import read_suite

FOLDER = Path(__file__).parents[2] / "bench" / "real"


@pytest.fixture(scope="module")
def making():
    sys.path.insert(0, str(FOLDER))
    try:
        import prompts
    finally:
        sys.path.remove(str(FOLDER))
    return prompts


def text_of(messages):
    return "\n".join(message["content"] for message in messages)


def test_a_seed_gives_as_many_different_prompts_as_asked_for(making):
    found = making.prompts(1200)
    assert found == making.prompts(1200)
    assert found[:100] != making.prompts(100, seed=1)
    assert len({*map(text_of, found)}) == 1200
    for messages in found:
        assert [message["role"] for message in messages] in (["user"], ["user", "assistant", "user"])
        assert "{" not in messages[0]["content"].partition("\n\n")[0]


def test_kinds_are_those_of_the_suite(making):
    assert {*making.KINDS} == {*read_suite()}
    turns = Counter(len(messages) for messages in making.prompts(400))
    assert turns[3] == pytest.approx(50, abs=30)


def test_no_prompt_is_one_of_the_suite(making):
    """Nor nearly: the longest text in common is a short part of a prompt of the suite."""
    found = [text_of(messages) for messages in making.prompts(24)]
    for prompts in read_suite().values():
        for prompt in prompts[:2]:
            asked = prompt if isinstance(prompt, str) else "\n".join(prompt)
            matcher = SequenceMatcher(b=asked, autojunk=False)
            for text in found:
                matcher.set_seq1(text)
                assert matcher.find_longest_match().size < max(40, len(asked) / 3)


def test_held_out_prompts_are_a_suite_of_all_kinds_and_none_of_those_before(making, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["prompts.py", "--after", "200", "--count", "16", "--suite"])
    making.main()
    (tmp_path / "held-out.json").write_text(capsys.readouterr().out)
    suite = read_suite(tmp_path / "held-out.json")
    assert {*suite} == {*making.KINDS}
    held_out = {"\n".join(prompt) for prompts in suite.values() for prompt in prompts}
    assert len(held_out) == 16
    assert held_out == {*map(text_of, making.prompts(216)[200:])}
    monkeypatch.setattr(sys, "argv", ["prompts.py", "--after", "2", "--count", "3"])
    making.main()
    lines = [json.loads(line)["messages"] for line in capsys.readouterr().out.splitlines()]
    assert lines == making.prompts(5)[2:]


def test_more_prompts_than_the_templates_give_are_refused(making, monkeypatch):
    monkeypatch.setattr(making, "KINDS", {"one": lambda random_: ["the same"]})
    with pytest.raises(ValueError, match="fewer than 3 different prompts, 1 were found"):
        making.prompts(3)
