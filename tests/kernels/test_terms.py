"""Kernels of a block draft's terms: rows side by side, units, messages, and logits of a few tokens."""

import math

import pytest
import torch
from devices import DEVICE

from heavypath.kernels.layers.few_logits import few_logits
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.layers.side_by_side import FieldRows, side_by_side
from heavypath.kernels.layers.spread import spread_few
from heavypath.kernels.layers.units import gru_unit, message_unit, rnn_unit

IMPLS = ["torch", "triton"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # two units in the last place of 1, or more


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_by_hand(impl):
    """Of two sequences with two nodes: a row of a table, one of the sequence's own, and one for both nodes."""
    table = torch.tensor([[1.0, 2], [3, 4], [5, 6]], device=DEVICE)
    own = torch.tensor([[[10.0], [11], [12]], [[20], [21], [22]]], device=DEVICE)
    shared = torch.tensor([[7.0, 7], [8, 8]], device=DEVICE)
    tokens, rows = torch.tensor([[[2, 0], [1, 1]], [[0, 2], [1, 1]]], device=DEVICE)
    parts = [FieldRows(own, rows), FieldRows.of_table(table, tokens), FieldRows.for_each(shared)]
    assert side_by_side(parts, impl=impl).tolist() == [
        [[10, 5, 6, 7, 7], [12, 1, 2, 7, 7]],
        [[21, 3, 4, 8, 8], [21, 3, 4, 8, 8]],
    ]
    assert side_by_side(parts[1:], impl=impl).tolist()[0] == [[5, 6, 7, 7], [1, 2, 7, 7]]
    assert side_by_side([FieldRows(0 * own, None), parts[1]], impl=impl).tolist()[1] == [[0, 3, 4], [0, 3, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(1, 40, 3), (130, 7)])
def test_rows_are_copied_as_they_are(widths, dtype):
    batch, count = 3, 5
    at = torch.randint(4, (batch, count), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    parts = [FieldRows(numbers(batch, 4, 2 * width, dtype=dtype)[..., :width], at) for width in widths]
    assert torch.equal(side_by_side(parts, impl="triton"), side_by_side(parts, impl="torch"))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("impl", IMPLS)
def test_units_by_hand(impl):
    """Two nodes of one number: by Python's own functions."""
    product, of_state = numbers(1, 2, 3), numbers(1, 2, 3, seed=1)
    state, beside = numbers(1, 2, 1, seed=2), numbers(1, 2, 2, seed=3)
    field = torch.full((1, 4, 1), 9.0, device=DEVICE)
    kept = FieldRows(field, torch.tensor([[3, 1]], device=DEVICE))
    word, new = rnn_unit(product, state, kept, impl=impl)
    for node in range(2):
        g, c, o = product[0, node].tolist()
        s = float(state[0, node, 0])
        below = sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c)
        assert float(word[0, node, 0]) == pytest.approx(math.tanh(o), abs=1e-6)
        assert float(new[0, node, 0]) == pytest.approx(below, abs=1e-6)
        assert float(field[0, (3, 1)[node], 0]) == float(new[0, node, 0])
    joined, new = gru_unit(product, of_state, state, beside, kept, impl=impl)
    for node in range(2):
        (r, z, n), (r_s, z_s, n_s) = product[0, node].tolist(), of_state[0, node].tolist()
        gate = sigmoid(z + z_s)
        below = gate * float(state[0, node, 0]) + (1 - gate) * math.tanh(n + sigmoid(r + r_s) * n_s)
        assert joined[0, node, :2].tolist() == beside[0, node].tolist()
        assert float(joined[0, node, 2]) == pytest.approx(below, abs=1e-6)
        assert float(new[0, node, 0]) == float(joined[0, node, 2]) == float(field[0, (3, 1)[node], 0])
    assert field[0, [0, 2]].flatten().tolist() == [9, 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "width"), [(1, 1), (40, 70), (130, 3)])
def test_units_are_rounded_where_pytorch_rounds(size, width, dtype):
    """Of states that are part of a wider tensor, in rows of a field that is, too; large numbers saturate."""
    batch, count = 2, 3
    product, of_state = (6 * numbers(batch, count, 3 * size, seed=seed, dtype=dtype) for seed in (0, 1))
    product[0, 0, 0], of_state[0, 0, -1] = 300, -300
    state = numbers(batch, count, size + 5, seed=2, dtype=dtype)[..., :size]
    beside = numbers(batch, 1, width, seed=3, dtype=dtype).expand(-1, count, -1)
    rows = torch.tensor([[4, 0, 2], [1, 2, 3]], device=DEVICE)
    found, expected = [], []
    for impl, results in (("triton", found), ("torch", expected)):
        fields = [torch.full((batch, 5, size + 1), 9.0, dtype=dtype, device=DEVICE)[..., :size] for _ in range(2)]
        results += rnn_unit(product, state, FieldRows(fields[0], rows), impl=impl)
        results += gru_unit(product, of_state, state, beside, FieldRows(fields[1], rows), impl=impl)
        results += fields
        results += rnn_unit(product, state, None, impl=impl)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=STEP[dtype], atol=STEP[dtype] / 2)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_message_by_hand(impl):
    """Two nodes of one number, of one sequence: by Python's own functions."""
    gate, message = numbers(1, 2, 1), numbers(1, 2, 1, seed=1)
    receiver, length = numbers(1, 1, seed=2), numbers(1, 1, seed=3)
    found = message_unit(gate, message, receiver, length, 3.0, impl=impl)
    for node in range(2):
        opened = sigmoid(float(receiver) + 3 * float(gate[0, node, 0]))
        assert float(found[0, node, 0]) == pytest.approx(float(length) * opened * 3 * float(message[0, node, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "few"), [(1, 1), (40, 3), (130, 5)])
def test_messages_and_their_logits_are_those_of_pytorch(size, few, dtype):
    """What a pass keeps is fp32, and part of a wider tensor; large gates saturate; each sequence has its own tokens."""
    batch, count, vocab = 2, 3, 9
    gate, message, added = (numbers(batch, count, size, seed=seed, dtype=dtype) for seed in (0, 1, 2))
    gate[0, 0, 0], gate[0, 1, 0] = 300, -300
    kept = numbers(batch, 2 * size + 1 + few, seed=3)
    kept[:, 2 * size + 1 :] = torch.tensor([[8, 0, 3, 1, 5], [2, 7, 3, 0, 4]], device=DEVICE)[:, :few]
    row, receiver, length, tokens = kept.split([size, size, 1, few], -1)
    norm, lm_head = Norm(numbers(size, seed=4, dtype=dtype), 1e-6), numbers(vocab, size + 2, seed=5, dtype=dtype)
    found, expected = [], []
    for impl, results in (("triton", found), ("torch", expected)):
        results.append(message_unit(gate, message, receiver, length, size**0.5, impl=impl))
        results.append(few_logits(row, added, norm, lm_head[:, :size], tokens, impl=impl))
        results.append(few_logits(row.to(dtype), added, norm, lm_head[:, :size], tokens.long(), impl=impl))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=STEP[dtype], atol=2 * size**0.5 * STEP[dtype])
    wide = numbers(batch, count, size, seed=2, dtype=dtype).double() + row[:, None].to(dtype).double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    exact = exact @ lm_head[:, :size][tokens.long()].mT.double()
    assert torch.allclose(found[1].double(), exact, atol=8 * size**0.5 * STEP[dtype])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("vocab", "few"), [(3, 3), (1025, 5), (2100, 1)])
def test_logits_of_a_few_tokens_are_theirs_and_all_others_minus_infinity(vocab, few, impl):
    logits, added = numbers(2, 3, few), numbers(2, few, seed=1)
    tokens = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)])
    tokens = tokens[:, :few].contiguous()
    for term in (None, added):
        found = spread_few(logits, tokens.to(DEVICE), vocab, term, impl=impl).cpu()
        kept = torch.cat([tokens.float(), tokens.float()], -1).to(DEVICE)[:, few:]  # as a pass keeps them
        assert torch.equal(spread_few(logits, kept, vocab, term, impl=impl).cpu(), found)
        expected = torch.full((2, 3, vocab), -torch.inf)
        for sequence in range(2):
            for number, token in enumerate(tokens[sequence].tolist()):
                values = logits[sequence, :, number]
                expected[sequence, :, token] = (values if term is None else values + term[sequence, number]).cpu()
        assert torch.equal(found, expected)


def test_tensors_that_do_not_fit_are_refused():
    half, wide = (numbers(1, 2, 3, dtype=dtype) for dtype in (torch.float16, torch.float32))
    at = torch.zeros(1, 2, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match=r"2 or 3 tensors \[B, S, C\] of one dtype; got .*float16.*float32"):
        side_by_side([FieldRows(half, at), FieldRows(wide, at)], impl="triton")
    with pytest.raises(
        ValueError, match=r"products \[B, n, 3 S\] and states .*float32.* got .*\[1, 2, 3\].*\[1, 2, 3\]"
    ):
        rnn_unit(wide, wide, None, impl="triton")
    with pytest.raises(ValueError, match=r"of contiguous columns|contiguous columns, got strides \[6, 1, 2\]"):
        rnn_unit(wide, wide[..., :1], FieldRows(numbers(1, 3, 2).mT, at), impl="triton")
    with pytest.raises(ValueError, match=r"a length \[B, 1\]; got .*\[1, 2, 3\].*\[1, 2\]"):
        message_unit(wide, wide, wide[:, :, 0], wide[:, 0, :1], 1.0, impl="triton")
    with pytest.raises(ValueError, match=r"and tokens \[B, F\]; got .*float16.*float32"):
        few_logits(half[:, 0], half, Norm(wide[0, 0], 1e-6), half[0], at, impl="triton")
    with pytest.raises(ValueError, match=r"logits of one dtype, got torch.float16 and torch.float32"):
        spread_few(half, torch.tensor([[0, 1, 2]], device=DEVICE), 9, wide[:, 0], impl="triton")


@pytest.mark.parametrize("case", [0, 1])
def test_terms_are_the_same_in_any_schedule(case, adversary):
    size, width = ((5, 3), (70, 40))[case]
    test_units_are_rounded_where_pytorch_rounds(size, width, torch.float32)
    test_rows_are_copied_as_they_are((size, width, 1), torch.bfloat16)
    test_messages_and_their_logits_are_those_of_pytorch(size, 5, torch.float32)
    test_logits_of_a_few_tokens_are_theirs_and_all_others_minus_infinity(1025, 5, "triton")
    adversary.met("_rnn_kernel", "_gru_kernel", "_message_kernel", "_side_by_side_kernel")
    adversary.met("_spread_few_kernel", "_few_logits_kernel")
