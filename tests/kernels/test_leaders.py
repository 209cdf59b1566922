"""Draws and verifications of compiled code, which leaves out noise: the reference has that of every token."""

import numpy as np
import pytest
import torch
from kernel_cases import needs_compiler, same

from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree

pytestmark = needs_compiler
VOCABULARY = 5001


def rows_of(kind, count, seed):
    """Logits [count, VOCABULARY] of several kinds, those of `rising` such that the best token comes late."""
    own = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCABULARY, generator=own) * 3
    if kind == "flat":
        return logits * 0.01
    if kind == "rising":
        return logits * 0.1 + torch.linspace(0, 12, VOCABULARY)
    if kind == "few":  # that can be drawn
        found = torch.rand(count, VOCABULARY, generator=own) < 4 / VOCABULARY
        return logits.masked_fill(~found, -torch.inf).index_fill(1, torch.tensor([VOCABULARY - 1]), 0.5)
    if kind == "far":  # all but some tokens have a probability below what fp32 can hold
        return logits.index_add(1, torch.tensor([7, 1500, 5000]), torch.full((count, 3), 200.0))
    return logits


@pytest.mark.parametrize("kind", ["usual", "flat", "rising", "few", "far"])
@pytest.mark.parametrize("k", [1, 2, 70])
@pytest.mark.parametrize("temperature", [0.6, 3.0])
def test_the_tokens_drawn_are_those_of_all_the_noise(kind, k, temperature):
    logits = rows_of(kind, 12, k)
    for options in ({}, {"replacement": True}, {"top_k": 40, "uniform_fill": True}):
        given = {"temperature": temperature, "seed": k, **options}
        found, expected = (gumbel_topk(logits, k, impl=impl, **given) for impl in ("native", "torch"))
        assert same(found, expected)


@pytest.mark.parametrize(
    ("extreme", "usual"), [({"top_p": 1e-46}, {"top_p": 1e-30}), ({"temperature": 1e300}, {"temperature": 1e38})]
)
@pytest.mark.parametrize("method", ["without_replacement", "kseq", "held_traversal", "race"])
def test_a_filter_that_fp32_cannot_hold_keeps_a_token(extreme, usual, method):
    logits = rows_of("few", 2, 0)[None]
    tokens, rows = torch.tensor([[0, VOCABULARY - 1]]), torch.tensor([[5, 6]])
    for seed in range(3):
        found, expected = (
            (
                *gumbel_topk(logits, 3, seed=seed, impl="native", **given),
                *verify_tree(
                    tokens, torch.tensor([-1, 0]), logits, logits,
                    method=method, seed=seed, rows=rows, impl="native", **given,
                ),
            )
            for given in (extreme, usual)
        )  # fmt: skip
        assert all(map(torch.equal, found, expected))


def test_a_top_k_of_more_than_64_bits_keeps_all_tokens():
    logits = rows_of("usual", 2, 0)
    assert same(gumbel_topk(logits, 3, top_k=2**64 + 1, impl="native"), gumbel_topk(logits, 3, impl="torch"))


@pytest.mark.parametrize(
    "seed", [np.int8(-5), np.uint32(2**32 - 1), np.int64(-(2**63)), np.uint64(2**64 - 1), 2**64 + 3]
)
def test_a_seed_of_numpy_is_its_number(seed):
    logits = rows_of("usual", 2, 0)
    found, expected = (
        gumbel_topk(logits, 3, seed=each, impl=impl) for each, impl in ((seed, "native"), (int(seed), "torch"))
    )
    assert same(found, expected)


@pytest.mark.parametrize("kind", ["usual", "flat", "rising", "few", "far"])
@pytest.mark.parametrize("method", ["without_replacement", "held_traversal", "race", "target_sample"])
def test_the_token_after_a_walk_is_that_of_all_the_noise(kind, method):
    count = 16
    target = rows_of(kind, 2 * count, 1).view(count, 2, VOCABULARY)
    draft = target + torch.randn(count, 2, VOCABULARY, generator=torch.Generator().manual_seed(2))
    drawn = gumbel_topk(draft[:, 0], 1, temperature=0.7, impl="torch").tokens
    tokens = torch.cat([torch.zeros_like(drawn), drawn], 1)
    rows = torch.arange(2 * count).view(count, 2)
    for seed in range(3):
        found, expected = (
            verify_tree(
                tokens, torch.tensor([-1, 0]), target, draft,
                method=method, temperature=0.7, seed=seed, rows=rows, impl=impl,
            )
            for impl in ("native", "torch")
        )  # fmt: skip
        assert all(map(torch.equal, found, expected))
