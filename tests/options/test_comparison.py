"""What the comparison says about a method is true: counts, ratios, and whether its text is the target's."""

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from own_verifier import sample_the_target
from profile_cases import greedy_counts, profile_of
from rich.console import Console
from tiny_models import tiny_llama

from heavypath.speculative import PromptLookup, SpeculativeDecoder, TokenTree
from heavypath.speculative.comparison import (
    ASSISTED,
    PLAIN,
    ComparedWay,
    as_table,
    compare,
    headline,
    over_plain,
    plot_ratios,
)
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.files.prompts import read_prompts

PROMPTS = [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9, 2]])]


@pytest.fixture
def pair():
    return [tiny_llama(seed, vocab_size=11, layers=1) for seed in (0, 1)]


def verdicts(rows):
    return {row.method: row.text for row in rows}


def last_token_changed(monkeypatch, change):
    """Every decoder ends its text with another token: change(token)."""
    generate = SpeculativeDecoder.generate

    def changed(self, *arguments, **options):
        out = generate(self, *arguments, **options)
        out.sequences[:, -1] = change(out.sequences[:, -1])
        return out

    monkeypatch.setattr(SpeculativeDecoder, "generate", changed)


def test_plain_decoding_takes_one_forward_per_token_and_is_the_reference(pair):
    rows = compare(*pair, PROMPTS, methods=["autoregressive", "sequoia", "dyspec", "ersd"], max_new_tokens=8)
    plain = rows[0]
    assert (plain.method, plain.text, plain.ratio, plain.ratio_range) == (PLAIN, "reference", 1.0, (1.0, 1.0))
    assert all(row.tokens_per_forward == 1 for row in rows if row.method in (PLAIN, "autoregressive"))
    assert all(row.text == "equal" and row.logit_gap is None for row in rows[1:])
    assert all(row.ratio_range[0] <= row.ratio <= row.ratio_range[1] for row in rows)


def test_of_several_rounds_the_fastest_run_of_each_prompt_counts(pair, monkeypatch):
    seconds = {PLAIN: [4, 2, 5], "autoregressive": [3, 8, 1]}
    lasting = [second for turn in range(3) for own in seconds.values() for second in (0, own[turn])]
    monkeypatch.setattr("heavypath.speculative.ways.time", SimpleNamespace(perf_counter=iter(lasting).__next__))
    said = []
    options = {"methods": ["autoregressive"], "max_new_tokens": 4, "repeats": 3, "on_progress": said.append}
    rows = compare(pair[0], None, PROMPTS[:1], **options)
    assert [row.tokens_per_second for row in rows] == [4 / 2, 4 / 1]
    assert rows[1].ratio == 2
    assert said[-1] == "round 3 of 3, prompt 1 of 1: autoregressive"
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        compare(pair[0], None, PROMPTS, methods=["autoregressive"], repeats=0)


def test_another_token_counts_as_a_difference_and_one_of_the_same_logit_as_a_tie(pair, monkeypatch):
    target, draft = pair
    with monkeypatch.context() as patched:
        last_token_changed(patched, lambda token: (token + 1) % 11)
        row = compare(target, draft, PROMPTS, methods=["sequoia"], max_new_tokens=8)[-1]
    assert row.text == "differs"
    assert row.logit_gap > 1e-4
    target.lm_head.weight.data[1::2] = target.lm_head.weight[0:10:2]  # tokens 2i and 2i + 1 tie
    last_token_changed(monkeypatch, lambda token: torch.where(token < 10, token ^ 1, token))
    row = compare(target, draft, PROMPTS, methods=["sequoia"], max_new_tokens=8)[-1]
    assert row.text == "tie"
    assert row.logit_gap < 1e-4


def test_sampled_races_are_held_to_the_plain_text_and_the_rest_to_no_text(pair, monkeypatch):
    methods = ["autoregressive", "chain", "ersd"]
    options = {"methods": methods, "max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    expected = {"autoregressive": "reference", "chain": "same law", "ersd": "equal"}
    expected |= dict.fromkeys([PLAIN, ASSISTED], "same law")
    assert verdicts(compare(*pair, PROMPTS, **options)) == expected
    steps = iter(range(100))
    last_token_changed(monkeypatch, lambda token: (token + next(steps)) % 11)
    assert verdicts(compare(*pair, PROMPTS, **options))["ersd"] == "differs"


def test_several_drafts_are_combined_with_each_method_and_ready_decoders_are_taken_as_they_are(pair):
    target, draft = pair
    wide = SpeculativeDecoder(target, draft, tree=TokenTree.from_branching([4]))
    named = {"small": draft, "lookup": PromptLookup(), "same": target, "wide": wide}
    options = {"methods": ["chain", "autoregressive", "top-k"], "max_new_tokens": 9, "tree_size": 5}
    rows = {row.method: row for row in compare(target, named, PROMPTS, **options)}
    chains, stars = ([f"{method}, {draft}" for draft in ("small", "lookup", "same")] for method in ("chain", "top-k"))
    assert [*rows] == [PLAIN, f"{ASSISTED}, small", f"{ASSISTED}, same", *chains, "autoregressive", *stars, "wide"]
    assert all(row.text in ("equal", "reference") for row in rows.values())
    assert rows["chain, same"].tokens_per_forward == 9 / 2  # twice 4 and the bonus token, less 1


def test_shapes_and_profiles_are_those_of_the_decoders(pair, tmp_path):
    target, draft = pair
    options = {"methods": ["sequoia"], "max_new_tokens": 12}
    four = compare(target, target, PROMPTS, tree=TokenTree.chain(3), **options)[-1]
    assert four.tokens_per_forward == 4  # 3 drafted and a bonus token
    profile = profile_of(greedy_counts([[600, 200]], [1000]))
    replace(profile, verifier=None, target=describe(target), draft=describe(draft)).save(tmp_path / "profile")
    assert compare(target, draft, PROMPTS, profile=tmp_path / "profile", **options)[-1].text == "equal"
    with pytest.raises(ValueError, match="a profile chooses the trees"):
        compare(target, draft, PROMPTS, profile=tmp_path / "profile", tree_size=3, **options)
    lookup = compare(target, PromptLookup(), PROMPTS, **options)
    assert [row.method for row in lookup] == [PLAIN, "sequoia"]  # assisted generation needs a model
    alone = compare(target, None, PROMPTS, methods=["autoregressive"], max_new_tokens=4)
    assert [row.method for row in alone] == [PLAIN, "autoregressive"]


def test_prompts_may_be_texts_files_and_tokens(demo_pair, tmp_path):
    target, draft = (tiny_llama(seed, vocab_size=1024, layers=1) for seed in (0, 1))
    tokenizer = demo_pair.tokenizer
    (tmp_path / "two.txt").write_text("import os\n\ndef read(self):\n")
    (tmp_path / "three.jsonl").write_text('"class A:\\n    pass"\n{"prompt": "x = 1", "id": 7}\n\n"y"\n')
    prompts = ["import re", tmp_path / "two.txt", tokenizer("a = 2", return_tensors="pt").input_ids]
    prompts.append(tmp_path / "three.jsonl")
    lines = []
    options = {"methods": ["chain"], "max_new_tokens": 2}
    rows = compare(target, draft, prompts, tokenizer=tokenizer, on_progress=lines.append, **options)
    assert lines[-1] == "prompt 7 of 7: chain"
    assert len(rows[-1].ratios) == 7
    assert read_prompts(tmp_path / "three.jsonl") == ["class A:\n    pass", "x = 1", "y"]
    assert len(compare(target, draft, "import re", tokenizer=tokenizer, **options)[0].ratios) == 1


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
def test_a_prompt_ends_with_its_line_and_not_at_other_separators_of_unicode(separator, tmp_path):
    prompt = f"one{separator}two"
    (tmp_path / "a.txt").write_text(f"{prompt}\nthree\n", encoding="utf-8-sig")  # as on Windows
    (tmp_path / "a.jsonl").write_text(f'"{prompt}"\n"three"\n', encoding="utf-8-sig")
    assert read_prompts(tmp_path / "a.txt") == [prompt, "three"]
    if separator != "\x0c":  # which JSON escapes
        assert read_prompts(tmp_path / "a.jsonl") == [prompt, "three"]


@pytest.mark.parametrize(("prompts", "error", "message"), [
    ([], ValueError, "at least one prompt, got none"),
    (["text"], ValueError, "prompts that are texts need the tokenizer"),
    ([torch.tensor([1, 2])], ValueError, r"a prompt must be a LongTensor \[1, T\], got torch.int64 \[2\]"),
    ([[1, 2]], TypeError, r"a prompt must be a text, a Path .*, got list"),
])  # fmt: skip
def test_what_is_no_prompt_is_refused(prompts, error, message, pair):
    with pytest.raises(error, match=message):
        compare(*pair, prompts)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.txt", b"\n \n", r"the prompts in '.*a.txt' are empty"),
    ("a.txt", b"caf\xe9", r"the prompts in '.*a.txt' are not UTF-8"),
    ("a.jsonl", b"plain text\n", r"a.jsonl, line 1: expected JSON, got 'plain text'"),
    ("a.jsonl", b'"x"\n\n{"text": 3}\n', r'line 3: expected a JSON string, or an object with a string "prompt", got'),
])  # fmt: skip
def test_files_that_hold_no_prompts_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(("make", "message"), [
    (lambda target, draft: {"d": draft, "chain, d": SpeculativeDecoder(target, draft)}, "ways .* called 'chain, d'"),
    (lambda target, draft: {"mine": SpeculativeDecoder(draft, target)}, "the decoder 'mine' decodes another target"),
    (lambda target, draft: {"mine": SpeculativeDecoder(target, draft, "ersd")}, r"'ersd' \(mine\) is compared with"),
])  # fmt: skip
def test_decoders_that_cannot_be_compared_are_refused(make, message, pair):
    with pytest.raises(ValueError, match=message):
        compare(pair[0], make(*pair), PROMPTS, methods=["chain"], temperature=1.0, max_new_tokens=8)


def test_the_law_of_an_own_verifier_is_not_claimed(pair):
    target, draft = pair
    named = {"mine": SpeculativeDecoder(target, draft, "ersd", verifier=sample_the_target)}
    assert verdicts(compare(target, named, PROMPTS, max_new_tokens=4, temperature=1.0))["mine"] == "unchecked"
    assert verdicts(compare(target, named, PROMPTS, max_new_tokens=4))["mine"] == "equal"


def test_ratios_are_paired_with_their_median_and_quartiles(pair, monkeypatch):
    """By a clock that lets transformers take 1, 2, 4, 8 and 16 seconds for a prompt, and us 1, of 4 tokens each."""
    plain = SpeculativeDecoder(*pair)
    plain.clock = lambda: 0.0
    times = iter([second for seconds in (1, 2, 4, 8, 16) for second in (0, seconds, 0, 1)])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("heavypath.speculative.ways.time", clock)
    theirs, ours = compare(pair[0], {"ours": plain}, PROMPTS[:1] * 5, max_new_tokens=4)
    assert ours.ratios == (1, 2, 4, 8, 16)
    assert (ours.ratio, ours.ratio_quartiles, ours.ratio_range) == (4, (2, 8), (1, 16))
    assert (ours.tokens_per_second, theirs.tokens_per_second) == (4, 20 / 31)


def test_a_plot_has_a_bar_from_quartile_to_quartile_for_each_way(tmp_path, monkeypatch):
    rows = [ComparedWay(PLAIN, 1, 1, 1, (1, 1), "reference", None, (1, 1), (1, 1))]
    rows += [
        ComparedWay(name, 2, 2, 2, (1, 4), "equal", None, (1.5, 3), (1, 1.5, 2, 3, 4)) for name in ("chain", "ersd")
    ]
    plot_ratios(rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("chain", "ersd"))
    assert drawn.count("fill: #2b6cb8") == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib: `pip install '\.\[figures\]'`"):
        plot_ratios([], tmp_path / "plot.png")


def row(method, *ratios, text="same law"):
    return ComparedWay(
        method, 1.0, 100.0, sorted(ratios)[len(ratios) // 2], (min(ratios), max(ratios)), text, ratios=ratios
    )


def test_the_table_fits_80_columns_and_has_the_ratio_to_plain_decoding_where_that_was_measured():
    def shown(*rows):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(as_table(rows))
        return [line.split() for line in console.export_text().splitlines()]

    lines = shown(row(PLAIN, 1), row("naive-distinct, held_traversal", 2, 99), row(ASSISTED, 100))
    assert any(words[:2] == ["transformers", "generate"] for words in lines)
    assert not any("…" in word for words in lines for word in words)
    rows = row("autoregressive", 4, 5, 6), row("sequoia", 8, 9, 12)
    assert [words[-3] for words in shown(*rows) if "law" in words] == ["1.00", "2.00"]
    assert over_plain(rows[1:]) == [None]
    assert "plain" not in {word for words in shown(*rows[1:]) for word in words}, "no column without figures"


def test_the_headline_says_what_the_fastest_gains_over_transformers_and_over_plain_decoding():
    plain, tree = row("autoregressive", 4, 5, 6), row("sequoia", 8, 9, 12)
    lossy = row("typical-lossy", 20, 20, 20, text="other law")
    assert headline([row(PLAIN, 1, 1, 1), row(f"{ASSISTED}, small", 30, 30, 30), plain, lossy, tree]) == (
        "fastest (median of 3 prompts): sequoia, 9.00 times transformers generate and 2.00 times plain decoding "
        "(autoregressive)"
    )
    assert headline([tree]) == "fastest (median of 3 prompts): sequoia, 9.00 times transformers generate"
    slow = row("chain", 3, 3, 3)
    assert headline([plain, slow]) == (
        "fastest (median of 3 prompts): autoregressive, 5.00 times transformers generate; no draft pays here"
    )
    assert headline([row(PLAIN, 1, 1, 1)]) is None
