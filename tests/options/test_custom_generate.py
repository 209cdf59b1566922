"""`model.generate(..., custom_generate=decoder)` is `model.generate(...)`, and what a decoder survives."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from texts_with_rules import EOS, PROMPTS, left_padded
from tiny_models import tiny_llama, transformers_greedy
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    pipeline,
)
from transformers.generation import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heavypath.kernels.native.library import library
from heavypath.kernels.native.sampling import below_infinity
from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.custom_generate import SpeculativeOutput
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.models import linear
from heavypath.speculative.models.text_cache import CACHE_NAME

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def decoder(tiny_pair):
    return SpeculativeDecoder(*tiny_pair)


class Recorder:
    """A streamer that keeps what it is told."""

    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


@pytest.mark.parametrize("settings", [
    {"max_length": 25, "min_length": 14, "eos_token_id": EOS},
    {"max_new_tokens": 20, "min_new_tokens": 7, "eos_token_id": [EOS, 6], "renormalize_logits": True},
    {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=EOS, pad_token_id=0, top_k=3, top_p=0.5)},
], ids=str)  # fmt: skip
def test_greedy_batches_are_those_of_generate(settings, decoder):
    settings = left_padded(PROMPTS) | {"pad_token_id": 0} | settings
    expected = decoder.target.generate(**settings)
    assert torch.equal(decoder.target.generate(**settings, custom_generate=decoder), expected)


def test_warpers_given_as_processors_are_the_decoders_filters(decoder):
    options = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0, "do_sample": True, "top_k": 0}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.8)])
    out = decoder.target.generate(IDS, seed=5, custom_generate=decoder, logits_processor=warpers, **options)
    assert torch.equal(out, decoder.generate(IDS, 16, temperature=0.7, top_k=4, top_p=0.8, seed=5).sequences)


def test_torchs_seed_makes_sampled_text_repeatable(decoder):
    def text(seed):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0, "custom_generate": decoder}
        return decoder.target.generate(IDS, **settings).tolist()

    assert text(1) == text(1) != text(2)
    state = torch.get_rng_state()
    decoder.target.generate(IDS, max_new_tokens=4, pad_token_id=0, custom_generate=decoder)
    assert torch.equal(torch.get_rng_state(), state)  # greedy text draws nothing


def test_a_dictionary_of_sequences_with_statistics_is_returned_on_demand(decoder):
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True}
    expected = decoder.target.generate(IDS, **settings)
    out = decoder.target.generate(IDS, custom_generate=decoder, **settings)
    assert isinstance(out, type(expected))
    assert isinstance(out, SpeculativeOutput)
    assert out.stats.new_tokens == out["stats"].new_tokens == 8
    assert out.scores is out.logits is None
    assert torch.equal(out.sequences, expected.sequences)
    for same in (copy.deepcopy(out), pickle.loads(pickle.dumps(out))):
        assert [*same] == ["sequences", "stats"]
        assert torch.equal(same.sequences, out.sequences)


@pytest.mark.parametrize("settings", [
    {"eos_token_id": [EOS, 99], "min_new_tokens": 5}, {"eos_token_id": 99}, {"eos_token_id": EOS, "pad_token_id": -1},
], ids=str)  # fmt: skip
def test_end_and_padding_tokens_that_a_model_lacks_end_and_pad_nothing(settings, decoder, monkeypatch):
    """As configurations have them, of tokenizers with more tokens."""
    target = decoder.target
    monkeypatch.setattr(target, "generation_config", GenerationConfig(**{"pad_token_id": 0} | settings))
    expected = target.generate(IDS[:1], max_new_tokens=20)
    assert torch.equal(target.generate(IDS[:1], max_new_tokens=20, custom_generate=decoder), expected)


def test_a_streamer_hears_what_generate_would_tell_it(decoder):
    ours, theirs, bound = Recorder(), Recorder(), Recorder()
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": 3}
    decoder.target.generate(IDS, streamer=theirs, **settings)
    decoder.target.generate(IDS, streamer=ours, custom_generate=decoder, **settings)
    decoder.target.generate(IDS, custom_generate=partial(decoder, streamer=bound), **settings)
    assert ours.heard == theirs.heard == bound.heard


def test_stop_strings_and_criteria_end_a_text_where_generate_ends_it(demo_pair):
    target, draft, tokenizer = demo_pair
    decoder, words = SpeculativeDecoder(target, draft), ["self", "ret"]
    inputs = tokenizer(demo_prompts()[:3], return_tensors="pt", padding=True) | {"max_new_tokens": 24}
    expected = target.generate(**inputs, tokenizer=tokenizer, stop_strings=words)
    bound = partial(decoder, tokenizer=tokenizer)
    assert torch.equal(target.generate(**inputs, custom_generate=bound, stop_strings=words), expected)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, words), MaxTimeCriteria(600)])
    out = target.generate(**inputs, custom_generate=decoder, stopping_criteria=criteria)
    assert torch.equal(out, expected)
    assert len({int((row != 0).sum()) for row in out}) > 1


def test_a_pipeline_writes_through_the_decoder(demo_pair):
    target, draft, tokenizer = demo_pair
    counted = Mock(wraps=SpeculativeDecoder(target, draft))
    # Without a device it would move the target, and not the draft, to a GPU.
    write = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu")
    settings, prompts = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}, demo_prompts()[:2]
    assert write(prompts, batch_size=2, custom_generate=counted, **settings) == write(prompts, **settings)
    assert counted.call_count == 1


@pytest.mark.parametrize("processors", [
    [RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=2)],
    [RepetitionPenaltyLogitsProcessor(1.3), RepetitionPenaltyLogitsProcessor(1.4)],
    [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.7)],
    [MinNewTokensLengthLogitsProcessor(3, 9, 4)],
    [TopKLogitsWarper(3, -9.0)],
    [TopPLogitsWarper(0.3, min_tokens_to_keep=2)],
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)],
], ids=lambda each: " ".join(type(one).__name__ for one in each))  # fmt: skip
def test_a_setting_that_differs_from_the_decoders_own_is_a_processor(processors, decoder):
    """Another place in the order, a part of the prompt, another end of sequence, ..."""
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": EOS, "output_scores": True}
    settings |= {"return_dict_in_generate": True, "logits_processor": LogitsProcessorList(processors)}
    expected = decoder.target.generate(IDS, **settings)
    out = decoder.target.generate(IDS, **settings, custom_generate=decoder)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)


def test_a_penalty_given_as_a_processor_reads_padding_as_it_does_by_generate(decoder):
    """Token 0 ends texts and is the padding, as in many tokenizers, so that padding makes an end less likely."""
    settings = left_padded(PROMPTS) | {"pad_token_id": 0, "eos_token_id": 0, "max_new_tokens": 12}
    expected = decoder.target.generate(**settings)
    settings["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    penalised = decoder.target.generate(**settings)
    assert not torch.equal(penalised, expected)
    assert torch.equal(decoder.target.generate(**settings, custom_generate=decoder), penalised)


@pytest.mark.parametrize(("settings", "message"), [
    ({"num_beams": 2}, "num_beams=2"),
    ({"assistant_model": tiny_llama(2, layers=1)}, "assistant_model: the decoder has a draft"),
    ({CACHE_NAME: DynamicCache()}, CACHE_NAME),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"guidance_scale": 1.5}, "the logits processor UnbatchedClassifierFreeGuidance.* decode without guidance_scale"),
    ({"encoder_no_repeat_ngram_size": 2}, "the logits processor EncoderNoRepeatNGram.* leave it out"),
    ({"stop_strings": "x"}, r"stop_strings need tokenizer=.*functools.partial\(decoder, tokenizer=tokenizer\)"),
    ({"prefix_allowed_tokens_fn": 5}, r"prefix_allowed_tokens_fn must be a function .* got 5"),
    ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
    ({"pad_token_id": int(IDS[0, 1])}, r"attention_mask with zeros after ones: .* give torch\.ones_like\(input_ids\)"),
    ({"inputs_embeds": torch.zeros(1, 3, 16)}, "inputs_embeds"),
    ({"token_type_ids": torch.zeros(1, 3)}, "token_type_ids"),
    ({"max_new_tokens": 90}, r"need 92 positions \(3 \+ 90 - 1: .*\), but target has 64"),
])  # fmt: skip
def test_settings_that_the_decoder_lacks_are_refused_by_name(settings, message, decoder):
    settings = {"max_new_tokens": 4, "pad_token_id": 0, "custom_generate": decoder} | settings
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.target.generate(IDS, **settings)


def test_other_models_and_inputs_than_the_targets_are_refused(decoder):
    with pytest.raises(ValueError, match="the decoder's target is another model than this LlamaForCausalLM"):
        tiny_llama(1).generate(IDS, max_new_tokens=4, pad_token_id=0, custom_generate=decoder)
    with pytest.raises(TypeError, match="token_type_ids"):
        decoder.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), token_type_ids=torch.zeros_like(IDS))


@pytest.mark.parametrize(("error", "which"), [
    (KeyboardInterrupt, 0), (torch.OutOfMemoryError, 1), (KeyboardInterrupt, "compiled"),
])  # fmt: skip
def test_decoding_goes_on_after_it_was_broken_off(error, which, tiny_pair, monkeypatch):
    """Within a model's layer, or within a recorded step."""
    if which == "compiled" and library() is None:
        pytest.skip("no C++ compiler")
    if which != "compiled":  # then the modules are called
        monkeypatch.setattr(linear, "library", lambda: None)
        monkeypatch.setattr(linear, "as_it_lies", lambda layer: layer)
    decoder = SpeculativeDecoder(*tiny_pair)
    expected = decoder.generate(IDS, 20, temperature=0.8, seed=4).sequences
    before = [copy.deepcopy(model.state_dict()) for model in tiny_pair]
    config = tiny_pair[0].config.to_dict()
    broken = "compiled" if which == "compiled" else tiny_pair[which].model.layers[0].mlp.down_proj
    left = iter(range(5, -1, -1))  # calls

    def called(part):
        if part is broken and next(left) == 0:
            raise error("in the middle")

    def breaks(self, hidden):
        called(self)
        return nn.functional.linear(hidden, self.weight, self.bias)

    def breaks_between(values):
        called("compiled")
        return below_infinity(values)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", breaks)
        patch.setattr("heavypath.speculative.decoding.drafted.below_infinity", breaks_between)
        with pytest.raises(error, match="in the middle"):
            decoder.generate(IDS, 20, temperature=0.8, seed=4)
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(decoder.generate(IDS, 20, temperature=0.8, seed=4).sequences, expected)
    for model, state in zip(tiny_pair, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert tiny_pair[0].config.to_dict() == config
    tiny_pair[0](IDS, labels=IDS).loss.backward()
    tiny_pair[0].zero_grad()


def test_three_threads_write_by_two_decoders_what_they_write_alone(tiny_pair):
    """Texts of several lengths, so that each needs other rotary tables and other trees."""
    jobs = [(decoder, length) for length in (40, 5, 58) for decoder in range(2)]
    shared = [SpeculativeDecoder(*tiny_pair) for _ in range(2)]

    def text(job, decoders=shared):
        return decoders[job[0]].generate(IDS, job[1], temperature=0.7, seed=job[0]).sequences.tolist()

    expected = [text(job, [SpeculativeDecoder(*tiny_pair)] * 2) for job in jobs]
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(text, jobs)] == expected


class Packed(torch.Tensor):
    """A weight whose module is an ordinary nn.Linear, as torchao has them; it lends itself to `linear` alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.mm, torch.sum, torch.Tensor.sum):
            raise NotImplementedError(func)
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is nn.functional.linear else out


def test_quantised_linear_layers_are_called_as_they_are():
    """Those that are a class of their own: kernels/test_linear."""
    target = tiny_llama(1, hidden_size=256, intermediate_size=1024)  # large enough to be read from memory
    for layer in target.model.layers:
        packed = layer.mlp.up_proj.weight.detach().as_subclass(Packed)
        layer.mlp.up_proj.weight = nn.Parameter(packed, requires_grad=False)
    expected = transformers_greedy(target, IDS, 24)
    out = SpeculativeDecoder(target, EarlyExit(1), "sequoia").generate(IDS, 24)
    assert torch.equal(out.sequences, expected)


def test_a_model_on_several_devices_or_offloaded_is_refused(tiny_pair, monkeypatch):
    offloaded = tiny_llama(1)
    offloaded.lm_head.to("meta")
    with pytest.raises(ValueError, match="target is on the meta device, it has no weights; load it first"):
        SpeculativeDecoder(offloaded, tiny_pair[1])
    spread, elsewhere = tiny_llama(1), Mock(device=torch.device("cuda:1"))
    monkeypatch.setattr(spread, "parameters", lambda recurse=True: [next(tiny_pair[0].parameters()), elsewhere])
    with pytest.raises(ValueError, match="target must be on one device, got one spread over cpu, cuda:1"):
        SpeculativeDecoder(spread, tiny_pair[1])


@pytest.mark.parametrize(("method", "settings"), [
    ("autoregressive", {}), ("sequoia", {}), ("dyspec", {"repetition_penalty": 1.3, "min_new_tokens": 4}),
    ("sequoia", {"renormalize_logits": True}),
])  # fmt: skip
def test_scores_and_logits_are_those_of_generate(method, settings, tiny_pair):
    ids = torch.tensor([[1, 2, 3], [0, 5, 6]])
    mask = ids.clamp(max=1) if not settings else torch.ones_like(ids)  # before 5.23 transformers penalises padding
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **settings}
    expected = tiny_pair[0].generate(**options)
    out = tiny_pair[0].generate(**options, custom_generate=SpeculativeDecoder(*tiny_pair, method))
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
        assert len(ours) == len(theirs) == out.sequences.shape[1] - 3
        for row in range(2):
            ends = (out.sequences[row, 3:] == EOS).nonzero()
            count = len(ours) if not len(ends) else int(ends[0]) + 1
            for one, other in zip(ours[:count], theirs[:count], strict=True):
                torch.testing.assert_close(one[row], other[row], atol=1e-4, rtol=1e-4)
            assert not torch.stack([*ours, ours[0]])[count:-1, row].any()


def test_a_draft_that_does_not_pay_is_remarked_once(tiny_pair, caplog):
    target, other = tiny_pair
    silent = SpeculativeDecoder(target, None, "autoregressive")
    silent.generate(IDS, 50, eos_token_id=None)
    assert not caplog.text
    slow = SpeculativeDecoder(target, other, tree_size=9)
    ticks = iter(range(100_000))
    slow.clock = lambda: float(next(ticks))  # so that every phase takes as long
    slow.generate(IDS, 8, eos_token_id=None)
    assert not caplog.text  # too few steps to tell
    for _ in range(2):
        stats = slow.generate(IDS, 50, eos_token_id=None).stats
    assert stats.gain_at_most == stats.tokens_per_step * (1 - stats.drafting_share) < 1
    remarks = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(remarks) == 1
    assert f"{stats.tokens_per_step:.2f} tokens a step, and {100 * stats.drafting_share:.0f}%" in remarks[0]
