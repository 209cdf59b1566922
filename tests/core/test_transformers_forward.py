"""Models that LlamaForward does not know are decoded by transformers' own forward pass, or refused by name."""

from functools import partial

import pytest
import torch
from families import GPT, MODELS, tiny
from played_steps import Strict, step_on_meta
from tiny_models import assert_same_text, tiny_llama
from transformers import Cache, FalconConfig, FalconForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import LlamaForward

pytestmark = pytest.mark.usefixtures("tried_anew")
PROMPTS = torch.tensor([[5, 9, 8, 7, 33, 2], [0, 0, 4, 4, 17, 60]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def llama():
    return tiny_llama(5, vocab_size=61)


def greedy(model, new_tokens):
    return model.generate(
        PROMPTS, attention_mask=PADDING, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_is_that_of_transformers_generate(kind):
    model = tiny(kind)
    out = SpeculativeDecoder(model, model, "dyspec", tree_size=5).generate(PROMPTS, 12, attention_mask=PADDING)
    assert_same_text(model, out.sequences, greedy(model, 12))
    assert out.stats.acceptance_by_rank[0] == 1  # a draft equal to the target is always right


@pytest.mark.parametrize("attention", ["sdpa", "eager", "heavypath"])
@pytest.mark.parametrize("kind", ["granite", "gpt_neox"])
def test_every_attention_gives_the_same_text(kind, attention, llama):
    model = tiny(kind)
    expected = greedy(model, 12)
    model.set_attn_implementation(attention)
    decoder = SpeculativeDecoder(model, llama, "sequoia", tree_size=5)
    assert_same_text(model, decoder.generate(PROMPTS, 12, attention_mask=PADDING).sequences, expected)
    assert model.config._attn_implementation == attention


@pytest.mark.usefixtures("interpreter")
def test_decoding_through_the_kernel(monkeypatch):
    model = tiny("granite", head_dim=16, hidden_size=64, num_hidden_layers=1, attn_implementation="heavypath")
    decoder = SpeculativeDecoder(model, model, "sequoia", tree=TokenTree.from_branching([2, 1]))
    expected = decoder.generate(PROMPTS, 3, attention_mask=PADDING).sequences
    by_kernel = partial(prepared_attention, impl="triton")
    monkeypatch.setattr("heavypath.speculative.models.forward.prepared_attention", by_kernel)
    assert torch.equal(decoder.generate(PROMPTS, 3, attention_mask=PADDING).sequences, expected)


def test_the_cache_is_one_of_transformers(llama):
    cache = LlamaForward(llama).new_cache(2, 12)
    assert isinstance(cache, Cache)
    assert (len(cache), cache.get_max_length(), cache.is_compileable) == (2, 12, False)
    rows = torch.tensor([[5, 7], [0, 3]])
    one_pass = cache.at(rows, 9)
    assert (one_pass.get_seq_length(), one_pass.get_mask_sizes(2, 0)) == (7, (9, 0))
    given = torch.randn(2, 2, 1, 2, 8).unbind()
    for found, new in zip(one_pass.update(*given, 1), given, strict=True):
        assert found.shape == (2, 1, 9, 8)
        assert all(torch.equal(found[sequence][:, rows[sequence]], new[sequence]) for sequence in range(2))
    assert one_pass.update(*given, 1)[0].data_ptr() == cache.read(1)[0].data_ptr()
    assert int(cache.keys.count_nonzero()) == given[0].numel()


def without_limit():
    model = tiny("granite")
    vars(model.config)["max_position_embeddings"] = None  # not every config has one
    return model


REFUSED = {
    "t5": (lambda: T5ForConditionalGeneration(T5Config(d_model=8, num_layers=1, d_kv=4, d_ff=8, num_heads=2)),
           TypeError, "target must be a decoder alone, got an encoder and decoder: T5For"),
    "no head": (lambda: tiny("granite").model, TypeError, "language-model head .* got GraniteModel"),
    "text": (lambda: "ibm/granite", TypeError, "target must be a transformers causal language model, got 'str'"),
    "training": (lambda: tiny("granite").train(), ValueError, "training mode; call target.eval"),
    "meta": (lambda: tiny("granite").to("meta"), ValueError, "meta device"),
    "another window": (lambda: tiny("olmoe", sliding_window=16), ValueError,  # which it does not use
                       "'olmoe' has sliding_window=16 in its config, but its own forward pass sees farther"),
    "a window of a cache": (lambda: tiny("llama", sliding_window=16), ValueError,  # Llama's attention has none
                            "'llama' has sliding_window=16 in its config, but its own forward pass sees farther"),
    "llama 4": (lambda: tiny("llama4_text"), ValueError, "'llama4_text' with layers of type chunked_attention"),
    "doge": (lambda: tiny("doge", keep_window_size=16), ValueError,  # of 64 positions
             "'doge' has 64 positions, and in texts of more than keep_window_size=16 tokens .* equal ones by chance"),
    "sinks": (lambda: tiny("gpt_oss", attn_implementation="heavypath"),
              ValueError, 'has no attention sinks .* use attn_implementation="eager"'),
    "caps": (lambda: tiny("gemma2", attn_implementation="heavypath"),
             ValueError, 'has no soft-capped scores .* use attn_implementation="eager"'),
    "arguments": (lambda: tiny("nemotron", attn_implementation="heavypath"), ValueError,
                  'the arguments of the call, which NemotronAttention does not get; use attn_implementation="sdpa"'),
    "flex": (lambda: tiny("granite", attn_implementation="flex_attention"),
             ValueError, r"'flex_attention', which takes no tree; call target.set_attn_implementation\(\"sdpa\"\)"),
    "mpt": (lambda: tiny("mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
            ValueError, "target of type 'mpt' has ALiBi position biases, which follow from a cache's rows"),
    "bloom": (lambda: tiny("bloom", n_layer=2, n_head=4), ValueError, "'bloom' has ALiBi position biases"),
    "falcon": (lambda: FalconForCausalLM(FalconConfig(num_hidden_layers=0, vocab_size=9, alibi=True)),
               ValueError, "'falcon' has ALiBi position biases"),
    "no limit": (without_limit, ValueError, "target's config has no max_position_embeddings; set it"),
    "no cache": (lambda: tiny("openai-gpt", **GPT), ValueError, r"its layers with keys and values are \[\], exp"),
    "both ways": (lambda: tiny("bert"), ValueError, "'bert' cannot be decoded by trees with attn_implementation="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_is_refused_by_name(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        SpeculativeDecoder(make(), None, "autoregressive")


def unmasked(module, query, key, value, attention_mask, **kwargs):
    nothing = None if attention_mask is None else torch.zeros_like(attention_mask)
    return sdpa_attention_forward(module, query, key, value, nothing, **kwargs)


def causal(module, query, key, value, attention_mask, **kwargs):
    if attention_mask is not None:
        queries, rows = attention_mask.shape[2:]
        seen = torch.ones(queries, rows, dtype=torch.bool).tril(rows - queries)
        attention_mask = attention_mask.new_zeros(queries, rows).masked_fill(~seen, -torch.inf)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [unmasked, causal, "positions counted", "rows in order"])
def test_a_model_that_does_not_do_as_told_is_found_out(broken, dtype, monkeypatch):
    model = tiny("granite").to(dtype)
    assert forward_of(model, "target")
    if callable(broken):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", broken)
    elif broken == "positions counted":
        rotary = model.model.rotary_emb.forward
        count = lambda x, position_ids: rotary(x, position_ids[:, :1] + torch.arange(position_ids.shape[1]))  # noqa: E731
        monkeypatch.setattr(model.model.rotary_emb, "forward", count)
    else:
        at = KeyValueCache.at
        monkeypatch.setattr(KeyValueCache, "at", lambda cache, rows, *read: at(cache, rows.flip(1), *read))
    with pytest.raises(ValueError, match=r"type 'granite' cannot be decoded by trees .* differ from those of"):
        SpeculativeDecoder(model, None, "autoregressive")


@pytest.mark.parametrize(("kind", "attention", "method"), [
    ("granite", "sdpa", "sequoia"), ("granite", "heavypath", "dyspec"), ("gemma2", "eager", "dyspec"),
    ("deepseek_v3", "sdpa", "sequoia"), ("gpt_oss", "eager", "sequoia"), ("mixtral", "sdpa", "dyspec"),
    ("cohere2", "heavypath", "sequoia"),
])  # fmt: skip
@torch.inference_mode()
def test_a_step_asks_the_host_nothing(kind, attention, method, without_values, monkeypatch):
    wide = {"head_dim": 16, "hidden_size": 64} if attention == "heavypath" else {}
    forward = TransformersForward(tiny(kind, attn_implementation=attention, **wide))
    forward.model.to("meta", torch.bfloat16)  # of whose experts the meta device knows
    _, step = step_on_meta(method, Filters(0.7), forward, ModelDraft(forward, 61))
    monkeypatch.setattr(torch, "tensor", None)  # which would copy numbers of the host, unseen by Strict
    with Strict():
        step()
