"""Rotary embeddings whose factors depend on the text's length: longrope and dynamic, where one set of factors holds."""

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


def check_text(decoder, length, padded, new, **options):
    """That greedy text is that of transformers' generate; where the draft is the target, all of it is accepted."""
    model, (ids, mask) = decoder.target, prompts_of(length, padded)
    told = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=new, **told)
    out = decoder.generate(ids, new, attention_mask=mask, eos_token_id=None, **options)
    assert_same_text(model, out.sequences, expected)
    assert out.stats.acceptance_by_rank[0] == 1
    return out


@pytest.mark.parametrize(("kind", "chunk"), [("llama", 7), ("llama", LIMIT), ("phi3", LIMIT + 1), ("phi3", 512)])
def test_texts_of_both_kinds_come_in_any_order(kind, chunk, monkeypatch):
    """However a prefill is cut into pieces: the first ones alone would pass for short texts."""
    monkeypatch.setattr(forward_module, "PREFILL_CHUNK", chunk)
    model = tiny(kind, **LONGROPE)
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=5)
    for length, padded, new in ((6, 3, LIMIT - 6), (LIMIT + 6, 5, 12), (6, 4, 18), (LIMIT + 1, 0, 12)):
        check_text(decoder, length, padded, new)


@pytest.mark.parametrize("kind", ["granite", "mistral"])
def test_another_draft_and_other_families_up_to_the_limit(kind):
    model = tiny(kind, **LONGROPE, **({"sliding_window": 8} if kind == "mistral" else {}))
    expected = check_text(SpeculativeDecoder(model, model, "dyspec", tree_size=5), 6, 4, LIMIT - 6).sequences
    other, (ids, mask) = SpeculativeDecoder(model, tiny_llama(5, vocab_size=61), tree_size=5), prompts_of(6, 4)
    assert_same_text(model, other.generate(ids, LIMIT - 6, attention_mask=mask).sequences, expected)


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
    decoder = SpeculativeDecoder(model, model, "dyspec", tree_size=5)
    ids, mask = prompts_of(6, 4)
    expected = check_text(decoder, 6, 4, 26)
    with torch.no_grad():
        model(torch.arange(3, 60)[None])
    for again in (decoder, SpeculativeDecoder(model, model, "dyspec", tree_size=5)):
        assert_same_text(model, again.generate(ids, 26, attention_mask=mask).sequences, expected.sequences)
    message = r"need 33 positions \(6 \+ 28 - 1.*\), but target has 32 positions; beyond them, its rotary embeddings"
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, 28, attention_mask=mask)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_frequencies_that_a_user_changes_are_noticed_beside_those_that_change_with_the_text(rope):
    model = tiny("llama", **rope)
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=5)
    before = check_text(decoder, 6, 4, 12)
    for frequencies in (model.model.rotary_emb.original_inv_freq, model.model.rotary_emb.inv_freq):
        frequencies.mul_(3)
    assert not torch.equal(check_text(decoder, 6, 4, 12).sequences, before.sequences)
    with pytest.raises(ValueError, match="past must come from"):
        decoder.generate(prompts_of(6, 4)[0], 12, past=before.cache)


@pytest.mark.parametrize(("length", "padded", "new", "got"), [
    (LIMIT - 4, 0, 6, "20 tokens and 6 new ones"), (LIMIT, 0, 2, "24 tokens and 2 new"), (LIMIT + 6, 6, 2, "24 to 30"),
])  # fmt: skip
@pytest.mark.parametrize(("kind", "whose"), [("llama", "target"), ("phi3", "draft")])
def test_what_mixes_both_kinds_is_refused_before_any_work(kind, whose, length, padded, new, got, monkeypatch):
    ids, mask = prompts_of(length, padded)
    models = {"target": tiny_llama(5, vocab_size=61), "draft": tiny_llama(5, vocab_size=61)}
    decoder = SpeculativeDecoder(**models | {whose: tiny(kind, **LONGROPE)}, tree_size=5)
    for forward in (LlamaForward, TransformersForward):
        monkeypatch.setattr(forward, "__call__", lambda *_: pytest.fail("worked"))
    message = rf"{whose}'s rotary embeddings \(longrope\) change .* than 24 tokens: .* got prompts of {got}"
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, new, attention_mask=mask)


@pytest.mark.parametrize(("kind", "method"), [
    ("llama", "chain"), ("phi3", "dyspec"), ("phi3", "chain"), ("gpt2", "dyspec"),
])  # fmt: skip
def test_nodes_beyond_the_end_of_the_text_change_nothing(kind, method, monkeypatch):
    """On a GPU whole trees are drafted to the end; here the runner is asked for them."""
    gpt = {"n_embd": 32, "n_head": 4, "n_layer": 2, "max_position_embeddings": LIMIT}
    model = tiny(kind, **gpt if kind == "gpt2" else LONGROPE)
    decoder = SpeculativeDecoder(model, model, method, tree_size=8)
    run = decoder.runner.run

    def whole(plan, workspace, *, slots, levels, longest, lap):
        most = workspace.most_visible(plan)
        return run(plan, workspace, slots=slots, levels=plan.tree.depth, longest=most, lap=lap)

    monkeypatch.setattr(decoder.runner, "run", whole)
    check_text(decoder, 6, 2, LIMIT - 5)


def test_embeddings_that_change_at_two_lengths_are_refused():
    model, one = tiny("granite"), LONGROPE["rope_parameters"]
    model.config.rope_parameters = {
        "full_attention": one, "sliding_attention": one | {"original_max_position_embeddings": 32},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"rotary embeddings must change at one length of the text, got \[24, 32\]"):
        forward_of(model, "target")


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_earlier_rows_of_the_same_kind_alone_are_used(kind):
    model = tiny(kind, **LONGROPE)
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=5)
    for first, then, shared in ((16, 16, True), (16, 30, False), (30, 16, False), (30, 30, True)):
        ids, _ = prompts_of(then, 0)
        before = ids[:, :first] if first <= then else torch.cat([ids, prompts_of(first - then, 0)[0]], 1)
        cache = decoder.generate(before, 4, eos_token_id=None).cache
        assert (check_text(decoder, then, 0, 6, past=cache).stats.reused_tokens > 0) == shared
