"""Ways to decode by kind of work: the shipped prompts have their form, and figures are what was decoded and timed."""

import json
import math
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import PromptLookup, SpeculativeDecoder, TokenTree, compare_suite
from heavypath.speculative.suite.estimates import Estimate, geometric_mean_of, mean_of, share_of
from heavypath.speculative.suite.measure import in_words
from heavypath.speculative.suite.page import suite_page
from heavypath.speculative.suite.plots import BOTTOM, HEIGHT, TOP, bars, lines
from heavypath.speculative.suite.prompts import SHIPPED, part_of_suite, read_suite, suite_tokens, without_template
from heavypath.speculative.ways import ASSISTED, LOOKUP, PLAIN

GIVEN = ("summary", "extraction", "rewriting")  # kinds whose prompts have a text after their first paragraph
SMALL = {"code": ["import os", "def read(self):"], "dialogue": [["x = 1", "y = 2", "z = 3"]]}


@pytest.fixture
def pair():
    return [tiny_llama(seed, vocab_size=1024, layers=1) for seed in (0, 1)]


@pytest.fixture
def tokenizer(demo_pair):
    return demo_pair.tokenizer


def rows_by_way(results, kind="code", temperature=0.0):
    return {row.way: row for row in results.rows if (row.kind, row.temperature) == (kind, temperature)}


def test_the_shipped_suite_has_ten_different_prompts_of_each_of_eight_kinds():
    suite = read_suite()
    kinds = ["writing", "code", "summary", "extraction", "translation", "maths", "dialogue", "rewriting"]
    assert [*suite] == kinds
    assert {len(prompts) for prompts in suite.values()} == {10}
    every = [without_template(prompt) for prompts in suite.values() for prompt in prompts]
    assert len({*every}) == 80
    assert len({text[:25] for kind in kinds if kind not in GIVEN for text in map(without_template, suite[kind])}) > 40
    assert SHIPPED.stat().st_size < 100_000


def test_the_shipped_texts_have_their_lengths_and_dialogues_three_turns():
    for kind, prompts in read_suite().items():
        for prompt in prompts:
            assert isinstance(prompt, list) == (kind == "dialogue")
            words = len(without_template(prompt).split())
            if kind in GIVEN:
                asked, _, text = prompt.partition("\n\n")
                assert 4 <= len(asked.split()) <= 40
                assert 100 <= len(text.split()) <= 250
            elif kind == "dialogue":
                assert len(prompt) == 5
                assert words <= 200
            else:
                assert 20 <= words <= 100


def test_each_prompt_is_decoded_as_a_decoder_does_it(pair, tokenizer):
    target, draft = pair
    results = compare_suite(target, draft, tokenizer, suite=SMALL, temperatures=[0.0, 0.7], max_new_tokens=9, seed=3)
    assert [(row.kind, row.temperature, row.way) for row in results.rows] == [
        (kind, temperature, way)
        for kind in ("code", "dialogue", "all")
        for temperature in (0.0, 0.7)
        for way in (PLAIN, ASSISTED, "autoregressive", "chain", "sequoia")
    ]
    for temperature in (0.0, 0.7):
        row = rows_by_way(results, temperature=temperature)["sequoia"]
        decoder = SpeculativeDecoder(target, draft, "sequoia")
        prompts = [tokenizer(text, return_tensors="pt").input_ids for text in SMALL["code"]]
        steps = [decoder.generate(ids, 9, temperature, seed=3).stats.steps for ids in prompts]
        assert (row.new_tokens, row.passes) == ([9, 9], steps)
        assert row.tokens_per_pass.mean == pytest.approx(sum(9 / count for count in steps) / 2)
        assert row.tokens_per_pass.error == pytest.approx(abs(9 / steps[0] - 9 / steps[1]) / 2)
        whole = rows_by_way(results, "all", temperature)["sequoia"]
        assert whole.new_tokens == row.new_tokens + rows_by_way(results, "dialogue", temperature)["sequoia"].new_tokens
    assert {row.text for row in results.rows if row.temperature == 0} == {"equal", "reference"}
    assert results.settings["prompts"] == {"code": 2, "dialogue": 1}
    assert rows_by_way(results, "dialogue")["chain"].tokens_per_pass.error is None


def test_acceptance_by_depth_is_1_where_the_draft_is_the_target_and_0_where_it_never_agrees(pair, tokenizer):
    target = pair[0]
    contrary = tiny_llama(0, vocab_size=1024, layers=1)
    contrary.lm_head.weight.data.neg_()
    named = {name: SpeculativeDecoder(target, each, tree=TokenTree.chain(3))
             for name, each in (("same", target), ("contrary", contrary))}  # fmt: skip
    results = compare_suite(target, named, tokenizer, suite=SMALL, kinds=["code"], max_new_tokens=12, methods=[])
    rows = rows_by_way(results)
    assert [share.mean for share in rows["same"].acceptance] == [1, 1, 1]
    assert [share.mean for share in rows["contrary"].acceptance] == [0], "no node of a second level was reached"
    assert rows["same"].tokens_per_pass == Estimate(4, 0)
    assert rows["contrary"].tokens_per_pass == Estimate(1, 0)
    assert rows["autoregressive"].acceptance == rows[PLAIN].acceptance == []


def test_acceptance_of_each_depth_is_the_decoders_own(pair, tokenizer):
    target, draft = pair[0], tiny_llama(0, vocab_size=1024, layers=1)
    torch.manual_seed(1)
    draft.lm_head.weight.data += 0.2 * torch.randn_like(draft.lm_head.weight)
    decoder = SpeculativeDecoder(target, draft, tree=TokenTree.chain(3))
    options = {"suite": {"code": ["import os"]}, "methods": [], "max_new_tokens": 40, "temperatures": [1.0]}
    row = rows_by_way(compare_suite(target, {"mine": decoder}, tokenizer, **options), temperature=1.0)["mine"]
    stats = decoder.generate(tokenizer("import os", return_tensors="pt").input_ids, 40, 1.0, seed=0).stats
    assert [share.mean for share in row.acceptance] == stats.acceptance_by_depth
    assert len({*stats.acceptance_by_depth}) == 3


def test_ratios_are_taken_prompt_by_prompt(pair, tokenizer, monkeypatch):
    """By a clock: transformers takes 8 and 4 seconds, assisted 2 and 8, plain decoding 2 and 4, a chain 1 and 0.5."""
    target, draft = pair
    times = iter([second for seconds in (8, 2, 2, 1, 4, 8, 4, 0.5) for second in (0, seconds)])
    monkeypatch.setattr("heavypath.speculative.ways.time", SimpleNamespace(perf_counter=lambda: next(times)))
    options = {"suite": SMALL, "kinds": ["code"], "methods": ["autoregressive", "chain"], "max_new_tokens": 4}
    chain = rows_by_way(compare_suite(target, draft, tokenizer, **options))["chain"]
    assert chain.over_transformers.mean == pytest.approx(8)
    assert chain.over_transformers.error == pytest.approx(0)
    assert chain.over_plain.mean == pytest.approx(4)  # of 2 and 8
    assert chain.over_plain.error == pytest.approx(4 * math.log(2))
    assert chain.over_assisted.mean == pytest.approx(math.sqrt(2 * 16))
    assert chain.tokens_per_second.mean == pytest.approx(math.sqrt(4 * 8))
    assert chain.seconds == [1, 0.5]


def test_drafts_that_are_no_models_are_compared_with_transformers_lookup(pair, tokenizer):
    target, draft = pair
    options = {"suite": SMALL, "kinds": ["code"], "methods": ["chain"], "max_new_tokens": 6}
    results = compare_suite(target, {"small": draft, "lookup": PromptLookup()}, tokenizer, **options)
    rows = rows_by_way(results)
    assert [*rows] == [PLAIN, f"{ASSISTED}, small", LOOKUP, "autoregressive", "chain, small", "chain, lookup"]
    for way, assisted in (("chain, small", f"{ASSISTED}, small"), ("chain, lookup", LOOKUP)):
        pairs = zip(rows[assisted].seconds, rows[way].seconds, strict=True)
        assert rows[way].over_assisted.mean == pytest.approx(math.prod(a / b for a, b in pairs) ** 0.5)
    assert rows["autoregressive"].over_assisted is None


def test_what_transformers_refuses_is_left_out_with_its_reason(pair, tokenizer, monkeypatch):
    target, draft = pair
    generate = type(target).generate

    def refusing(self, *given, assistant_model=None, **options):
        if assistant_model is not None:
            raise ValueError("assisted generation is not supported with this model")
        return generate(self, *given, **options)

    monkeypatch.setattr(type(target), "generate", refusing)
    results = compare_suite(target, draft, tokenizer, suite=SMALL, methods=["chain"], max_new_tokens=4)
    assert results.left_out == {ASSISTED: "assisted generation is not supported with this model"}
    assert [*rows_by_way(results)] == [PLAIN, "autoregressive", "chain"]
    assert rows_by_way(results)["chain"].over_assisted is None
    assert "is not supported" in suite_page(results, {})


def test_the_chat_template_is_used_if_there_is_one(tokenizer, monkeypatch):
    device = torch.device("cpu")
    plain = suite_tokens(["x = 1", "y = 2", "z = 3"], tokenizer, device)
    assert tokenizer.decode(plain[0]) == "User: x = 1\n\nAssistant: y = 2\n\nUser: z = 3\n\nAssistant:"
    assert tokenizer.decode(suite_tokens("import os", tokenizer, device)[0]) == "import os"
    template = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template, raising=False)
    asked = suite_tokens(["x = 1", "y = 2", "z = 3"], tokenizer, device)
    assert tokenizer.decode(asked[0]) == "<user>x = 1<assistant>y = 2<user>z = 3>"
    assert tokenizer.decode(suite_tokens("import os", tokenizer, device)[0]) == "<user>import os>"


def test_progress_says_the_time_left_and_results_come_after_each_kind(pair, tokenizer):
    said, counts = [], []
    compare_suite(*pair, tokenizer, suite=SMALL, methods=["chain"], max_new_tokens=2, on_progress=said.append,
                  on_results=lambda results: counts.append(len(results.rows)))  # fmt: skip
    assert said[:2] == [f"warm-up at temperature 0: {way}" for way in (PLAIN, ASSISTED)]
    assert said[4] == f"code, temperature 0, prompt 1 of 2: {PLAIN}"
    assert said[-1].startswith("dialogue, temperature 0, prompt 1 of 1: chain; about ")
    assert said[-1].endswith(" s left")
    assert counts == [4, 8]
    assert [in_words(seconds) for seconds in (3.2, 89, 600, 7_500)] == ["3 s", "89 s", "10 min", "2 h 5 min"]


def test_errors_are_those_of_independent_prompts():
    assert mean_of([1.0, 3.0]) == Estimate(2.0, 1.0)
    assert mean_of([5.0]) == Estimate(5.0, None)
    assert geometric_mean_of([1.0, 4.0]).mean == pytest.approx(2)
    over, under = geometric_mean_of([3.0, 5.0, 9.0]), geometric_mean_of([1 / 3, 1 / 5, 1 / 9])
    assert over.mean * under.mean == pytest.approx(1)
    assert over.error / over.mean == pytest.approx(under.error / under.mean)
    equal = share_of([3, 1, 2], [4, 4, 4])
    expected = mean_of([3 / 4, 1 / 4, 2 / 4])  # with equal wholes a ratio estimator is the mean of the shares
    assert equal == (pytest.approx(expected.mean), pytest.approx(expected.error))
    assert share_of([30, 0], [40, 0]).mean == 0.75
    assert [str(each) for each in (Estimate(1.234, 0.056), Estimate(45.67, 1.2), Estimate(1234.5, 30.0))] == [
        "1.23 ± 0.06", "45.7 ± 1.2", "1234 ± 30"
    ]  # fmt: skip
    assert Estimate(1.234, 0.056).in_short() == "1.23±.06"


def test_bars_are_as_high_as_their_values_with_their_errors():
    drawn = ElementTree.fromstring(
        bars(["a", "b & c"], [("one", [Estimate(2, 0.5), Estimate(4, None)]), ("two", [None, Estimate(1, 0)])])
    )
    heights = [float(each.get("height")) for each in drawn.iter("rect")]
    room = HEIGHT - BOTTOM - TOP
    assert heights == [pytest.approx(room / 2, abs=0.1), pytest.approx(room, abs=0.1), pytest.approx(room / 4, abs=0.1)]
    (error,) = (each for each in drawn.iter("line") if each.get("class") == "error")
    assert float(error.get("y1")) - float(error.get("y2")) == pytest.approx(room / 4, abs=0.2)
    assert [each.text for each in drawn.iter("title")] == [
        "a, one: 2.00 ± 0.50",
        "b & c, one: 4.00",
        "b & c, two: 1.00 ± 0.00",
    ]


def test_lines_go_through_their_values_from_left_to_right():
    drawn = ElementTree.fromstring(lines([("one", [Estimate(1, 0.1), Estimate(0.5, None)]), ("none", [])]))
    heights = [float(each.get("cy")) for each in drawn.iter("circle")]
    assert heights == [TOP, pytest.approx((TOP + 150 - BOTTOM) / 2)]
    assert ElementTree.fromstring(bars(["a"], [("none", [None])])) is not None


def test_the_page_stands_alone_and_has_every_way(pair, tokenizer):
    results = compare_suite(*pair, tokenizer, suite={"<kind>": ["import os"]}, methods=["chain"], max_new_tokens=2)
    page = suite_page(results, {"device": "a <machine>", "kernels": {}})
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<kind>" not in page
    assert "a &lt;machine&gt;" in page
    for way in (PLAIN, ASSISTED, "autoregressive", "chain"):
        assert f"</i>{way}</span>" in page
    assert page.count("<svg") == 3
    assert "no chat template" in page


@pytest.mark.parametrize(("content", "message"), [
    ([], "must be an object of kinds"),
    ({}, "must be an object of kinds"),
    ({"code": []}, "kind 'code' .* must be a list of prompts"),
    ({"code": "x"}, "kind 'code' .* must be a list of prompts"),
    ({"code": ["x", " "]}, "prompt 2 of kind 'code' .* must be a text"),
    ({"code": [["x", "y"]]}, "an odd number of texts"),
    ({"code": [["x", 3, "y"]]}, "prompt 1 of kind 'code'"),
])  # fmt: skip
def test_what_is_no_suite_is_refused(content, message, tmp_path):
    (tmp_path / "suite.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_suite(tmp_path / "suite.json")


def test_files_and_parts_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "text.json").write_text("plain text")
    with pytest.raises(ValueError, match="a suite must be a file of JSON"):
        read_suite(tmp_path / "text.json")
    with pytest.raises(OSError, match=r"cannot read the suite in '.*none.json': No such file"):
        read_suite(tmp_path / "none.json")
    with pytest.raises(ValueError, match="a kind must be one of code, dialogue, got 'codes'"):
        part_of_suite(SMALL, ["codes"])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        part_of_suite(SMALL, None, 0)
    assert part_of_suite(SMALL, ["dialogue", "code"], 1) == {"dialogue": SMALL["dialogue"], "code": ["import os"]}


@pytest.mark.parametrize(("options", "message"), [
    ({"temperatures": []}, "temperatures must be a list"),
    ({"temperatures": 0.5}, "temperatures must be a list"),
    ({"temperatures": [-1.0]}, "temperature"),
    ({"repeats": 0}, "repeats must be at least 1"),
    ({"max_new_tokens": 63}, "prompt 1 of kind 'code' has 2 tokens, .* 64 positions leave no room for 63"),
    ({"methods": ["medusa"]}, "medusa"),
])  # fmt: skip
def test_mistakes_are_refused_before_anything_is_decoded(options, message, pair, tokenizer, monkeypatch):
    monkeypatch.setattr("heavypath.speculative.suite.measure.timed_runs", None)
    with pytest.raises(ValueError, match=message):
        compare_suite(*pair, tokenizer, **{"suite": {"code": ["import os"]}, "max_new_tokens": 4} | options)
