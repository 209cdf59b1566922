"""Mixtures of distributions: against their formula in fp64, by all implementations, and in any schedule."""

import math

import pytest
import torch
from devices import PLACES, run_on
from kernel_cases import NATIVE

from heavypath.kernels.mixing import add_to_mixture

INF = torch.inf
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])


def mixture(parts, weights, impl):
    mixed = None
    for part, weight in zip(parts, weights, strict=True):
        mixed = add_to_mixture(mixed, part, math.log(weight), impl=impl)
    return mixed


def by_formula(parts, weights):
    """log sum of w softmax(x) in fp64, where rows of only -inf have no softmax."""
    laws = [part.double().softmax(-1).nan_to_num(0) * weight for part, weight in zip(parts, weights, strict=True)]
    return torch.stack(laws).sum(0).log()


def parts_of(vocab, dtype=torch.float32, seed=0):
    """Of a model; of a lookup, which says nothing after two nodes; and rows that have gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    model, wide = (4 * torch.randn(2, nodes, vocab, generator=generator) for nodes in (3, 6))
    lookup = torch.full((2, 3, vocab), -INF)
    few = min(3, vocab)
    lookup[..., :few] = torch.randn(2, 3, few, generator=generator)
    lookup[0, 1] = lookup[1, 2] = model[1, 2] = -INF
    model[0, 0, -1] = -INF
    return [model.to(dtype), lookup.to(dtype), wide.to(dtype)[:, ::2]]


@IMPLS
@pytest.mark.parametrize("vocab", [1, 5, 1000, 9001])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1,), (1, 1)])
def test_a_mixture_is_its_formula(impl, vocab, order):
    parts = [parts_of(vocab)[number] for number in order]
    weights = [0.1 + number / 3 for number in range(len(parts))]
    found = run_on(PLACES.get(impl, "cpu"), mixture, parts, weights, impl=impl)
    expected = by_formula(parts, weights)
    assert torch.equal(found == -INF, expected == -INF)
    of_sums = vocab / 8 * 2**-24  # rounding errors of a softmax's sum, which PyTorch takes in eight lanes with AVX2
    assert torch.allclose(found.double(), expected, atol=2e-6 + of_sums, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@IMPLS
def test_halves_are_mixed_in_fp32(impl, dtype):
    parts = parts_of(40, dtype)
    found = run_on(PLACES.get(impl, "cpu"), mixture, parts, (0.7, 0.2, 0.1), impl=impl)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), by_formula(parts, (0.7, 0.2, 0.1)), atol=2e-6, rtol=2e-6)


@IMPLS
def test_the_mixture_so_far_may_lie_apart_in_memory(impl):
    first, second, _ = parts_of(40)
    mixed = add_to_mixture(None, first, -1.0, impl="torch")
    expected = add_to_mixture(mixed.clone(), second, -0.5, impl="torch")
    for apart in (torch.stack([mixed, mixed + 1], -1)[..., 0], mixed.mT.contiguous().mT):
        found = run_on(PLACES.get(impl, "cpu"), add_to_mixture, apart, second, -0.5, impl=impl)
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@IMPLS
@pytest.mark.parametrize("wrong", [torch.nan, INF])
def test_a_part_that_is_no_distribution_leaves_none(impl, wrong):
    """Wherever it stands among the parts, only its own row."""
    model, lookup, _ = parts_of(70)
    broken = model.clone()
    broken[0, 1, 33] = wrong
    for parts in ([broken, lookup], [lookup, broken], [model, broken, lookup]):
        found = run_on(PLACES.get(impl, "cpu"), mixture, parts, [1.0] * len(parts), impl=impl)
        assert found[0, 1].isnan().all()
        assert not found[0, [0, 2]].isnan().any()
        assert not found[1].isnan().any()


@IMPLS
@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 40), torch.float16), ((2, 3, 41), torch.float32)])
def test_a_mixture_that_does_not_fit_is_refused_and_not_written_to(impl, shape, dtype):
    mixed = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=rf"must be torch.float32 \[2, 3, 40\].* got {dtype} \[2, 3, {shape[2]}\]"):
        run_on(PLACES.get(impl, "cpu"), add_to_mixture, mixed, torch.zeros(2, 3, 40), -0.5, impl=impl)


def test_mixtures_are_right_in_any_schedule(adversary):
    test_a_mixture_is_its_formula("triton", 5000, (0, 1, 2))
    test_a_mixture_is_its_formula("triton", 5, (1, 0, 2))
    adversary.met("_mix_kernel")
