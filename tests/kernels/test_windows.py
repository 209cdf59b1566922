"""Sliding windows: each node of a tree sees its own window, each layer has its own, at any length of the text."""

import math
from functools import partial

import pytest
import torch
from devices import PLACES, run_on
from families import EXPERTS, tiny
from tiny_models import assert_same_text, tiny_llama

from heavypath.kernels.attention.masks import narrowed, pack_ancestors
from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.kernels.tree_attention import tree_attention
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.window_probe import check_windows

slow = pytest.mark.slow
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])
NAN = float("nan")

# A tree as it grows, level by level; its nodes' depths are 0, 1, 1, 2, 2, 2, 3, 4, 5.
PARENTS = [-1, 0, 0, 2, 1, 2, 3, 6, 7]
# Which nodes ask; -1 is the last row of the prefix, which a draft is given again together with the root.
ASKING = {
    "the first feed": [-1, 0], "a level": [3, 5], "the last nodes": [6, 7, 8], "some": [1, 4, 8], "all": [*range(9)],
}  # fmt: skip
OFTEN = [("the first feed", 1), ("the first feed", 5), ("some", 2), ("all", 3)]


def path_of(node: int) -> list[int]:
    """The node and its ancestors, from the node up."""
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path


def ancestor_mask(asking: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(asking), 9, dtype=torch.bool)
    for row, node in enumerate(asking):
        mask[row, path_of(node)] = True
    return mask


def by_loops(query, key, value, length, asking, window, first_row=0):
    """Attention [H, Q, D] of one sequence, one query and one row at a time, in Python's floats."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for i, node in enumerate(asking):
        path = path_of(node)
        own_position = length + len(path) - 1
        seen = [row for row in range(length) if own_position - row < window and row >= first_row]
        for up, ancestor in enumerate(path):
            if up < window and length + ancestor >= first_row:
                seen.append(length + ancestor)
        for head in range(len(query)):
            scores = [float(query[head, i].double() @ key[head, row].double()) / 4 for row in seen]  # sqrt(16) = 4
            weights = [math.exp(score) for score in scores]
            for row, weight in zip(seen, weights, strict=True):
                out[head, i] += weight / sum(weights) * value[head, row].double()
    return out


def problem(lengths, queries):
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(len(lengths), 2, queries, 16, generator=generator)
    key, value = torch.randn(2, len(lengths), 2, max(lengths) + 12, 16, generator=generator)
    for b, length in enumerate(lengths):
        key[b, :, length + 9 :] = value[b, :, length + 9 :] = 5.0  # what nobody sees
    return query, key, value


@pytest.mark.parametrize(("who", "window", "impl"), [
    pytest.param(who, window, impl, marks=() if (who, window) in OFTEN else slow)
    for who in ASKING for window in (1, 2, 3, 5, 9, 66) for impl in ("torch", "triton")
])  # fmt: skip
def test_any_nodes_of_a_tree_see_their_windows(who, window, impl):
    asking, lengths = ASKING[who], torch.tensor([2 if window > 2 else 1, 70, 65])  # on both sides of a block of 64
    tensors = problem(lengths.tolist(), len(asking))
    mask, padding = ancestor_mask(asking), torch.tensor([1, 66, 0])

    def expected(first_row):
        each = (
            by_loops(*(x[b] for x in tensors), int(lengths[b]), asking, window, int(first_row[b])) for b in range(3)
        )
        return torch.stack([*each])

    on_device = partial(run_on, PLACES[impl])
    tree_attend = partial(on_device, tree_attention, *tensors, prefix_length=lengths, window=window, impl=impl)
    said = [mask, pack_ancestors(mask), pack_ancestors(mask, window), pack_ancestors(mask.expand(3, -1, -1), window)]
    for ancestors in said if impl == "torch" else said[1::2]:
        out = tree_attend(ancestor_mask=ancestors, first_row=padding)
        torch.testing.assert_close(out.double(), expected(padding), atol=1e-5, rtol=0)
    said = {"ancestor_mask": mask, "window": window, "impl": impl}
    attend = on_device(prepared_attention, prefix_length=lengths, rows=79, dtype=torch.float32, **said)
    torch.testing.assert_close(on_device(attend, *tensors, 0.25).double(), expected([0, 0, 0]), atol=1e-5, rtol=0)


@IMPLS
def test_rows_before_every_window_are_not_read(impl):
    """So the time of a step does not grow with the text."""
    query, key, value = problem([300, 400], 9)
    earliest = 300 - 5  # of the row before the root
    untouched = earliest if impl == "torch" else earliest // 64 * 64  # a kernel reads whole blocks
    clean = run_on(
        PLACES[impl], prepared_attention, prefix_length=torch.tensor([300, 400]), rows=409, dtype=torch.float32,
        subtree_end=TokenTree.chain(8).subtree_end, window=5, impl=impl,
    )  # fmt: skip
    expected = run_on(PLACES[impl], clean, query, key, value, 0.25)
    key[:, :, :untouched] = value[:, :, :untouched] = NAN
    assert torch.equal(run_on(PLACES[impl], clean, query, key, value, 0.25), expected)


def test_a_narrowed_mask_by_hand():
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    assert narrowed(mask, 1).int().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert narrowed(mask, 2).int().tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]
    assert torch.equal(narrowed(mask, 3), mask)
    assert torch.equal(narrowed(narrowed(mask, 2), 2), narrowed(mask, 2))
    assert pack_ancestors(mask, 2).counts.tolist() == [1, 2, 2, 0]


def test_layers_with_one_window_share_one_mask_and_a_wide_window_is_none():
    mask = TreeMask(prefix_length=torch.tensor([6, 4]), visible_rows=9, subtree_end=torch.full((3,), 3))
    biases = mask.biases(torch.float32, [None, 2, 9, 2, 100])
    assert biases[None] is biases[9] is biases[100]
    assert mask.first_row(2) == 2  # two rows before the shorter prefix ends
    o, x = 0.0, -math.inf
    assert biases[2][:, 0].tolist() == [  # rows 2 .. 8
        [[x, x, x, o, o, x, x], [x, x, x, x, o, o, x], [x, x, x, x, x, o, o]],
        [[x, o, o, x, x, x, x], [x, x, o, o, x, x, x], [x, x, x, o, o, x, x]],
    ]


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


@pytest.mark.parametrize(("kind", "method"), [
    ("cohere2", "dyspec"), ("qwen3", "sequoia"),
    *(pytest.param(kind, method, marks=slow) for kind in FAMILIES for method in ("sequoia", "dyspec", "specinfer")),
])  # fmt: skip
def test_greedy_text_of_three_windows_is_that_of_transformers_generate(kind, method):
    model, unlike = windowed(kind), tiny_llama(5, vocab_size=61)
    expected = greedy(model)
    for draft in (unlike, model):
        out = SpeculativeDecoder(model, draft, method, tree_size=5).generate(PROMPTS, 16, attention_mask=PADDING)
        assert_same_text(model, out.sequences, expected)
    assert method == "specinfer" or out.stats.acceptance_by_rank[0] == 1


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "gemma3_text" else slow) for kind in FAMILIES])
def test_these_texts_depend_on_the_window(kind):
    """Otherwise the test above would show nothing."""
    expected = greedy(windowed(kind))
    assert not torch.equal(greedy(windowed(kind, WINDOW + 1)), expected)
    assert not torch.equal(greedy(windowed(kind, 64)), expected)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_window_may_be_smaller_than_the_tree_is_deep(kind, window):
    model = windowed(kind, window)
    expected = greedy(model, use_cache=window > 1)  # transformers' caches have no windows of 1
    for method, shape in (("chain", {"tree_size": 7}), ("dyspec", {"tree_size": 9, "max_depth": 6, "width": 2})):
        out = SpeculativeDecoder(model, model, method, **shape).generate(PROMPTS, 16, attention_mask=PADDING)
        assert_same_text(model, out.sequences, expected)
        assert out.stats.acceptance_by_rank[0] == 1


@pytest.mark.parametrize(("kind", "attention"), [
    ("cohere2", "eager"), ("olmo3", "heavypath"), ("mixtral", "sdpa"), ("mixtral", "heavypath"),
])  # fmt: skip
def test_windows_under_every_attention(kind, attention):
    model = windowed(kind)
    expected = greedy(model)
    model.set_attn_implementation(attention)
    out = SpeculativeDecoder(model, model, "dyspec", tree_size=5).generate(PROMPTS, 16, attention_mask=PADDING)
    assert_same_text(model, out.sequences, expected)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("cohere2", marks=slow)])
def test_windows_through_the_kernel(kind, monkeypatch):
    """A growing tree, of which a part asks, and a finished one; two kinds of layers."""
    attention = "sdpa" if kind == "qwen3" else "heavypath"
    model = windowed(kind, 4, head_dim=16, hidden_size=64, attn_implementation=attention)
    decoder = SpeculativeDecoder(model, model, "dyspec", tree_size=4, max_depth=3, width=2)
    expected = decoder.generate(PROMPTS, 5, attention_mask=PADDING).sequences
    monkeypatch.setattr(
        "heavypath.speculative.models.forward.prepared_attention", partial(prepared_attention, impl="triton")
    )
    assert torch.equal(decoder.generate(PROMPTS, 5, attention_mask=PADDING).sequences, expected)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "mistral", "mixtral"])
@pytest.mark.parametrize("window", [1, 8, 4096])
def test_a_window_that_is_one_off_is_found_out(kind, window):
    model = tiny(kind, **FAMILIES[kind], sliding_window=window, max_position_embeddings=8192)
    forward = forward_of(model, "target")
    check_windows(forward, 3e-3)
    for wrong in {window + 1, max(1, window - 1)} - {window}:
        model.config.sliding_window = wrong  # from which transformers makes its masks
        with pytest.raises(ValueError, match=rf"'{kind}' has sliding_window={window} in its config, but its own"):
            check_windows(forward, 3e-3)


def test_a_large_window_is_tried_with_few_tokens():
    model, tokens = tiny("gemma3_text", sliding_window=4096, max_position_embeddings=8192), []
    model.model.layers[0].register_forward_pre_hook(lambda layer, inputs: tokens.append(inputs[0][..., 0].numel()))
    forward_of(model, "target")
    assert max(tokens) <= 32
