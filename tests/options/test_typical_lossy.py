"""Method typical-lossy: its text has the law of its rule, which is not the target's, and everything says so."""

import json
import logging
import math
from functools import cache

import pytest
import torch
from profile_cases import profile_of
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    Method,
    SpeculativeDecoder,
    TokenTree,
    compare,
    read_trace,
)
from heavypath.speculative.calibration import ways_to_draft
from heavypath.speculative.output.page import trace_page

PROMPT = torch.tensor([3, 1, 4])
SAID = "typical acceptance, epsilon 0.09, delta 0.3"


@torch.inference_mode()
def law_of_the_rule(target, draft, length, epsilon, delta):
    """Joint probabilities [V ** length] of the next tokens where chains of two are drafted, by enumeration.

    What a step drafts is certain, and so is what it accepts. The token behind that is drawn, and so is the last of all.
    """
    vocab = target.config.vocab_size

    @cache
    def after(model, text):
        return model(torch.tensor([text])).logits[0, -1].double().softmax(0)

    @cache
    def law(text, left):
        if left <= 0:
            return {(): 1.0}
        accepted = ()
        while len(accepted) < min(2, left - 1):
            drafted, p = int(after(draft, text + accepted).argmax()), after(target, text + accepted)
            entropy = -sum(float(q) * math.log(float(q)) for q in p)
            if not float(p[drafted]) > min(epsilon, delta * math.exp(-entropy)):
                break
            accepted += (drafted,)
        found = {}
        for token, chance in enumerate(after(target, text + accepted).tolist()):
            new = (*accepted, token)[:left]
            for rest, share in law(text + new, left - len(new)).items():
                found[new + rest] = found.get(new + rest, 0.0) + chance * share
        return found

    joint = torch.zeros(vocab**length, dtype=torch.float64)
    for tokens, chance in law(tuple(PROMPT.tolist()), length).items():
        joint[sum(token * vocab**place for place, token in enumerate(reversed(tokens)))] += chance
    return joint


def test_the_joint_law_of_four_tokens_is_that_of_the_rule_and_not_the_targets(tiny_pair):
    limits = {"epsilon": 0.3, "delta": 0.9}
    decoder = SpeculativeDecoder(*tiny_pair, "typical-lossy", tree=TokenTree.chain(2), **limits)
    out = decoder.generate(PROMPT.expand(10_000, -1), max_new_tokens=4, seed=11, temperature=1.0)
    counts = joint_counts(out.sequences[:, 3:], 7)
    assert chi_square_p_value(counts, law_of_the_rule(*tiny_pair, 4, **limits)) > SIGNIFICANCE
    assert chi_square_p_value(counts, exact_law(tiny_pair[0], PROMPT, Filters(1.0), 4)) < 1e-12
    assert out.stats.tokens_per_step > 1.1


def test_the_statistics_the_log_and_the_trace_page_say_that_the_law_was_changed(tiny_pair, caplog, tmp_path):
    decoder = SpeculativeDecoder(*tiny_pair, "typical-lossy")
    with caplog.at_level(logging.DEBUG, "heavypath"):
        out = decoder.generate(PROMPT[None], max_new_tokens=20, temperature=0.8, trace=tmp_path / "trace")
    assert out.stats.law_changed_by == SAID
    assert f"output distribution   changed by {SAID}" in str(out.stats)
    assert f"the output distribution is changed by {SAID}" in caplog.text
    header, steps = read_trace(tmp_path / "trace")
    assert (header["verify"], header["law_changed_by"]) == ("typical", SAID)
    assert f"<dt>output distribution</dt><dd>changed by {SAID}</dd>" in trace_page(header, steps)
    caplog.clear()
    for method, temperature in (("sequoia", 0.8), ("typical-lossy", 0.0)):  # at temperature 0 nothing is changed
        decoder, options = SpeculativeDecoder(*tiny_pair, method), {"max_new_tokens": 4, "temperature": temperature}
        other = decoder.generate(PROMPT[None], trace=tmp_path / "trace", **options)
        assert other.stats.law_changed_by == read_trace(tmp_path / "trace")[0]["law_changed_by"] == ""
        assert "law" not in str(other.stats)
        assert "law" not in caplog.text


def test_a_trace_says_of_each_node_that_was_reached_what_its_chance_had_to_be(tiny_pair, tmp_path):
    decoder = SpeculativeDecoder(*tiny_pair, "typical-lossy", tree=TokenTree.k_ary(3, 2))
    decoder.generate(PROMPT.expand(4, -1), max_new_tokens=30, temperature=1.0, trace=tmp_path / "trace")
    seen = set()
    for step in read_trace(tmp_path / "trace")[1]:
        for node, fate in enumerate(step["fates"]):
            seen.add(fate)
            assert step["coins"][node] is None
            if fate in ("accepted", "unlikely", "shorter"):
                assert (step["target"][node] > step["thresholds"][node]) == (fate != "unlikely")
                assert step["parents"][node] in step["path"]
                assert (node in step["path"]) == (fate == "accepted")
            else:
                assert step["thresholds"][node] is None
    assert {"accepted", "unlikely", "shorter", "parent"} <= seen


def test_compare_measures_it_where_it_is_asked_for_and_claims_no_law(tiny_pair):
    names = ["autoregressive", "typical-lossy"]
    for temperature, text in ((0.8, "other law"), (0.0, "equal")):
        rows = compare(*tiny_pair, PROMPT[None], methods=names, max_new_tokens=4, temperature=temperature)
        assert {row.method: row.text for row in rows}["typical-lossy"] == text
    assert "typical-lossy" not in compare.__kwdefaults__["methods"]


def test_the_command_line_says_it_too(heavypath):
    options = ("import os", "--method", "typical-lossy", "--temperature", "0.8", "--max-new-tokens", "2")
    code, out, _ = heavypath("generate", *options, "--json")
    assert (code, json.loads(out)["stats"]["law_changed_by"]) == (0, SAID)
    code, out, _ = heavypath("compare", *options)
    assert code == 0
    assert "other law: the method changes the output's distribution" in " ".join(out.split())


def test_limits_are_options_of_this_method_alone(tiny_pair):
    for method in LOSSLESS_METHODS:
        with pytest.raises(ValueError, match=r"typical acceptance, method 'typical-lossy', takes epsilon and delta$"):
            SpeculativeDecoder(*tiny_pair, method, epsilon=0.1, delta=0.3)
    with pytest.raises(ValueError, match=r"only typical acceptance, .* takes epsilon$"):
        SpeculativeDecoder(*tiny_pair, epsilon=0.1)
    with pytest.raises(ValueError, match=r"epsilon must be in \[0, 1\], got 2"):
        SpeculativeDecoder(*tiny_pair, "typical-lossy", epsilon=2)
    with pytest.raises(ValueError, match="is its verification; with a verifier of your own give another method"):
        SpeculativeDecoder(*tiny_pair, "typical-lossy", verifier=lambda *_, **__: None)
    out = SpeculativeDecoder(*tiny_pair, "typical-lossy", epsilon=0.2, delta=0.5).generate(
        PROMPT[None], 4, temperature=1.0
    )
    assert out.stats.law_changed_by == "typical acceptance, epsilon 0.2, delta 0.5"


def test_it_is_not_lossless_in_the_table_and_nothing_else_is_lossy(tiny_pair):
    assert {*METHODS} - {*LOSSLESS_METHODS} == {"typical-lossy"}
    assert not Method("with_replacement", "typical", TokenTree.chain).is_lossless
    assert "typical" not in {way.verification for way in ways_to_draft(1.0, "cpu")}


def test_a_profile_measures_no_lossy_method(tiny_pair):
    with pytest.raises(ValueError, match="a profile is for methods that keep the target's law; give 'typical-lossy'"):
        SpeculativeDecoder(*tiny_pair, "typical-lossy", profile=profile_of())
    with pytest.raises(ValueError, match="a profile measures methods that keep the target's law, got 'typical-lossy'"):
        profile_of().plan("typical-lossy", Filters(1.0))
