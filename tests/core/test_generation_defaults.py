"""What `generate` is not told is taken from the target's generation_config, and transformers' own generate agrees."""

import pytest
import torch
from texts_with_rules import left_padded
from tiny_models import tiny_llama
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig

from heavypath.speculative import SpeculativeDecoder

IDS = torch.tensor([[1, 2, 3]])
PROMPTS = [[3, 1, 4, 1, 6, 2], [6, 2], [1, 1, 2, 0, 4], [2]]


@pytest.fixture
def pair():
    return tiny_llama(1), tiny_llama(2, layers=1)


@pytest.mark.parametrize("config", [
    {"eos_token_id": [6, 3], "pad_token_id": 1},
    {"eos_token_id": 6, "min_new_tokens": 5},
    {"repetition_penalty": 1.7, "eos_token_id": 4, "pad_token_id": 4},
    {"temperature": 0.3, "top_k": 2, "top_p": 0.4, "min_p": 0.2, "eos_token_id": 6},
    {"min_new_tokens": 0, "min_length": 9, "eos_token_id": 6},
], ids=str)  # fmt: skip
def test_greedy_text_is_that_of_the_models_own_generate(config, pair):
    target = pair[0]
    target.generation_config = GenerationConfig(**config)
    decoder = SpeculativeDecoder(*pair)
    batches = [left_padded([prompt]) for prompt in PROMPTS]
    if "repetition_penalty" not in config:  # which counts padding in transformers before 5.23
        batches.append(left_padded(PROMPTS))
    for batch in batches:
        ours, expected = (each.generate(**batch, max_new_tokens=12) for each in (decoder, target))
        assert torch.equal(ours.sequences, expected)


def test_sampled_text_is_that_of_the_same_settings_given_by_name_and_what_is_said_wins(pair):
    target, decoder = pair[0], SpeculativeDecoder(*pair)
    options = {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2}
    options |= {"min_new_tokens": 0, "eos_token_id": None, "pad_token_id": 0}
    free, greedy = decoder.generate(IDS, 20, **options, seed=3).sequences, decoder.generate(IDS, 20).sequences
    target.generation_config = GenerationConfig(do_sample=True, **options)
    assert torch.equal(decoder.generate(IDS, 20, seed=3).sequences, free)
    config = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.01, "min_p": 1.0, "eos_token_id": 6}
    target.generation_config = GenerationConfig(**config, repetition_penalty=3.0, min_new_tokens=9, pad_token_id=2)
    assert torch.equal(decoder.generate(IDS, 20, **options, seed=3).sequences, free)
    least = options | {"temperature": 0.0, "repetition_penalty": 1.0}
    assert torch.equal(decoder.generate(IDS, 20, **least).sequences, greedy)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"):  # each does something
        rest = {other: given for other, given in options.items() if other != name}
        assert not torch.equal(decoder.generate(IDS, 20, **rest, seed=3).sequences, free), name
    other = options | {"eos_token_id": int(free[0, 8]), "pad_token_id": None}
    assert 2 in decoder.generate(torch.cat([IDS, IDS]), 20, **other, seed=3).sequences[:, -1]


@pytest.mark.parametrize(("config", "message"), [
    ({"num_beams": 4}, r"generation_config has num_beams=4, .* set target.generation_config.num_beams = 1 to do"),
    ({"penalty_alpha": 0.6}, "penalty_alpha=0.6, .* = 0 to do without it"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"watermarking_config": SynthIDTextWatermarkingConfig(5, [1])}, "SynthIDTextWatermarkLogitsProcessor cannot be"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    ({"stop_strings": ["x"]}, "stop_strings need tokenizer="),
])  # fmt: skip
def test_settings_that_the_decoder_lacks_are_refused_by_name(config, message, pair, monkeypatch):
    monkeypatch.setattr(GenerationConfig, "validate", lambda *_, **__: None)
    pair[0].generation_config = GenerationConfig(**config)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(*pair).generate(IDS, 4)


@pytest.mark.parametrize("count", [1, 4])
def test_a_least_length_of_the_model_is_no_more_than_what_is_asked(count, pair):
    target = pair[0]
    decoder = SpeculativeDecoder(*pair)
    target.generation_config = GenerationConfig(min_new_tokens=count, eos_token_id=[*range(6)], pad_token_id=0)
    expected = decoder.generate(IDS, count).sequences
    target.generation_config.min_new_tokens = 99
    assert torch.equal(decoder.generate(IDS, count).sequences, expected)
    with decoder.serve(slots=1, max_tokens=32) as service:
        assert service.submit(IDS[0], count).result(60).tokens == expected[0, 3:].tolist()


def test_a_least_number_of_new_tokens_that_is_given_takes_the_place_of_the_models_least_length(pair):
    target = pair[0]
    ends = [*range(5)]  # of seven tokens, so that a text ends soon
    expected = SpeculativeDecoder(*pair).generate(IDS, 9, eos_token_id=ends).sequences
    assert expected.shape[1] < 12
    target.generation_config = GenerationConfig(min_length=12, eos_token_id=ends, pad_token_id=0)
    decoder = SpeculativeDecoder(*pair)
    assert decoder.generate(IDS, 9).sequences.shape[1] == 12
    assert torch.equal(target.generate(IDS, max_new_tokens=9, min_new_tokens=0), expected), "as by transformers"
    assert torch.equal(decoder.generate(IDS, 9, min_new_tokens=0).sequences, expected)


@pytest.mark.parametrize("config", [
    {"typical_p": 0.5, "top_k": 3, "max_length": 5, "max_new_tokens": 2, "use_cache": False, "num_beams": 1,
     "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "output_scores": True},
    {"eos_token_id": [7, 151643], "pad_token_id": -1},
    None,
])  # fmt: skip
def test_settings_that_change_no_text_are_no_error(config, pair):
    expected = SpeculativeDecoder(*pair).generate(IDS, 4).sequences
    pair[0].generation_config = None if config is None else GenerationConfig(**config)
    assert torch.equal(SpeculativeDecoder(*pair).generate(IDS, 4).sequences, expected)


def test_generate_of_transformers_has_the_last_word_on_its_own_settings(pair):
    """What its caller switches off is off, whatever the config of the model says."""
    target = pair[0]
    decoder = SpeculativeDecoder(*pair)
    expected = decoder.generate(IDS, 12).sequences
    on = {"repetition_penalty": 2.0, "no_repeat_ngram_size": 2, "eos_token_id": 6, "num_beams": 2}
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "eos_token_id": None, "num_beams": 1}
    target.generation_config = GenerationConfig(**on)
    out = target.generate(IDS, custom_generate=decoder, max_new_tokens=12, **off, pad_token_id=0)
    assert torch.equal(out, expected)


def test_padding_without_a_mask_is_warned_of_once(caplog):
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, None, "autoregressive")
    with caplog.at_level("WARNING"):
        decoder.generate(torch.tensor([[0, 3, 1], [4, 1, 5]]), 4, pad_token_id=6)
        decoder.generate(torch.tensor([[6, 3, 1], [6, 1, 5]]), 4, pad_token_id=6)
        decoder.generate(torch.tensor([[6, 3, 1], [4, 1, 5]]), 4, pad_token_id=6, attention_mask=torch.ones(2, 3))
        assert "padding" not in caplog.text
        for _ in range(2):
            decoder.generate(torch.tensor([[6, 3, 1], [4, 1, 5]]), 4, pad_token_id=6)
    assert caplog.text.count("some prompts begin with the padding token") == 1


def test_a_mask_of_ones_that_transformers_does_not_pass_on_is_no_missing_mask(caplog):
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, None, "autoregressive")
    ids = torch.tensor([[6, 3, 1], [4, 1, 5]])
    inputs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 6}
    with caplog.at_level("WARNING"):
        out = target.generate(ids, **inputs, custom_generate=decoder)
    assert "padding token" not in caplog.text
    assert torch.equal(out, target.generate(ids, **inputs))
