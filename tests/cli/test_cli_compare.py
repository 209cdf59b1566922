"""`heavypath compare`: own prompts, drafts and methods, and suites; as tables, as JSON, as a picture and as a page."""

import json
import sys

import pytest
from command_line import assert_refused

from heavypath.speculative.cli import compare
from heavypath.speculative.cli.suite import command_of
from heavypath.speculative.suite.measure import SUITE_METHODS
from heavypath.speculative.ways import ASSISTED, PLAIN

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


def test_a_second_drafts_vocabulary_is_checked_and_a_plot_without_matplotlib_is_refused_before_any_work(
    heavypath, folders, models, monkeypatch
):
    refused = heavypath("compare", "one", *models, "--draft", folders / "other words", *OPTIONS)
    assert_refused(refused, 1, "a draft must have 5% of the target's tokens")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(heavypath("compare", "x", "--plot", "plot.png"), 1, r"pip install '\.\[figures\]'")


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"counting": ["one two", "two three"], "dialogue": [["one", "two", "three"]]}))
    return path


def test_a_users_suite_is_measured_printed_and_written(heavypath, models, suite, tmp_path):
    files = ("--save", tmp_path / "figures.json", "--page", tmp_path / "plots.html")
    code, output, errors = heavypath(
        "compare", "--suite", suite, *models, *OPTIONS, "--temperature", 0, "--temperature", 0.5, *files
    )
    assert code == 0, errors
    words = " ".join(output.split())
    for said in ("temperature 0.5", "2 of counting, 1 of dialogue", "no chat template", "standard error", "CPU thread"):
        assert said in words
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert {"command", "date", "device", "threads"} <= saved["environment"].keys()
    assert saved["settings"]["temperatures"] == [0, 0.5]
    assert {row["kind"] for row in saved["rows"]} == {"counting", "dialogue", "all"}
    ways = [row["way"] for row in saved["rows"] if (row["kind"], row["temperature"]) == ("counting", 0)]
    assert ways == [PLAIN, ASSISTED, "autoregressive", "chain"]
    assert (tmp_path / "plots.html").read_text().count("<svg") == 2 * (2 + 3)


def test_kinds_and_prompts_are_chosen_and_json_is_all_that_is_printed(heavypath, models, suite):
    code, output, errors = heavypath(
        "compare", "--suite", suite, *models, *OPTIONS, "--kind", "counting", "--per-kind", 1, "--json"
    )
    answer = json.loads(output)
    assert (code, errors) == (0, "")
    assert answer["settings"]["prompts"] == {"counting": 1}
    assert all(row["tokens_per_pass"][1] is None for row in answer["rows"]), "one prompt has no error"


@pytest.mark.slow
def test_the_shipped_suite_is_found(heavypath):
    code, output, _ = heavypath("compare", "--suite", "--kind", "maths", "--per-kind", 1, *OPTIONS, "--json")
    assert code == 0
    assert json.loads(output)["settings"]["prompts"] == {"maths": 1}


def test_the_default_methods_are_those_of_the_package():
    assert compare.SUITE_METHODS == SUITE_METHODS


def test_the_command_that_is_kept_measures_again_without_writing_files():
    given = ["compare", "--suite", "my prompts.json", "--save", "/a/b.json", "--page=c.html", "--per-kind", "3"]
    assert command_of(given) == "heavypath compare --suite 'my prompts.json' --per-kind 3"


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("", 2, "give some texts, or --prompts FILE"),
    ("x --method medusa", 1, "--method must be one of autoregressive, .*, got 'medusa'"),
    ("x --profile no.json", 1, "there is no profile 'no.json'"),
    ("x --draft early-exit:all", 1, "expected early-exit:LAYERS"),
    ("x --prompts no.txt", 2, "--prompts.* 'no.txt' does not exist"),
    ("x --plot no/such/plot.png", 1, "--plot must be in a folder that exists"),
    ("x --plot ratios.txt", 1, "a plot must be a .png, .svg or .pdf file, got 'ratios.txt'"),
    ("x --plot .", 2, "--plot.* '.' is a directory"),
    ("--suite --save .", 2, "--save.* '.' is a directory"),
    ("--suite --page .", 2, "--page.* '.' is a directory"),
    ("x --draft prompt-lookup --draft gpt", 1, r"a draft \('gpt'\) needs its target"),
    ("--suite --kind sums", 1, "a kind must be one of writing, .*, got 'sums'"),
    ("--suite no.json", 1, "cannot read the suite in 'no.json'"),
    ("--suite a.json b.json", 2, "--suite takes one file, got 2"),
    ("--suite --plot a.svg", 2, "--plot.* it does not go with --suite"),
    ("--suite --save no/such/a.json", 1, "--save must be in a folder that exists"),
    ("x --kind maths", 2, "--kind.* it needs --suite"),
    ("x --page a.html", 2, "--page.* it needs --suite"),
    ("x --temperature 0 --temperature 1", 2, "several temperatures need --suite"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(arguments, code, message, heavypath):
    assert_refused(heavypath("compare", *arguments.split()), code, message)
