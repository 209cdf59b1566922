"""Rotary embeddings whose factors depend on the text's length: longrope and dynamic, where one set of factors holds."""

from contextlib import nullcontext

import pytest
import torch
from families import tiny
from rope_cases import DYNAMIC, LIMIT, LONGROPE
from tiny_models import assert_same_text, tiny_llama

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.models import forward as forward_module
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import LlamaForward


def prompts_of(length, padded):
    """Two prompts, the second one shorter by `padded` tokens; and their mask."""
    generator = torch.Generator().manual_seed(length)
    ids, mask = torch.randint(3, 61, (2, length), generator=generator), torch.ones(2, length, dtype=torch.long)
    ids[1, :padded], mask[1, :padded] = 0, 0
    return ids, mask


def greedy(model, ids, mask, new):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)


def check_text(model, length, padded, new, methods=("sequoia", "dyspec")):
    ids, mask = prompts_of(length, padded)
    expected = greedy(model, ids, mask, new)
    for draft in (tiny_llama(5, vocab_size=61), model):
        for method in methods:
            out = SpeculativeDecoder(model, draft, method, tree_size=5).generate(ids, new, attention_mask=mask)
            assert_same_text(model, out.sequences, expected)
        assert draft is not model or out.stats.acceptance_by_rank[0] == 1
    return expected


@pytest.mark.parametrize("chunk", [512, 7, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_greedy_text_of_a_long_prompt_is_that_of_transformers_generate(kind, chunk, monkeypatch):
    """However its prefill is cut into pieces: the first ones alone would pass for short texts."""
    monkeypatch.setattr(forward_module, "PREFILL_CHUNK", chunk)
    check_text(tiny(kind, **LONGROPE), LIMIT + 6, 5, 20, methods=("dyspec",))
    check_text(tiny(kind, **LONGROPE), LIMIT + 1, 0, 20, methods=("sequoia",))


@pytest.mark.parametrize("kind", ["llama", "phi3", "granite", "mistral"])
def test_greedy_text_up_to_the_limit_is_that_of_transformers_generate(kind):
    windowed = {"sliding_window": 8} if kind == "mistral" else {}
    check_text(tiny(kind, **LONGROPE, **windowed), 6, 4, LIMIT - 6)


def test_both_kinds_of_texts_come_in_any_order():
    """Of one decoder, whose tables and modules serve both."""
    for kind in ("llama", "phi3"):
        model = tiny(kind, **LONGROPE)
        decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=5)
        for length, new in ((6, 18), (30, 12), (6, 18), (30, 20)):
            ids, mask = prompts_of(length, 3)
            out = decoder.generate(ids, new, attention_mask=mask)
            assert_same_text(model, out.sequences, greedy(model, ids, mask, new))


def test_these_texts_depend_on_the_factors():
    """Otherwise the tests above would show nothing."""
    ids, _ = prompts_of(LIMIT + 6, 0)
    model = tiny("llama", **LONGROPE)
    with torch.no_grad():
        whole, alone = model(ids).logits, model(ids[:, :LIMIT]).logits
    assert (whole[:, :LIMIT] - alone).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_dynamic_factors_stay_those_of_short_texts(kind):
    """Up to max_position_embeddings, also after the model has seen a longer text by itself."""
    model = tiny(kind, **DYNAMIC)
    expected = check_text(model, 6, 4, 26)
    decoder = SpeculativeDecoder(model, model, "dyspec", tree_size=5)
    ids, mask = prompts_of(6, 4)
    for make_anew in (False, True):
        with torch.no_grad():
            model(torch.arange(3, 60)[None])
        if make_anew:
            decoder = SpeculativeDecoder(model, model, "dyspec", tree_size=5)
        assert_same_text(model, decoder.generate(ids, 26, attention_mask=mask).sequences, expected)
    message = r"need 33 positions \(6 \+ 27\), but target has 32 positions; beyond them, its rotary embeddings depend"
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, 27, attention_mask=mask)


@pytest.mark.parametrize(("length", "padded", "new", "got"), [
    (LIMIT - 4, 0, 5, "20 tokens and 5 new ones"), (LIMIT, 0, 1, "24 tokens and 1 new"), (LIMIT + 6, 6, 2, "24 to 30"),
])  # fmt: skip
def test_what_mixes_both_kinds_is_refused_before_any_work(length, padded, new, got, monkeypatch):
    ids, mask = prompts_of(length, padded)
    for kind in ("llama", "phi3"):
        model, plain = tiny(kind, **LONGROPE), tiny_llama(5, vocab_size=61)
        for name, target, draft in (("target", model, plain), ("draft", plain, model)):
            decoder = SpeculativeDecoder(target, draft, "sequoia", tree_size=5)
            message = rf"{name}'s rotary embeddings \(longrope\) change .* than 24 tokens: .* got prompts of {got}"
            with monkeypatch.context() as context:
                for forward in (LlamaForward, TransformersForward):
                    context.setattr(forward, "__call__", lambda *_: pytest.fail("worked"))
                with pytest.raises(ValueError, match=message):
                    decoder.generate(ids, new, attention_mask=mask)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_nodes_beyond_the_end_of_the_text_change_nothing(kind, monkeypatch):
    """On a GPU whole trees are drafted to the end; here the runner is told that it is on one."""
    gpt = {"n_embd": 32, "n_head": 4, "n_layer": 2, "max_position_embeddings": LIMIT}
    model = tiny(kind, **gpt if kind == "gpt2" else LONGROPE)
    ids, mask = prompts_of(6, 2)
    expected = greedy(model, ids, mask, LIMIT - 6)
    for method in ("chain", "dyspec"):
        decoder = SpeculativeDecoder(model, model, method, tree_size=8)
        monkeypatch.setattr("heavypath.speculative.decoding.runner.host_can_read", lambda device: False)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        out = decoder.generate(ids, LIMIT - 6, attention_mask=mask)
        assert_same_text(model, out.sequences, expected)


def test_settled_positions_by_hand():
    model = forward_of(tiny("phi3", **LONGROPE), "target")
    positions, roots = torch.tensor([[21, 22, 25], [24, 25, 26], [23, 24, 30]]), torch.tensor([21, 24, 23])
    assert model.settled(positions, roots).tolist() == [[21, 22, 23], [24, 25, 26], [23, 23, 23]]
    plain = forward_of(tiny("granite"), "target")
    assert plain.settled(positions, roots) is positions


def test_embeddings_that_change_at_two_lengths_are_refused():
    two = {name: LONGROPE["rope_parameters"] | {"original_max_position_embeddings": limit}
           for name, limit in (("full_attention", 24), ("sliding_attention", 32))}  # fmt: skip
    model = tiny("granite")
    model.config.rope_parameters = two
    with pytest.raises(ValueError, match=r"rotary embeddings must change at one length of the text, got \[24, 32\]"):
        forward_of(model, "target")


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_decoder_for_texts_of_both_kinds_uses_earlier_rows_of_the_same_kind_alone(kind):
    model = tiny(kind, **LONGROPE)
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=5)
    short, long = prompts_of(LIMIT - 8, 0)[0], prompts_of(LIMIT + 6, 0)[0]
    long[:, : short.shape[1]] = short
    for first, then, shared in ((short, short, True), (short, long, False), (long, short, False), (long, long, True)):
        cache = decoder.generate(first, 4, eos_token_id=None).cache
        out = decoder.generate(then, 6, eos_token_id=None, past=cache)
        assert (out.stats.reused_tokens > 0) == shared
        assert_same_text(model, out.sequences, greedy(model, then, torch.ones_like(then), 6))
