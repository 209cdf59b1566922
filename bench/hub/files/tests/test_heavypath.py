"""The kernels against PyTorch, as the Hub gives them. LOCAL_KERNELS=heavypath/heavypath=FOLDER takes those of a folder.

On a CPU what has a kernel alone is run by Triton's interpreter, if TRITON_INTERPRET is 1.
"""

import os

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
heavypath = kernels.get_kernel("heavypath/heavypath", version=0, trust_remote_code=True)
on_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)
IMPL = {} if DEVICE == "cuda" else {"impl": "triton"}
PARENTS = torch.tensor([-1, 0, 0, 1, 1])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_is_that_of_the_mask(heads):
    query = torch.randn(1, heads, 5, 32, device=DEVICE)
    key, value = torch.randn(2, 1, 2, 12, 32, device=DEVICE)
    order = heavypath.heavy_path_order(PARENTS.to(DEVICE)) if DEVICE == "cuda" else None
    ends = torch.tensor([5, 4, 3, 4, 5]) if order is None else order.subtree_end
    index = torch.arange(5, device=DEVICE)
    tree = (index[:, None] >= index) & (index[:, None] < ends.to(DEVICE))
    mask = torch.cat([torch.ones(5, 7, dtype=torch.bool, device=DEVICE), tree], 1)
    out = heavypath.tree_attention(query, key, value, prefix_length=7, subtree_end=ends.to(DEVICE))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.kernels_ci
def test_parts_of_layers_are_those_of_pytorch():
    x, y = torch.randn(2, 3, 64, device=DEVICE)
    weight = torch.rand(64, device=DEVICE)
    total, normed = heavypath.add_rms_norm(x, y, heavypath.Norm(weight, 1e-6))
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, rms_norm(x + y, (64,), weight, 1e-6))
    torch.testing.assert_close(heavypath.silu_product(x, y), silu(x) * y)


@on_kernels
@pytest.mark.kernels_ci
def test_a_tree_is_drawn_ordered_verified_and_its_rows_are_moved():
    order = heavypath.heavy_path_order(PARENTS.to(DEVICE), **IMPL)
    assert order.permutation.tolist() == [0, 1, 3, 4, 2]
    logits = torch.randn(1, 5, 40, device=DEVICE)
    drawn = heavypath.gumbel_topk(logits[:, 0], 2, seed=3, **IMPL)
    assert len({*drawn.tokens[0].tolist()}) == 2
    best = logits.argmax(-1)
    tokens = torch.stack([best[0, 0] * 0, best[0, 0], drawn.tokens[0, 1], best[0, 1], best[0, 1] * 0])[None]
    options = {"method": "greedy", "temperature": 0.0, "max_depth": 2} | IMPL
    verified = heavypath.verify_tree(tokens, PARENTS.to(DEVICE), logits, None, **options)
    assert verified.path[0, : verified.length + 1].tolist() == [0, 1, 3]
    assert verified.next_token.item() == best[0, 3].item()
    keys = torch.arange(8.0, device=DEVICE).view(1, 1, 8, 1).repeat(1, 1, 1, 16)
    heavypath.compact_cache(
        [keys], [keys.clone()], verified.path, verified.length, torch.tensor([2], device=DEVICE), **IMPL
    )
    assert keys[0, 0, :5, 0].tolist() == [0, 1, 2, 3, 5]


@pytest.mark.kernels_ci
def test_the_compiler_sees_one_node():
    x, y = torch.randn(2, 3, 64, device=DEVICE)
    compiled = torch.compile(lambda x, y: heavypath.silu_product(x * 2, y), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), silu(x * 2) * y)
