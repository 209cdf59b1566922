"""Models that other libraries quantise or spread: decoded as they are, or refused by name.

`make test-libraries` installs torchao and bitsandbytes into an environment of their own, since transformers imports
them wherever it finds them. Without them these tests are skipped.
"""

import copy

import pytest
import torch
from block_checkpoints import random_block
from head_cases import head_of
from tiny_models import tiny_llama

from heavypath.kernels.layers import few_rows
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.models.linear import as_it_lies

PROMPTS = torch.tensor([[3, 1, 4, 1], [2, 6, 5, 3]])


def greedy(model):
    return model.generate(input_ids=PROMPTS, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)


def text(decoder):
    return decoder.generate(PROMPTS, 12, eos_token_id=None).sequences


def assert_same_but_for_rounding(model, sequences, expected):
    """Rounding may move an activation to the next of its 256 steps, which moves logits by some hundredths."""
    for own, wanted in zip(sequences, expected, strict=True):
        parted = (own != wanted).nonzero()
        if len(parted):
            place = int(parted[0])
            logits = model(wanted[None, :place]).logits[0, -1]
            assert abs(logits[own[place]] - logits[wanted[place]]) < 0.1 * logits.std()


@pytest.fixture
def pair():
    return tiny_llama(1, vocab_size=31, hidden_size=64, intermediate_size=128), tiny_llama(2, vocab_size=31)


def weight_only(quantize, configs):
    return lambda model: quantize(model, configs.Int8WeightOnlyConfig())


def per_token(quantize, configs):
    return lambda model: quantize(model, configs.Int8DynamicActivationInt8WeightConfig())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [weight_only, per_token])
def test_torchao_quantised_before_and_after(kind, pair):
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model, draft = pair
    decoder = SpeculativeDecoder(model, draft)
    before = text(decoder)
    kind(quantization.quantize_, quantization)(model)
    expected = greedy(model)
    for made in (decoder, SpeculativeDecoder(model, draft), SpeculativeDecoder(model, model, "dyspec")):
        assert_same_but_for_rounding(model, text(made), expected)
    assert not torch.equal(before, expected)


def by_torchao(name):
    def quantise(model):
        quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
        quantization.quantize_(model, getattr(quantization, name)())

    return quantise


def in_4_bits(model):
    """By bitsandbytes, as `BitsAndBytesConfig(load_in_4bit=True)` does it."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for module in [*model.modules()]:
        for name, plain in [*module.named_children()]:
            if type(plain) is torch.nn.Linear and name != "lm_head":
                quantised = bitsandbytes.nn.Linear4bit(
                    plain.in_features, plain.out_features, plain.bias is not None, torch.float32, quant_type="nf4"
                )
                quantised.load_state_dict(plain.state_dict())
                setattr(module, name, quantised.to("cpu"))


QUANTISERS = {
    "int8": by_torchao("Int8WeightOnlyConfig"),
    "fp8": by_torchao("Float8WeightOnlyConfig"),
    "4 bits": in_4_bits,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantised", QUANTISERS)
@pytest.mark.parametrize("kind", ["model", "head", "block"])
def test_a_quantised_draft_changes_no_text(kind, quantised):
    target = tiny_llama(1, vocab_size=31, hidden_size=64, intermediate_size=128)
    make = {
        "model": lambda: copy.deepcopy(target),
        "head": lambda: head_of(target),
        "block": lambda: random_block(target),
    }
    draft, plain = make[kind](), SpeculativeDecoder(target, method="autoregressive")
    QUANTISERS[quantised](draft)
    out = SpeculativeDecoder(target, draft, tree_size=6).generate(PROMPTS, 12, eos_token_id=None)
    assert torch.equal(out.sequences, text(plain))
    assert out.stats.tokens_per_step > 2 or kind != "model", "a quantised copy of the target agrees with it"
    sampled = [
        decoder.generate(PROMPTS, 24, temperature=0.8, seed=5, eos_token_id=None).sequences
        for decoder in (SpeculativeDecoder(target, draft, "ersd"), plain)
    ]
    assert torch.equal(*sampled)


@pytest.mark.filterwarnings("ignore")
def test_fp8_weights_of_torchao_are_multiplied_by_the_kernel_on_a_gpu(monkeypatch):
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    layer, x = torch.nn.Linear(64, 48, bias=False).bfloat16(), torch.randn(3, 64).bfloat16()
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
    expected, given = layer(x), []
    monkeypatch.setattr(type(layer.weight), "is_cuda", True, raising=False)
    monkeypatch.setattr(
        few_rows, "linear", lambda x, weight: given.append(weight) or torch.nn.functional.linear(x, weight)
    )
    torch.testing.assert_close(as_it_lies(layer)(x), expected)
    assert type(given.pop()) is torch.Tensor


@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_in_8_bits(pair):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, draft = pair
    decoder = SpeculativeDecoder(model, draft)
    text(decoder)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(layer.mlp, name)
            quantised = bitsandbytes.nn.Linear8bitLt(
                plain.in_features, plain.out_features, bias=False, has_fp16_weights=False
            )
            quantised.load_state_dict(plain.state_dict())
            setattr(layer.mlp, name, quantised.to("cpu"))
    expected = greedy(model)
    for made in (decoder, SpeculativeDecoder(model, draft)):
        assert_same_but_for_rounding(model, text(made), expected)


@pytest.fixture
def one_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_models_spread_by_fsdp_write_the_text_of_the_whole_ones(pair, one_process):
    """Over one process here; test_tensor_parallel.py has more. They run by transformers' own forward pass."""
    model, draft = pair
    expected = greedy(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    spread = torch.distributed.fsdp.fully_shard(copy.deepcopy(model), mesh=mesh)
    assert_same_but_for_rounding(model, text(SpeculativeDecoder(spread, draft, tree_size=5)), expected)
