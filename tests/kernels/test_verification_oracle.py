"""The exact oracle itself: each of its rules emits the target's law, with a difference of 0."""

from fractions import Fraction

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


@pytest.mark.budget(1.7)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", GROWTHS)
def test_each_rule_emits_the_targets_law_exactly(name, rule):
    for seed, zeros in enumerate((0.0, 0.4)):
        language = Language(3, seed, zeros)
        assert keeps_the_law(RULES[rule], language, GROWTHS[name], 4, replacement=True)
        for fill in (False, True) if rule in DISTINCT else ():
            assert keeps_the_law(RULES[rule], language, GROWTHS[name], 4, fill=fill)


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


def accepted(rule, language, children, **ways):
    """The probability that one of so many children of the root is accepted."""
    trees = drawn(language, static([-1] + [0] * children), **ways)
    replacement = ways.get("replacement", False)
    return sum(
        chance * part
        for tree, chance in trees
        for (path, _), part in RULES[rule](language, tree, (), replacement).items()
        if path
    )


def with_root(target, draft):
    """A language whose laws after the root are these whole numbers, over their sum."""
    language = Language(len(target), 0)
    language._known |= {("target", ()): oracle.whole(target), ("draft", ()): oracle.whole(draft)}
    return language


@pytest.mark.parametrize("rule", RULES)
def test_one_child_is_accepted_with_the_overlap_and_as_many_as_tokens_always(rule):
    for seed in range(3):
        language = Language(4, seed)
        assert accepted(rule, language, 1) == sum(map(min, language.target(()), language.draft(())))
        assert rule not in DISTINCT or accepted(rule, language, 4) == 1


@pytest.mark.parametrize("rule", DISTINCT)
@pytest.mark.parametrize(("target", "draft"), [
    ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0)),
    ((0, 3, 0, 1, 0), (0, 1, 0, 5, 0)),
    ((2, 0, 1, 0, 0), (1, 0, 3, 2, 0)),
    ((1, 1, 0, 5, 1), (4, 1, 0, 1, 3)),
])  # fmt: skip
def test_as_many_children_as_the_draft_has_tokens_cover_the_target(rule, target, draft):
    """Sequoia's theorem 3.7: k children where the draft has k tokens, fewer than the vocabulary, among them all of the
    target's. One fewer does not do."""
    language, tokens = with_root(target, draft), sum(map(bool, draft))
    assert accepted(rule, language, tokens) == 1
    assert accepted(rule, language, tokens - 1) < 1


def test_other_rules_miss_what_theorem_37_promises():
    """The four counter-examples of Sequoia's appendix F.6. Each of its two promises is broken by two rules."""
    sure, even = with_root((1, 0), (1, 1)), with_root((3, 2), (3, 2))
    # Two draws from a draft of two tokens are both the wrong one in a quarter of the cases.
    assert accepted("rejection", sure, 2, replacement=True) == Fraction(3, 4)  # SpecInfer
    assert accepted("k_seq", sure, 2, replacement=True) == Fraction(3, 4)  # SpecTr
    # Draft and target are equal, and a rule that waits for the target's own sample takes one child less than always.
    target, draft = even.target(()), even.draft(())
    assert max(draft) == target[draft.index(max(draft))] == Fraction(3, 5)  # top-k: the likeliest token is the child
    assert sum(p * q for p, q in zip(target, draft, strict=True)) == Fraction(13, 25)  # naive: the child is drawn
    assert accepted("rejection", sure, 2) == accepted("rejection", even, 1) == 1
