"""A model that runs code of a user's own goes through transformers' forward, where that can be tried, or is refused."""

import copy
import functools
import types
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from families import MODELS, tiny
from recurrent_families import recurrent
from tiny_models import assert_same_text, tiny_llama, transformers_greedy
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.functions import strange_parts
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.models.recurrent.qwen import QwenForward
from heavypath.speculative.models.structure import attentions_of

pytestmark = pytest.mark.usefixtures("tried_anew")
PROMPT = torch.randint(1, 31, (1, 60), generator=torch.Generator().manual_seed(3))  # behind windows of 28
NEW = 9


def llama(**changes):
    return tiny_llama(1, vocab_size=31, max_position_embeddings=128, **changes)


def greedy(model):
    return transformers_greedy(model, PROMPT, NEW)


def decoder_of(model):
    return SpeculativeDecoder(model, model, "dyspec", tree_size=5)


def text(decoder):
    return decoder.generate(PROMPT, NEW, eos_token_id=None).sequences


def by_index(window, sinks):
    """An attention that takes no mask: it sees the first rows, and the last ones of each token."""

    def attend(module, query, key, value, mask, scaling=None, **_):
        rows = torch.arange(key.shape[2])
        token = rows[-query.shape[2] :, None]
        seen = (rows <= token) & ((rows > token - window) | (rows < sinks))
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return sdpa_attention_forward(module, query, key, value, bias[None, None], scaling=scaling)

    return attend


def quiet(module, query, key, value, mask, scaling=None, **_):
    """Attention in which each token may look at nothing, under a mask of any kind."""
    key, value = (modeling_llama.repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), None


def of_bools(module, query, key, value, mask, **options):
    return quiet(module, query, key, value, None if mask is None else mask & True, **options)


@pytest.fixture
def register(monkeypatch):
    def register(function, masks=None):
        monkeypatch.setitem(AttentionInterface._global_mapping, "mine", function)
        if masks is not None:
            monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", masks)

    return register


@pytest.mark.parametrize("masks", [None, sdpa_mask, eager_mask])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attention_of_ones_own_that_takes_the_mask_is_used(masks, when, register):
    register(quiet, masks)
    model = llama()
    decoder, plain = decoder_of(model), greedy(model)
    assert isinstance(decoder._target, LlamaForward)
    model.set_attn_implementation("mine")
    expected = greedy(model)
    assert not torch.equal(expected, plain)
    decoder = decoder if when == "after" else decoder_of(model)
    assert torch.equal(text(decoder), expected)
    assert isinstance(decoder._target, TransformersForward)


def test_an_attention_that_is_registered_anew_is_noticed(register):
    model = llama()
    register(sdpa_attention_forward, sdpa_mask)
    model.set_attn_implementation("mine")
    decoder = decoder_of(model)
    assert isinstance(decoder._target, LlamaForward)  # transformers' own by another name
    register(of_bools, sdpa_mask)
    assert torch.equal(text(decoder), greedy(model))
    assert isinstance(decoder._target, TransformersForward)


@pytest.mark.parametrize(("window", "sinks"), [(28, 4), (12, 0), (40, 1)])
def test_a_hidden_window_is_refused(window, sinks, register):
    register(by_index(window, sinks), sdpa_mask)
    model = llama()
    model.set_attn_implementation("mine")
    with pytest.raises(ValueError, match=r"attn_implementation='mine': .*AttentionInterface.mine"):
        decoder_of(model)


@pytest.mark.parametrize("masks", [flash_attention_mask, lambda *args, **options: sdpa_mask(*args, **options)])
def test_masks_of_ones_own_are_refused(masks, register, monkeypatch):
    register(quiet, masks)
    model = llama()
    model.set_attn_implementation("mine")
    with pytest.raises(
        ValueError, match=r"attn_implementation='mine', whose masks are made by .* register .*sdpa_mask"
    ):
        decoder_of(model)
    model = llama()
    decoder = decoder_of(model)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", masks)
    if masks is not flash_attention_mask:
        with pytest.raises(ValueError, match=r"attn_implementation='sdpa', whose masks are made by"):
            text(decoder)


def one_layers_attention(model):
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "mine"


def of_eager(function):
    def change(model):
        model.set_attn_implementation("eager")
        return patch.object(modeling_llama, "eager_attention_forward", function)

    return change


REPLACED = {
    "sdpa": lambda model: patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, sdpa=quiet),
    "sdpa for all": lambda model: patch.dict(AttentionInterface._global_mapping, sdpa=quiet),
    "eager": of_eager(quiet),
    "registered eager": lambda model: (
        model.set_attn_implementation("eager"), patch.dict(AttentionInterface._global_mapping, eager=quiet)
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("which", REPLACED)
def test_a_replaced_attention_is_used(which):
    model = llama()
    decoder, plain = decoder_of(model), greedy(model)
    with REPLACED[which](model):
        expected = greedy(model)
        assert not torch.equal(expected, plain)
        assert torch.equal(text(decoder), expected)
        assert torch.equal(text(decoder_of(model)), expected)
    with of_eager(by_index(28, 4))(model), pytest.raises(ValueError, match=r"modeling_llama\.eager_attention_forward"):
        text(decoder)


def test_one_layers_own_attention_is_used(register):
    register(quiet)
    model = llama()
    decoder = decoder_of(model)
    one_layers_attention(model)
    assert torch.equal(text(decoder), greedy(model))
    assert isinstance(decoder._target, TransformersForward)
    assert isinstance(decoder_of(model)._target, TransformersForward)


def late(owner, name, long=28):
    """A patch as functools.wraps makes it, which changes long texts alone."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def changed(*args, **options):
        out = own(*args, **options)
        first = out[0] if isinstance(out, tuple) else out
        if max(first.shape[:3]) <= long:
            return out
        return (-first, *out[1:]) if isinstance(out, tuple) else 1.5 * out

    return patch.object(owner, name, changed)


PATCHES = {
    "attention": lambda: late(modeling_llama.LlamaAttention, "forward"),
    "perceptron": lambda: late(modeling_llama.LlamaMLP, "forward"),
    "norm": lambda: late(modeling_llama.LlamaRMSNorm, "forward"),
    "layer's call": lambda: late(modeling_llama.LlamaDecoderLayer, "__call__"),
    "linear layers": lambda: late(nn.Linear, "forward"),
    "embedding": lambda: late(nn.Embedding, "forward"),
    "rotate_half": lambda: late(modeling_llama, "rotate_half"),
    "rotary": lambda: late(modeling_llama, "apply_rotary_pos_emb"),
    "sdpa": lambda: late(nn.functional, "scaled_dot_product_attention"),
    "an exchanged code": lambda: _exchanged(modeling_llama.LlamaMLP.forward),
    "qwen3's halves": lambda: late(modeling_qwen3, "rotate_half"),
    "mistral's rotary": lambda: late(modeling_mistral, "apply_rotary_pos_emb"),
}
PATCHED = {"qwen3's halves": "qwen3", "mistral's rotary": "mistral"}  # of other models than Llama


@contextmanager
def _exchanged(function):
    own, function.__code__ = function.__code__, _doubled.__code__
    try:
        yield
    finally:
        function.__code__ = own


def _doubled(self, x):
    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("which", PATCHES)
def test_a_patch_that_a_short_trial_cannot_see(which):
    """It is decoded as transformers does, or refused, whether it is made before the decoder or after."""
    model = tiny(PATCHED[which], max_position_embeddings=128) if which in PATCHED else llama()
    decoder = decoder_of(model)
    assert isinstance(decoder._target, LlamaForward)
    with PATCHES[which]():
        for make in (lambda: decoder_of(model), lambda: decoder):
            try:
                assert torch.equal(text(make()), greedy(model))
                assert isinstance(make()._target, TransformersForward)
            except ValueError as error:
                assert "not the library's own" in str(error)  # noqa: PT017
    assert torch.equal(text(decoder), greedy(model))
    assert isinstance(decoder._target, LlamaForward)


def test_functions_and_forwards_of_qwen_3_5(monkeypatch):
    model = recurrent.__wrapped__("qwen3_5_text")
    assert isinstance(forward_of(model, "target"), QwenForward)
    with late(modeling_qwen3_5.Qwen3_5MLP, "forward"):
        assert not isinstance(forward_of(model, "target"), QwenForward)
    for owner, name in ((modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward"), (modeling_qwen3_5, "causal_conv1d_fn")):
        with late(owner, name), pytest.raises(ValueError, match=f"{name} is not transformers' own any more"):
            forward_of(model, "target")


def test_a_modules_own_method_is_tried_with_long_texts():
    model = llama()
    layer = model.model.layers[1]
    own = layer.forward

    def changed(self, states, **options):
        return own(states, **options) * (-1 if states.shape[1] > 28 else 1)

    layer.forward = types.MethodType(changed, layer)
    with pytest.raises(ValueError, match=r"after 64 tokens, while shorter texts agree; .*model.layers.1.forward"):
        decoder_of(model)


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_of_transformers_own_models_is_strange(kind):
    model = tiny(kind)
    assert strange_parts(model, attentions_of(model)) == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "heavypath"])
def test_published_models_keep_their_own_pass(kind, attention):
    model = tiny(kind)
    model.set_attn_implementation(attention)
    assert isinstance(forward_of(model, "target"), LlamaForward)


MADE = {
    "llama": llama,
    "granite": lambda: tiny("granite", max_position_embeddings=128),
    "qwen3_5_text": lambda: recurrent.__wrapped__("qwen3_5_text"),
}


@pytest.mark.parametrize("kind", MADE)
def test_logits_that_are_not_finite_are_named(kind):
    model = MADE[kind]().half()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.fill_(6e4)
    with pytest.raises(ValueError, match=r"target's own logits are NaN or infinite in torch.float16.*bfloat16 or"):
        SpeculativeDecoder(model, None, "autoregressive")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"target has NaN or infinite weights in model.layers.0.mlp.down_proj.weight"):
        SpeculativeDecoder(model, None, "autoregressive")


@pytest.mark.parametrize("window", [1, 0, -3])
@pytest.mark.parametrize(("kind", "more"), [
    ("mistral", {}), ("gemma2", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
])  # fmt: skip
def test_windows_that_are_none_are_refused(kind, more, window):
    model = tiny(kind, sliding_window=window, **more)
    with pytest.raises(ValueError, match=rf"target has sliding_window={window} in its config, expected .* at least 2"):
        SpeculativeDecoder(model, None, "autoregressive")


CHANGED = {
    "in place": lambda model: model.model.norm.weight.data.mul_(-1),
    "a row": lambda model: model.model.embed_tokens.weight.data[3].add_(1),
    "a number": lambda model: model.model.layers[0].mlp.up_proj.weight.data[0, 0].add_(1),
    "rows that change places": lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0)),
    "replaced": lambda model: setattr(model.model.norm.weight, "data", 2 * model.model.norm.weight.data),
    "all": lambda model: [weight.data.copy_(0.9 * weight) for weight in model.parameters()],
    "loaded": lambda model: model.load_state_dict({name: 0.9 * one for name, one in model.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize(("kind", "inferred"), [("llama", True), ("llama", False), ("granite", False)])
def test_a_past_ends_with_weights_that_change_unseen(change, kind, inferred):
    """Through data, or made and changed in inference mode, where weights have no versions."""
    with torch.inference_mode(inferred):
        model = MADE[kind]()
    decoder = decoder_of(model)
    first = decoder.generate(PROMPT, 4, eos_token_id=None)
    assert decoder.generate(first.sequences, 4, past=first.cache, eos_token_id=None).stats.reused_tokens > 0
    with torch.inference_mode(inferred):
        CHANGED[change](model)
    with pytest.raises(ValueError, match=r"past must come from .* before its weights"):
        decoder.generate(first.sequences, 4, past=first.cache)
    assert_same_text(model, text(decoder), greedy(model))
