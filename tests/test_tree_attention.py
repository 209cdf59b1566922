"""tree_attention against a loop over nodes in fp64."""

import math

import pytest
import torch

from heavypath.kernels.tree_attention import attention_bias, tree_attention
from heavypath.speculative.tree import TokenTree


def oracle(query, key, value, prefix_lengths, mask, scale=None):
    """Dense softmax in fp64, one query row at a time."""
    batch, heads, nodes, head_dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(batch):
        length = int(prefix_lengths[b])
        for h in range(heads):
            for i in range(nodes):
                seen = [*range(length), *(length + j for j in range(nodes) if mask[b, i, j])]
                if not seen:
                    continue
                keys, values = key[b, h // group, seen].double(), value[b, h // group, seen].double()
                scores = keys @ query[b, h, i].double() * (scale or head_dim**-0.5)
                out[b, h, i] = scores.softmax(0) @ values
    return out


def random_tree(nodes: int, seed: int) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))]
    return TokenTree(parents).reordered("heavy_path")[0]


def inputs(batch, heads, kv_heads, nodes, rows, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, nodes, head_dim, generator=generator)
    key, value = torch.randn(2, batch, kv_heads, rows, head_dim, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@pytest.mark.parametrize("head_dim", [16, 40, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("nodes", "prefix"), [(1, 0), (1, 9), (7, 0), (13, 5)])
def test_one_prefix_length_for_all(nodes, prefix, heads, kv_heads, head_dim):
    tree = random_tree(nodes, seed=nodes)
    query, key, value = inputs(2, heads, kv_heads, nodes, prefix + nodes + 3, head_dim)
    key[:, :, prefix + nodes :] = value[:, :, prefix + nodes :] = math.nan
    expected = oracle(query, key, value, [prefix] * 2, tree.mask().expand(2, -1, -1))
    for shape in (
        {"subtree_end": tree.subtree_end},
        {"subtree_end": tree.subtree_end.int()},
        {"ancestor_mask": tree.mask()},
    ):
        out = tree_attention(query, key, value, prefix_length=prefix, **shape)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def test_each_sequence_its_own_prefix_and_tree():
    lengths = torch.tensor([0, 11, 4])
    trees = [random_tree(9, seed) for seed in range(3)]
    query, key, value = inputs(3, 4, 2, 9, 24, 32)
    for b, length in enumerate(lengths):
        key[b, :, length + 9 :] = value[b, :, length + 9 :] = math.nan
    mask = torch.stack([tree.mask() for tree in trees])
    expected = oracle(query, key, value, lengths, mask, scale=0.3)
    ends = torch.stack([tree.subtree_end for tree in trees])
    for shape in ({"subtree_end": ends}, {"ancestor_mask": mask}):
        out = tree_attention(query, key, value, prefix_length=lengths, scale=0.3, **shape)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def test_a_chain_is_causal_attention():
    query, key, value = inputs(1, 2, 2, 12, 12, 16)
    end = torch.full((12,), 12)
    causal = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(tree_attention(query, key, value, prefix_length=0, subtree_end=end), causal)


def test_a_node_that_sees_nothing_gets_zeros():
    query, key, value = inputs(1, 2, 1, 3, 3, 16)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]]).bool()
    out = tree_attention(query, key, value, prefix_length=0, ancestor_mask=mask)
    assert (out[:, :, 1] == 0).all()
    torch.testing.assert_close(out.double(), oracle(query, key, value, [0], mask[None]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_errs_at_most_twice_as_much_as_pytorchs_own(dtype):
    tree = random_tree(33, seed=1)
    query, key, value = inputs(2, 4, 2, 33, 97, 64, dtype)
    exact = oracle(query, key, value, [64, 64], tree.mask().expand(2, -1, -1))
    out = tree_attention(query, key, value, prefix_length=64, subtree_end=tree.subtree_end)
    dense = torch.cat([torch.ones(33, 64, dtype=torch.bool), tree.mask()], 1)
    pytorch = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 2 * (pytorch.double() - exact).abs().max() + 1e-5


def test_attention_bias_by_hand():
    ancestors = torch.tensor([[1, 0], [1, 1]]).bool()
    bias = attention_bias(ancestors, torch.tensor([1, 2]), 5, torch.float32)
    o, x = 0.0, -math.inf
    assert bias[:, 0].tolist() == [[[o, o, x, x, x], [o, o, o, x, x]], [[o, o, o, x, x], [o, o, o, o, x]]]


@pytest.mark.parametrize(("change", "message"), [
    ({"key": torch.zeros(1, 3, 8, 16), "value": torch.zeros(1, 3, 8, 16)}, "multiple of key heads, got 4 and 3"),
    ({"value": torch.zeros(1, 2, 7, 16)}, r"expected query \[B, Hq, N, D\]"),
    ({"query": torch.zeros(1, 4, 3, 16).half()}, "one floating-point dtype, got torch.float16"),
    ({"subtree_end": None}, "exactly one of subtree_end and ancestor_mask"),
    ({"ancestor_mask": torch.ones(3, 3).bool()}, "exactly one of"),
    ({"subtree_end": torch.tensor([3, 3])}, r"subtree_end must be .* \[3\] or \[1, 3\]"),
    ({"subtree_end": None, "ancestor_mask": torch.ones(3, 3)}, "ancestor_mask must be torch.bool"),
    ({"prefix_length": 6}, r"prefix_length \+ 3 nodes must lie in 0 .. 8"),
    ({"prefix_length": -1}, "prefix_length"),
    ({"prefix_length": torch.tensor([1, 2])}, r"prefix_length must be an int or a LongTensor \[1\]"),
    ({"impl": "flash"}, "impl .* got 'flash'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {
        "query": torch.zeros(1, 4, 3, 16), "key": torch.zeros(1, 2, 8, 16), "value": torch.zeros(1, 2, 8, 16),
        "prefix_length": 2, "subtree_end": torch.tensor([3, 3, 3]),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        tree_attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
