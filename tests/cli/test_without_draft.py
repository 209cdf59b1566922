"""A target without a draft drafts from text already written, by a method that can rest, and says so in one line."""

import io
import json
import sys

import pytest

from heavypath.speculative import Mixture, PromptLookup, Recall, SpeculativeDecoder, compare
from heavypath.speculative.comparison import PLAIN
from heavypath.speculative.http.server import Server

SAID = "heavypath: no --draft: drafting from text already written (Recall), method {}\n"
COMMANDS = {
    "generate": ["generate", "one two", "--max-new-tokens", 4],
    "chat": ["chat", "--max-new-tokens", 4],
    "serve": ["serve", "--port", 0, "--slots", 1, "--max-tokens", 32],
    "batch": ["batch", "FILE", "--out", "OUT", "--max-new-tokens", 4, "--max-tokens", 32, "--slots", 1],
}


@pytest.fixture
def decoders(monkeypatch):
    """The drafts and methods of all decoders that are made."""
    made, init = [], SpeculativeDecoder.__init__

    def keep(self, target, draft=None, method="sequoia", **options):
        made.append((type(draft), method))
        init(self, target, draft, method, **options)

    monkeypatch.setattr(SpeculativeDecoder, "__init__", keep)
    return made


@pytest.fixture
def run(heavypath, tmp_path, monkeypatch):
    """Run a command; a server stops once it would listen, and a chat has one message."""

    def run(command, *more):
        (tmp_path / "FILE").write_text('"one two"\n')
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
        monkeypatch.setattr(Server, "serve_until_stopped", lambda self, bound: None)
        return heavypath(*(tmp_path / word if word in ("FILE", "OUT") else word for word in COMMANDS[command]), *more)

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_alone_drafts_by_recall_and_a_method_that_can_rest(run, folders, decoders, command):
    code, _, errors = run(command, "--target", folders / "target")
    assert code == 0, errors
    assert errors.startswith(SAID.format("ersd"))
    assert decoders == [(Recall, "ersd")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("given", "draft", "method"), [
    (["--method", "chain"], Recall, "chain"),
    (["--method", "autoregressive"], type(None), "autoregressive"),
    (["--draft", "prompt-lookup"], PromptLookup, None),
    (["--draft", "prompt-lookup", "--method", "rsd-c"], PromptLookup, "rsd-c"),
])  # fmt: skip
def test_what_is_given_is_honoured(run, folders, decoders, command, given, draft, method):
    default = "ersd" if command in ("serve", "batch") else "sequoia"
    code, _, errors = run(command, "--target", folders / "target", *given)
    assert code == 0, errors
    assert ("no --draft" in errors) == (draft is Recall)
    assert draft is not Recall or SAID.format(method) in errors
    assert decoders == [(draft, method or default)]


def test_the_text_is_that_of_plain_decoding(run, folders):
    for more in ([], ["--temperature", 1, "--seed", 3]):
        answers = [
            json.loads(run("generate", "--target", folders / "target", "--json", *more, *plain)[1])
            for plain in ([], ["--method", "autoregressive"])
        ]
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert [answer["settings"]["method"] for answer in answers] == ["ersd", "autoregressive"]


@pytest.mark.slow
def test_compare_compares_all_methods_with_recall_and_plain_decoding_first(heavypath, folders):
    given = ("compare", "one", "--target", folders / "target", "--max-new-tokens", 2, "--json")
    code, output, errors = heavypath(*given)
    assert (code, errors) == (0, "heavypath: no --draft: drafting from text already written (Recall)\n")
    assert [row["method"] for row in json.loads(output)["rows"]][:3] == [PLAIN, "autoregressive", "chain"]
    plain = heavypath(*given, "--method", "autoregressive")
    assert (plain[0], plain[2]) == (0, "")


@pytest.mark.parametrize("wrapped", [lambda recall: recall, lambda recall: Mixture([PromptLookup(), recall])])
def test_no_method_is_measured_with_texts_that_another_one_or_an_earlier_round_has_written(demo_pair, wrapped):
    """A text that was read before would be drafted to its end, which no user sees who asks once."""
    target, _, tokenizer = demo_pair
    given = Recall()
    prompt = tokenizer("class Stack:\n    def push(", return_tensors="pt").input_ids
    drafts = {"a": wrapped(given), "b": wrapped(given)}
    rows = compare(target, drafts, [prompt], methods=["chain"], max_new_tokens=24, repeats=2)
    counts = [row.tokens_per_forward for row in rows if row.method != PLAIN]
    fresh = SpeculativeDecoder(target, wrapped(Recall()), "chain").generate(prompt, 24, temperature=0.0)
    assert counts == [pytest.approx(fresh.stats.tokens_per_step)] * 2
    again = SpeculativeDecoder(target, wrapped(given), "chain").generate(prompt, 24, temperature=0.0)
    assert again.stats.tokens_per_step == pytest.approx(counts[0]), "what was given has learned nothing either"
