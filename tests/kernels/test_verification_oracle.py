"""The exact oracle itself: right rules differ from the target's law by nothing, and each wrong one by something."""

import importlib.util
import inspect
import sys

import pytest
import verification_oracle
from growths import GROWTHS, by_the_first_token
from verification_oracle import Drawn, Language, static, target_law, text_law

RULES = ("rejection", "held", "traversal", "held_traversal")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize(("replacement", "fill"), [(False, False), (False, True), (True, False)])
def test_each_rule_emits_the_targets_law_exactly(name, rule, replacement, fill):
    verifier = getattr(verification_oracle, rule)
    for seed, zeros in enumerate((0.0, 0.4)):
        language = Language(3, seed, zeros)
        law = text_law(language, verifier, GROWTHS[name], 4, replacement=replacement, fill=fill)
        assert law == target_law(language, (), 4)


@pytest.mark.parametrize("rule", RULES)
def test_two_steps_emit_the_targets_law_exactly(rule):
    verifier = getattr(verification_oracle, rule)
    for vocab_size, shape in ((3, [-1, 0, 0, 2]), (4, [-1, 0, 0])):
        language = Language(vocab_size, seed=1)
        law = text_law(language, verifier, static(shape), 4, steps=2)
        assert law == target_law(language, (), 4)


@pytest.mark.parametrize(
    "rule", RULES[:3]
)  # held traversal wants groups of siblings that are complete before they grow
def test_trees_that_grow_by_what_was_drawn_keep_the_law_exactly(rule):
    verifier = getattr(verification_oracle, rule)
    for seed in range(3):
        language = Language(3, seed, zeros=0.2)
        assert text_law(language, verifier, by_the_first_token, 3) == target_law(language, (), 3)


def test_one_child_of_a_fair_coin_by_hand():
    """P = (1/2, 1/2), Q = (1, 0): child 0 is accepted in half of the cases, else token 1 follows."""
    tree = Drawn((-1, 0), (-1, 0))
    half = verification_oracle.ONE / 2
    language = Language(2, 0)
    language._known |= {("target", ()): (half, half), ("draft", ()): (2 * half, 0 * half)}
    bonus = dict(enumerate(language.target((0,))))
    expected = {((), 1): half} | {((1,), token): half * chance for token, chance in bonus.items()}
    for rule in RULES:
        assert dict(getattr(verification_oracle, rule)(language, tree, (), False)) == expected


MUTANTS = {  # each with the rules that it must break
    "r without 1 - n": ("whole = 1 - n + rest", "whole = rest", RULES[1:]),
    "t without R": ("NONE) * mass / q[token]", "NONE) / q[token]", RULES[1:]),
    "l without R": ("1 / (c * mass)", "1 / c", RULES[1:]),
    "l without c": ("1 / (c * mass)", "1 / mass", RULES[1:]),
    "c and n are scaled alike for all children": ("((1 - take) if held else 1)", "1", ("held", "held_traversal")),
    "the youngest comes first": (
        "for token in tokens:\n        undrawn",
        "for token in tokens[::-1]:\n        undrawn",
        RULES[1:],
    ),
    "n is forgotten where the draft is used up": (
        "multiple, mass = NONE, ONE",
        "multiple, mass, n = NONE, ONE, ONE",
        RULES[1:],
    ),
    "P is made whole where the draft is used up": (
        "multiple, mass = NONE, ONE",
        "multiple, mass, c = NONE, ONE, n",
        RULES[1:],
    ),
    "equal siblings are dropped": (
        "for token in tokens:\n        undrawn",
        "for token in dict.fromkeys(tokens):\n        undrawn",
        RULES[1:],
    ),
    "w is not below the root": ("tokens, replacement, weight, held)", "tokens, replacement, ONE, held)", RULES[2:]),
    "the recovered token is the target's": (
        "rest = _rest(p, q, multiple)\n    return",
        "rest = p\n    return",
        RULES[1:],
    ),
}

WAYS = (("binary", False, False), ("star", True, False), ("star", False, True), ("a deep younger child", True, False))


def mutated(original: str, replacement: str):
    """A copy of the oracle in which some text of its source is replaced."""
    source = inspect.getsource(verification_oracle)
    assert original in source, f"{original!r} is not in the oracle: update the mutant"
    spec = importlib.util.spec_from_loader("mutated_oracle", loader=None)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    exec(compile(source.replace(original, replacement), "<mutated oracle>", "exec"), copy.__dict__)
    return copy


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_is_found(name):
    original, replacement, broken = MUTANTS[name]
    copy = mutated(original, replacement)

    def keeps_the_law(rule: str, seed: int, name: str, replacement: bool, fill: bool) -> bool:
        language = Language(3, seed, zeros=0.5 if fill else 0.0)
        given = language, getattr(copy, rule), GROWTHS[name], 3
        try:
            return text_law(*given, replacement=replacement, fill=fill) == target_law(language, (), 3)
        except (AssertionError, ZeroDivisionError, ValueError, IndexError):
            return False

    ways = [(seed, *way) for way in WAYS for seed in range(8 if way[2] else 3)]
    assert [rule for rule in RULES if not all(keeps_the_law(rule, *way) for way in ways)] == [*broken]
