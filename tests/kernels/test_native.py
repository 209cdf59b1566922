"""The compiled kernels for CPUs against PyTorch's operations, and how they come to be compiled."""

import logging
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from native_cases import assert_fails_with
from tiny_models import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from heavypath.kernels.native import library as native_library
from heavypath.kernels.native.library import library
from heavypath.kernels.native.products import Blocks, product
from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.trees.tree import TokenTree

needs_compiler = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="models of tests are on the GPU")
TYPES = [torch.float32, torch.bfloat16]
ROWS = (*range(1, 14), 16, 47, 48, 49, 64, 97, 130)
TREE = TokenTree([-1, 0, 1, 1, 0, 4, 4, 0])


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("columns", "outputs"), [(1, 1), (17, 5), (64, 64), (40, 100), (1300, 70)])
def test_products_are_those_of_pytorch(columns, outputs, dtype):
    weights = [torch.randn(count, columns).to(dtype) for count in (outputs, 3, outputs)]
    biases = [torch.randn(outputs).to(dtype), None, torch.randn(outputs).to(dtype)]
    blocks, plain = Blocks.of(weights, biases), Blocks.of(weights, [None] * 3)
    added = torch.cat([biases[0], torch.zeros(3, dtype=dtype), biases[2]])
    for rows in ROWS:
        hidden = torch.randn(rows, columns).to(dtype)
        expected = hidden.double() @ torch.cat(weights).double().T
        close = {"rtol": 1e-5 if dtype == torch.float32 else 8e-3, "atol": 1e-4 if dtype == torch.float32 else 1e-2}
        torch.testing.assert_close(product(hidden, plain).double(), expected, **close)
        torch.testing.assert_close(product(hidden, blocks).double(), expected + added.double(), **close)


@needs_compiler
@pytest.mark.parametrize("hidden", [torch.zeros(3, 6), torch.zeros(3, 7).bfloat16()])
def test_a_product_of_other_rows_than_the_weights_is_refused(hidden):
    blocks = Blocks.of([torch.zeros(5, 6).bfloat16()], [None])
    with pytest.raises(ValueError, match=r"product needs rows \[\.\.\., 6\] of torch.bfloat16, got "):
        product(hidden, blocks)


@needs_compiler
def test_sixteen_bits_are_rounded_to_the_nearest():
    hidden, weight = (torch.randn(count, 1).bfloat16() for count in (60, 500))
    assert torch.equal(product(hidden, Blocks.of([weight], [None])), hidden * weight.T)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_product_is_the_same_to_the_bit_beside_any_others(threads, monkeypatch):
    blocks = Blocks.of([torch.randn(300, 700)], [torch.randn(300)])
    hidden = torch.randn(100, 700)
    alone = torch.cat([product(row[None], blocks) for row in hidden])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native_library, "SHARE", 1)
    for rows in ROWS:
        assert torch.equal(product(hidden[:rows], blocks), alone[:rows])


def model_of(kind, dtype=torch.float32, **settings):
    """A small model whose norms and biases are not neutral, of odd sizes."""
    class_of, config_of = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "mistral": (MistralForCausalLM, MistralConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[kind]
    torch.manual_seed(0)
    sizes = {"vocab_size": 77, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.3}
    model = class_of(config_of(**sizes | {"max_position_embeddings": 256} | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


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
    "a window of 1": ("mistral", {"sliding_window": 1}),
    "a window of 3": ("mistral", {"sliding_window": 3}),
    "a window of 20": ("mistral", {"sliding_window": 20}),
    "long rope": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0 + i / 10 for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
    }}),
}  # fmt: skip


def both(forward, *arguments, **options):
    """What the compiled pass and PyTorch's give, each with a cache of its own: logits, tapped states, rows."""
    compiled, given = forward._native, []
    compiled.takes = lambda rows: True  # of 16 bits, too
    for native in (compiled, None):
        forward._native = native
        given.append(_passes(forward, *arguments, **options))
    forward._native = compiled
    return given


def _passes(forward, lengths, interval, needs_logits=True):
    generator = torch.Generator().manual_seed(1)
    batch, longest = len(lengths), max(lengths)
    cache = forward.new_cache(batch, longest + 40)
    prompts = torch.randint(77, (batch, longest), generator=generator)
    forward.prefill(prompts, cache)
    nodes, tokens = len(TREE), torch.randint(77, (batch, len(TREE)), generator=generator)
    prefix = torch.tensor(lengths)
    mask = TreeMask(prefix_length=prefix, visible_rows=longest + nodes, subtree_end=TREE.subtree_end)
    if not interval:  # the last nodes of a larger tree, whose first ones were given before
        mask = replace(mask, subtree_end=None, ancestor_mask=TREE.mask()[None].expand(batch, -1, -1))
    states = []
    taps = Taps((0, 2, 3), lambda tapped, tokens, rows: states.extend(tapped))
    rows = prefix[:, None] + torch.arange(nodes)
    logits = forward(tokens, prefix[:, None] + TREE.depths, rows, cache, mask, needs_logits=needs_logits, taps=taps)
    return [logits, *states, cache.keys, cache.values]


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", [[1], [30], [19, 3, 30]])
@pytest.mark.parametrize("interval", [True, False])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_pass_is_that_of_pytorch(name, interval, lengths, dtype):
    kind, settings = MODELS[name]
    forward = LlamaForward(model_of(kind, dtype, **settings))
    assert forward._native is not None
    if dtype == torch.float32:
        for found, expected in zip(*both(forward, lengths, interval), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
    else:  # about as far from what 64 bits give as PyTorch's operations, some of which round less often
        exact = _passes(LlamaForward(model_of(kind, dtype, **settings).double()), lengths, interval)
        for found, other, expected in zip(*both(forward, lengths, interval), exact, strict=True):
            apart, usual = ((each.double() - expected).square().mean().sqrt() for each in (found, other))
            assert apart <= 1.6 * usual


@needs_compiler
@torch.inference_mode()
def test_a_pass_without_logits_leaves_the_head_out():
    forward = LlamaForward(model_of("llama"))
    for found, expected in zip(*both(forward, [5], True, needs_logits=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_a_sequences_logits_are_the_same_to_the_bit_in_any_batch(threads, monkeypatch):
    forward = LlamaForward(model_of("llama"))
    together = _passes(forward, [30, 30, 30, 30], True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native_library, "SHARE", 1)
    again = _passes(forward, [30, 30, 30, 30], False)
    assert all(map(torch.equal, together, again))
    # The first sequence of a batch gets the random numbers that a single one gets in part.
    cache = [forward.new_cache(batch, 40) for batch in (1, 3)]
    tokens = torch.randint(77, (3, 33))
    rows = torch.arange(33).expand(3, -1)
    mask = TreeMask(prefix_length=torch.tensor(0), visible_rows=33, subtree_end=torch.full((33,), 33))
    every = forward(tokens, rows, rows, cache[1], mask)
    alone = forward(tokens[:1], rows[:1], rows[:1], cache[0], mask)
    assert torch.equal(every[:1], alone)
    for row in range(20, 33):  # token by token
        one = TreeMask(prefix_length=torch.tensor(row), visible_rows=row + 1, subtree_end=torch.tensor([1]))
        given = rows[:1, row : row + 1]
        assert torch.equal(forward(tokens[:1, row : row + 1], given, given, cache[0], one)[:, 0], alone[:, row])


@needs_compiler
@torch.inference_mode()
def test_nan_and_infinity_come_out():
    model = model_of("llama")
    for bad in (torch.nan, torch.inf):
        model.model.embed_tokens.weight[5, 3] = bad
        forward = LlamaForward(model)
        rows = torch.arange(4).expand(2, -1)
        mask = TreeMask(prefix_length=torch.tensor(0), visible_rows=4, subtree_end=torch.full((4,), 4))
        logits = forward(torch.tensor([[1, 2, 5, 3], [1, 2, 4, 3]]), rows, rows, forward.new_cache(2, 4), mask)
        assert logits[0, 2:].isnan().all()
        assert logits[1].isfinite().all()


@needs_compiler
@torch.inference_mode()
def test_many_rows_of_16_bits_are_left_to_pytorch():
    for dtype, expected in ((torch.float32, [True] * 3), (torch.bfloat16, [True, True, False])):
        forward = LlamaForward(model_of("llama", dtype))
        assert [forward._native.takes(rows) for rows in (1, 8, 9)] == expected
        outs = _passes(forward, [19, 3, 30], True)
        forward._native = None
        for one, other in zip(outs, _passes(forward, [19, 3, 30], True), strict=True):
            close = {"rtol": 1e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one, other, **close)


@needs_compiler
def test_what_is_not_compiled_is_left_to_pytorch():
    half, double = model_of("llama", torch.float16), model_of("llama", torch.float64)
    other = model_of("llama", hidden_act="gelu")
    mixed = model_of("llama")
    mixed.model.norm.to(torch.bfloat16)
    for model in (half, double, other, mixed):
        assert LlamaForward(model)._native is None


def test_it_is_compiled_once_and_found_again(tmp_path, monkeypatch, caplog):
    if library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quickly = ["-O0" if flag == "-O3" else flag for flag in native_library.FLAGS]
    monkeypatch.setattr(native_library, "FLAGS", quickly)
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is not None
        assert "compiling kernels for this CPU, once" in caplog.text
        caplog.clear()
        assert library.__wrapped__() is not None
        assert not caplog.records
    [kept] = (tmp_path / "heavypath").iterdir()
    assert kept.suffix == ".so"


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("HEAVYPATH_NATIVE", "0", "HEAVYPATH_NATIVE=0: no compiled kernels"),
    ("CXX", "no-such-compiler", "no C\\+\\+ compiler: .* install g\\+\\+"),
    ("CXX", sys.executable, "cannot compile the CPU kernels"),
])  # fmt: skip
def test_without_compiled_kernels_the_log_says_why(variable, value, message, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    assert re.search(message, caplog.records[-1].getMessage())
    assert [*tmp_path.rglob("*.so")] == []


@needs_compiler
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"temperature": 0.8}, id="sampled", marks=pytest.mark.slow),
    pytest.param({"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}, id="filtered"),
])  # fmt: skip
def test_texts_are_those_of_pytorchs_operations(method, sampling, monkeypatch):
    target, draft = tiny_llama(1), tiny_llama(2)
    prompts, texts = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 1, 0, 2]]), []
    for compiled in (True, False):
        with monkeypatch.context() as context:
            if not compiled:
                for place in ("speculative.models.linear", "kernels.implementation", "speculative.decoding.drafted"):
                    context.setattr(f"heavypath.{place}.library", lambda: None)
            decoder = SpeculativeDecoder(target, None if method == "autoregressive" else draft, method)
            assert (decoder._target._native is not None) == compiled
            texts += [decoder.generate(prompts, max_new_tokens=40, seed=seed, **sampling).sequences for seed in (5, -3)]
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])


@needs_compiler
def test_the_kernels_share_pytorchs_threads():
    """With two OpenMP runtimes in a process the threads of one would spin where those of the other work."""
    code = (
        "import torch; from heavypath.kernels.native.library import library; library();"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line})"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert len(found) == 1


def a_pass(name):
    return lambda: test_a_pass_is_that_of_pytorch(name, True, [19, 3, 30], torch.float32)


MUTANTS = [  # of the C++: a file, what is replaced, and a test that must fail
    ("products.h", "std::min(depth, weight.columns - k)", "std::min<int64_t>(depth, 8)",
     lambda: test_products_are_those_of_pytorch(40, 100, torch.float32)),
    ("products.h", "k += depth)", "k += 512)", lambda: test_products_are_those_of_pytorch(1300, 70, torch.float32)),
    ("vectors.h", "nearest = bits + 0x7fff", "nearest = bits + 0xffff",
     lambda: test_sixteen_bits_are_rounded_to_the_nearest()),
    ("attention.h", "if (!sights[q].sees[j])", "if (false)", a_pass("odd sizes")),
    ("attention.h", "r < sights[q].first", "r + 1 < sights[q].first", a_pass("a window of 3")),
    ("llama.cpp", "seen++ < layer.window", "seen++ <= layer.window", a_pass("a window of 1")),
    ("llama.cpp", "rotary += c.rotary_positions * 2 * width;", ";", a_pass("long rope")),
    ("llama.cpp", "const Norm<Number>& norm = is_query ? layer.query_norm : layer.key_norm",
     "const Norm<Number>& norm = layer.key_norm", a_pass("head norms")),
    ("llama.cpp", "gate / (1.0f + exponential(-gate))", "gate", a_pass("odd sizes")),
    ("llama.cpp", "query % group;", "0;", a_pass("odd sizes")),
    ("llama.cpp", "tap(index, s.hidden);", "", a_pass("odd sizes")),
]  # fmt: skip


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "replacement", "test"), MUTANTS, ids=[f"{m[0]}, {m[1]}" for m in MUTANTS])
def test_a_bug_of_the_compiled_code_is_found(file, original, replacement, test, tmp_path, monkeypatch):
    with torch.inference_mode():
        assert_fails_with(test, file, original, replacement, tmp_path, monkeypatch)
