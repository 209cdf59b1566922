"""Verifiers by name: which methods take which, and what profiles and tables say of them."""

import json
from dataclasses import replace

import pytest
import torch
from profile_cases import profile_of

from heavypath.speculative import LOSSLESS_METHODS, METHODS, SpeculativeDecoder, calibrate
from heavypath.speculative.comparison import compare
from heavypath.speculative.methods import VERIFIERS, default_verifier, row_of

PROMPT = torch.tensor([3, 1, 4])
SMALL = {"tokens": 8, "sequences": 4, "sizes": (1, 2, 4), "batch_sizes": [1], "limit": 60}  # for `calibrate`


def test_the_methods_of_recursive_rejection_take_all_verifiers_but_held_traversal_where_trees_grow(tiny_pair):
    taken = {word: {name for name, row in METHODS.items() if word in row.verifiers} for word in VERIFIERS}
    assert taken["rejection"] == {"chain", "specinfer", "sequoia", "dyspec", "rsd-c", "rsd-s"}
    assert taken["rejection"] == taken["held"] == taken["traversal"]
    assert taken["held"] - taken["held_traversal"] == {"dyspec", "rsd-s"}
    for method in ("dyspec", "rsd-s"):
        with pytest.raises(ValueError, match=r"not so where trees grow.*it takes rejection, held, traversal$"):
            SpeculativeDecoder(*tiny_pair, method, verifier="held_traversal")


@pytest.mark.parametrize("method", METHODS)
def test_without_a_verifier_a_method_has_that_of_the_kind_of_device(method, tiny_pair):
    """And one that verifies otherwise than by rejection refuses a verifier by name."""
    named = default_verifier(method, "cpu")
    assert (named is not None) == bool(METHODS[method].verifiers)
    assert default_verifier(method, "a device on which nothing was measured") is None
    for verifier in (None, named, "rejection")[: 3 if named else 1]:
        decoder = SpeculativeDecoder(*tiny_pair, method, tree_size=8, verifier=verifier)
        stats = decoder.generate(PROMPT[None], 4, temperature=0.8).stats
        papers = METHODS[method].verification  # what the method's paper has
        assert stats.verification == (papers if verifier == "rejection" else named or papers)
        assert decoder.generate(PROMPT[None], 4).stats.verification == "greedy"
    if not METHODS[method].verifiers:
        message = f"replaces recursive rejection, .* chain, .*; method '{method}' is verified by '.*': leave"
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(*tiny_pair, method, verifier="held")


@pytest.mark.usefixtures("any_noise")
def test_a_profile_of_another_verifier_is_refused(tiny_pair, tmp_path):
    target, draft = tiny_pair
    profile = calibrate(target, draft, temperatures=[1.0], **SMALL, verifier="held")
    assert {entry.verification for entry in profile.acceptance} == {"held", "kseq", "race", "target_sample"}
    profile.save(tmp_path / "profile.json")
    for method in ("sequoia", "specinfer"):
        for verifier in (None, "rejection"):
            with pytest.raises(ValueError, match=f"measured with method '{method}' verified by 'held', got '"):
                SpeculativeDecoder(target, draft, method, profile=tmp_path / "profile.json", verifier=verifier)
    decoder = SpeculativeDecoder(target, draft, "sequoia", profile=tmp_path / "profile.json", verifier="held")
    decoder.generate(PROMPT[None], 8, temperature=1.0)
    SpeculativeDecoder(target, draft, "spectr", profile=profile).generate(PROMPT[None], 8, temperature=1.0)
    with pytest.raises(ValueError, match=r"verifier must be .* got 'bold'"):
        calibrate(target, draft, verifier="bold")


def test_a_profile_without_a_verifier_is_of_what_its_kind_of_device_has():
    profile = replace(profile_of(), verifier=None)
    for method in LOSSLESS_METHODS:
        assert profile.row(method) == row_of(method, default_verifier(method, "cpu"))
    elsewhere = replace(profile, environment={"device_type": "cuda"})
    assert elsewhere.row("sequoia") == METHODS["sequoia"]
    assert replace(elsewhere, verifier="held").row("sequoia").verification == "held"


def test_methods_are_compared_with_each_verifier(tiny_pair):
    prompts = [PROMPT[None]]
    options = {"max_new_tokens": 8, "temperature": 1.0, "verifiers": ["rejection", "held"]}
    rows = compare(*tiny_pair, prompts, methods=["sequoia", "spectr"], **options)
    assert [row.method for row in rows[2:]] == ["sequoia, rejection", "sequoia, held", "spectr"]
    assert {row.text for row in rows} == {"same law"}
    with pytest.raises(ValueError, match="method 'naive' is verified by 'target_sample'"):
        compare(*tiny_pair, prompts, methods=["naive"], **options)


def test_the_command_line_takes_a_verifier(heavypath):
    options = ("--max-new-tokens", "6", "--temperature", "1", "--json", "--verifier", "held")
    code, out, _ = heavypath("generate", "def f(", *options)
    answer = json.loads(out)
    assert (code, answer["settings"]["verifier"], answer["stats"]["verification"]) == (0, "held", "held")
    code, out, _ = heavypath("compare", "def f(", "--method", "chain", "--verifier", "rejection", *options)
    assert code == 0
    assert [row["method"] for row in json.loads(out)["rows"]][-2:] == ["chain, rejection", "chain, held"]
    code, _, error = heavypath("generate", "def f(", "--method", "spectr", "--verifier", "held")
    assert code == 1
    assert "leave the verifier out" in error
