"""Filters against transformers' own logits processors."""

import numpy as np
import pytest
import torch
from devices import PLACES, run_on
from kernel_cases import NATIVE
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk


@pytest.mark.parametrize("filters", [
    Filters(), Filters(0.3), Filters(1.7, top_k=1), Filters(top_k=5), Filters(top_k=500), Filters(top_p=0.3),
    Filters(top_p=1e-6), Filters(top_p=1.0), Filters(min_p=0.2), Filters(min_p=1.0),
    Filters(0.8, 20, 0.9, 0.05), Filters(1.3, 0, 0.95, 0.0),
])  # fmt: skip
def test_filters_keep_what_transformers_keeps(filters):
    logits = 3 * torch.randn(40, 97)
    logits[0] = 0  # ties stay in top-k
    logits[1, 5:] = -torch.inf
    expected = TemperatureLogitsWarper(filters.temperature)(None, logits)
    if filters.top_k:
        expected = TopKLogitsWarper(filters.top_k)(None, expected)
    if filters.top_p is not None and filters.top_p < 1:
        expected = TopPLogitsWarper(filters.top_p)(None, expected)
    if filters.min_p:
        expected = MinPLogitsWarper(filters.min_p)(None, expected)
    if filters.top_p is not None and filters.top_p < 1:
        expected, logits = expected[1:], logits[1:]  # which of equal tokens top-p keeps is the sort's choice
    logprobs = filtered_logprobs(logits, filters)
    assert torch.equal(logprobs > -torch.inf, expected > -torch.inf)
    torch.testing.assert_close(logprobs, expected.double().log_softmax(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(logits)).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_logits_of_any_floating_point_type_are_filtered_as_in_fp32(dtype):
    logits = torch.randn(5, 60).to(dtype).requires_grad_()
    logprobs = filtered_logprobs(logits, Filters(0.7, 20, 0.8, 0.01))
    kept = filtered_logprobs(logits.detach().float(), Filters(0.7, 20, 0.8, 0.01)) > -torch.inf
    assert torch.equal(logprobs > -torch.inf, kept)


@pytest.mark.parametrize(("filters", "message"), [
    (Filters(temperature=-0.1), "temperature must be a finite number >= 0, got -0.1"),
    (Filters(temperature=float("nan")), "temperature must be .* got nan"),
    (Filters(top_k=-1), "top_k must be .* got -1"),
    (Filters(top_k=2.5), "top_k must be .* got 2.5"),
    (Filters(top_p=0.0), r"top_p must be .* \(0, 1\], got 0.0"),
    (Filters(top_p=1.01), "top_p must be .* got 1.01"),
    (Filters(min_p=1.01), "min_p must be .* got 1.01"),
])  # fmt: skip
def test_a_filter_outside_its_range_is_refused(filters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        filters.check()


@pytest.mark.parametrize("top_p", [1e-46, 5e-324])
def test_a_top_p_that_is_zero_in_fp32_keeps_the_likeliest_token(top_p):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, -torch.inf]])
    kept = filtered_logprobs(logits, Filters(top_p=top_p)) > -torch.inf
    assert kept.tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])
@pytest.mark.parametrize("temperature", [4e38, 1e300])
def test_a_temperature_that_is_infinite_in_fp32_makes_all_tokens_but_excluded_ones_equally_likely(temperature, impl):
    logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]])
    drawn = run_on(PLACES.get(impl, "cpu"), gumbel_topk, logits, 4, temperature=temperature, impl=impl)
    assert sorted(drawn.tokens[0].tolist()) == [-1, 0, 1, 2]
    torch.testing.assert_close(drawn.logprobs[0, :3].exp(), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("lay", [lambda value: np.array([value]), lambda value: torch.tensor([[value]])])
def test_filters_of_one_element_are_numbers(lay):
    assert Filters(*map(lay, (0.5, 3, 0.25, 0.125))).check() == Filters(0.5, 3, 0.25, 0.125)
