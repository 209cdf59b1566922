"""Held siblings: exact laws and weights of the implementation itself, and what is gained over recursive rejection."""

from functools import partial
from math import log2, nan

import numpy as np
import pytest
import torch
import verification_oracle
from bisection import bisected
from mutations import mutated
from verification_oracle import Language, drawn, static

from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying import held, residual
from heavypath.kernels.verifying.residual import residual_chain


def logs(law) -> np.ndarray:
    return np.array([[log2(part) if part else -np.inf for part in law]])


def draws(language: Language, children: int, replacement: bool, fill: bool) -> tuple[np.ndarray, np.ndarray]:
    """Every draw of so many children of the root, int64 [n, k], and its probability [n]."""
    trees = [*drawn(language, static([-1] + [0] * children), (), replacement, fill)]
    return np.array([tree.tokens[1:] for tree, _ in trees]), np.array([float(chance) for _, chance in trees])


def weights_of(language: Language, tokens: np.ndarray, replacement: bool, chain=residual_chain):
    """What `residual_chain` does with each row of children: the weights [n, k], by bisecting the coin, and the law
    [n, V] of the recovered token, nan where there is none. Other coins than the first child's must not be read: nan."""
    rows, children = tokens.shape
    sides = [logs(law).repeat(rows, 0) for law in (language.target(()), language.draft(()))]

    def decided(coins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        coins[:, 1:] = nan
        return chain(*sides, tokens, coins, replacement, True)

    def accepts(coins: np.ndarray, place: int) -> np.ndarray:
        choice, _ = decided(coins)
        return (choice >= 0) & (choice <= place)

    upto = np.zeros((rows, children))
    for place in range(children):
        upto[:, place] = bisected(partial(accepts, place=place), rows, children, 0)
    choice, stopped = decided(np.ones(tokens.shape))
    recovered = np.full((rows, len(language.target(()))), nan)
    recovered[choice < 0] = stopped / stopped.sum(1, keepdims=True)
    return np.diff(upto, axis=1, prepend=0), recovered


def error_of_the_law(language: Language, children: int, replacement: bool, fill: bool, chain=residual_chain) -> float:
    """How far the emitted token's law is from the target's, at most."""
    tokens, probability = draws(language, children, replacement, fill)
    weights, recovered = weights_of(language, tokens, replacement, chain)
    law = np.zeros(language.vocab_size)
    for place in range(children):
        np.add.at(law, tokens[:, place].clip(0), probability * weights[:, place])
    stop = probability * (1 - weights.sum(1))
    law += (stop[:, None] * recovered)[stop > 1e-12].sum(0)
    return float(abs(law - np.array(language.target(()), float)).max())


WAYS = [(False, False), (False, True), (True, False)]  # with replacement, uniform fill


@pytest.mark.parametrize(("replacement", "fill"), WAYS)
@pytest.mark.parametrize(("vocab_size", "children"), [(2, 2), (3, 1), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_the_token_after_a_node_has_exactly_the_targets_law(vocab_size, children, replacement, fill):
    for seed, zeros in enumerate((0.0, 0.0, 0.3, 0.5)):
        language = Language(vocab_size, seed, zeros)
        assert error_of_the_law(language, children, replacement, fill) < 1e-11


@pytest.mark.parametrize(("replacement", "fill"), WAYS)
def test_each_weight_is_the_oracles(replacement, fill):
    for seed, zeros in enumerate((0.0, 0.0, 0.4)):
        language = Language(4, seed, zeros)
        tokens, _ = draws(language, 3, replacement, fill)
        weights, recovered = weights_of(language, tokens, replacement)
        for row, found, law in zip(tokens, weights, recovered, strict=True):
            given = language.target(()), language.draft(()), row.tolist(), replacement
            expected, rest = verification_oracle.holding(*given)
            np.testing.assert_allclose(found, np.array(expected, float), atol=1e-12)
            if sum(expected) < 1:
                np.testing.assert_allclose(law, np.array(rest, float), atol=1e-12)


@pytest.mark.parametrize("replacement", [False, True])
def test_a_child_is_accepted_at_least_as_often_as_by_rejection(replacement):
    gains = []
    for seed in range(60):
        language = Language(3 + seed % 2, seed, zeros=0.2 * (seed % 3))
        accepted = []
        for rule in (verification_oracle.rejecting, verification_oracle.holding):
            accepted.append(
                sum(
                    chance * sum(rule(language.target(()), language.draft(()), tree.tokens[1:], replacement)[0])
                    for tree, chance in drawn(language, static([-1, 0, 0, 0][: 3 + seed % 2]), (), replacement)
                )
            )
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


def problem(method_draws: int, seed: int, nodes: int = 5, vocab_size: int = 6):
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, 300, nodes, vocab_size, generator=generator)
    tokens = torch.stack([torch.randperm(vocab_size, generator=generator)[:nodes] for _ in range(300)])
    return tokens, target, draft


def test_a_single_child_is_decided_as_by_rejection():
    tokens, target, draft = problem(1, seed=3)
    for parents in (torch.tensor([-1, 0, 1, 2, 3]), torch.tensor([-1, 0, 1, 2, 2])):
        tokens[:, 4] = -1
        held, rejected = (
            verify_tree(tokens, parents, target, draft, method=method) for method in ("held", "without_replacement")
        )
        assert all(torch.equal(*fields) for fields in zip(held, rejected, strict=True))
    assert held.length.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("replacement", [False, True])
def test_point_masses_are_decided_as_by_rejection(replacement):
    tokens, target, draft = problem(4, seed=4)
    parents = torch.tensor([-1, 0, 0, 1, 0])
    held, rejected = (
        verify_tree(tokens, parents, target, draft, method=method, draft_temperature=0.0, **more)
        for method, more in (("held", {"replacement": replacement}), ("without_replacement", {}))
    )
    assert all(torch.equal(*fields) for fields in zip(held, rejected, strict=True))
    assert held.length.unique().tolist() == [0, 1, 2]


MUTANTS = {
    "the elder do not lose": (held, "weights *= scale[:, None]", "pass"),
    "the elder are not counted": (held, "whole = weights.sum(1) + left", "whole = left"),
    "what is left keeps all": (held, "(1 - chance) / whole", "1 / whole"),
    "c stays": (residual, "total / scale", "total"),
    "l without c": (residual, "np.log2(total) - log_mass", "-log_mass"),
    "l without R": (residual, "np.log2(total) - log_mass", "np.log2(total)"),
    "t without R": (residual, "np.exp2(log_mass - log_q)", "np.exp2(-log_q)"),
    "c is new after a restart": (residual, "target.sum(-1) / mass_left", "target.sum(-1)"),
    "the elder of a certain child stay": (residual, "holding[accepted] = np.arange(drawn.shape[1]) == place",
                                          "holding[accepted, place] = 1"),
    "children stay in the draft": (residual, "undrawn[sequence[rejected], child[rejected]] = False", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_is_found(name, monkeypatch):
    module, original, replacement = MUTANTS[name]
    copy = mutated(module, original, replacement)
    if module is held:
        monkeypatch.setattr(residual, "hold", copy.hold)
    chain = residual_chain if module is held else copy.residual_chain

    def found(replacement: bool, fill: bool, seed: int) -> bool:
        return not error_of_the_law(Language(3, seed, 0.4 * fill), 3, replacement, fill, chain) < 1e-6

    assert any(found(*way, seed) for way in WAYS for seed in range(4))
