"""What mutants that survived showed: places that no other test looks at."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, inputs, random_tree

from heavypath.kernels.attention.masks import PackedAncestors, pack_ancestors
from heavypath.kernels.cache_compaction import compact_unchecked
from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.noise import Stream, gumbel, gumbel_noise, gumbel_of, log2_below, noise_bits
from heavypath.kernels.sampling import gumbel_topk, stochastic_beam
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.trees.growing_kernel import _expm1, _log1p
from heavypath.kernels.trees.levels import Chosen, Trees, alike

LN2 = math.log(2)


@triton.jit
def _noise_kernel(bits_ptr, gumbel_ptr, below_ptr, INTERPRETED: tl.constexpr):
    at = tl.arange(0, 8)
    bits = tl.load(bits_ptr + at).to(tl.uint32)
    tl.store(gumbel_ptr + at, gumbel_of(bits))
    tl.store(below_ptr + at, log2_below(bits, INTERPRETED))


@triton.jit
def _logarithms_kernel(x_ptr, expm1_ptr, log1p_ptr):
    at = tl.arange(0, 8)
    x = tl.load(x_ptr + at)
    tl.store(expm1_ptr + at, _expm1(x))
    tl.store(log1p_ptr + at, _log1p(x))


def test_noise_of_the_least_and_the_greatest_word():
    words = np.array([0, 1, 255, 256, 2**31, 2**32 - 256, 2**32 - 2, 2**32 - 1])
    found, below = torch.empty(2, 8, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor(words, device=DEVICE), found, below, INTERPRETED=DEVICE == "cpu")
    assert gumbel(words)[0] == pytest.approx(33 * LN2)
    assert gumbel(words)[-1] == pytest.approx(-math.log(24 * LN2))  # 1 - u is at least 2^-24
    assert found.cpu().numpy() == pytest.approx(gumbel(words), rel=1e-6)
    uniform = (words + 0.5) / 2**32
    lost = uniform - 2.0 ** below.double().cpu().numpy()
    assert ((lost > -1e-9) & (lost < 2.0**-23 + 1e-9)).all()


def test_logarithms_of_a_beam_are_exact_near_0():
    x = torch.tensor([-0.5, -1e-3, -1e-9, -1e-17, 1e-17, 1e-9, 1e-3, 0.5], dtype=torch.float64, device=DEVICE)
    expm1, log1p = torch.empty(2, 8, dtype=torch.float64, device=DEVICE)
    _logarithms_kernel[(1,)](x, expm1, log1p)
    torch.testing.assert_close(expm1, torch.expm1(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(log1p, torch.log1p(x), rtol=1e-12, atol=0)


def test_noise_of_a_tensor_is_that_of_its_seed_stream_and_rows():
    rows = torch.tensor([5, 1 << 40])
    expected = gumbel(noise_bits(3, Stream.TARGET, rows.numpy(), 9))
    assert np.array_equal(gumbel_noise(3, Stream.TARGET, rows, 9).numpy(), expected)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.0])
def test_logits_are_divided_by_the_temperature(temperature):
    logits = torch.randn(3, 9)
    expected = torch.log_softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(filtered_logprobs(logits, Filters(temperature)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_of_equal_logits_top_p_keeps_the_first_ones(impl):
    drawn = gumbel_topk(torch.zeros(1, 8, device=DEVICE), 8, top_p=0.5, impl=impl if DEVICE == "cpu" else "triton")
    assert sorted(drawn.tokens[0].tolist()) == [-1, -1, -1, -1, 0, 1, 2, 3]


def test_a_beam_takes_the_implementation_that_is_named():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="impl"):
        stochastic_beam(torch.zeros(1, 5), zero, zero, 2, impl="no such")


def test_attention_takes_trees_whose_numbers_lie_apart():
    tree = random_tree(9)
    query, key, value = inputs(2, 2, 1, 9, 24, 16)
    ends = tree.subtree_end.expand(2, -1).to(DEVICE)
    lengths, first = torch.tensor([15, 7], device=DEVICE), torch.tensor([2, 1], device=DEVICE)

    def apart(tensor):
        """The same numbers, with others between them."""
        return torch.stack([tensor, tensor * 0 + 3], -1)[..., 0]

    given = {"prefix_length": lengths, "first_row": first, "impl": "triton"}
    expected = tree_attention(query, key, value, subtree_end=ends, **given)
    given = {"prefix_length": apart(lengths), "first_row": apart(first), "impl": "triton"}
    assert torch.equal(tree_attention(query, key, value, subtree_end=apart(ends), **given), expected)
    words, *more = pack_ancestors(tree.mask().to(DEVICE))
    packed = PackedAncestors(apart(words), *more)
    assert torch.equal(tree_attention(query, key, value, ancestor_mask=packed, **given), expected)


def test_the_first_node_of_a_text_is_an_index():
    tokens = torch.tensor([[0, 6, 6]], device=DEVICE)
    trees = Trees(tokens, tokens[:, 0], tokens, tokens[0, :1], tokens[0, :1], torch.zeros_like(tokens))
    given = Chosen(*(torch.tensor(numbers, device=DEVICE) for numbers in ([1, 2], [0, 0], [1, 1])))
    assert torch.equal(alike(trees, given, impl="triton"), torch.tensor([[0, 0]], device=DEVICE))


@pytest.mark.parametrize("apart", [False, True])
def test_an_unchecked_compaction_copies_rows_whose_numbers_lie_apart(apart):
    """Rows 3 and 4 of a cache [1, 1, 6, 2] come after two rows of a prefix and the root's."""
    cache = torch.arange(12.0).view(1, 1, 2, 6).mT if apart else torch.arange(12.0).view(1, 1, 6, 2)
    expected = cache[0, 0, [0, 1, 2, 4, 5, 5]]
    path, length = torch.tensor([[0, 2, 3]]), torch.tensor([2])
    compact_unchecked([cache], path=path, length=length, prefix_length=torch.tensor([2]))
    assert torch.equal(cache[0, 0], expected)
