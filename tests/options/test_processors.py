"""Logits processors along every path of a tree: transformers' own, callables, one sequence's and another's."""

from itertools import pairwise

import pytest
import torch
from devices import DEVICE, moved
from processed_texts import odd_behind_even, processed_law
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from texts_with_rules import EOS, PROMPTS, left_padded
from tiny_models import tiny_llama
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import logits_process as theirs

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    Cascade,
    EarlyExit,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    Recall,
    SpeculativeDecoder,
)

IDS = torch.tensor([[3, 1, 4, 1, 6, 2]])
USUAL = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 18, "eos_token_id": EOS, "pad_token_id": 0}


def by_last_two(seed, strength=3.0, vocab_size=7):
    """A bias on every token that depends on the two tokens before it."""
    biases = strength * torch.randn(vocab_size**3, generator=torch.Generator().manual_seed(seed))
    triples = torch.cartesian_prod(*[torch.arange(vocab_size)] * 3).tolist()
    return theirs.SequenceBiasLogitsProcessor(dict(zip(map(tuple, triples), biases.tolist(), strict=True)))


TOLD = {
    "model": lambda target: target,
    "early exit": lambda target: EarlyExit(2),
    "mixture": lambda target: Mixture([target, target]),
    "cascade": lambda target: Cascade([target, target], levels=[1, 2]),
    "merge": lambda target: Merge([target, target]),
}


@pytest.mark.parametrize("kind", TOLD)
def test_drafts_are_told_of_processors(kind):
    """Of a draft that is the target itself nothing is refused; the bias is so strong that it would be otherwise."""
    target = tiny_llama(1, layers=3 if kind == "early exit" else 2)
    if kind == "early exit":  # whose last layer does nothing
        target.model.layers[2].self_attn.o_proj.weight.data.zero_()
        target.model.layers[2].mlp.down_proj.weight.data.zero_()
    method, own = "specinfer" if kind == "merge" else "chain", [by_last_two(8, strength=8.0)]
    decoder = SpeculativeDecoder(target, TOLD[kind](target), method, tree_size=6)
    stats = decoder.generate(IDS.expand(50, -1), 9, temperature=0.9, eos_token_id=None, logits_processor=own).stats
    assert stats.acceptance_by_rank[0] == 1


@pytest.mark.parametrize("method", ["ersd", "eagle-2"])
def test_contexts_are_texts_that_can_come_about(method, tiny_pair):
    """Padding stands before them; no text is longer than it may become, none goes on behind its end or a barred token;
    and every beginning of the text that is written has been asked about."""
    inputs, asked = left_padded(PROMPTS), set()

    def noted(input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        asked.add(tuple(input_ids[0].tolist()))
        return odd_behind_even(input_ids, scores)

    noted.keeps_no_state = True  # that it depends on
    decoder = SpeculativeDecoder(*tiny_pair, method, tree_size=8)
    out = decoder.generate(
        **inputs, max_new_tokens=9, eos_token_id=EOS, pad_token_id=EOS, temperature=0.9, logits_processor=[noted]
    )
    width, prompts = inputs["input_ids"].shape[1], inputs["input_ids"].tolist()
    for text in asked:
        assert [*text[:width]] in prompts
        new = text[width - 1 :]
        assert EOS not in new[1:]
        assert all((one ^ other) & 1 for one, other in pairwise(new))
        assert len(text) < width + 9
    for row in out.sequences.tolist():
        length = (*row, EOS).index(EOS, width)
        assert all(tuple(row[:end]) in asked for end in range(width, min(length, width + 8) + 1))


def test_a_function_of_allowed_tokens_is_told_which_sequence_it_is(tiny_pair):
    """Sequences end at different times and change slots; each goes on with its own tokens."""

    def allowed(batch_id, text):
        assert text.shape == (text.shape[0],)
        return [batch_id, batch_id + 1] if len(text) % 3 else [EOS, 6]

    target, decoder = tiny_pair[0], SpeculativeDecoder(*tiny_pair, "dyspec")
    options = {**left_padded(PROMPTS), "max_new_tokens": 16, "eos_token_id": EOS, "pad_token_id": 0}
    options["prefix_allowed_tokens_fn"] = allowed
    expected = target.generate(**options)
    assert torch.equal(decoder.generate(**options).sequences, expected)
    assert torch.equal(target.generate(**options, custom_generate=decoder), expected)


def test_a_function_of_allowed_tokens_gets_the_number_that_generate_gives_it_for_several_texts_of_a_prompt(tiny_pair):
    """The number of the text in transformers 5.23, and that of the prompt in later versions."""
    target, decoder = tiny_pair[0], SpeculativeDecoder(*tiny_pair, "dyspec")
    options = {
        **left_padded(PROMPTS), "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "do_sample": True,
        "top_k": 1, "num_return_sequences": 2, "prefix_allowed_tokens_fn": lambda number, _: [number % 7],
    }  # fmt: skip
    expected = target.generate(**options)
    assert torch.equal(target.generate(**options, custom_generate=decoder), expected)


def test_a_processor_of_allowed_tokens_for_several_beams_counts_prompts(tiny_pair):
    processors = [theirs.PrefixConstrainedLogitsProcessor(lambda number, _: [number], 2)]
    ids = torch.tensor([[3, 1, 4]]).expand(4, -1)
    out = SpeculativeDecoder(*tiny_pair).generate(ids, 2, eos_token_id=None, logits_processor=processors)
    assert out.sequences[:, 3:].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


SETTINGS = [
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.4},
    {"bad_words_ids": [[1], [2, 6]], "min_new_tokens": 4},
    {"suppress_tokens": [1, 4], "begin_suppress_tokens": [2, 6]},
    {"sequence_bias": {(1,): 3.0, (2, 6): -9.0}, "repetition_penalty": 1.6},
    {"forced_eos_token_id": 5, "min_length": 12},
    {"min_length": 24, "min_new_tokens": 2, "sequence_bias": {(EOS,): 9.0}},
    {"exponential_decay_length_penalty": (3, 1.5), "remove_invalid_values": True},
    {"watermarking_config": WatermarkingConfig(bias=9.0)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_that_are_processors_are_those_of_transformers(settings, tiny_pair, monkeypatch):
    target = tiny_pair[0]
    decoder = SpeculativeDecoder(*tiny_pair)
    expected = target.generate(IDS, **USUAL, **settings)
    assert not torch.equal(expected, target.generate(IDS, **USUAL))
    assert torch.equal(target.generate(IDS, **USUAL, **settings, custom_generate=decoder), expected)
    own = GenerationConfig(**settings, eos_token_id=EOS, pad_token_id=0)
    monkeypatch.setattr(target, "generation_config", own)
    assert torch.equal(decoder.generate(IDS, 18).sequences, expected)


@pytest.mark.parametrize("method", ["rsd-s", "ersd", "chain", "dyspec"])
@pytest.mark.parametrize("least", [{}, {"min_new_tokens": 9}, {"min_length": 20}], ids=str)
def test_a_growing_wish_to_end_is_that_of_transformers_in_every_call(least, method, tiny_pair, monkeypatch):
    """Prompts of 17 and 2 tokens; where the least length forbids the end, -inf + |-inf| is NaN in transformers too."""
    target, decoder = tiny_pair[0], SpeculativeDecoder(*tiny_pair, method)
    own = GenerationConfig(exponential_decay_length_penalty=(1, 1.3), eos_token_id=EOS, pad_token_id=0, **least)
    monkeypatch.setattr(target, "generation_config", own)
    inputs = left_padded([[1 + place % 6 for place in range(17)], [2, 1]])
    expected = target.generate(**inputs, max_new_tokens=18, do_sample=False)
    for _ in range(2):
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=18, temperature=0).sequences, expected)


DOUBLED = {
    "a bias of the config": ({"sequence_bias": {(1,): 3.0}}, lambda: [theirs.SequenceBiasLogitsProcessor({(2,): 2.0})]),
    "two of a class": (
        {"repetition_penalty": 3.0},
        lambda: [theirs.RepetitionPenaltyLogitsProcessor(penalty) for penalty in (0.8, 1.1)],
    ),
    "one twice": ({}, lambda: [theirs.SequenceBiasLogitsProcessor({(2,): 2.0})] * 2),
    "both least lengths": (
        {"min_new_tokens": 12},
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(6, 4, EOS), theirs.MinLengthLogitsProcessor(9, EOS)],
    ),
    "another least length": ({"min_length": 11}, lambda: [theirs.MinNewTokensLengthLogitsProcessor(6, 9, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBLED)
def test_a_users_processor_takes_the_place_of_a_settings_of_its_class(name, tiny_pair, monkeypatch):
    target = tiny_pair[0]
    settings, own = DOUBLED[name]
    decoder = SpeculativeDecoder(*tiny_pair)
    given = {"return_dict_in_generate": True, "output_scores": True, "logits_processor": LogitsProcessorList(own())}
    expected = target.generate(IDS, **USUAL, **settings, **given)
    through = target.generate(IDS, **USUAL, **settings, **given, custom_generate=decoder)
    config = GenerationConfig(**settings, eos_token_id=EOS, pad_token_id=0)
    monkeypatch.setattr(target, "generation_config", config)
    for out in (through, decoder.generate(IDS, 18, output_scores=True, logits_processor=own())):
        assert torch.equal(out.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)


WARPED = [
    {"epsilon_cutoff": 0.05, "top_k": 5, "temperature": 1.5},
    {"eta_cutoff": 0.2, "top_p": 0.9},
    {"top_h": 0.9, "min_p": 0.05, "temperature": 1.7},
    {"typical_p": 0.8, "watermarking_config": WatermarkingConfig(bias=1.5), "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("settings", WARPED, ids=str)
def test_sampled_text_under_all_warpers_has_transformers_law(settings, tiny_pair, monkeypatch):
    """Given to transformers' generate and found in the model's generation_config by turns."""
    target, ids, count = tiny_pair[0], torch.tensor([[3, 1, 4]]), 2000
    given = {"do_sample": True, "max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 0, "top_k": 0} | settings
    config = GenerationConfig(**given)
    config._eos_token_tensor = None
    processors = target._get_logits_processor(
        config, input_ids_seq_length=3, encoder_input_ids=ids, device="cpu", model_kwargs={}
    )
    law = processed_law(target, ids[0], processors, Filters(1.0), 2)
    decoder = SpeculativeDecoder(*tiny_pair, "dyspec")
    if WARPED.index(settings) % 2 == 1:
        torch.manual_seed(6)
        out = target.generate(ids, **given, num_return_sequences=count, custom_generate=decoder)
    else:
        monkeypatch.setattr(target, "generation_config", config)
        out = decoder.generate(ids.expand(count, -1), 2, seed=3).sequences
    assert chi_square_p_value(joint_counts(out[:, 3:], 7), law) > SIGNIFICANCE


def test_warpers_out_of_order_are_processors(tiny_pair):
    processors = [theirs.TopPLogitsWarper(0.8), by_last_two(1, 0.5), theirs.TopKLogitsWarper(3, min_tokens_to_keep=2)]
    law = processed_law(tiny_pair[0], torch.tensor([3, 1, 4]), processors, Filters(1.0), 2)
    out = tiny_pair[0].generate(
        torch.tensor([[3, 1, 4]]), custom_generate=SpeculativeDecoder(*tiny_pair), logits_processor=processors,
        do_sample=True, max_new_tokens=2, num_return_sequences=2000, top_k=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert chi_square_p_value(joint_counts(out[:, 3:], 7), law) > SIGNIFICANCE


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_are_those_after_processing_and_logits_those_of_the_model(do_sample, tiny_pair):
    model = tiny_pair[0]
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    own = [by_last_two(2), theirs.NoRepeatNGramLogitsProcessor(2)]
    options = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0,
        "do_sample": do_sample, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    if do_sample:
        options |= {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    out = model.generate(ids, custom_generate=SpeculativeDecoder(*tiny_pair), logits_processor=own, **options)
    if do_sample:
        own += [theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(5), theirs.TopPLogitsWarper(0.9)]
    for place, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True), start=3):
        raw = model(out.sequences[:, :place]).logits[:, -1]
        torch.testing.assert_close(logits, raw, atol=1e-4, rtol=1e-4)
        expected = LogitsProcessorList(own)(out.sequences[:, :place], raw)
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert (scores.gather(1, out.sequences[:, place : place + 1]) > -torch.inf).all()
    if not do_sample:
        assert torch.equal(out.sequences, model.generate(ids, logits_processor=own, **options).sequences)


class Promising(LogitsProcessor):
    """Bars another token in each call, and says that it does not."""

    keeps_no_state = True

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % scores.shape[1]] = -torch.inf
        return scores


@pytest.mark.parametrize("begin", [1, 3, 9])
@pytest.mark.parametrize("method", ["dyspec", "autoregressive"])
def test_an_answer_that_changes_is_found_out(method, begin, tiny_pair):
    """Also where it changes late, in the step in which it is asked again."""
    own = Promising()

    def late(input_ids, scores):
        return own(input_ids, scores) if input_ids.shape[1] >= begin else scores

    late.keeps_no_state = True
    decoder = SpeculativeDecoder(*tiny_pair, method)
    with pytest.raises(ValueError, match=r"late answered differently .* depend on its arguments alone"):
        decoder.generate(torch.tensor([[1, 2]]), 30, logits_processor=[odd_behind_even, late])


def nothing_left(input_ids, scores):
    return scores.masked_fill(torch.tensor(input_ids.shape[1] == 4), -torch.inf)


SYNTH_ID = theirs.SynthIDTextWatermarkLogitsProcessor(
    ngram_len=5, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu"
)


@pytest.mark.parametrize(("given", "message"), [
    (odd_behind_even, "must be a list of processors, got function; put it into a list"),
    ([3], "is called with .* got 3"),
    ([Promising], "got the class Promising; make an object of it"),
    ([[odd_behind_even], odd_behind_even], "got some of both"),
    ([[odd_behind_even], None, []], "must have a list for each sequence, got 3 for 1"),
    ([SYNTH_ID], "SynthIDTextWatermark.* keeps the input_ids of earlier calls.* WatermarkLogitsProcessor, which does"),
    ([theirs.EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(1, 4).long())], "EncoderNoRepeatNGram.* leave it out"),
    ([theirs.ClassifierFreeGuidanceLogitsProcessor(2.0)], "ClassifierFreeGuidance.*decode with transformers"),
    ([lambda ids, scores: None], r"lambda. must return scores \[R, V\] = \[1, 7\] .* got NoneType"),
    ([lambda ids, scores: scores[0]], r"must return scores .* got torch.float32 \[7\]"),
    ([lambda ids, scores: scores * torch.nan], "make NaN or .inf of the draft's logits after 0 new tokens"),
    ([nothing_left], "processors nothing_left leave no token after the 2 new tokens"),
])  # fmt: skip
def test_what_cannot_be_asked_along_a_tree_is_refused(given, message, tiny_pair):
    with pytest.raises((TypeError, ValueError), match=message):
        SpeculativeDecoder(*tiny_pair, tree_size=5).generate(torch.tensor([[1, 2]]), 8, logits_processor=given)


def test_a_dead_end_that_is_never_reached_is_no_error(tiny_pair):
    """The end of sequence is forced where nothing else may follow; a tree looks one level further."""

    def ends_early(input_ids, scores):
        allowed = [EOS] if input_ids.shape[1] >= 6 else [EOS, 1, 2] if input_ids[0, -1] != 1 else [2]
        allowed = [] if input_ids[0, -2:].tolist() == [1, 1] else allowed
        mask = torch.full_like(scores, -torch.inf)
        mask[:, allowed] = 0
        return scores + mask

    for method in ("sequoia", "dyspec", "specinfer", "ersd"):
        out = SpeculativeDecoder(*tiny_pair, method).generate(
            torch.tensor([[0, 2]]).expand(20, -1), 8, temperature=1.5, eos_token_id=EOS, logits_processor=[ends_early]
        )
        assert (out.sequences[:, 2:] == EOS).any(1).all()


def test_texts_on_a_gpu_are_those_on_a_cpu(tiny_pair):
    """Where there is one, or one that is played: nothing meets a tensor of another device."""
    inputs, texts = left_padded(PROMPTS[:2]), []
    for device in ("cpu", DEVICE):
        pair = [tiny_llama(seed, layers=1, hidden_size=32).to(device) for seed in (1, 2)]
        lists = [[by_last_two(2), odd_behind_even], [theirs.NoRepeatNGramLogitsProcessor(2), by_last_two(3)]]
        for method in ("sequoia", "dyspec"):
            out = SpeculativeDecoder(*pair, method, tree_size=4, verifier="rejection").generate(
                **moved(inputs, device), max_new_tokens=5, temperature=0.8, logits_processor=lists, eos_token_id=EOS,
                repetition_penalty=1.2, min_new_tokens=2, prefix_allowed_tokens_fn=lambda *_: range(1, 7),
            )  # fmt: skip
            texts.append(out.sequences.tolist())
    assert texts[:2] == texts[2:]


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "rsd-s", "specinfer"])
@pytest.mark.parametrize("draft", [PromptLookup, Recall, Lookahead])
def test_no_processor_is_shown_a_row_without_any_token(draft, method, tiny_pair):
    """Where a draft proposes nothing, or in some sequences only; and the greedy text is that of transformers."""

    def needs_a_distribution(input_ids, scores):
        assert (scores > -torch.inf).any(-1).all()
        entropy = torch.distributions.Categorical(logits=scores).entropy()[:, None]
        return scores - entropy * torch.arange(scores.shape[1])

    ids, target = torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 2]]), tiny_pair[0]  # of which the first repeats itself
    own = [theirs.NoRepeatNGramLogitsProcessor(3), theirs.TopHLogitsWarper(0.9), needs_a_distribution]
    usual = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = target.generate(ids, **usual, logits_processor=LogitsProcessorList(own))
    out = SpeculativeDecoder(target, draft(), method).generate(ids, 10, eos_token_id=None, logits_processor=own)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
@pytest.mark.parametrize("draft", [PromptLookup, Recall])
def test_a_token_that_a_draft_excludes_may_become_any_number_by_processors(draft, method, tiny_pair):
    """remove_invalid_values makes the least number of -inf, of which the wish to end makes +inf."""
    target = tiny_pair[0]
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1]])
    settings = {"remove_invalid_values": True, "exponential_decay_length_penalty": (1, 1.7)}
    usual = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 18, "eos_token_id": EOS, "pad_token_id": 0}
    expected = target.generate(ids, **usual, **settings)
    decoder = SpeculativeDecoder(target, draft(), method, tree_size=4)
    assert torch.equal(target.generate(ids, **usual, **settings, custom_generate=decoder), expected)
