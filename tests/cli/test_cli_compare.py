"""`heavypath compare`: own prompts, drafts and methods; as a table, as JSON and as a picture."""

import json
import sys

import pytest
from command_line import assert_refused

from heavypath.speculative.comparison import ASSISTED, PLAIN

OPTIONS = ("--max-new-tokens", 4, "--method", "chain")


@pytest.fixture
def models(folders):
    return ("--target", folders / "target", "--draft", folders / "draft")


def test_texts_and_a_file_are_compared_and_printed_as_json(heavypath, models, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"one two"\n{"prompt": "three\\nfour"}\n')
    code, output, errors = heavypath(
        "compare", "one", "--prompts", tmp_path / "prompts.jsonl", *models, *OPTIONS, "--json"
    )
    answer = json.loads(output)
    assert (code, errors) == (0, "")
    assert [row["method"] for row in answer["rows"]] == [PLAIN, ASSISTED, "chain"]
    assert (answer["settings"]["prompts"], len(answer["rows"][-1]["ratios"])) == (3, 3)
    assert {"device", "threads", "torch"} <= answer["environment"].keys()


def test_several_drafts_and_methods_make_a_table_and_a_picture(heavypath, models, tmp_path):
    arguments = (*models, "--draft", "prompt-lookup", *OPTIONS, "--method", "top-k", "--tree-size", 3)
    code, output, _ = heavypath("compare", "one two", *arguments, "--plot", tmp_path / "ratios.svg")
    assert code == 0
    words = " ".join(output.split())
    for said in ("chain, prompt-lookup", "top-k, prompt-lookup", "median and quartiles", "CPU thread", "warm up"):
        assert said in words
    assert "<!-- top-k, prompt-lookup -->" in (tmp_path / "ratios.svg").read_text()


def test_the_shipped_pair_is_compared_without_further_ado(heavypath):
    code, output, _ = heavypath("compare", "import os", *OPTIONS, "--temperature", 0.7, "--min-p", 0.1, "--json")
    rows = json.loads(output)["rows"]
    assert code == 0
    assert [row["text"] for row in rows] == ["same law"] * 3


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("", 2, "give some texts, or --prompts FILE"),
    ("x --method medusa", 1, "--method must be one of autoregressive, .*, got 'medusa'"),
    ("x --target gpt", 1, "the target 'gpt' is no folder here and is not in the Hugging Face cache"),
    ("x --prompts no.txt", 2, "--prompts.* 'no.txt' does not exist"),
    ("x --plot no/such/plot.png", 1, "--plot must be in a folder that exists"),
    ("x --profile no.json", 1, "there is no profile 'no.json'"),
    ("x --draft early-exit:all", 1, "expected early-exit:LAYERS"),
    ("x --draft prompt-lookup --draft gpt", 1, r"a draft \('gpt'\) needs its target"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(arguments, code, message, heavypath):
    assert_refused(heavypath("compare", *arguments.split()), code, message)


def test_a_second_drafts_vocabulary_is_checked_and_a_plot_without_matplotlib_is_refused_before_any_work(
    heavypath, folders, models, monkeypatch
):
    refused = heavypath("compare", "one", *models, "--draft", folders / "other words", *OPTIONS)
    assert_refused(refused, 1, "a draft must have 5% of the target's tokens")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(heavypath("compare", "x", "--plot", "plot.png"), 1, r"pip install '\.\[figures\]'")
