"""Small models of odd sizes, and passes over a tree behind prompts; for tests of kernels and of compiled code."""

from dataclasses import replace

import torch
from llama_cases import LLAMA3, YARN, sharpened
from transformers import AutoConfig, AutoModelForCausalLM

from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.trees.tree import TokenTree

TREE = TokenTree([-1, 0, 1, 1, 0, 4, 4, 0])
MODELS = {
    "odd sizes": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one key for all": ("llama", {"num_key_value_heads": 1}),
    "a key for each": ("llama", {"num_key_value_heads": 6}),
    "head of 64": ("llama", {"head_dim": 64}),
    "head of 80": ("llama", {"head_dim": 80}),
    "head of 128": ("llama", {"head_dim": 128}),
    "head of 2": ("llama", {"head_dim": 2}),
    "head norms": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "a window of 2": ("mistral", {"sliding_window": 2}),
    "a window of 3": ("mistral", {"sliding_window": 3}),
    "a window of 20": ("mistral", {"sliding_window": 20}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "long rope": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0 + i / 10 for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
    }}),
    "another activation, yarn": ("llama", {"rope_parameters": YARN, "hidden_act": "gelu"}),
}  # fmt: skip


def model_of(name, dtype=torch.float32, **changes):
    """A small model whose norms and biases are not neutral."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 77, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.3}
    config = AutoConfig.for_model(kind, **sizes | {"max_position_embeddings": 256} | settings | changes)
    return sharpened(AutoModelForCausalLM.from_config(config)).to(dtype)


def passed(forward, lengths, interval, needs_logits=True):
    """Logits of a tree's nodes behind prompts of these lengths, tapped states and cache rows."""
    generator = torch.Generator().manual_seed(1)
    batch, longest, nodes = len(lengths), max(lengths), len(TREE)
    cache = forward.new_cache(batch, longest + 40)
    forward.prefill(torch.randint(77, (batch, longest), generator=generator), cache)
    tokens, prefix = torch.randint(77, (batch, nodes), generator=generator), torch.tensor(lengths)
    mask = TreeMask(prefix_length=prefix, visible_rows=longest + nodes, subtree_end=TREE.subtree_end)
    if not interval:  # as for the last nodes of a larger tree, whose first ones were given before
        mask = replace(mask, subtree_end=None, ancestor_mask=TREE.mask()[None].expand(batch, -1, -1))
    states = []
    layers = forward.model.config.num_hidden_layers
    taps = Taps((0, 2, 3)[:layers], lambda tapped, tokens, positions, rows: states.extend(tapped))
    rows = prefix[:, None] + torch.arange(nodes)
    logits = forward(tokens, prefix[:, None] + TREE.depths, rows, cache, mask, needs_logits=needs_logits, taps=taps)
    return [logits, *states, cache.keys, cache.values]


def assert_as_near(found, usual, exact, most):
    """Within `most` times the error of PyTorch's operations, in the eyes of fp64."""
    for one, other, right in zip(found, usual, exact, strict=True):
        assert one.dtype == other.dtype
        apart, allowed = ((each.double() - right).square().mean().sqrt() for each in (one, other))
        assert apart <= most * allowed
