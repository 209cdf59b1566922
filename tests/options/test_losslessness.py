"""The joint law of three tokens over consecutive steps is the target's, for every way of drawing and verifying.

That each rule keeps the law of one step is shown exactly (tests/kernels/test_verification_oracle.py).
"""

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from toy_language import ToyLanguage, decode

from heavypath.kernels.filtering import Filters
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import goodness_of_fit
from heavypath.speculative.trees.tree import TokenTree

SEQUENCES, VOCABULARY = 25_000, 5
PLAIN = Filters()
COOL, HOT = Filters(temperature=0.7), Filters(temperature=1.4)

BINARY, TERNARY = TokenTree.k_ary(2, 2), TokenTree.k_ary(3, 2)
EQUAL, SEQUENCES_OF_2 = TokenTree([-1, 0, 0, 2]), TokenTree.independent(3, 2)
DIFFERENT = {"target_filters": COOL, "draft_filters": HOT}
INDEPENDENT, POINTS = {"replacement": True}, {"draft_filters": Filters(0.0)}  # the draft's top-k as point masses
TRUNCATED = {"draft_filters": Filters(top_k=1), "uniform_fill": True}
WITHOUT, WITH = "without_replacement", "with_replacement"
SETTINGS = {  # verification, tree, and options of `decode`
    "siblings out of index order": (WITHOUT, TokenTree([-1, 0, 1, 1, 0, 4], [0, 1, 0, 1, 0, 0]), {}),
    "other draft temperature": (WITHOUT, BINARY, DIFFERENT),
    "truncated on both sides, filled": (WITHOUT, TERNARY, TRUNCATED | {"target_filters": Filters(0.8, top_k=2)}),
    "min-p": (WITHOUT, BINARY, {"target_filters": Filters(min_p=0.2), "draft_filters": Filters(min_p=0.05)}),
    "points": (WITHOUT, BINARY, POINTS),
    "a leaf's equal sibling has children": (WITH, EQUAL, INDEPENDENT),
    "independent sequences": (WITH, SEQUENCES_OF_2, INDEPENDENT | DIFFERENT),
    "held, truncated draft, filled": ("held", TERNARY, TRUNCATED),
    "held, out of index order": ("held", TokenTree([-1, 0, 0, 0, 1, 1], [0, 2, 0, 1, 1, 0]), DIFFERENT),
    "race": ("race", BINARY, DIFFERENT),
    "spectr, filtered": ("kseq", BINARY, INDEPENDENT | DIFFERENT),
    "naive": ("target_sample", EQUAL, INDEPENDENT | DIFFERENT),
    "top-k": ("target_sample", BINARY, POINTS | {"target_filters": COOL}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_of_three_tokens_over_steps_is_the_targets(name):
    method, tree, options = SETTINGS[name]
    language = ToyLanguage(VOCABULARY, seed=6)
    text = decode(language, tree, method=method, sequences=SEQUENCES, seed=7, **options)
    law = language.law(options.get("target_filters", PLAIN))
    assert chi_square_p_value(joint_counts(text, VOCABULARY), law) > SIGNIFICANCE


def test_a_race_writes_the_same_text_with_any_draft_and_any_tree():
    texts, trees = [], [TokenTree([-1]), TokenTree.chain(3), TokenTree.k_ary(2, 2), TokenTree.k_ary(3, 1)]
    for draft_seed, tree in enumerate(trees):
        language = ToyLanguage(5, seed=1)
        language.draft = torch.randn(5, 5, generator=torch.Generator().manual_seed(draft_seed))
        texts.append(decode(language, tree, method="race", sequences=2_000, length=6, seed=3))
    assert all(torch.equal(text, texts[0]) for text in texts)


def by_a_uniform_draft(tokens, parents, target_logits, draft_logits, **options):
    return verify_tree(tokens, parents, target_logits, 0 * draft_logits, **options)


@pytest.mark.parametrize(("bug", "first"), [
    ({}, None), ({"stale": True}, False), ({"verify_tree": by_a_uniform_draft}, True),
])  # fmt: skip
def test_a_bug_is_found_and_named_at_the_token_where_it_arises(bug, first):
    """Noise that is used again in every step leaves the law of the first token as it is."""
    language = ToyLanguage(3, seed=3)
    text = decode(language, TokenTree.chain(1), method="without_replacement", sequences=SEQUENCES, **bug)
    fit = goodness_of_fit(text, language.law(PLAIN).view(3, 3, 3))
    assert fit.is_lossless() == (first is None)
    if first is not None:
        assert (min(len(one.prefix) for one in fit.tokens if one.p_value < 1e-6) == 0) == first
