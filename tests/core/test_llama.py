"""LlamaForward gives the logits of the transformers model it wraps."""

import pytest
import torch
from llama_cases import MODELS, made, sharpened

from heavypath.kernels.attention.layouts import MAX_NODES
from heavypath.kernels.native.library import library
from heavypath.speculative.models import linear, llama
from heavypath.speculative.models.forward import STREAMED_CHUNK, TreeMask, chunk_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.trees.tree import TokenTree

WAYS = ["compiled pass", "compiled products", "PyTorch"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How a forward pass on the CPU computes."""
    if request.param == "PyTorch":
        monkeypatch.setattr(linear, "library", lambda: None)
    elif library() is None:
        pytest.skip("no C++ compiler")
    if request.param == "compiled products":
        monkeypatch.setattr(llama, "native_pass", lambda *parts: None)
    return request.param


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_of_prompts_then_trees_are_those_of_transformers(name, way):
    model = sharpened(made(MODELS[name][0], **MODELS[name][1]))
    forward = LlamaForward(model)
    assert (forward._native is not None) == (way == "compiled pass" and forward.device.type == "cpu")
    prompts, prefix = torch.randint(0, 61, (2, 9)), 9
    cache = forward.new_cache(2, 20)
    rows = torch.arange(9).expand(2, -1)

    def behind(length, ends):
        rows = length + len(ends)
        return TreeMask(prefix_length=torch.tensor(length), visible_rows=rows, subtree_end=torch.as_tensor(ends))

    logits = forward(prompts, rows, rows, cache, behind(0, [9] * 9))
    torch.testing.assert_close(logits, model(prompts).logits, atol=2e-4, rtol=2e-4)

    alone = forward.new_cache(1, 20)
    forward.prefill(prompts[:1, :8], alone)
    one = forward(prompts[:1, 8:], rows[:1, 8:], rows[:1, 8:], alone, behind(8, [1]))
    torch.testing.assert_close(one[0, 0], logits[0, 8], atol=2e-4, rtol=2e-4)

    tree = TokenTree([-1, 0, 1, 1, 0, 4])
    tokens = torch.randint(0, 61, (2, 6))
    positions, tree_rows = prefix + tree.depths.expand(2, -1), prefix + torch.arange(6).expand(2, -1)
    logits = forward(tokens, positions, tree_rows, cache, behind(prefix, tree.subtree_end))
    for node in range(6):
        path = tree.mask()[node].nonzero()[:, 0]
        expected = model(torch.cat([prompts, tokens[:, path]], 1)).logits[:, -1]
        torch.testing.assert_close(logits[:, node], expected, atol=2e-4, rtol=2e-4)


def test_pieces_of_a_prompt_are_smaller_than_attention_on_a_gpu_takes():
    """One token may go with a piece of a long text, see `as_long`."""
    assert STREAMED_CHUNK["cuda"] < MAX_NODES
    assert [chunk_of(batch, torch.device("cuda")) for batch in (1, 4, 8, 16, 64)] == [1984, 1984, 1024, 512, 512]
    assert chunk_of(1, torch.device("cpu")) == 512
