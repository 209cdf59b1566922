"""Held siblings: a case by hand, where they decide as rejection, and what is gained over it by enumeration.

That they keep the target's law: test_verification_oracle.py; that verify_tree is that rule: test_verification.py.
"""

import pytest
import torch
from verification_oracle import Language, drawn, holding, rejecting, static

from heavypath.kernels.verification import verify_tree


@pytest.mark.parametrize("replacement", [False, True])
def test_a_child_is_accepted_at_least_as_often_as_by_rejection(replacement):
    gains = []
    for seed in range(30):
        language = Language(3 + seed % 2, seed, zeros=0.2 * (seed % 3))
        children = 2 + seed % 2
        accepted = [
            sum(
                chance
                * sum(rule(language.target(()), [language.draft(())] * children, tree.tokens[1:], replacement)[0])
                for tree, chance in drawn(language, static([-1] + [0] * children), (), replacement, fill=True)
            )
            for rule in (rejecting, holding)
        ]
        gains.append(accepted[1] - accepted[0])
    assert min(gains) >= 0
    assert float(sum(gains) / len(gains)) > 0.01


def test_two_children_by_hand():
    """P = (1/2, 1/2), Q = (3/4, 1/4), x = (0, 1): t_1 = 2/3, and then P - Q leaves 1/4 for token 1, the only one left.

    l = 1, s_1 = (1 - 2/3) / (1/4) = 4/3, c = 4/3, R = 1/4: t_2 = 4/3 (1/4) (1/4) / (1/4) = 1/3. From l + 1 / (c R) = 4
    on nothing is left, and s_2 = (1 - 1/3) / (2/3) = 1: the weights are 2/3 and 1/3. Drawn as (1, 0), t_1 = 1.
    """
    logits = torch.tensor([3.0, 1.0]).log(), torch.zeros(2)
    seeds = 400
    tokens, parents = torch.tensor([[0, 0, 1]]).repeat(seeds, 1), torch.tensor([-1, 0, 0])
    draft, target = (row.expand(seeds, 3, 2) for row in logits)
    verified = verify_tree(tokens, parents, target, draft, method="held")
    assert (verified.length == 1).all()
    assert abs(float((verified.path[:, 1] == 1).double().mean()) - 2 / 3) < 0.12
    verified = verify_tree(tokens[:, [0, 2, 1]], parents, target, draft, method="held")
    assert (verified.path[:, 1] == 1).all()


@pytest.mark.parametrize(("parents", "draft_temperature"), [([-1, 0, 1, 2, 3], 1.0), ([-1, 0, 0, 1, 0], 0.0)])
@pytest.mark.parametrize("replacement", [False, True])
def test_single_children_and_point_masses_are_decided_as_by_rejection(parents, draft_temperature, replacement):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 300, 5, 6, generator=generator)
    tokens = torch.stack([torch.randperm(6, generator=generator)[:5] for _ in range(300)])
    held, rejected = (
        verify_tree(tokens, torch.tensor(parents), *logits, draft_temperature=draft_temperature, **rule)
        for rule in ({"method": "held", "replacement": replacement}, {"method": "without_replacement"})
    )
    assert all(torch.equal(*fields) for fields in zip(held, rejected, strict=True))
    assert held.length.max() >= 2
