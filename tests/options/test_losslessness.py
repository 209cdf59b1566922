"""The joint law of three tokens over consecutive steps is the target's, for every way of drawing and verifying."""

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

# name: (verification, tree, target filters, draft filters, replacement, uniform fill)
SETTINGS = {
    "one child": ("without_replacement", TokenTree.chain(2), PLAIN, PLAIN, False, False),
    "no draft": ("without_replacement", TokenTree([-1]), PLAIN, PLAIN, False, False),
    "two children": ("without_replacement", TokenTree.k_ary(2, 2), PLAIN, PLAIN, False, False),
    "ragged tree": ("without_replacement", TokenTree([-1, 0, 1, 1, 0, 4, 0]), PLAIN, PLAIN, False, False),
    "siblings out of index order": (
        "without_replacement", TokenTree([-1, 0, 1, 1, 0, 4], [0, 1, 0, 1, 0, 0]), PLAIN, PLAIN, False, False,
    ),
    "other draft temperature": ("without_replacement", TokenTree.k_ary(2, 2), COOL, HOT, False, False),
    "filtered target": ("without_replacement", TokenTree.k_ary(2, 2), Filters(1.2, 3, 0.8), PLAIN, False, False),
    "truncated draft": ("without_replacement", TokenTree.k_ary(3, 2), PLAIN, Filters(top_k=2), False, False),
    "truncated draft, filled": ("without_replacement", TokenTree.k_ary(3, 2), PLAIN, Filters(top_k=1), False, True),
    "draft's top-k as point masses": ("without_replacement", TokenTree.k_ary(2, 2), PLAIN, Filters(0.0), False, False),
    "independent draws": ("with_replacement", TokenTree.k_ary(2, 2), PLAIN, PLAIN, True, False),
    "a leaf's equal sibling has children": ("with_replacement", TokenTree([-1, 0, 0, 2]), PLAIN, PLAIN, True, False),
    "independent draws, ragged": ("with_replacement", TokenTree([-1, 0, 0, 2, 0, 4, 4]), PLAIN, HOT, True, False),
    "filled by other filters": (
        "without_replacement", TokenTree.k_ary(3, 2), Filters(0.8, top_k=2), Filters(top_p=0.5), False, True,
    ),
    "min-p on both sides": (
        "without_replacement", TokenTree.k_ary(2, 2), Filters(min_p=0.2), Filters(min_p=0.05), False, False,
    ),
    "independent sequences": ("with_replacement", TokenTree.independent(3, 2), COOL, HOT, True, False),
    "held siblings": ("held", TokenTree.k_ary(2, 2), PLAIN, PLAIN, False, False),
    "held siblings, truncated draft, filled": ("held", TokenTree.k_ary(3, 2), PLAIN, Filters(top_k=1), False, True),
    "held siblings, filtered, out of index order": (
        "held", TokenTree([-1, 0, 0, 0, 1, 1], [0, 2, 0, 1, 1, 0]), Filters(1.2, 3, 0.8), HOT, False, False,
    ),
    "held siblings, draft's top-k as point masses": ("held", TokenTree.k_ary(2, 2), PLAIN, Filters(0.0), False, False),
    "held siblings, independent": ("held", TokenTree.independent(3, 2), COOL, HOT, True, False),
    "held siblings, an equal sibling has children": ("held", TokenTree([-1, 0, 0, 2, 2]), PLAIN, PLAIN, True, False),
    "race": ("race", TokenTree.k_ary(2, 2), PLAIN, PLAIN, False, False),
    "race, other draft temperature": ("race", TokenTree.k_ary(2, 2), COOL, HOT, False, False),
    "spectr": ("kseq", TokenTree.independent(3, 2), PLAIN, PLAIN, True, False),
    "spectr, filtered": ("kseq", TokenTree.k_ary(2, 2), COOL, HOT, True, False),
    "naive": ("target_sample", TokenTree.k_ary(2, 2), PLAIN, PLAIN, True, False),
    "naive, a leaf's equal sibling has children": ("target_sample", TokenTree([-1, 0, 0, 2]), COOL, HOT, True, False),
    "naive, distinct siblings": ("target_sample", TokenTree.k_ary(2, 2), PLAIN, PLAIN, False, False),
    "top-k": ("target_sample", TokenTree.k_ary(2, 2), COOL, Filters(0.0), False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_of_three_tokens_over_steps_is_the_targets(name):
    method, tree, target_filters, draft_filters, replacement, fill = SETTINGS[name]
    language = ToyLanguage(VOCABULARY, seed=6)
    text = decode(
        language, tree, method=method, sequences=SEQUENCES, target_filters=target_filters, draft_filters=draft_filters,
        replacement=replacement, uniform_fill=fill, seed=7,
    )  # fmt: skip
    counts = joint_counts(text, VOCABULARY)
    assert chi_square_p_value(counts, language.law(target_filters)) > SIGNIFICANCE


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
