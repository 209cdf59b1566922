"""Kernels around a head's layers: entries by loops over numbers, and logits of a draft's own tokens."""

import math

import pytest
import torch
from devices import DEVICE, moved

from heavypath.kernels.attention.masks import PackedAncestors, unpack_ancestors
from heavypath.kernels.layers.entries import EntryNodes, EntryNorms, end_entries, entry_inputs, node_entries
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.layers.spread import OwnTokens, spread_logits

IMPLS = ["torch", "triton"]
BATCH, COUNT, ROWS, VOCAB = 3, 2, 9, 11
LENGTHS = (5, 1, 0)  # of one token, and of none before the root


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(*tensors):
    return [each.to(DEVICE) for each in tensors]


def rms(row, norm):
    """A row's RMS norm in fp64, number by number."""
    if norm is None:
        return row
    weight, epsilon = norm.weight.tolist(), norm.epsilon
    scale = 1 / math.sqrt(sum(x * x for x in row) / len(row) + epsilon)
    return [x * scale * w for x, w in zip(row, weight, strict=True)]


def nodes_of(shared):
    """Two nodes of each sequence at depths 1 and 2, in the tree's rows 1 and 3; their parents are in rows 0 and 1."""
    lengths = torch.tensor(LENGTHS)
    tokens = torch.tensor([[3, 4], [0, 10], [7, 7]])
    below = lengths[:, None]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1]]).bool()
    wide = torch.zeros(COUNT, 70).bool()
    wide[:, :4] = mask
    wide[1, 69] = True
    mask = wide if shared else torch.stack([wide, ~wide, wide])
    rows, parents = below + torch.tensor([1, 3]), below + torch.tensor([0, 1])
    return EntryNodes(tokens, rows, below + torch.tensor([1, 2]), parents, lengths, mask)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("normed", "keeps"), [(True, False), (True, True), (False, False)])
def test_entries_of_nodes_are_their_tokens_and_their_parents_outputs(normed, keeps, shared, impl):
    """A row and a position before the node's own, but not where no token is before the root."""
    table, outputs = numbers(VOCAB, 5), numbers(BATCH, ROWS, 12, seed=1)[..., :7]
    norms = EntryNorms(None, None)
    if normed:
        norms = EntryNorms(Norm(numbers(5, 2, seed=2)[:, 0], 1e-5), Norm(numbers(7, 2, seed=3)[:, 0], 1e-6), keeps)
    nodes = nodes_of(shared)
    given = moved((outputs, nodes, table, norms), DEVICE)
    found = node_entries(*given, impl=impl)
    for sequence, length in enumerate(LENGTHS):
        shift = 0 if length == 0 else 1
        assert int(found.before[sequence]) == length - shift
        for node, (row, depth, parent) in enumerate(((1, 1, 0), (3, 2, 1))):
            assert int(found.rows[sequence, node]) == length + row - shift
            assert int(found.positions[sequence, node]) == length + depth - shift
            entry = sequence * COUNT + node
            given = outputs[sequence, length + parent - shift].tolist()
            states, word = rms(given, norms.features), rms(table[nodes.tokens[sequence, node]].tolist(), norms.embedded)
            expected = [torch.tensor(each) for each in (states if keeps else given, word + states)]
            for one, other in zip(found.inputs, expected, strict=True):
                torch.testing.assert_close(one[entry].cpu(), other, rtol=1e-5, atol=1e-5)
    ancestors = found.ancestors
    if impl == "triton":
        assert isinstance(ancestors, PackedAncestors)
        ancestors = unpack_ancestors(ancestors)
    assert torch.equal(ancestors.cpu(), nodes.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("looked_up", [True, False])
@pytest.mark.parametrize("features_first", [True, False])
def test_inputs_are_rounded_where_pytorch_rounds(features_first, looked_up, dtype):
    features, table = numbers(2, 3, 40, dtype=dtype), numbers(6, 40, seed=1, dtype=dtype)
    norms = EntryNorms(*(Norm(numbers(40, seed=seed, dtype=dtype).to(DEVICE), 1e-5) for seed in (2, 3)))
    tokens = torch.tensor([[5, 0, 1], [1, 1, 4]], device=DEVICE) if looked_up else None
    ours, plain = (
        entry_inputs(features.to(DEVICE), tokens, table.to(DEVICE), norms, features_first=features_first, impl=impl)
        for impl in ("triton", "torch")
    )
    assert torch.equal(ours.states, plain.states)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(ours.joined, plain.joined, rtol=step, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("normed", "keeps"), [(True, False), (True, True), (False, False)])
def test_ends_are_kept_in_their_rows_and_nowhere_else(normed, keeps, impl):
    hidden, added = numbers(4, 6), numbers(4, 6, seed=1)
    norm = Norm(numbers(6, 2, seed=2)[:, 0], 1e-5) if normed else None
    outputs = torch.full((2, 5, 8), 9.0, device=DEVICE)[..., :6]
    rows = torch.tensor([[4, 0], [1, 3]], device=DEVICE)
    given = moved((hidden, added, norm), DEVICE)
    ends = end_entries(*given, outputs, rows, keeps_normed=keeps, impl=impl).cpu()
    written = set()
    for entry, (sequence, row) in enumerate(((0, 4), (0, 0), (1, 1), (1, 3))):
        total = [float(one) + float(other) for one, other in zip(hidden[entry], added[entry], strict=True)]
        unit = rms(total, norm)
        torch.testing.assert_close(ends[entry], torch.tensor(unit), rtol=1e-5, atol=1e-6)
        kept = torch.tensor(unit if keeps else total)
        torch.testing.assert_close(outputs[sequence, row].cpu(), kept, rtol=1e-5, atol=1e-6)
        written.add((sequence, row))
    for sequence in range(2):
        for row in {*range(5)} - {row for own, row in written if own == sequence}:
            assert (outputs[sequence, row] == 9).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (9, torch.bfloat16), (1025, torch.float32)])
def test_logits_are_those_of_the_same_tokens(vocab, dtype, impl):
    own = [token for token in range(vocab) if token % 3 == 0][::-1]
    offsets = torch.tensor([token - number for number, token in enumerate(own)], device=DEVICE)
    logits = numbers(2, 3, len(own), dtype=dtype)
    tokens = OwnTokens.by_offsets(offsets, vocab)
    tokens = tokens._replace(of_draft=torch.stack([tokens.of_draft, 0 * tokens.of_draft], -1)[:, 0])  # with gaps
    found = spread_logits(logits.to(DEVICE), tokens, impl=impl).cpu()
    for token in range(vocab):
        expected = logits[..., own.index(token)] if token in own else torch.full((2, 3), -torch.inf, dtype=dtype)
        assert torch.equal(found[..., token], expected)


def test_tensors_that_the_kernels_do_not_take_are_refused():
    half, wide = (numbers(1, 2, 4, dtype=dtype).to(DEVICE) for dtype in (torch.float16, torch.float32))
    with pytest.raises(ValueError, match=r"tensors of one dtype, .* got .*float16.*float32"):
        entry_inputs(half, None, wide[0], EntryNorms(None, None), impl="triton")
    rows = torch.zeros(1, 3, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match=r"hidden and added must be .*; got \[2, 4\], \[2, 4\], \[1, 3\]"):
        end_entries(wide[0], wide[0], None, wide, rows, impl="triton")


def test_entries_are_the_same_in_any_schedule(adversary):
    """Of three sequences that share a mask, whose words one of them writes."""
    nodes = EntryNodes(*on_device(*nodes_of(shared=True)))
    table, outputs, first, second = on_device(numbers(VOCAB, 5), numbers(BATCH, ROWS, 7), numbers(5), numbers(7))
    norms = EntryNorms(Norm(first, 1e-5), Norm(second, 1e-5))
    found, plain = (node_entries(outputs, nodes, table, norms, impl=impl) for impl in ("triton", "torch"))
    assert torch.equal(found.rows, plain.rows)
    assert isinstance(found.ancestors, PackedAncestors)
    assert torch.equal(unpack_ancestors(found.ancestors), nodes.mask)
    torch.testing.assert_close(found.inputs.joined, plain.inputs.joined)
    hidden, logits, offsets = on_device(numbers(6, 7), numbers(2, 3), torch.tensor([4, 0, 0]))
    end_entries(hidden, hidden, None, outputs, found.rows, impl="triton")
    spread_logits(logits, OwnTokens.by_offsets(offsets, 9), impl="triton")
    adversary.met("_begin_kernel", "_end_kernel", "_spread_kernel")
