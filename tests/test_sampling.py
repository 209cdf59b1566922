"""gumbel_topk: the exact law of ordered draws, and every edge."""

from itertools import permutations

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk, stable_topk

ROWS = 200_000


@pytest.mark.parametrize("filters", [Filters(), Filters(0.5), Filters(1.5, top_k=3), Filters(top_p=0.8)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_ordered_draws_without_replacement_have_the_sequential_law(filters, k):
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -1.5])
    drawn = gumbel_topk(logits.expand(ROWS, 5), k, **filters._asdict(), seed=4)
    probs = filtered_logprobs(logits, filters).exp()
    counts, law = [], []
    for draw in permutations(range(5), k):
        probability, mass = 1.0, 1.0
        for token in draw:
            probability *= float(probs[token]) / mass if mass > 1e-12 else 0.0
            mass -= float(probs[token])
        expected = torch.tensor(draw)
        counts.append(int((drawn.tokens == expected).all(-1).sum()))
        law.append(probability)
    law = torch.tensor(law)
    if k <= int((probs > 0).sum()):
        assert sum(counts) == ROWS
        assert chi_square_p_value(torch.tensor(counts), law) > SIGNIFICANCE
    else:
        assert (drawn.tokens[:, int((probs > 0).sum()) :] == -1).all()
    torch.testing.assert_close(
        drawn.logprobs, probs.log().float()[drawn.tokens.clamp(min=0)].masked_fill(drawn.tokens < 0, -torch.inf)
    )


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
    pairs = [(a, b) for a in (0, 2, 3) for b in (0, 2, 3) if a != b]
    counts = torch.tensor([int((drawn.tokens[:, 2:] == torch.tensor(p)).all(-1).sum()) for p in pairs])
    assert counts.sum() == ROWS
    assert chi_square_p_value(counts, torch.full((6,), 1 / 6)) > SIGNIFICANCE


def test_keys_descend_and_name_the_same_draw_in_any_batch():
    logits = torch.randn(6, 999)
    rows = torch.tensor([5, 1 << 33, 0, 7, 2, 3])
    whole = gumbel_topk(logits, 8, rows=rows, seed=1, top_p=0.95)
    assert (whole.keys.diff(dim=-1) <= 0).all()
    for index in (0, 1, 5):
        alone = gumbel_topk(logits[index : index + 1], 8, rows=rows[index : index + 1], seed=1, top_p=0.95)
        assert all(torch.equal(field[0], whole_field[index]) for field, whole_field in zip(alone, whole, strict=True))
    batched = gumbel_topk(logits.view(2, 3, 999), 8, rows=rows.view(2, 3), seed=1, top_p=0.95)
    assert torch.equal(batched.tokens.view(6, 8), whole.tokens)


def test_temperature_zero_takes_the_largest_logits_lower_index_first():
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 2.0], [-0.0, 0.0, -0.0, -1.0, -torch.inf]])
    drawn = gumbel_topk(logits, 5, temperature=0.0)
    assert drawn.tokens.tolist() == [[1, 3, 4, 0, -1], [0, 1, 2, 3, -1]]
    assert gumbel_topk(logits, 1, temperature=0.0).tokens.tolist() == [[1], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 999, 1024, 4097])
def test_any_vocabulary_and_dtype(vocab_size, dtype):
    logits = torch.randn(3, vocab_size).to(dtype)
    drawn = gumbel_topk(logits, 4, seed=1)
    present = min(4, vocab_size)
    assert (drawn.tokens[:, :present] >= 0).all()
    assert (drawn.tokens[:, present:] == -1).all()
    assert torch.equal(drawn.tokens, gumbel_topk(logits.float(), 4, seed=1).tokens)


def test_strides_do_not_matter():
    logits = torch.randn(4, 5, 7)[:, 1:3]
    assert torch.equal(gumbel_topk(logits, 2).tokens, gumbel_topk(logits.contiguous(), 2).tokens)


def test_rows_without_support_and_single_tokens_are_defined():
    logits = torch.full((2, 4), -torch.inf)
    logits[1, 2] = -7.0
    drawn = gumbel_topk(logits, 2)
    assert drawn.tokens.tolist() == [[-1, -1], [2, -1]]
    assert drawn.logprobs.tolist() == [[-torch.inf, -torch.inf], [0.0, -torch.inf]]


def test_stable_topk_equals_a_stable_sort():
    values = torch.randint(-3, 4, (50, 40)).float() * 0.5
    values[:, 7] = -torch.inf
    for k in (1, 2, 17, 40):
        best, index = stable_topk(values, k)
        order = values.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(index, order.indices[:, :k])
        assert torch.equal(best, order.values[:, :k])


@pytest.mark.parametrize(("change", "message"), [
    ({"logits": torch.zeros(2, 3, dtype=torch.long)}, "logits must be floating point"),
    ({"logits": torch.zeros(3)}, r"\[\.\.\., R, V\]"),
    ({"logits": torch.zeros(2, 0)}, "V >= 1"),
    ({"k": 0}, "k must be at least 1, got 0"),
    ({"temperature": -1.0}, "temperature must be .* got -1.0"),
    ({"top_p": 2.0}, "top_p must be .* got 2.0"),
    ({"rows": torch.tensor([-1, 0])}, "rows must be at least 0, got -1"),
    ({"rows": torch.zeros(3, dtype=torch.long)}, r"rows must be a LongTensor \[2\]"),
    ({"logits": torch.tensor([[0.0, 0.0], [0.0, float("nan")]])}, "row 1 holds nan"),
    ({"logits": torch.tensor([[0.0, float("inf")], [0.0, 0.0]])}, "row 0 holds inf"),
    ({"impl": "magic"}, "impl .* got 'magic'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {"logits": torch.zeros(2, 3), "k": 1} | change
    logits, k = arguments.pop("logits"), arguments.pop("k")
    with pytest.raises(ValueError, match=message):
        gumbel_topk(logits, k, **arguments)
