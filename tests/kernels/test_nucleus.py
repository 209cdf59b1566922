"""Draws under top-p that look for its cut only where they must: the tokens of the draws with the cut."""

import pytest
import torch
from devices import DEVICE
from torch import Tensor

from heavypath.kernels import nucleus
from heavypath.kernels.filtering import Filters
from heavypath.kernels.noise import Noise, Stream
from heavypath.kernels.nucleus import launch_tokens
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.sampling_kernel import launch_topk


def drawn(logits: Tensor, k: int, top_p: float, *, temperature: float = 0.8, seed: int = 3, fill: bool = False):
    """The tokens that the kernel draws, and those of the reference."""
    noise_rows = torch.arange(len(logits)) + 7
    filters = Filters(temperature, top_p=top_p)
    noise = Noise(seed, noise_rows.to(DEVICE))
    options = {"noise": noise, "stream": Stream.DRAFT, "uniform_fill": fill}
    tokens, _, _ = launch_tokens(logits.to(DEVICE), k, filters, **options)
    expected = gumbel_topk(
        logits, k, **filters._asdict(), seed=seed, rows=noise_rows, uniform_fill=fill, impl="torch"
    ).tokens  # fmt: skip
    return tokens.cpu(), expected


def likely_rows(count: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Rows as of a language model, from nearly certain to nearly even, the last with many equal logits."""
    rows = torch.linspace(8, 0.3, count)[:, None] * torch.randn(count, vocab_size)
    rows[-1] = rows[-1].mul(4).round()
    return rows.to(dtype)


@pytest.fixture
def passes(monkeypatch, interpreter):
    """What each pass over a row was given."""
    found, one = [], nucleus.sums_of_pass
    monkeypatch.setattr(nucleus, "sums_of_pass", lambda *given: found.append(given) or one(*given))
    return found


@pytest.mark.parametrize(("vocab_size", "k", "top_p", "dtype", "fill"), [
    (16, 1, 0.5, torch.float32, False), (16, 4, 0.9, torch.float32, True), (64, 1, 0.9, torch.bfloat16, False),
    (64, 3, 0.5, torch.float16, True), (64, 9, 0.8, torch.float32, False),
    # Closer to 1 the rounding of a sum decides, which is another in another order.
    *(pytest.param(992, k, top_p, dtype, k == 5, marks=pytest.mark.slow) for k in (1, 5, 16)
      for top_p in (1e-6, 0.5, 0.95, 1 - 2**-12) for dtype in (torch.float32, torch.bfloat16)),
    *(pytest.param(9_008, 4, 0.9, dtype, False, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
], ids=str)  # fmt: skip
def test_the_tokens_are_those_that_are_drawn_with_the_cut(vocab_size, k, top_p, dtype, fill):
    tokens, expected = drawn(likely_rows(3, vocab_size, dtype), k, top_p, fill=fill)
    assert torch.equal(tokens, expected)


def test_where_the_candidates_decide_one_pass_is_all(passes):
    logits = torch.randn(1, 48)
    logits[0, 11] = 20
    for fill in (False, True):
        tokens, expected = drawn(logits, 4, 0.9, fill=fill)
        assert torch.equal(tokens, expected)
        assert tokens[0, 0] == 11
        assert (tokens[0, 1:] >= 0).all() == fill
    assert len(passes) == 2


def test_of_equal_tokens_at_the_cut_the_first_are_kept():
    logits = torch.zeros(1, 48)
    tokens, expected = drawn(logits, 4, 0.25)  # the first twelve are kept
    assert torch.equal(tokens, expected)
    assert tokens.max() < 12


def test_rows_without_a_distribution_are_flagged():
    logits = torch.zeros(4, 16)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, expected = drawn(logits, 2, 0.5)
    assert torch.equal(tokens, expected)
    assert (tokens[:3] == -1).all()


def test_rows_in_several_chunks_are_drawn_from_in_any_schedule(adversary):
    logits = likely_rows(2, 8_208, torch.bfloat16)
    tokens, expected = drawn(logits, 2, 0.9, seed=adversary.seed)
    assert torch.equal(tokens, expected)
    adversary.met("_nucleus_kernel")


@pytest.mark.parametrize(("filters", "vocab_size"), [
    (Filters(0.0, top_p=0.5), 16), (Filters(0.7, 3, 0.9, 0.01), 16), (Filters(top_p=0.5), 9)
])  # fmt: skip
def test_other_filters_and_rows_out_of_line_are_drawn_from_with_cuts(filters, vocab_size):
    logits = torch.randn(1, vocab_size).to(DEVICE)
    options = {"noise": Noise(1, None), "stream": Stream.TARGET}
    pairs = zip(launch_tokens(logits, 2, filters, **options), launch_topk(logits, 2, filters, **options), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
