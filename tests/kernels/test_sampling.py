"""gumbel_topk: the exact law of ordered draws, and every edge."""

from itertools import permutations

import numpy as np
import pytest
import torch
from devices import DEVICE, PLACES, placed, run_on
from kernel_cases import same
from statistical import SIGNIFICANCE, chi_square_p_value

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk, stochastic_beam
from heavypath.kernels.verification import verify_tree

ROWS = 60_000


def drawn_by(impl, logits, k, **options):
    """gumbel_topk where the implementation runs; what was drawn is on the CPU."""
    return run_on(PLACES[impl], gumbel_topk, logits, k, impl=impl, **options)


@pytest.mark.parametrize(("filters", "k"), [
    (Filters(), 3), (Filters(0.5), 3), (Filters(1.5, top_k=3), 3), (Filters(top_p=0.8), 2), (Filters(top_p=0.8), 3)
])  # fmt: skip
def test_ordered_draws_without_replacement_have_the_sequential_law(filters, k):
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -1.5])
    drawn = gumbel_topk(logits.expand(ROWS, 5), k, **filters._asdict(), seed=4)
    probs = filtered_logprobs(logits, filters).exp()
    counts, law, support = [], [], int((probs > 0).sum())
    for draw in permutations(range(5), k):
        probability, mass = 1.0, 1.0
        for token in draw:
            probability *= float(probs[token]) / mass if mass > 1e-12 else 0.0
            mass -= float(probs[token])
        counts.append(int((drawn.tokens == torch.tensor(draw)).all(-1).sum()))
        law.append(probability)
    if k <= support:
        assert sum(counts) == ROWS
        assert chi_square_p_value(torch.tensor(counts), torch.tensor(law)) > SIGNIFICANCE
    else:
        assert (drawn.tokens[:, support:] == -1).all()
    logprobs = probs.log().float()[drawn.tokens.clamp(min=0)].masked_fill(drawn.tokens < 0, -torch.inf)
    torch.testing.assert_close(drawn.logprobs, logprobs)


def test_draws_with_replacement_are_independent():
    logits = torch.tensor([1.0, 0.2, -0.5])
    drawn = gumbel_topk(logits.expand(ROWS, 3), 3, replacement=True, seed=9).tokens
    probs = logits.softmax(-1)
    law = torch.einsum("i,j,k->ijk", probs, probs, probs).flatten()
    counts = (drawn * torch.tensor([9, 3, 1])).sum(-1).bincount(minlength=27)
    assert chi_square_p_value(counts, law) > SIGNIFICANCE


def test_filled_tokens_are_uniform_over_the_rest_and_come_last():
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5])
    drawn = gumbel_topk(logits.expand(ROWS, 5), 4, top_k=2, uniform_fill=True, seed=2)
    assert (drawn.tokens[:, :2].sort(-1).values == torch.tensor([1, 4])).all()
    assert (drawn.logprobs[:, 2:] == -torch.inf).all()
    pairs = permutations((0, 2, 3), 2)
    counts = torch.tensor([int((drawn.tokens[:, 2:] == torch.tensor(pair)).all(-1).sum()) for pair in pairs])
    assert counts.sum() == ROWS
    assert chi_square_p_value(counts, torch.full((6,), 1 / 6)) > SIGNIFICANCE


def test_temperature_zero_takes_the_largest_logits_lower_index_first():
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 2.0], [-0.0, 0.0, -0.0, -1.0, -torch.inf]])
    drawn = gumbel_topk(logits, 5, temperature=0.0)
    assert drawn.tokens.tolist() == [[1, 3, 4, 0, -1], [0, 1, 2, 3, -1]]
    values = torch.randint(-3, 4, (50, 90)).float() * 0.5
    order = values.sort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 17, 90):
        drawn = gumbel_topk(values, k, temperature=0.0, impl="torch")
        assert torch.equal(drawn.tokens, order.indices[:, :k])
        assert torch.equal(drawn.keys, order.values[:, :k])


def test_rows_without_support_and_single_tokens_are_defined():
    drawn = gumbel_topk(torch.tensor([[-torch.inf, -torch.inf], [-torch.inf, -7.0]]), 2)
    assert drawn.tokens.tolist() == [[-1, -1], [1, -1]]
    assert drawn.logprobs.tolist() == [[-torch.inf, -torch.inf], [0.0, -torch.inf]]


@pytest.mark.parametrize(("change", "message"), [
    ({"logits": torch.zeros(2, 3, dtype=torch.long)}, "logits must be floating point"),
    ({"logits": torch.zeros(3)}, r"\[\.\.\., R, V\]"),
    ({"k": 0}, "k must be at least 1, got 0"),
    ({"top_p": 2.0}, "top_p must be .* got 2.0"),
    ({"rows": torch.tensor([-1, 0])}, "rows must be at least 0, got -1"),
    ({"rows": torch.zeros(3, dtype=torch.long)}, r"rows must be a LongTensor \[2\]"),
    ({"seed": torch.zeros(1, dtype=torch.long)}, r"seed must be an integer or a LongTensor \[\] on cpu, got .* \[1\]"),
    ({"seed": torch.tensor(0, device="meta")}, "on cpu, got .* on meta"),
    ({"seed": 1.5}, "seed must be an integer .* got 1.5"),
    ({"impl": "magic"}, "impl .* got 'magic'"),
    ({"logits": torch.zeros(2, 3).double(), "impl": "triton"}, "takes fp32, fp16 or bf16 logits, got torch.float64"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = placed({"logits": torch.zeros(2, 3), "k": 1} | change)
    logits, k = arguments.pop("logits"), arguments.pop("k")
    with pytest.raises(ValueError, match=message):
        gumbel_topk(logits, k, **arguments)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"uniform_fill": True}])
def test_a_row_without_numbers_is_flagged_and_never_gives_a_token(options, impl):
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0.0, 1, 2], [0, nan, 1], [inf, 0, 0], [nan, nan, nan], [-inf, nan, -inf]])
    drawn = drawn_by(impl, logits, 2, **options)
    assert (drawn.tokens[1:] == -1).all()
    assert drawn.keys[1:].isnan().all()
    assert drawn.logprobs[1:].isnan().all()
    assert drawn.tokens[0, 0] >= 0
    assert not drawn.keys[0].isnan().any()


OPTIONS = [
    {}, {"temperature": 0.3}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8}, {"replacement": True},
    {"top_k": 2, "uniform_fill": True},
]  # fmt: skip


@pytest.mark.parametrize(("vocab_size", "k", "dtype", "options"), [
    (1, 1, torch.float32, {}),
    *((6, 8, torch.float32, options) for options in OPTIONS),
    *((999, 4, torch.bfloat16, options) for options in OPTIONS[::6]),
    *(pytest.param(*large, options, marks=pytest.mark.slow) for options in OPTIONS
      for large in ((999, 5, torch.float16), (4097, 3, torch.float32), (9000, 32, torch.bfloat16))),
], ids=str)  # fmt: skip
def test_the_kernel_draws_what_the_reference_draws(vocab_size, k, dtype, options):
    logits = (3 * torch.randn(2, vocab_size)).to(dtype)  # bfloat16 has many ties
    rows = torch.tensor([5, 1 << 33])
    k = min(k, 3) if "replacement" in options else k
    settings = {"rows": rows, "seed": -3} | options
    assert same(drawn_by("triton", logits, k, **settings), drawn_by("torch", logits, k, **settings))


@pytest.mark.parametrize(("count", "vocab_size", "options"), [
    (2, 17_000, {}), (1, 9_000, {"replacement": True}), (1, 9_000, {"top_k": 50}),  # in three chunks, or two
])  # fmt: skip
def test_rows_of_several_chunks_are_drawn_from_in_any_schedule(count, vocab_size, options, adversary):
    logits = 3 * torch.randn(count, vocab_size).bfloat16().to(DEVICE)
    options = {"seed": adversary.seed, "rows": torch.arange(count, device=DEVICE)} | options
    assert same(*(gumbel_topk(logits, 3, impl=impl, **options) for impl in ("triton", "torch")))
    adversary.met("_gumbel_topk_kernel")


@pytest.mark.parametrize("seed", [0, 2**32 + 5, -(2**40) - 3, 2**32 - 1, 2**63 - 1, -1, -(2**63)])
def test_a_seed_in_memory_draws_what_its_number_draws(seed):
    logits, zero = torch.randn(1, 20), torch.zeros(1)
    for impl in ("torch", "triton") if seed in (2**32 + 5, -1) else ("torch",):
        drawn, beams = zip(*(
            (drawn_by(impl, logits, 4, seed=given, uniform_fill=True),
             run_on(PLACES[impl], stochastic_beam, logits, zero, zero, 3, seed=given, impl=impl))
            for given in (torch.tensor(seed), seed)
        ), strict=True)  # fmt: skip
        assert all(map(torch.equal, *drawn))
        assert all(map(torch.equal, *beams))


@pytest.mark.parametrize("seed", [np.int8(-3), np.int32(7), np.int64(2**40), np.uint64(2**64 - 1)], ids=repr)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_seed_of_numpy_draws_and_verifies_as_its_number(seed, impl):
    logits, tree = torch.randn(1, 3, 20), (torch.tensor([[0, 7, 9]]), torch.tensor([-1, 0, 0]))
    drawn, verified = zip(*(
        (drawn_by(impl, logits[0], 4, seed=given, uniform_fill=True, top_k=2),
         run_on(PLACES[impl], verify_tree, *tree, logits, logits, method="held", seed=given, impl=impl))
        for given in (seed, int(seed))
    ), strict=True)  # fmt: skip
    assert all(map(torch.equal, *drawn))
    assert all(map(torch.equal, *verified))


@pytest.mark.parametrize("temperature", [1.0, 0.0, 1e-30, 1e-42])
@pytest.mark.parametrize("k", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (5, 60))])
def test_the_kernel_has_the_references_edges(k, temperature):
    lowest, token = torch.finfo(torch.float32).min, torch.arange(50)
    logits = torch.stack([
        torch.zeros(50), torch.full((50,), -torch.inf), torch.full((50,), lowest), token.float(),
        1e6 + torch.rand(50), token.float().where(token < 3, lowest), torch.zeros(50).where(token == 7, -torch.inf),
    ])  # fmt: skip
    for options in ({}, {"uniform_fill": True}, {"top_k": 2})[: (1 if temperature != 1 else 2) if k == 1 else 3]:
        settings = {"temperature": temperature} | options
        kernel, reference = (drawn_by(impl, logits, k, **settings) for impl in ("triton", "torch"))
        assert torch.equal(kernel.tokens, reference.tokens)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_padded_vocabulary_is_left_out_by_slicing(impl):
    whole = torch.randn(3, 4, 32)
    whole[:, :, 20:] = 100
    drawn = run_on(PLACES[impl], lambda whole: gumbel_topk(whole[:, 1:3, :20], 24, impl=impl), whole)
    assert drawn.tokens.max() == 19
    assert (drawn.tokens[..., 20:] == -1).all()
    assert same(drawn, drawn_by(impl, whole[:, 1:3, :20].contiguous(), 24))


def beams(logits: tuple[torch.Tensor, torch.Tensor], width: int, count: int):
    """Two steps of a beam: first-level logits [V], second-level [V, V]; tokens [count, W, 2], and the second level."""
    zeros = torch.zeros(count, 1)
    rows = torch.arange(count)[:, None] << 8
    first = stochastic_beam(logits[0].expand(count, 1, -1), zeros, zeros, width, rows=rows)
    parents = first.tokens.clamp(min=0), first.logprobs, first.keys
    second = stochastic_beam(logits[1][parents[0]], *parents[1:], width, rows=rows + 1 + torch.arange(width))
    heads = first.tokens.gather(1, second.parent.clamp(min=0)).where(second.parent >= 0, -1)
    return torch.stack([heads, second.tokens], -1), second


def test_a_stochastic_beam_draws_sequences_without_replacement():
    logits = torch.tensor([0.5, 0.0, -1.0]), torch.tensor([[0.0, 1.0, 0.3], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    tokens, beam = beams(logits, 2, 40_000)
    joint = (logits[0].softmax(-1)[:, None] * logits[1].softmax(-1)).flatten().double()
    law = joint[:, None] * joint / (1 - joint[:, None])
    law.fill_diagonal_(0)
    leaves = tokens[..., 0] * 3 + tokens[..., 1]
    counts = (leaves[:, 0] * 9 + leaves[:, 1]).bincount(minlength=81)
    assert chi_square_p_value(counts, law.flatten()) > SIGNIFICANCE
    torch.testing.assert_close(beam.logprobs, joint[leaves].log().float())
    assert (beam.keys.diff(dim=-1) <= 0).all()


def test_a_beam_is_stable_far_down_and_keeps_its_parents_key():
    logits = torch.randn(4, 1000)
    for phi in (0.0, -100.0, -1e4):
        parent = torch.full((4,), phi, dtype=torch.float64)
        key = parent + torch.tensor([3.0, 1.0, -2.0, 0.5])
        beam = stochastic_beam(logits, parent, key, 8, seed=1)
        near = stochastic_beam(logits, 0 * parent, key - parent, 8, seed=1)
        assert torch.equal(beam.tokens, near.tokens)
        assert torch.equal(beam.parent, near.parent)
        torch.testing.assert_close(beam.keys - phi, near.keys, atol=1e-8, rtol=0)
        assert beam.keys[0] == key.max()  # the largest child has its parent's key
        assert beam.keys.isfinite().all()


def test_a_beam_passes_absent_parents_over_and_says_what_is_missing():
    beam = stochastic_beam(torch.zeros(3, 2), torch.tensor([0.0, -torch.inf, -1.0]), torch.tensor([0.0, 0.0, 0.0]), 6)
    assert sorted(beam.parent.tolist()) == [-1, -1, 0, 0, 2, 2]
    assert (beam.tokens[4:] == -1).all()
    assert (beam.keys[4:] == -torch.inf).all()
    plain = stochastic_beam(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.zeros(2), torch.zeros(2), 3, temperature=0.0)
    assert plain.parent.tolist() == [1, 0, 0]
    assert plain.tokens.tolist() == [0, 1, 0]
    assert torch.equal(plain.keys, plain.logprobs)
    with pytest.raises(ValueError, match=r"parent_key must be floating point \[3\]"):
        stochastic_beam(torch.zeros(3, 2), torch.zeros(3), torch.zeros(2), 2)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        stochastic_beam(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3), 0)
