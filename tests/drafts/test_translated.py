"""A draft with another tokenizer: which tokens are common, what it reads for others, and its laws along trees."""

import logging

import pytest
import torch
from conformance_parts import other_tokenizer_of, tokenizer_of
from drafted_cases import PROMPTS, assert_drafts_as_said, assert_later_turns_agree
from families import tiny
from recurrent_families import recurrent
from rounding import SMALL_MODEL
from tiny_models import assert_alike, tiny_llama, transformers_greedy
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from heavypath.speculative import (
    Cascade,
    PromptLookup,
    SpeculativeDecoder,
    Translated,
    load_draft,
)
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.drafts.translated import TranslatedDraft
from heavypath.speculative.drafts.vocabularies import MOST_PIECES, Vocabularies
from heavypath.speculative.loading import load_pair
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.llama import LlamaForward

MARKS = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
LETTERS = {"a": 0, "b": 1, "c": 2, "abc": 3, "ca": 4, "<end>": 5, "bcab": 6}


def tokenizer_with(vocabulary, decoder=None, special=(), **named):
    """One with these tokens, which is asked for nothing else; numbers are in order if they are not given."""
    if not isinstance(vocabulary, dict):
        vocabulary = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@pytest.fixture(scope="module")
def translated():
    """In fp64, with a token of four letters, which is longer than the text has room for at its beginning."""
    names = ["<end>", "c", "b", "cc", "a"]
    model = tiny_llama(5, len(names), layers=1, max_position_embeddings=256).double()
    end = {"eos_token": "<end>"}
    return Translated(model, tokenizer_with(names, special=["<end>"], **end),
                      tokenizer_with(LETTERS, special=["<end>"], **end))  # fmt: skip


def test_tokens_of_the_same_bytes_are_common_however_they_are_written():
    by_bytes = tokenizer_with(
        ["Ġthe", "the", "Ċ", "é".encode().decode("latin1"), "Ã", "<s>", "!", "<|eot|>", "<|pad|>"],
        decoders.ByteLevel(), ["<|eot|>", "<|pad|>"], eos_token="<|eot|>",
    )  # fmt: skip
    by_marks = tokenizer_with(
        ["<unk>", "<0x0A>", "<0x21>", "the", "▁the", "é", "<0xC3>", "!", "</s>", "<|pad|>"], MARKS,
        ["</s>", "<|pad|>"], eos_token="</s>",
    )  # fmt: skip
    shared = Vocabularies(by_bytes, by_marks).shared
    # "<s>" is three letters there; "!" is a token and a byte, and the token is meant; both ends are the end.
    assert shared == {0: 4, 1: 3, 2: 1, 3: 5, 4: 6, 6: 7, 7: 8, 8: 9}
    assert Vocabularies(by_marks, by_bytes).shared == {other: token for token, other in shared.items()}


def test_a_token_that_the_draft_lacks_is_written_by_its_longest_tokens():
    target = tokenizer_with(["a", "abcab", "é", "abx", "x", "ab" * 20])
    draft = tokenizer_with(["<unk>", "a", "b", "c", "ab", "<0xC3>", "<0xA9>"], MARKS, ["<unk>"], unk_token="<unk>")
    pieces, counts = Vocabularies(target, draft).pieces(7, 7)
    read = [row[len(row) - count :] for row, count in zip(pieces.tolist(), counts.tolist(), strict=True)]
    # What has no bytes there is left out; what has no tokens at all is unknown, as is a token of the model alone.
    assert read == [[1], [4, 3, 4], [5, 6], [4], [0], [4] * MOST_PIECES, [0]]


@pytest.mark.parametrize("size", [7, 64, 1024])
def test_what_is_read_for_a_token_has_its_bytes(size, demo_pair):
    target = demo_pair.tokenizer if size == 1024 else tokenizer_of(size)
    draft = tokenizer_with([*bytes_to_unicode().values()], decoders.ByteLevel())
    names = draft.convert_ids_to_tokens(range(len(draft)))
    pieces, counts = Vocabularies(target, draft).pieces(len(target), len(draft))
    for word, token in target.get_vocab().items():
        read = "".join(names[each] for each in pieces[token, pieces.shape[1] - counts[token] :])
        assert read == word[-MOST_PIECES:]


@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec"])
def test_every_node_has_the_law_of_the_text_in_the_drafts_tokens(method, target, translated):
    decoder = SpeculativeDecoder(target, translated, method, tree_size=8)
    nodes = assert_drafts_as_said(decoder, translated, 20, [*PROMPTS, *torch.tensor([[6], [0]])], atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1
    assert {int(node.text[-1]) for node in nodes} > {3, 4}, "no root is a token that the draft lacks"
    for node in nodes:
        assert node.logits[[3, 4, 6]].eq(-torch.inf).all()


@pytest.mark.parametrize(("kind", "settings"), [("gpt2", {"n_layer": 1}), ("mistral", {"sliding_window": 5})])
def test_other_models_draft_so_too(kind, settings, target, translated):
    """One that runs on transformers' own forward pass, and one that sees its last rows alone."""
    model = tiny(kind, vocab_size=5, **settings).double()
    other = Translated(model, translated.tokenizer, translated.target_tokenizer)
    assert_drafts_as_said(SpeculativeDecoder(target, other, "sequoia", tree_size=8), other, 16, atol=SMALL_MODEL)


def test_above_and_below_other_drafts_its_laws_are_the_same(target, translated):
    for draft in (Cascade([translated, translated], [1, 2]), Cascade([translated, PromptLookup()], [2, 1])):
        assert_drafts_as_said(SpeculativeDecoder(target, draft, "dyspec", tree_size=8), draft, 14, atol=SMALL_MODEL)


def test_a_later_turn_drafts_the_same(target, translated):
    assert_later_turns_agree(SpeculativeDecoder(target, translated, "sequoia", tree_size=8))


def test_a_long_chain_of_one_text_reaches_not_beyond_the_rows_of_another(target, translated, monkeypatch):
    ends, run = [], LlamaForward.__call__

    def noting(self, tokens, positions, rows, cache, mask, **more):
        if self.model is translated.model:
            ends.append(cache.keys.shape[2] - int(mask.prefix_length.max()) - mask.ancestor_mask.shape[-1])
        return run(self, tokens, positions, rows, cache, mask, **more)

    monkeypatch.setattr(LlamaForward, "__call__", noting)
    decoder = SpeculativeDecoder(target, translated, "chain", tree_size=3)
    before = torch.tensor([[0], [6]]).expand(2, 26)
    prompt = torch.cat([before[:, :24], before.flip(0)[:, :14]], 1)
    past = decoder.generate(before, 2).cache
    again = decoder.generate(prompt, 6, temperature=1.0, past=past)
    assert_alike(again, decoder.generate(prompt, 6, temperature=1.0))
    assert again.stats.reused_tokens == 48
    assert min(ends) >= 0


def test_of_a_past_with_the_model_alone_nothing_is_taken(target):
    draft, prompt = tiny_llama(5, layers=1).double(), torch.tensor([[3, 1, 4, 1, 6, 2]])
    wrapped = SpeculativeDecoder(target, Translated(draft, tokenizer_of(7), tokenizer_of(7)), "chain")
    past = SpeculativeDecoder(target, draft, "chain").generate(prompt, 9).cache
    assert_alike(wrapped.generate(prompt, 20, past=past), wrapped.generate(prompt, 20))


def test_rows_of_a_cache_are_counted_in_the_targets_tokens(translated):
    draft = TranslatedDraft(translated, forward_of(translated.model, "draft"), 7)
    cache, later = draft.new_cache(3, 5), draft.new_cache(2, 6)
    for field in (*cache.remembered(), *later.remembered()):
        field.copy_(torch.arange(field.numel()).view_as(field))
    kept = cache.trimmed(slice(1, 2), 4)
    assert kept.nbytes == cache.trimmed_bytes(slice(1, 2), 4)
    assert later.take(1, kept, 0, 3) == 3
    before = [field.clone() for field in cache.remembered()]
    for own, source in zip(later.remembered(), before, strict=True):
        assert torch.equal(own[1, :, :6], source[1, :, :6])
        assert not torch.equal(own[1, :, 6:8], source[1, :, 6:8])
    cache.swap(0, 2, 4)
    for own, was in zip(cache.remembered(), before, strict=True):
        assert torch.equal(own[[2, 1, 0], :, :8], was[:, :, :8])
        assert torch.equal(own[:, :, 8:], was[:, :, 8:])


def test_a_draft_of_another_tokenizer_is_loaded_as_one_and_the_log_says_so(tmp_path, caplog):
    for role, tokenizer in (("target", tokenizer_of(7)), ("draft", other_tokenizer_of(7))):
        tiny_llama(3, len(tokenizer), eos_token_id=5).save_pretrained(tmp_path / role)
        tokenizer.save_pretrained(tmp_path / role)
    pair = load_pair(str(tmp_path / "target"), str(tmp_path / "draft"))
    again = [load_draft(tmp_path / "draft", *to) for to in ([pair, str(tmp_path / "target")], [pair.target])]
    said = "the draft has another tokenizer: it drafts 5 of the target's 7 tokens (71%)"
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [(logging.WARNING, said)] * 3
    assert {*map(type, [pair.draft, *again])} == {Translated}
    assert describe(again[0]).endswith(", which drafts 5 of the target's 7 tokens (71%)")
    prompt = torch.tensor([[3, 1, 4, 1, 6, 2]])
    out = SpeculativeDecoder(pair.target, pair.draft, "chain").generate(prompt, 20)
    assert torch.equal(out.sequences, transformers_greedy(pair.target, prompt, 20))
    assert isinstance(load_draft(tmp_path / "target", pair.target), type(pair.target)), "the same tokenizer"


def test_what_cannot_be_is_refused(target):
    few, many = tokenizer_with([*"abc"]), tokenizer_with([*"aABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    with pytest.raises(ValueError, match=r"must have 5% of .* at least, got .* with 1 of the target's 27 tokens"):
        Translated(tiny_llama(1), few, many)
    with pytest.raises(TypeError, match=r"the draft's tokenizer must be one of the tokenizers library, .* got int"):
        Translated(tiny_llama(1), 3, few)
    hybrid = Translated(recurrent("lfm2", 3), tokenizer_of(7), tokenizer_of(7))
    with pytest.raises(ValueError, match=r"attention layers alone, .*; got one with recurrent layers"):
        SpeculativeDecoder(target.float(), hybrid)
    target.double()
