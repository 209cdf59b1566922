"""The exact oracle itself: each of its rules emits the target's law, with a difference of 0."""

import pytest
import verification_oracle as oracle
from verification_oracle import (
    GROWTHS,
    NONE,
    ONE,
    Drawn,
    Filtered,
    Language,
    by_the_first_token,
    drawn,
    keeps_the_law,
    rejection,
    static,
)

from heavypath.kernels.filtering import Filters

RULES = {name: getattr(oracle, name) for name in ("rejection", "held", "traversal", "held_traversal", "k_seq")}
DISTINCT = [name for name in RULES if name != "k_seq"]  # which K-SEQ does not take


@pytest.mark.few(9)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", GROWTHS)
def test_each_rule_emits_the_targets_law_exactly(name, rule):
    for seed, zeros in enumerate((0.0, 0.4)):
        language = Language(3, seed, zeros)
        assert keeps_the_law(RULES[rule], language, GROWTHS[name], 4, replacement=True)
        for fill in (False, True) if rule in DISTINCT else ():
            assert keeps_the_law(RULES[rule], language, GROWTHS[name], 4, fill=fill)


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES)
def test_two_steps_emit_the_targets_law_exactly(rule):
    for vocab_size, shape in ((3, [-1, 0, 0, 2]), (4, [-1, 0, 0])):
        language = Language(vocab_size, seed=1)
        assert keeps_the_law(RULES[rule], language, static(shape), 4, steps=2, replacement=rule not in DISTINCT)


def by_a_grandchild(tree: Drawn) -> int | None:
    """Whether the root gets a second child depends on a token below the first one."""
    return [0, 1, 0 if tree.tokens[-1] == 0 else 1, None][len(tree.parents) - 1]


@pytest.mark.parametrize("growth", [by_the_first_token, by_a_grandchild])
def test_trees_that_grow_by_what_was_drawn_keep_the_law_exactly(growth):
    """Held traversal wants groups of siblings that are complete before they grow."""
    languages = [Language(3, seed, zeros=0.2) for seed in range(3)]
    kept = [rule for rule in DISTINCT if all(keeps_the_law(RULES[rule], each, growth, 3) for each in languages)]
    assert kept == (DISTINCT[:3] if growth is by_a_grandchild else DISTINCT)


@pytest.mark.parametrize("rule", DISTINCT)
def test_the_drafts_likeliest_tokens_keep_the_law_exactly(rule):
    language = Filtered(Language(3, 5, most=97), Filters(), Filters(0.0))
    growth = static([-1, 0, 0, 1, 1, 2])
    assert len([*drawn(language, growth, sources=[0, 0, 1, 0, 1, 0])]) == 1
    assert keeps_the_law(RULES[rule], language, growth, 4, replacement=True, sources=[0, 0, 1, 0, 1, 0])


def test_siblings_of_several_drafts_keep_the_law_exactly_by_the_drafts_that_they_are_from():
    growth, sources = static([-1, 0, 0, 0, 1, 1]), [0, 0, 1, 0, 0, 2]
    language = Language(3, 4, zeros=0.1)
    assert keeps_the_law(rejection, language, growth, 3, replacement=True, sources=sources)
    wrong = oracle.Verifier(
        lambda language, tree, *more: rejection.ends(language, tree._replace(sources=6 * (0,)), *more)
    )
    assert not keeps_the_law(wrong, language, growth, 3, replacement=True, sources=sources)


def test_one_child_of_a_fair_coin_by_hand():
    """P = (1/2, 1/2), Q = (1, 0): child 0 is accepted in half of the cases, else token 1 follows."""
    tree, half = Drawn((-1, 0), (-1, 0), (0, 0)), ONE / 2
    language = Language(2, 0)
    language._known |= {("target", ()): (half, half), ("draft", ()): (ONE, NONE)}
    bonus = dict(enumerate(language.target((0,))))
    expected = {((), 1): half} | {((1,), token): half * chance for token, chance in bonus.items()}
    for verifier in RULES.values():
        assert verifier(language, tree) == expected


@pytest.mark.parametrize("rule", RULES)
def test_one_child_is_accepted_with_the_overlap_and_as_many_as_tokens_always(rule):
    def accepted(language, children):
        trees = drawn(language, static([-1] + [0] * children))
        return sum(
            chance * part for tree, chance in trees for (path, _), part in RULES[rule](language, tree).items() if path
        )

    for seed in range(3):
        language = Language(4, seed)
        assert accepted(language, 1) == sum(map(min, language.target(()), language.draft(())))
        assert rule not in DISTINCT or accepted(language, 4) == 1
