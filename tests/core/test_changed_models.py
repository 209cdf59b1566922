"""A model that is not what its type says, or no longer what it was, is decoded as it is, or refused by name."""

import copy
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from families import tiny
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_models import assert_alike, tiny_llama
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import LlamaForward

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of PEFT
    pytest.mark.usefixtures("tried_anew"),
]

PROMPTS, NEW = torch.tensor([[3, 1, 4, 1], [2, 6, 5, 3]]), 9
ANOTHER = r"past must come from .* before its weights, adapters, type or device changed"


@pytest.fixture
def model():
    return tiny_llama(1, vocab_size=31)


@pytest.fixture
def draft():
    return tiny_llama(2, vocab_size=31)


@pytest.fixture
def decoder(model, draft):
    return SpeculativeDecoder(model, draft, tree_size=5)


def greedy(model):
    return model.generate(input_ids=PROMPTS, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def text(decoder):
    return decoder.generate(PROMPTS, NEW, eos_token_id=None).sequences


class Leaning(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.index_add(-1, torch.tensor([7, 11]), torch.full((*out.logits.shape[:-1], 2), 1.5))
        return out


def hooked(path):
    return lambda model: model.get_submodule(path).register_forward_hook(
        lambda module, args, out: (-out[0], *out[1:]) if isinstance(out, tuple) else -out
    )


def patched(path):
    """As accelerate and others put their own function in the place of a module's forward."""

    def change(model):
        module = model.get_submodule(path)
        module.forward = lambda *args, before=module.forward, **kwargs: -before(*args, **kwargs)

    return change


def adapted(model):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    model.add_adapter(config, "first")
    with pytest.warns(UserWarning, match="multiple adapters"):
        model.add_adapter(config, "second")


def scaled(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-2)


def changed_unseen(model):
    model.model.norm.weight.data = model.model.norm.weight.data.flip(0) * torch.linspace(-1, 1, 16)


CHANGES = {
    "a subclass": lambda model: setattr(model, "__class__", Leaning),
    "a module's forward": lambda model: setattr(model.model.layers[0].mlp, "forward", torch.zeros_like),
    "another module": lambda model: setattr(
        model.model.layers[0], "mlp", nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    ),
    "another head": lambda model: setattr(model, "lm_head", nn.Linear(16, 31, bias=True)),
    "a hook on a layer": hooked("model.layers.0"),
    "a hook on attention": hooked("model.layers.0.self_attn"),
    "a hook on a linear layer": hooked("model.layers.1.mlp.up_proj"),
    "a hook before the head": lambda model: model.lm_head.register_forward_pre_hook(
        lambda _, args: (args[0].flip(-1),)
    ),
    "a patched linear layer": patched("model.layers.0.mlp.gate_proj"),
    "a patched activation": patched("model.layers.0.mlp.act_fn"),
    "adapters": adapted,
    "weights in place": scaled,
    "weights through data": changed_unseen,
    "rotary frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(3),
    "rotary frequencies through data": lambda model: model.model.rotary_emb.inv_freq.data.mul_(3),
    "rotary scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 3.0),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "epsilon": lambda model: setattr(model.model.layers[0].post_attention_layernorm, "variance_epsilon", 1e4),
    "a window": lambda model: setattr(model.config, "sliding_window", 3),
    "a wider type": lambda model: model.double(),
    "eager attention": lambda model: model.set_attn_implementation("eager"),
}


RELATIVES = {"a window": "mistral", "a hook on attention": "qwen3"}  # of Llama, and which change is made to them


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_decoded_as_it_is(change, model, draft):
    if change in RELATIVES:
        model = tiny(RELATIVES[change], vocab_size=31, sliding_window=None)
    decoder = SpeculativeDecoder(model, draft, tree_size=5)
    assert isinstance(decoder._target, LlamaForward)
    out, before = decoder.generate(PROMPTS, NEW, eos_token_id=None), greedy(model)
    assert torch.equal(out.sequences, before)
    CHANGES[change](model)
    expected = greedy(model)
    assert torch.equal(expected, before) == (change in ("a wider type", "eager attention"))
    assert torch.equal(text(decoder), expected)
    assert torch.equal(text(SpeculativeDecoder(model, draft, "dyspec", tree_size=5)), expected)
    if change != "eager attention":
        with pytest.raises(ValueError, match=ANOTHER):
            decoder.generate(PROMPTS, NEW, past=out.cache)


@pytest.mark.parametrize("change", ["a hook on a layer", "adapters", "weights in place"])
def test_a_changed_draft_computes_its_rows_anew_and_costs_acceptance_alone(change, model, draft):
    decoder = SpeculativeDecoder(model, draft, "ersd", tree_size=5)
    options = {"temperature": 0.9, "seed": 3, "eos_token_id": None}
    plain = SpeculativeDecoder(model, None, "autoregressive").generate(PROMPTS, NEW, **options).sequences
    cache = decoder.generate(PROMPTS, 4, **options).cache
    CHANGES[change](draft)
    out = decoder.generate(PROMPTS, NEW, past=cache, **options)
    assert out.stats.reused_tokens > 0
    assert torch.equal(out.sequences, plain)
    assert_alike(decoder.generate(PROMPTS, NEW, **options), out)


def test_the_state_of_a_model_is_another_one_after_each_change_of_a_weight(model):
    forward, seen = forward_of(model, "target"), []
    with torch.no_grad():
        for weight in model.parameters():
            seen += [forward.state(), forward.state()]
            weight.mul_(1.0)
    assert seen[::2] == seen[1::2]
    assert len({*seen, forward.state()}) == len([*model.parameters()]) + 1


def sharper(module, query, key, value, attention_mask, sdpa=ALL_ATTENTION_FUNCTIONS["sdpa"], **kwargs):
    return sdpa(module, 3 * query, key, value, attention_mask, **kwargs)


def of_all(module, args, out):
    return -out if isinstance(module, modeling_llama.LlamaMLP) else None


def flipped(self, *args, forward=modeling_llama.LlamaAttention.forward, **kwargs):
    out, weights = forward(self, *args, **kwargs)
    return out.flip(-1), weights


def unrotated(q, k, cos, sin):
    return q * cos[:, None], k * cos[:, None]


CHANGES_FOR_A_WHILE = {
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, out: -out),
    "a hook on all modules": lambda model: nn.modules.module.register_module_forward_hook(of_all),
    "all llamas' attention": lambda model: patch.object(modeling_llama.LlamaAttention, "forward", flipped),
    "an attention function": lambda model: patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=sharper),
    "a function of the layers": lambda model: patch.object(modeling_llama, "apply_rotary_pos_emb", unrotated),
}


@pytest.mark.parametrize("change", CHANGES_FOR_A_WHILE)
def test_a_change_that_is_undone_is_gone(change, model, draft, decoder):
    before = greedy(model)
    assert torch.equal(text(decoder), before)
    with CHANGES_FOR_A_WHILE[change](model):
        expected = greedy(model)
        assert not torch.equal(expected, before)
        assert isinstance(forward_of(model, "target"), TransformersForward)
        assert torch.equal(text(decoder), expected)
        assert torch.equal(text(SpeculativeDecoder(model, draft, tree_size=5)), expected)
    assert torch.equal(text(decoder), before)
    assert isinstance(forward_of(model, "target"), LlamaForward)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hooks_that_transformers_leaves_behind_are_no_change(asked, model, decoder):
    """It registers them for good when it is asked for these for the first time."""
    expected = greedy(model)
    first = decoder.generate(PROMPTS, 6, eos_token_id=None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scaled-dot-product attention has no weights to give
        model(PROMPTS, **{asked: True})
    assert any(module._forward_hooks for module in model.modules())
    later = decoder.generate(first.sequences, NEW - 6, past=first.cache, eos_token_id=None)
    assert later.stats.reused_tokens > 0
    assert torch.equal(later.sequences, expected)
    assert isinstance(decoder._target, LlamaForward)
    assert isinstance(forward_of(model, "target"), LlamaForward)
    hooked("model.layers.0")(model)
    assert not torch.equal(greedy(model), expected)
    assert torch.equal(text(decoder), greedy(model))
    assert isinstance(forward_of(model, "target"), TransformersForward)


def test_adapters_are_switched(model, decoder):
    adapted(model)
    texts = []
    for switch in (partial(model.set_adapter, "first"), partial(model.set_adapter, "second"), model.disable_adapters,
                   model.enable_adapters):  # fmt: skip
        switch()
        texts.append(text(decoder))
        assert torch.equal(texts[-1], greedy(model))
    assert len({tuple(each.flatten().tolist()) for each in texts}) >= 3
    model.set_adapter("first")
    cache = decoder.generate(PROMPTS, 4, eos_token_id=None).cache
    model.set_adapter("second")
    with pytest.raises(ValueError, match=ANOTHER):
        decoder.generate(PROMPTS, 4, eos_token_id=None, past=cache)
    model.set_adapter("first")
    assert decoder.generate(PROMPTS, 4, eos_token_id=None, past=cache).stats.reused_tokens > 0


def test_a_peft_model_and_what_is_inside(model, draft):
    plain = greedy(model)
    torch.manual_seed(5)
    target = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    target.eval()
    expected = greedy(target)
    assert not torch.equal(expected, plain)
    for given in (target, target.get_base_model()):
        decoder = SpeculativeDecoder(given, draft, tree_size=5)
        assert torch.equal(text(decoder), expected)
        with target.disable_adapter():
            assert torch.equal(text(decoder), plain)
        assert torch.equal(text(decoder), expected)
        out = target.generate(input_ids=PROMPTS, custom_generate=decoder, max_new_tokens=NEW, do_sample=False,
                              eos_token_id=None, pad_token_id=0)  # fmt: skip
        assert torch.equal(out, expected)
    assert torch.equal(text(SpeculativeDecoder(target, target, "dyspec", tree_size=5)), expected)  # and as a draft
    merged = target.merge_and_unload()
    assert torch.equal(text(SpeculativeDecoder(merged, draft, tree_size=5)), expected)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config, model, draft):
    target = get_peft_model(model, config(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(ValueError, match=r"target has a P.*_TUNING adapter, which puts virtual tokens before"):
        SpeculativeDecoder(target, draft, tree_size=5)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrappers_are_refused_by_name(wrap, model, draft):
    with pytest.raises(TypeError, match=r"target must be .* around a LlamaForCausalLM; give one that is not wrapped"):
        SpeculativeDecoder(wrap(model), draft)


def test_layers_that_mix_tokens_are_refused(model, draft, decoder, caplog):
    """Quantised per tensor, a token's numbers depend on which others are in the same forward pass."""
    text(decoder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    for generate in (lambda: SpeculativeDecoder(quantised, draft, tree_size=5), lambda: text(decoder)):
        with pytest.raises(ValueError, match=r"decoded by trees .* each token by itself, which .* quantize_dynamic"):
            generate()
    assert torch.equal(text(SpeculativeDecoder(draft, quantised, tree_size=5)), greedy(draft))  # as a draft it will do
    assert "draft's logits are not its own" in caplog.text


def test_autocast_and_a_model_back_in_training_are_refused_by_name(model, draft, decoder):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for refused in (lambda: text(decoder), lambda: SpeculativeDecoder(model, draft, tree_size=5)):
            with pytest.raises(ValueError, match=r"does not run under torch.autocast\('cpu', ...\)"):
                refused()
    model.train()
    with pytest.raises(ValueError, match=r"target is in training mode; call target.eval\(\) first"):
        text(decoder)
