"""attn_implementation="heavypath" gives what transformers' own attention gives, and a tree what its paths give."""

from functools import cache, partial
from unittest.mock import Mock

import pytest
import torch
from devices import DEVICE
from llama_cases import LLAMA3, made
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertModel, CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import Cache, StaticLayer
from transformers.masking_utils import chunked_causal_mask_function

from heavypath.kernels.attention.masks import pack_ancestors
from heavypath.kernels.tree_attention import chain_attention
from heavypath.speculative import TokenTree
from heavypath.speculative.models import attn_implementation
from heavypath.speculative.models.text_cache import CACHE_NAME

WINDOW = 7  # less than any text here
FAMILIES = {
    "llama": {"head_dim": 40, "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},  # of some layers
    "gemma2": {"head_dim": 24, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "qwen3": {"head_dim": 24},
}
FEW = [family for family in FAMILIES if family != "qwen3"]  # a family for each kind of attention
CACHES = {
    "no": lambda model: None,
    "a growing": lambda model: DynamicCache(config=model.config),
    "an all-keeping": lambda model: DynamicCache(),
    "a static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}

TEXT = torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(0))
PARTS = (9, 1, 2, 7, 1, 3)  # prefill, decoding, and several tokens behind a cache
PADDING = torch.ones(2, 23, dtype=torch.long)
PADDING[0, :5] = 0
HOLES = PADDING.index_fill(1, torch.tensor([11, 14]), 0)
MASKS = {"left padding": PADDING, "zeros between ones": HOLES, "right padding": PADDING.flip(1)}

TREE = TokenTree([-1, 0, 1, 1, 0, 4, 4, 6, 0])  # in depth-first order
NODES = torch.randint(61, (2, len(TREE)), generator=torch.Generator().manual_seed(1))


@cache
def tiny(family, layers=3):
    """A model of 3 layers, or the first of them."""
    torch.manual_seed(0)
    model = made(family, **FAMILIES[family])
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = model.config.layer_types[:layers]
    return model


@pytest.fixture(params=FAMILIES)
def model(request):
    return patched(tiny(request.param))


def by_kernel(monkeypatch):
    """Calls without a tree are served by tree_attention, as on a GPU, of at most 8 tokens at once; on a CPU by sdpa."""
    monkeypatch.setattr(attn_implementation, "_takes_sdpa", lambda *_: False)
    monkeypatch.setattr(attn_implementation, "_longest_chain", lambda query: 8)


@pytest.fixture(params=["sdpa", "tree_attention"])
def route(request, monkeypatch):
    if request.param == "tree_attention":
        by_kernel(monkeypatch)
    return request.param


def patched(model, implementation="heavypath"):
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def read(model, implementation, make_cache=CACHES["no"], padding=None, parts=PARTS):
    """Logits after every token of TEXT that is not padding, read in parts where there is a cache."""
    patched(model, implementation)
    cache, logits, start = make_cache(model), [], 0
    for size in (TEXT.shape[1],) if cache is None else parts:
        new, start = slice(start, start + size), start + size
        mask = {}
        if padding is not None:
            mask = {"attention_mask": padding[:, :start], "position_ids": positions(padding)[:, new]}
        logits.append(model(TEXT[:, new], **{CACHE_NAME: cache}, use_cache=cache is not None, **mask).logits)
    patched(model)
    logits = torch.cat(logits, 1)
    return logits if padding is None else logits[padding.bool()]


def positions(padding):
    return (padding.cumsum(1) - 1).clamp(min=0)


def assert_close(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@cache
def whole_by_eager(model, is_padded):
    return read(model, "eager", padding=PADDING if is_padded else None)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.usefixtures("route")
def test_logits_are_those_of_eager(model, kind):
    for padding in (None, PADDING):
        assert_close(read(model, "heavypath", CACHES[kind], padding), whole_by_eager(model, padding is not None))


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6's interpreter
@pytest.mark.usefixtures("interpreter")
def test_logits_through_the_kernel(monkeypatch):
    model = made("gemma2", num_hidden_layers=2, head_dim=16, sliding_window=WINDOW)
    growing, parts = CACHES["a growing"], (9, 1, 13)
    expected = read(model, "eager", growing, PADDING, parts)
    monkeypatch.setattr(attn_implementation, "chain_attention", partial(chain_attention, impl="triton"))
    torch.testing.assert_close(read(model, "heavypath", growing, PADDING, parts), expected, atol=1e-3, rtol=1e-3)


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "assisted": {"num_assistant_tokens": 3},  # of one sequence alone in transformers
}


def generated(family, implementation, padding="left padding", layers=3, **options):
    """Text and scores after padded prompts that are longer than any window."""
    model, sequences = patched(tiny(family, layers), implementation), slice(2)
    if "num_assistant_tokens" in options:
        options["assistant_model"], sequences = patched(tiny(family, layers=1), implementation), slice(1)
    out = model.generate(
        TEXT[sequences], attention_mask=MASKS[padding][sequences], max_new_tokens=12, do_sample=False, pad_token_id=0,
        eos_token_id=None, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.scores, 1)


by_eager = cache(partial(generated, implementation="eager"))


def assert_generated(ours, expected):
    assert torch.equal(ours[0], expected[0][: len(ours[0])])
    assert_close(ours[1], expected[1][: len(ours[1])])


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("way", WAYS)
def test_generate_writes_the_text_of_eager(family, way, route):
    expected = by_eager(family, **(WAYS[way] if way == "beams" else {}))  # all others are ways to the greedy text
    assert_generated(generated(family, "heavypath", **WAYS[way]), expected)
    if way in ("beams", "without a cache") or route == "tree_attention" or (family, way) == ("mistral", "assisted"):
        return  # other padding is served by sdpa, and transformers 5.17 fails after it with assistants of a window
    for padding in ("zeros between ones", "right padding"):
        assert_generated(generated(family, "heavypath", padding, **WAYS[way]), by_eager(family, padding=padding))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("mistral", 1), *((family, 3) for family in FEW[:3])])
def test_compiled_generate_writes_the_greedy_text(family, layers):
    torch._dynamo.reset()
    whole = CompileConfig(backend="eager", fullgraph=True)
    whole._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": whole}
    compiled = generated(family, "heavypath", layers=layers, **options)
    del tiny(family, layers)._compiled_call  # generate made it
    assert_generated(compiled, by_eager(family, layers=layers))


@pytest.mark.parametrize("family", FEW)
def test_gradients_are_those_of_sdpa_and_of_soft_capped_scores_those_of_eager(family):
    other, padding = ("eager", torch.ones_like(PADDING)) if family == "gemma2" else ("sdpa", PADDING)
    gradients = []
    for implementation in ("heavypath", other):
        model, labels = patched(tiny(family), implementation), TEXT.masked_fill(padding == 0, -100)
        model.zero_grad()
        model(TEXT, attention_mask=padding, position_ids=positions(padding), labels=labels).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    rtol, atol = (1e-3, 1e-5) if family == "gemma2" else (0, 0)
    torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)


def test_on_a_gpu_sdpa_serves_gradients_and_dropout_only():
    with FakeTensorMode():
        states = torch.empty(1, 2, 3, 16, device="cuda")
        assert not attn_implementation._takes_sdpa(states, states, states, dropout=0.0)
        assert attn_implementation._takes_sdpa(states, states, states, dropout=0.1)
        states.requires_grad_()
        assert attn_implementation._takes_sdpa(states, states, states, dropout=0.0)
        with torch.no_grad():
            assert not attn_implementation._takes_sdpa(states, states, states, dropout=0.0)


def test_dropout_is_that_of_sdpa():
    model = made("llama", attention_dropout=0.5).train()
    for no_gradients in (False, True):
        logits = []
        for implementation in ("heavypath", "sdpa"):
            torch.manual_seed(0)
            with torch.inference_mode(no_gradients):
                logits.append(patched(model, implementation)(TEXT).logits)
        assert torch.equal(*logits)


@pytest.mark.usefixtures("route")
def test_autocast_is_that_of_sdpa():
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits, expected = (
            patched(tiny("llama"), name)(TEXT, use_cache=False).logits for name in ("heavypath", "sdpa")
        )
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected, atol=0.2, rtol=0.05)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "kind"), [("mistral", "a static"), pytest.param("llama", "a growing", marks=pytest.mark.slow)]
)
def test_compiled_decoding_has_the_operator_as_a_node(family, kind, monkeypatch):
    monkeypatch.setattr(attn_implementation, "_has_kernel", lambda _: True)
    operators = set()

    def backend(graph, _):
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model = made(family, **FAMILIES[family], num_hidden_layers=1)
    expected = read(model, "eager", CACHES[kind], PADDING, (22, 1))
    torch._dynamo.reset()
    prefill, decode = model.forward, torch.compile(model.forward, backend=backend, fullgraph=True)
    monkeypatch.setattr(model, "forward", lambda ids, **told: (prefill, decode)[ids.shape[1] == 1](ids, **told))
    assert_close(read(model, "heavypath", CACHES[kind], PADDING, (22, 1)), expected)
    assert "heavypath.tree_attention.default" in operators


# Trees


def path_logits(model, prompts, nodes, tree=TREE):
    """Logits after each node, from its path alone behind the prompt."""
    patched(model, "eager")
    mask, logits = tree.mask(), []
    for prompt, tokens in zip(prompts, nodes, strict=True):
        texts = [torch.cat([prompt, tokens[mask[node]]])[None] for node in range(len(tree))]
        logits.append(torch.stack([model(text).logits[0, -1] for text in texts]))
    patched(model)
    return torch.stack(logits)


TREES = {
    "subtree_end": {"tree_subtree_end": TREE.subtree_end},
    "ancestor_mask": {"tree_ancestor_mask": TREE.mask()},
    "one for each sequence": {"tree_subtree_end": TREE.subtree_end.expand(2, -1)},
    "packed": {"tree_ancestor_mask": pack_ancestors(TREE.mask())},
}


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, PADDING[:, :12]], ids=["unpadded", "left padding"])
def test_a_node_of_a_tree_sees_what_its_path_sees(model, padding):
    known = torch.ones(2, 12, dtype=torch.long) if padding is None else padding
    lengths = known.sum(1, keepdim=True)
    expected = path_logits(
        model, [prompt[mask.bool()] for prompt, mask in zip(TEXT[:, :12], known, strict=True)], NODES
    )
    before, behind = {}, {"position_ids": lengths + TREE.depths}
    if padding is not None:
        before = {"attention_mask": padding, "position_ids": positions(padding)}
        behind["attention_mask"] = torch.cat([padding, torch.ones_like(NODES)], 1)
    for kind in ("a growing", "an all-keeping", "a static"):
        for given in TREES if kind == "a growing" else ["subtree_end"]:
            cache = CACHES[kind](model)
            model(TEXT[:, :12], **{CACHE_NAME: cache}, **before)
            logits = model(NODES, **{CACHE_NAME: cache}, **behind, **TREES[given]).logits
            assert_close(logits, expected)


class OwnRowsLayer(StaticLayer):
    """Each sequence's new tokens follow its own `lengths`."""

    lengths = torch.zeros(2, dtype=torch.long)

    def update(self, key_states, value_states, *_, **__):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.lengths[:, None] + torch.arange(key_states.shape[2])
        for rows_of, new in ((self.keys, key_states), (self.values, value_states)):
            rows_of.transpose(1, 2)[torch.arange(2)[:, None], rows] = new.transpose(1, 2)
        return self.keys, self.values


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_tree_after_prompts_of_different_lengths(family):
    model, lengths = patched(tiny(family)), torch.tensor([9, 12])
    cache = Cache(layers=[OwnRowsLayer(40) for _ in range(3)])
    right_padding = (torch.arange(12) < lengths[:, None]).long()
    model(TEXT[:, :12], attention_mask=right_padding, **{CACHE_NAME: cache})
    for layer in cache.layers:
        layer.lengths = lengths
    tree = {"tree_subtree_end": TREE.subtree_end, "tree_prefix_length": lengths}
    logits = model(NODES, position_ids=lengths[:, None] + TREE.depths, **{CACHE_NAME: cache}, **tree).logits
    assert_close(logits, path_logits(model, [TEXT[0, :9], TEXT[1, :12]], NODES))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["a growing", "a static"])
def test_a_tree_that_grows_level_by_level(kind):
    model, tree = patched(tiny("llama")), TREE.reordered("breadth_first")[0]
    expected = path_logits(model, TEXT[:, :12], NODES, tree)
    for pack in (torch.clone, pack_ancestors):
        cache, logits = CACHES[kind](model), []
        model(TEXT[:, :12], **{CACHE_NAME: cache})
        for level in tree.depths.unique():
            new = (tree.depths == level).nonzero()[:, 0]
            mask = pack(tree.mask()[new, : new[-1] + 1])
            position = (12 + tree.depths[new])[None]
            out = model(NODES[:, new], position_ids=position, **{CACHE_NAME: cache}, tree_ancestor_mask=mask)
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1), expected)


@torch.no_grad()
def test_a_tree_needs_no_cache(model):
    ones = torch.ones_like(NODES)
    tree = {"position_ids": TREE.depths[None], "tree_subtree_end": TREE.subtree_end}
    logits = model(NODES, attention_mask=ones, use_cache=False, **tree).logits
    assert_close(logits, path_logits(model, TEXT[:, :0], NODES))


def test_a_tree_has_gradients():
    model, root, tokens = patched(tiny("llama")), TokenTree([-1, 0, 0]), NODES[:1, :3]

    def gradient(*losses):
        model.zero_grad()
        sum(losses).backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    cache = {"position_ids": root.depths[None], "attention_mask": torch.ones_like(tokens), "use_cache": False}
    logits = model(tokens, tree_subtree_end=root.subtree_end, **cache).logits[0]
    by_paths = [model(tokens[:, [0, node]]).logits[0, 1].logsumexp(0) for node in (1, 2)]
    torch.testing.assert_close(gradient(*logits[1:].logsumexp(1)), gradient(*by_paths), atol=1e-4, rtol=1e-3)


# Other masks


RANDOM = (torch.rand(2, 1, 23, 23, generator=torch.Generator().manual_seed(2)) < 0.5) | torch.eye(23).bool()
OTHER_MASKS = {
    "zeros between ones": {"attention_mask": HOLES},
    "right padding": {"attention_mask": PADDING.flip(1)},
    "a mask": {"attention_mask": RANDOM},
    "an additive mask": {"attention_mask": torch.where(RANDOM, 0.3, -1e9)},
    "packed sequences": {"position_ids": torch.arange(23)[None] % 8, "use_cache": False},
    "bidirectional": {"is_causal": False},
    "attention weights": {"output_attentions": True},
}


@torch.no_grad()
@pytest.mark.parametrize("family", FEW[:3])
@pytest.mark.parametrize("name", OTHER_MASKS)
def test_any_other_mask_is_served_as_sdpa_does_and_attention_weights_are_missed_with_a_warning(
    family, name, monkeypatch
):
    warned = Mock()
    monkeypatch.setattr(attn_implementation.logger, "warning_once", warned)
    ours, expected = (patched(tiny(family), each)(TEXT, **OTHER_MASKS[name]).logits for each in ("heavypath", "sdpa"))
    assert_close(ours, expected)
    assert ("no attention weights" in str(warned.call_args)) == (name == "attention weights")


@torch.no_grad()
@pytest.mark.integration
@pytest.mark.parametrize(
    "mask", [HOLES, *(pytest.param(mask, marks=pytest.mark.slow) for mask in (PADDING.flip(1), None))],
    ids=["zeros between ones", "right padding", "none"],
)  # fmt: skip
def test_a_compiler_for_cpus_gets_the_mask_of_sdpa(mask):
    model = patched(made("llama", num_hidden_layers=1), "sdpa")
    expected = model(TEXT, attention_mask=mask).logits
    torch._dynamo.reset()
    compiled = torch.compile(patched(model), backend="eager", fullgraph=True)
    assert_close(compiled(TEXT, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_a_bidirectional_model_is_served_as_sdpa_does():
    bert = BertModel(BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).eval()
    for mask in (None, PADDING, HOLES):
        ours, expected = (patched(bert, each)(TEXT, mask).last_hidden_state for each in ("heavypath", "sdpa"))
        assert_close(ours, expected)


def test_chunks_are_seen_from_their_beginning():
    chunks = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = attn_implementation.visible_rows(1, 6, 6, mask_function=chunks, local_size=4)
    first_and_count = [[int(row.nonzero()[0]), int(row.sum())] for row in mask[0, 0]]
    assert first_and_count == [[0, 1], [0, 2], [0, 3], [0, 4], [4, 1], [4, 2]]
    # the rows of a static cache behind the new tokens, in a chunk that is longer than both
    chunks = chunked_causal_mask_function(9, torch.zeros(1, dtype=torch.long))
    mask = attn_implementation.visible_rows(1, 3, 6, mask_function=chunks, local_size=9)
    assert torch.equal(mask[0, 0], torch.ones(3, 6).tril().bool())


# Refusals


WHOLE = torch.full((23,), 23)  # a chain of that many nodes, as a tree
REFUSED = [
    ("llama", {"position_bias": torch.zeros(1)}, 'has no position biases.* use attn_implementation="sdpa"'),
    ("llama", {"attention_mask": PADDING[:, :9]}, "cover cache and new tokens, 23 columns, got 9"),
    ("llama", {"tree_prefix_length": 3}, "tree_prefix_length needs tree_subtree_end or tree_ancestor_mask"),
    ("llama", {"tree_subtree_end": torch.ones(5, dtype=torch.long)}, r"subtree_end must be .* \[23\]"),
    ("llama", {"tree_subtree_end": WHOLE, "tree_ancestor_mask": torch.ones(23, 23).tril() > 0}, "exactly one"),
    ("llama", {"tree_subtree_ends": WHOLE}, r"expected tree_subtree_end, .*, got tree_subtree_ends"),
    ("gemma2", OTHER_MASKS["bidirectional"], r'soft-capped scores .* use attn_implementation="eager"'),
    ("gemma2", OTHER_MASKS["an additive mask"], r'soft-capped scores .* use attn_implementation="eager"'),
    *(
        ("llama", {"tree_subtree_end": WHOLE, **mask}, "has no trees under bidirectional or custom masks")
        for name, mask in OTHER_MASKS.items()
        if name != "attention weights"
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("family", "arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_calls_that_it_cannot_serve_are_refused(family, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        patched(tiny(family))(TEXT, **arguments)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["a growing", "a static"])
def test_a_mask_too_short_behind_a_cache_is_refused(kind):
    model = patched(tiny("llama"))
    cache = model(TEXT[:, :9], **{CACHE_NAME: CACHES[kind](model)})[CACHE_NAME]
    with pytest.raises(ValueError, match="10 columns, got 1"):
        model(TEXT[:, 9:10], attention_mask=torch.ones(2, 1), **{CACHE_NAME: cache})


@torch.no_grad()
def test_models_it_cannot_serve_are_refused(monkeypatch):
    sinks = made("gpt_oss", head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match=r'has no attention sinks \(s_aux\); use attn_implementation="eager"'):
        patched(sinks)(TEXT)
    dropping = patched(made("llama", attention_dropout=0.5)).train()
    with pytest.raises(ValueError, match=r'has no dropout of 0\.5 for trees; use attn_implementation="eager"'):
        dropping(NODES, position_ids=TREE.depths[None], tree_subtree_end=TREE.subtree_end)
    by_kernel(monkeypatch)
    monkeypatch.setattr(attn_implementation, "chain_attention", partial(chain_attention, impl="triton"))
    model = patched(made("llama", head_dim=20)).to(DEVICE)
    with pytest.raises(ValueError, match=r"head sizes 16 to 256.*use attn_implementation=\"sdpa\""):
        model(TEXT.to(DEVICE))


@pytest.mark.parametrize(("mask", "options", "message"), [
    (torch.zeros(1, 1, 1, 3, dtype=torch.long), {}, "needs the sliding window, which Module does not pass"),
    (torch.ones(1, 3, dtype=torch.long), {}, r"takes an attention_mask \[B, rows\]"),
    (None, {}, "causal self-attention only, got 8 queries and 3 keys"),
])  # fmt: skip
def test_attention_it_cannot_serve_is_refused(mask, options, message):
    query, key = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=message):
        attn_implementation.attention_forward(nn.Module(), query, key, key, mask, **options)


@torch.no_grad()
def test_more_key_heads_than_a_launch_has_are_for_sdpa(monkeypatch):
    monkeypatch.setattr(attn_implementation, "_has_kernel", lambda _: True)
    served = []
    for kind in ("chain_attention", "sdpa_attention_forward"):
        does = getattr(attn_implementation, kind)
        wraps = partial(lambda does, kind, *args, **named: (served.append(kind), does(*args, **named))[1], does, kind)
        monkeypatch.setattr(attn_implementation, kind, wraps)
    model = patched(made("llama", num_hidden_layers=1))
    heads, logits = model.config.num_key_value_heads, []
    for most in (3 * heads, 3 * heads - 1):
        monkeypatch.setattr(attn_implementation, "MOST_HEADS", most)
        logits.append(model(TEXT[:1].expand(3, -1)).logits)
    assert served == ["chain_attention", "sdpa_attention_forward"]
    assert_close(*logits)


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_logits_on_a_gpu_are_those_of_eager():
    for family in FAMILIES:
        model, text, padding = made(family, **FAMILIES[family]).cuda(), TEXT.cuda(), PADDING.cuda()
        logits = [patched(model, name)(text, attention_mask=padding, position_ids=positions(padding)).logits
                  for name in ("heavypath", "eager")]  # fmt: skip
        torch.testing.assert_close(*(each[padding.bool()] for each in logits), atol=1e-3, rtol=1e-3)
