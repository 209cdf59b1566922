"""What a layer does between its products: the kernels against transformers' own modules, and a layer's launches."""

import importlib

import pytest
import torch
from devices import DEVICE, moved
from layer_cases import assert_as_near, model_of, passed
from played_steps import Launches
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels.layers import few_rows
from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm
from heavypath.kernels.layers.rotary import HeadNorms, Projected, Turns, rotate_and_store
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.llama import LlamaForward

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="takes tensors of the host to the kernels")
LAYER_KERNELS = (
    "layers.rms_norm", "layers.rotary", "layers.gated", "layers.few_rows", "attention.prepared", "tree_attention",
)  # fmt: skip


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def check(ours, plain, exact, times=2):
    """At most so many times the error of PyTorch's own operations in that precision, and a constant."""
    small = 1e-6 if plain.dtype == torch.float32 else 1e-4
    error, allowed = ((each.cpu().double() - exact).abs().max() for each in (ours, plain))
    assert ours.dtype == plain.dtype
    assert error <= times * allowed + small, (error, allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (17, 512), (2, 4097)])
def test_a_norm_behind_a_sum_is_that_of_transformers(rows, columns, dtype):
    hidden, added = torch.randn(2, rows, columns, dtype=torch.float64).to(dtype)
    hidden = 30 * hidden
    module = LlamaRMSNorm(columns, 1e-5).to(dtype)
    nn.init.normal_(module.weight)
    norm = Norm(module.weight.detach().to(DEVICE), 1e-5)
    for sum_of_both, term in ((hidden + added, added), (hidden, None)):
        given = None if term is None else term.to(DEVICE)
        total, normed = add_rms_norm(hidden.to(DEVICE), given, norm, impl="triton")
        assert torch.equal(total.cpu(), sum_of_both)
        wide = sum_of_both.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * module.weight.detach().double()
        check(normed, module(sum_of_both).detach(), exact)
        plain = add_rms_norm(hidden, term, Norm(module.weight.detach(), 1e-5), impl="torch")
        check(plain[1], module(sum_of_both).detach(), exact)
    assert total.data_ptr() == hidden.data_ptr() or DEVICE == "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_whose_factor_is_centred_is_that_of_qwen(dtype):
    hidden, module = (30 * torch.randn(5, 40)).to(dtype), Qwen3_5RMSNorm(40, 1e-5).to(dtype)
    nn.init.normal_(module.weight)
    wide = hidden.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + module.weight.detach().double())
    for impl, device in (("triton", DEVICE), ("torch", "cpu")):
        norm = Norm(module.weight.detach().to(device), 1e-5)
        _, normed = add_rms_norm(hidden.to(device), None, norm, centred=True, impl=impl)
        check(normed, module(hidden).detach(), exact)


def test_a_norm_of_zeros_and_of_an_infinite_row():
    hidden = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [3.0, 4.0]], device=DEVICE)
    _, normed = add_rms_norm(hidden, None, Norm(torch.ones(2, device=DEVICE), 0.5), impl="triton")
    assert normed[0].tolist() == [0, 0]
    assert normed[1, 0].isnan()
    torch.testing.assert_close(normed[2].cpu(), torch.tensor([3.0, 4.0]) / 13**0.5)  # (9 + 16) / 2 + 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 96), (2, 1030)])
def test_gate_and_up_of_one_product_are_multiplied_as_by_transformers(rows, columns, dtype):
    joined = (4 * torch.randn(rows, 2 * columns)).to(dtype)
    joined[0, 0] = -200  # whose exp overflows
    gate, up = joined.split(columns, 1)
    ours = silu_product(*joined.to(DEVICE).split(columns, 1), impl="triton")
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=columns))
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    check(ours, mlp.act_fn(gate) * up, exact, times=4)  # a GPU's quick division is 2 units off in the last place
    assert torch.equal(silu_product(gate, up, impl="torch"), mlp.act_fn(gate) * up)


def states_of(batch, nodes, heads, kv_heads, head_dim, dtype):
    """Queries, keys and values as parts of one product, and cosines and sines of random positions."""
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    joined = torch.randn(batch * nodes, sum(sizes)).to(dtype)
    config = LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads, head_dim=head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(joined, torch.randint(500, (batch, nodes)))
    return [part.view(batch, nodes, -1, head_dim) for part in joined.split(sizes, 1)], cos, sin


def signed(sin):
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], -1)


# Batch, nodes, heads, heads of keys, head size.
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 3, 6, 2, 24), (3, 5, 3, 1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_cache_rows_are_those_of_transformers(shape, normed, dtype):
    batch, nodes, _, kv_heads, head_dim = shape
    (query, key, value), cos, sin = states_of(*shape, dtype)
    modules = [LlamaRMSNorm(head_dim, 1e-6).to(dtype) for _ in range(2)]
    for module in modules:
        nn.init.normal_(module.weight)
    norms = HeadNorms(*(Norm(module.weight.detach().to(DEVICE), 1e-6) for module in modules)) if normed else None
    rows = torch.stack([torch.randperm(nodes + 4)[:nodes] for _ in range(batch)])
    caches = [poisoned(batch, 2 * kv_heads, nodes + 4, head_dim, dtype=dtype) for _ in range(2)]
    keys, values = (cache[:, kv_heads:] for cache in caches)  # of the second layer
    turns = Turns(cos[:, :, None].to(DEVICE), signed(sin)[:, :, None].to(DEVICE))
    given = Projected(*(each.to(DEVICE) for each in (query, key, value)))
    turned = rotate_and_store(given, turns, keys, values, rows.to(DEVICE), norms, impl="triton")

    positions = torch.randperm(batch * nodes + 2)[: batch * nodes].view(batch, nodes)
    table = torch.full((batch * nodes + 2, 2, head_dim), torch.nan, dtype=dtype)
    table[positions] = torch.stack([cos, signed(sin)], 2)
    again = [torch.full_like(cache, torch.nan)[:, kv_heads:] for cache in caches]
    for impl in ("triton", "torch"):
        looked_up = Turns.at(table.to(DEVICE), positions.to(DEVICE), impl=impl)
        same = rotate_and_store(given, looked_up, *again, rows.to(DEVICE), norms, impl="triton")
        assert torch.equal(same, turned)
        for cache, other in zip((keys, values), again, strict=True):
            assert torch.equal(cache.nan_to_num(), other.nan_to_num())

    narrow, wide = [query, key], [query.double(), key.double()]
    if normed:
        narrow = [module(each).detach() for each, module in zip(narrow, modules, strict=True)]
        wide = [
            each * (each.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.weight.detach().double()
            for each, module in zip(wide, modules, strict=True)
        ]
    narrow = apply_rotary_pos_emb(*narrow, cos, sin, unsqueeze_dim=2)
    wide = apply_rotary_pos_emb(*wide, cos.double(), sin.double(), unsqueeze_dim=2)
    sequence = torch.arange(batch)[:, None]
    stored = keys.cpu().transpose(1, 2)[sequence, rows]
    for ours, plain, exact in zip((turned, stored), narrow, wide, strict=True):
        check(ours, plain, exact)
        if not normed:
            assert torch.equal(ours.cpu(), plain), "without a norm, it is the same arithmetic"
    assert torch.equal(values.cpu().transpose(1, 2)[sequence, rows], value)
    for cache, part in zip(caches, (keys, values), strict=True):
        assert int(part.isfinite().sum()) == int(cache.isfinite().sum()) == batch * nodes * kv_heads * head_dim


def test_layers_are_right_in_any_schedule(adversary):
    for columns in (40, 512):
        test_a_norm_behind_a_sum_is_that_of_transformers(3, columns, torch.bfloat16)
    test_gate_and_up_of_one_product_are_multiplied_as_by_transformers(2, 1030, torch.bfloat16)
    for normed in (False, True):
        test_rotary_and_cache_rows_are_those_of_transformers((2, 3, 6, 2, 24), normed, torch.bfloat16)
    adversary.met("_rms_norm_kernel", "_gated_kernel", "_rotary_kernel")


NARROW = torch.zeros(1, 9, 8, 2)  # whose columns lie apart


@pytest.mark.parametrize(("change", "message"), [
    ({"key": torch.zeros(1, 2, 1, 6)}, r"key must be torch.float32 \[1, 2, 1, 8\], got torch.float32 \[1, 2, 1, 6\]"),
    ({"values": torch.zeros(1, 1, 4, 8).half()}, r"values must be torch.float32 \[1, 1, 4, 8\], got torch.float16"),
    ({"rows": torch.zeros(2).long()}, r"cache_rows must be a LongTensor \[1, 2\], got torch.int64 \[2\]"),
    ({"keys": torch.zeros(1, 1, 8, 4).mT}, "equal strides and contiguous columns"),
    ({"cos": NARROW[:, :2, None, :, 0], "sin": NARROW[:, :2, None, :, 1]}, "cos and sin must .* contiguous columns"),
    ({"weight": torch.zeros(16)}, r"weights of norms must be contiguous \[D\]"),
    ({"weight": torch.zeros(16)[::2]}, r"weights of norms must be contiguous \[D\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, message):
    parts = {name: torch.zeros(1, 2, 1, 8) for name in ("query", "key", "value", "cos", "sin")}
    parts |= {"keys": torch.zeros(1, 1, 4, 8), "values": torch.zeros(1, 1, 4, 8), "rows": torch.zeros(1, 2).long()}
    parts |= {"weight": torch.zeros(8)}
    query, key, value, cos, sin, keys, values, rows, weight = moved(parts | change, DEVICE).values()
    norms = HeadNorms(Norm(weight, 1e-5), Norm(weight, 1e-5))
    with pytest.raises(ValueError, match=message):
        rotate_and_store(Projected(query, key, value), Turns(cos, sin), keys, values, rows, norms, impl="triton")


def test_numbers_that_lie_apart_are_read_where_they_are():
    """Of a single head, too, whose distance from the next one means nothing."""
    query, key, value = torch.randn(3, 2, 3, 1, 16)[..., ::2].unbind()
    cos, sin = torch.randn(2, 2, 3, 1, 8)
    weight = torch.rand(16)[::2]
    found = []
    for impl, device in (("triton", DEVICE), ("torch", "cpu")):
        keys, values = torch.zeros(2, 2, 1, 3, 8, device=device)
        rows = torch.arange(3, device=device).expand(2, 3)
        given = moved((Projected(query, key, value), Turns(cos, sin), weight), device)
        out = rotate_and_store(*given[:2], keys, values, rows, impl=impl)
        _, normed = add_rms_norm(given[0].query[:, 0, 0], None, Norm(given[2], 1e-5), impl=impl)
        found.append([each.cpu() for each in (out, keys, values, normed)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_rows_that_do_not_fit_are_refused():
    three, four = torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"a weight \[K\]; got .*\[2, 3\].*\[4\]"):
        add_rms_norm(three, None, Norm(four[0], 1e-5), impl="triton")
    with pytest.raises(ValueError, match=r"gate and up \[R, F\] .* got torch.float32 \[2, 3\] and .* \[2, 4\]"):
        silu_product(three, four, impl="triton")


BY_KERNELS = ["llama 3", "another activation, yarn", "biases", "a window of 3", "qwen2", "head norms"]


def take_kernels(monkeypatch):
    """From here on a layer goes its way on a GPU."""
    for name in LAYER_KERNELS:
        module = importlib.import_module(f"heavypath.kernels.{name}")
        monkeypatch.setattr(module, "choose_impl", lambda function, impl, tensor, native=False: "triton")
    monkeypatch.setattr("heavypath.speculative.models.joined.choose_impl", lambda *_: "triton")
    monkeypatch.setattr("heavypath.speculative.models.linear.library", lambda: None)  # no compiled pass


@interpreted
@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.float32) for name in BY_KERNELS), ("head norms", torch.float16), ("head norms", torch.bfloat16)
])  # fmt: skip
@torch.inference_mode()
def test_a_pass_by_the_kernels_is_that_of_pytorch(name, dtype, monkeypatch):
    model = model_of(name, dtype, head_dim=24, num_hidden_layers=2, num_attention_heads=4)
    plain = LlamaForward(model)
    plain._native = None
    expected = passed(plain, [6, 3], True)
    take_kernels(monkeypatch)
    found = passed(LlamaForward(model), [6, 3], True)
    if dtype == torch.float32:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
    else:
        monkeypatch.undo()
        assert_as_near(found, expected, passed(LlamaForward(model.double()), [6, 3], True), 2)


def launches_of(forward, batch, nodes, monkeypatch):
    """What one forward pass on the meta device would launch; attention is an operator there, of one launch."""
    cache = forward.new_cache(batch, 4096)
    cache.rotary = forward._rotary.to("meta")
    tokens = torch.zeros(batch, nodes, dtype=torch.long, device="meta")
    ends = torch.full((nodes,), nodes, device="meta")
    mask = TreeMask(torch.zeros(batch, dtype=torch.long, device="meta"), 4000, subtree_end=ends)
    launches = Launches()
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.note(self.fn.__name__))
    with launches:
        forward(tokens, tokens, tokens, cache, mask)
    return launches.names


def on_meta(model, layers):
    """The forward pass of some layers of a model without values."""
    forward = LlamaForward(model, layers=layers)
    model.to("meta")
    forward._look_up()
    return forward


@interpreted
@pytest.mark.parametrize("name", BY_KERNELS)
def test_a_layer_is_nine_launches(name, monkeypatch):
    take_kernels(monkeypatch)
    forwards = [on_meta(model_of(name, num_hidden_layers=2, head_dim=24), layers) for layers in ([0], None)]
    for batch, nodes in ((1, 1), (1, 32), (4, 32), (3, 512)):
        with torch.inference_mode():
            one, two = (launches_of(forward, batch, nodes, monkeypatch) for forward in forwards)
        assert len(two) - len(one) == 9 + (name == "another activation, yarn"), two


@interpreted
def test_products_that_were_measured_to_be_faster_are_the_kernels(monkeypatch):
    """Queries, keys and values, and gate and up with silu, which is a launch less for a layer."""
    models = [model_of("odd sizes", torch.bfloat16, head_dim=24, hidden_size=48, num_hidden_layers=2) for _ in "abc"]
    plain = LlamaForward(models[0])
    plain._native = None
    expected = passed(plain, [6, 3], True)
    take_kernels(monkeypatch)
    monkeypatch.setattr(few_rows, "is_faster", lambda x, weight, gated: True)
    found = passed(LlamaForward(models[0]), [6, 3], True)
    forwards = [on_meta(model, layers) for model, layers in zip(models[1:], ([0], None), strict=True)]
    with torch.inference_mode():
        one, two = (launches_of(forward, 1, 32, monkeypatch) for forward in forwards)
    assert (len(two) - len(one), two.count("_few_rows_kernel")) == (8, 4)
    monkeypatch.undo()
    assert_as_near(found, expected, passed(LlamaForward(models[0].double()), [6, 3], True), 2)
