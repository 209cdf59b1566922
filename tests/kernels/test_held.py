"""Held siblings: a case by hand, and what is gained over rejection by enumeration.

That they keep the target's law: test_verification_oracle.py; that verify_tree is that rule: test_verification.py.
"""

from fractions import Fraction

import pytest
from verification_oracle import Language, drawn, holding, rejecting, static, whole


@pytest.mark.parametrize("replacement", [False, True])
def test_a_child_is_accepted_at_least_as_often_as_by_rejection(replacement):
    gains = []
    for seed in range(30):
        language = Language(3 + seed % 2, seed, zeros=0.2 * (seed % 3))
        drafts = [language.draft(())] * (2 + seed % 2)
        trees = drawn(language, static([-1] + [0] * len(drafts)), (), replacement, fill=True)
        gains.append(Fraction(0))
        for tree, chance in trees:
            rejected, held = (sum(rule(language.target(()), drafts, tree.tokens[1:], replacement)[0])
                              for rule in (rejecting, holding))  # fmt: skip
            gains[-1] += chance * (held - rejected)
    assert min(gains) >= 0
    assert float(sum(gains) / len(gains)) > 0.01


def test_two_children_by_hand():
    """P = (1/2, 1/2), Q = (3/4, 1/4), x = (0, 1): t_1 = 2/3, and then P - Q leaves 1/4 for token 1, the only one left.

    l = 1, s_1 = (1 - 2/3) / (1/4) = 4/3, c = 4/3, R = 1/4: t_2 = 4/3 (1/4) (1/4) / (1/4) = 1/3. From l + 1 / (c R) = 4
    on nothing is left, and s_2 = (1 - 1/3) / (2/3) = 1: the weights are 2/3 and 1/3. Drawn as (1, 0), t_1 = 1.
    """
    target, drafts = whole([1, 1]), 2 * [whole([3, 1])]
    assert holding(target, drafts, (0, 1), False)[0] == [Fraction(2, 3), Fraction(1, 3)]
    assert holding(target, drafts, (1, 0), False)[0] == [1, 0]
