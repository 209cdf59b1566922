"""LlamaForward gives the logits of the transformers model it wraps."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from heavypath.kernels.native.library import library
from heavypath.speculative.models import linear, llama
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.trees.tree import TokenTree

TINY = {
    "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3)),
    "llama, dynamic": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=DYNAMIC)),
    "llama with biases, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=24)),
}


def sharpened(model):
    """Biases and norm weights away from their neutral initial values, so that leaving one out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


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
    model = sharpened(MODELS[name]())
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


@pytest.mark.parametrize(("model", "error", "message"), [
    (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)), TypeError, "got 'gpt2'"),
    (lambda: T5ForConditionalGeneration(T5Config(d_model=8, num_layers=1, d_kv=4, d_ff=8, num_heads=2, vocab_size=16)),
     TypeError, "got 't5'"),
    (lambda: LlamaModel(LlamaConfig(**TINY)), TypeError, "language-model head .* got LlamaModel"),
    (lambda: "meta-llama/Llama-2-7b", TypeError, "got 'str'"),
    (lambda: LlamaForCausalLM(LlamaConfig(**TINY)).train(), ValueError, "training mode; call target.eval"),
    (lambda: LlamaForCausalLM(LlamaConfig(**TINY)).to("meta"), ValueError, "meta device"),
])  # fmt: skip
def test_what_it_cannot_run_is_refused_by_name(model, error, message):
    model = model()
    if hasattr(model, "eval") and "training" not in message:
        model.eval()
    with pytest.raises(error, match=message):
        LlamaForward(model, "target")
