"""Sliding windows: each node of a tree sees its own window, each layer has its own, at any length of the text."""

import pytest
import torch
from attention_cases import inputs
from devices import PLACES, run_on
from families import EXPERTS, tiny
from tiny_models import assert_same_text, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.window_probe import check_windows

slow = pytest.mark.slow
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


@IMPLS
def test_rows_before_every_window_are_not_read(impl):
    """So the time of a step does not grow with the text."""
    query, key, value = (x.cpu() for x in inputs(2, 2, 2, 9, 409, 16))
    earliest = 300 - 5  # of the row before the root
    untouched = earliest if impl == "torch" else earliest // 64 * 64  # a kernel reads whole blocks
    clean = run_on(
        PLACES[impl], prepared_attention, prefix_length=torch.tensor([300, 400]), rows=409, dtype=torch.float32,
        subtree_end=TokenTree.chain(8).subtree_end, window=5, impl=impl,
    )  # fmt: skip
    expected = run_on(PLACES[impl], clean, query, key, value, 0.25)
    key[:, :, :untouched] = value[:, :, :untouched] = torch.nan
    assert torch.equal(run_on(PLACES[impl], clean, query, key, value, 0.25), expected)


WINDOW = 8
SOME = {"use_sliding_window": True, "max_window_layers": 1}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "afmoe": EXPERTS, "cohere2": {}, "cohere2_moe": EXPERTS, "cwm": {}, "exaone4": MIXED, "exaone_moe": EXPERTS,
    "gemma2": {}, "gemma3_text": MIXED, "gpt_oss": EXPERTS, "granite_swa": {}, "ministral": MIXED, "ministral3": {},
    "mistral": {}, "mixtral": EXPERTS, "olmo3": {}, "phi3": {}, "phimoe": EXPERTS, "qwen2": SOME,
    "qwen2_moe": EXPERTS | SOME, "qwen3": SOME, "qwen3_moe": EXPERTS | SOME, "smollm3": SOME | MIXED, "starcoder2": {},
    "vaultgemma": {},
}  # fmt: skip
PROMPTS = torch.tensor([[5, 9, 8, 7, 33, 2, 14, 41, 3, 3, 27, 50], [0, 0, 0, 0, 0, 4, 4, 17, 60, 22, 8, 11]])
PADDING = (torch.arange(12) >= torch.tensor([[0], [5]])).long()


def windowed(kind, window=WINDOW, **changes):
    return tiny(kind, sliding_window=window, tie_word_embeddings=False, **FAMILIES[kind] | changes)


def greedy(model, **changes):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | changes
    return model.generate(PROMPTS, attention_mask=PADDING, **options)


@pytest.mark.parametrize(("kind", "method", "attention"), [
    ("cohere2", "dyspec", "eager"), ("qwen3", "sequoia", "sdpa"), ("olmo3", "dyspec", "heavypath"),
    ("mixtral", "dyspec", "heavypath"),
    *(pytest.param(kind, method, None, marks=slow)  # None: transformers' choice, since not all families have sdpa
      for kind in FAMILIES for method in ("sequoia", "dyspec", "specinfer")),
])  # fmt: skip
def test_greedy_text_of_three_windows_is_that_of_transformers_generate(kind, method, attention):
    model, unlike = windowed(kind), tiny_llama(5, vocab_size=61)
    expected = greedy(model)
    assert not any(torch.equal(greedy(windowed(kind, other)), expected) for other in (WINDOW + 1, 64))
    if attention is not None:
        model.set_attn_implementation(attention)
    for draft in (unlike, model):
        out = SpeculativeDecoder(model, draft, method, tree_size=5).generate(PROMPTS, 16, attention_mask=PADDING)
        assert_same_text(model, out.sequences, expected)
    assert method == "specinfer" or out.stats.acceptance_by_rank[0] == 1


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_may_be_smaller_than_the_tree_is_deep(kind, window):
    model = windowed(kind, window)
    expected = greedy(model)
    for method, shape in (("chain", {"tree_size": 7}), ("dyspec", {"tree_size": 9, "max_depth": 6, "width": 2})):
        out = SpeculativeDecoder(model, model, method, **shape).generate(PROMPTS, 16, attention_mask=PADDING)
        assert_same_text(model, out.sequences, expected)
        assert out.stats.acceptance_by_rank[0] == 1


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "mistral", "mixtral"])
@pytest.mark.parametrize("window", [2, 8, 4096])
def test_a_window_that_is_one_off_is_found_out(kind, window):
    model = tiny(kind, **FAMILIES[kind], sliding_window=window, max_position_embeddings=8192)
    forward = forward_of(model, "target")
    check_windows(forward, 3e-3)
    for wrong in (window + 1, window - 1):
        model.config.sliding_window = wrong  # from which transformers makes its masks
        with pytest.raises(ValueError, match=rf"'{kind}' has sliding_window={window} in its config, but its own"):
            check_windows(forward, 3e-3)


class Embedded(TorchDispatchMode):
    """Notes how many tokens are embedded at once. A hook would be code that nobody knows, and tried for longer."""

    def __init__(self):
        super().__init__()
        self.tokens = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.embedding.default:
            self.tokens.append(args[1].numel())
        return operator(*args, **(kwargs or {}))


def test_a_large_window_is_tried_with_few_tokens():
    model = tiny("gemma3_text", sliding_window=4096, max_position_embeddings=8192)
    with Embedded() as embedded:
        forward_of(model, "target")
    assert 0 < max(embedded.tokens) <= 32
