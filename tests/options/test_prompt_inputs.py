"""Prompts with images and sounds: a multimodal model's text is that of transformers' own generate."""

from types import SimpleNamespace

import pytest
import torch
from families import TINY
from head_cases import head_of
from played_steps import Tape
from texts_with_rules import PROMPTS, left_padded
from tiny_models import tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BatchFeature,
    LlamaForCausalLM,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

from heavypath.speculative import Lookahead, PromptLookup, SpeculativeDecoder
from heavypath.speculative.models.forward import Taps
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.prompt_inputs import inputs_of
from heavypath.speculative.models.text_cache import CACHE_NAME

SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OURS = {"temperature": 0, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.tensor([[1, 2, 3]])

SHOWN = 60  # the token in whose place the target reads a part of an image, or of a sound
FILMED = 59  # and of a video
TEXT = TINY | {"tie_word_embeddings": False}
SEES = {"hidden_size": 16, "intermediate_size": 16}
SQUARE = SEES | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
GRIDS = SEES | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = {"image_token_id": SHOWN, "video_token_id": FILMED, "vision_start_token_id": 58, "vision_end_token_id": 57}
KINDS = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 8}, "vision_config": SQUARE, "image_token_index": SHOWN,
        "boi_token_index": 59, "eoi_token_index": 58, "mm_tokens_per_image": 4, "tie_word_embeddings": False,
    },
    "qwen2_5_vl": QWEN | {"text_config": TEXT | MROPE, "vision_config": GRIDS},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SQUARE | {"model_type": "clip_vision_model"},
        "image_token_index": SHOWN,
    },
    "qwen3_vl": QWEN | {
        "text_config": TEXT | MROPE,
        "vision_config": GRIDS | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "voxtral": {
        "text_config": TEXT | {"model_type": "llama"}, "audio_token_id": SHOWN,
        "audio_config": SEES | {
            "model_type": "voxtral_encoder", "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 4,
            "max_source_positions": 4,
        },
    },
}  # fmt: skip


def multimodal(kind: str):
    """A random model, no weight at its neutral initial value."""
    torch.manual_seed(3)
    if kind == "voxtral":
        model = VoxtralForConditionalGeneration(VoxtralConfig(**KINDS[kind]))
    else:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.lm_head.weight[[SHOWN, FILMED]] = 0  # transformers refuses them in a text without images
    return model.eval()


def shown(kind: str, batch: int = 1, seed: int = 5) -> dict[str, torch.Tensor]:
    """Prompts with an image or a sound in each, all the arguments of `generate`; seed: of what is seen."""
    noise, sizes = torch.Generator().manual_seed(seed), [4, 4][:batch]
    if kind.startswith("qwen"):  # two and three rows of 2 x 2 patches, whose positions go on before so many tokens
        grids = torch.tensor([[1, 4, 6], [1, 4, 4]][:batch])
        sizes = (grids.prod(1) // 4).tolist()
        pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14, generator=noise)
        inputs = {"pixel_values": pixels, "image_grid_thw": grids}
    elif kind == "voxtral":
        inputs = {"input_features": torch.randn(batch, 4, 8, generator=noise)}
    else:
        inputs = {"pixel_values": torch.randn(batch, 3, 28, 28, generator=noise)}
    texts = [([5, 58], [57, 7, 8, 9]), ([11], [12, 13])]
    prompts = [before + [SHOWN] * size + after for (before, after), size in zip(texts, sizes, strict=False)]
    if kind == "voxtral":  # where one sound has as many tokens as the encoder has numbers for it
        prompts = [before + [SHOWN] * 4 + after for before, after in texts[:batch]]
    made = left_padded(prompts)
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    if kind in types:
        inputs[types[kind]] = (made["input_ids"] == SHOWN).long()
    return made | inputs


def filmed() -> dict[str, torch.Tensor]:
    """A prompt with a video for "qwen2_5_vl", whose positions go on behind more than its tokens."""
    prompt, noise = left_padded([[5, 58, *[FILMED] * 8, 57, 7, 8]]), torch.Generator().manual_seed(5)
    return prompt | {
        "pixel_values_videos": torch.randn(32, 3 * 2 * 14 * 14, generator=noise),
        "video_grid_thw": torch.tensor([[4, 2, 4]]),
        "second_per_grid_ts": torch.tensor([1.0]),
        "mm_token_type_ids": 2 * (prompt["input_ids"] == FILMED).long(),
    }


def apart(prompt: dict[str, torch.Tensor]) -> dict:
    """The same prompts, as arguments of the decoder's own generate."""
    tokens = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    inputs = {name: value for name, value in prompt.items() if name not in tokens}
    return tokens | {"model_inputs": BatchFeature(inputs)}  # as processors return them


@pytest.fixture(scope="module")
def model_of():
    made = {}

    def model_of(kind):
        return made[kind] if kind in made else made.setdefault(kind, multimodal(kind))

    return model_of


def text_model(model):
    """The language model of a multimodal one if it is a Llama, else the whole; either is never shown an image."""
    if not isinstance(model.model.language_model, type(tiny_llama(1).model)):
        return model
    draft = LlamaForCausalLM(model.config.get_text_config()).eval()
    draft.model, draft.lm_head = model.model.language_model, model.lm_head
    return draft


@pytest.mark.parametrize(("kind", "method"), [
    ("gemma3", "sequoia"), ("qwen2_5_vl", "dyspec"), ("llava", "chain"), ("qwen3_vl", "sequoia"),
    ("voxtral", "sequoia"),
])  # fmt: skip
def test_texts_are_those_of_generate(kind, method, model_of):
    """Of one prompt and of a batch with left padding, with images and without."""
    model, batch = model_of(kind), shown(kind, batch=2)
    draft = PromptLookup() if method == "chain" else text_model(model)
    decoder = SpeculativeDecoder(model, draft, method, tree_size=6)
    for prompts in (shown(kind), left_padded(PROMPTS), batch):
        expected = model.generate(**prompts, **SETTINGS, max_new_tokens=12)
        assert torch.equal(model.generate(**prompts, **SETTINGS, max_new_tokens=12, custom_generate=decoder), expected)
    assert torch.equal(decoder.generate(**apart(batch), **OURS, max_new_tokens=12).sequences, expected)
    blind = apart(batch) | {"model_inputs": None}
    assert not torch.equal(decoder.generate(**blind, **OURS, max_new_tokens=12).sequences, expected)


def test_positions_go_on_far_behind_a_video(model_of):
    model = model_of("qwen2_5_vl")
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=6)
    expected = model.generate(**filmed(), **SETTINGS, max_new_tokens=12)
    assert model.model.rope_deltas > 0
    assert torch.equal(decoder.generate(**apart(filmed()), **OURS, max_new_tokens=12).sequences, expected)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_seeds_text_is_that_of_plain_decoding(kind, model_of):
    model = model_of(kind)
    prompts = apart(shown(kind, batch=2)) | {"temperature": 1.0, "eos_token_id": None, "max_new_tokens": 12}
    plain, drafted = SpeculativeDecoder(model, method="autoregressive"), SpeculativeDecoder(model, model, "ersd")
    texts = {tuple(plain.generate(**prompts, seed=seed).sequences.flatten().tolist()) for seed in range(3)}
    assert len(texts) == 3
    assert texts == {tuple(drafted.generate(**prompts, seed=seed).sequences.flatten().tolist()) for seed in range(3)}


def test_each_sequence_keeps_its_positions_when_the_batch_closes_up(model_of):
    """The first of two texts ends; positions of the other one go on from a smaller image."""
    model, prompts = model_of("qwen2_5_vl"), shown("qwen2_5_vl", batch=2)
    ends = int(model.generate(**prompts, **SETTINGS, max_new_tokens=2)[0, -1])
    settings = SETTINGS | {"eos_token_id": ends, "max_new_tokens": 16}
    expected = model.generate(**prompts, **settings)
    assert (expected[0, -12:] == 0).all()
    assert (expected[1, -12:] != 0).any()
    decoder = SpeculativeDecoder(model, PromptLookup(), "chain")
    assert torch.equal(model.generate(**prompts, **settings, custom_generate=decoder), expected)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "voxtral"])
def test_a_text_goes_on_behind_the_images_of_its_past(kind, model_of):
    model, prompts = model_of(kind), shown(kind, batch=2)
    decoder = SpeculativeDecoder(model, text_model(model), "sequoia", tree_size=6)
    first = decoder.generate(**apart(prompts), **OURS, max_new_tokens=9)
    said = torch.tensor([[3, 5], [6, 4]])
    more = {"input_ids": torch.cat([first.sequences, said], 1), "attention_mask": padded(prompts["attention_mask"], 11)}
    types = {name: padded(value, 11, 0) for name, value in prompts.items() if name.endswith("type_ids")}
    expected = model.generate(**prompts | more | types, **SETTINGS, max_new_tokens=9)
    out = decoder.generate(**more, **OURS, max_new_tokens=9, past=first.cache)
    assert torch.equal(out.sequences, expected)
    assert out.stats.reused_tokens > prompts["attention_mask"].sum()
    last = padded(more["attention_mask"], 10)
    again = {"input_ids": torch.cat([expected, said[:, :1]], 1), "attention_mask": last}
    types = {name: padded(value, 21, 0) for name, value in prompts.items() if name.endswith("type_ids")}
    expected = model.generate(**prompts | again | types, **SETTINGS, max_new_tokens=5)
    cached = {CACHE_NAME: out.cache, "custom_generate": decoder}
    assert torch.equal(model.generate(**again, **cached, **SETTINGS, max_new_tokens=5), expected)


def padded(mask, more, value=1):
    return torch.nn.functional.pad(mask, (0, more), value=value)


def test_equal_prompts_with_other_images_each_go_on_behind_their_own(model_of):
    model, one, other = model_of("llava"), shown("llava", seed=5), shown("llava", seed=6)
    decoder = SpeculativeDecoder(model, PromptLookup(), "chain")
    prompts = {name: torch.cat([one[name], other[name]]) for name in one}
    first = decoder.generate(**apart(prompts), **OURS, max_new_tokens=2)
    ids = torch.cat([prompts["input_ids"], torch.tensor([[3, 4, 5]] * 2)], 1)
    out = decoder.generate(ids, **OURS, max_new_tokens=8, past=first.cache)
    pixels = prompts["pixel_values"]
    expected = model.generate(
        ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), **SETTINGS, max_new_tokens=8
    )
    assert torch.equal(out.sequences, expected)
    assert len({*map(tuple, out.sequences.tolist())}) == 2


def test_a_later_text_of_the_same_memory_has_its_own_positions(model_of, as_on_a_gpu):
    """By CUDA graphs that are only played."""
    model = model_of("qwen2_5_vl")
    texts, new = [apart(shown("qwen2_5_vl")), {"input_ids": IDS}], OURS | {"max_new_tokens": 3}
    expected = [SpeculativeDecoder(model, method="autoregressive").generate(**text, **new).sequences for text in texts]
    as_on_a_gpu()
    decoder = SpeculativeDecoder(model, method="autoregressive")
    assert all(
        torch.equal(decoder.generate(**text, **new).sequences, out) for text, out in zip(texts, expected, strict=True)
    )
    assert Tape.replays > 0
    assert not decoder.runner.idle.target_cache.offsets.any()


@torch.no_grad()
def test_a_draft_reads_hidden_states_of_the_pass_over_the_prompt(model_of):
    """Those of a prompt that shows nothing are those of its tokens; images change them."""
    model, prompts = model_of("gemma3"), left_padded(PROMPTS)
    ids, lengths = prompts["input_ids"], prompts["attention_mask"].sum(1)
    forward, width = TransformersForward(model), int(lengths.max())
    texts, seen = torch.stack([row.roll(int(length)) for row, length in zip(ids, lengths, strict=True)]), []
    taps = Taps((0, 1, 2), lambda *given: seen.append(given))
    forward.prefill(texts[:, : width - 1], forward.new_cache(len(ids), width), taps=taps)
    inputs_of({"token_type_ids": 0 * ids}, ids, lengths, forward, 4, None).begin(
        forward.new_cache(len(ids), width), taps, []
    )
    for row, length in enumerate(lengths.tolist()):
        ours, theirs = ([torch.stack(states, -1), *rest] for states, *rest in seen)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[row, : length - 1], other[row, : length - 1])


def test_a_head_drafts_behind_images(model_of):
    model, prompts = model_of("gemma3"), shown("gemma3", batch=2)
    head = head_of(SimpleNamespace(config=model.config.get_text_config(), dtype=model.dtype))
    for draft in (head, Lookahead()):
        decoder = SpeculativeDecoder(model, draft, "sequoia", tree_size=6)
        expected = model.generate(**prompts, **SETTINGS, max_new_tokens=8)
        assert torch.equal(decoder.generate(**apart(prompts), **OURS, max_new_tokens=8).sequences, expected)


def test_embeddings_stand_for_all_of_a_prompt_but_its_last_token(model_of):
    model, prompts = model_of("llava"), shown("llava")
    ids, pixels = prompts["input_ids"], prompts["pixel_values"]
    embeds = model.get_input_embeddings()(ids).detach()
    embeds[ids == SHOWN] = torch.cat(list(model.get_image_features(pixels).pooler_output)).detach()
    decoder = SpeculativeDecoder(model, PromptLookup(), "chain")
    expected = model.generate(**prompts, **SETTINGS, max_new_tokens=8)
    out = model.generate(ids, inputs_embeds=embeds, **SETTINGS, max_new_tokens=8, custom_generate=decoder)
    assert torch.equal(out, expected)
    embeds[0, -1] += 1
    with pytest.raises(
        ValueError, match=r"inputs_embeds.*: read as text, the prompt's last token has logits that differ"
    ):
        decoder.generate(ids, 8, model_inputs={"inputs_embeds": embeds})
    with pytest.raises(
        ValueError, match=r"inputs_embeds must be \[1, 10, hidden size\] like input_ids, got \[1, 9, 32\]"
    ):
        decoder.generate(ids, 8, model_inputs={"inputs_embeds": embeds[:, 1:]})


SKEWED = IDS.expand(3, 1, 3) + torch.arange(3)[:, None, None]


@pytest.mark.parametrize(("options", "message"), [
    ({"model_inputs": torch.zeros(1)}, "model_inputs must be a dictionary, as a processor returns it, got Tensor"),
    ({"model_inputs": {"pixels": IDS}}, "model_inputs has 'pixels', which Qwen2_5_VLForCond.* takes.*pixel_values,"),
    ({"model_inputs": {"labels": IDS}}, "model_inputs has 'labels', which"),
    ({"model_inputs": {"mm_token_type_ids": IDS}, "input_ids": IDS[:, :1]}, "must have two tokens or more, got one"),
    ({"model_inputs": {"position_ids": SKEWED}}, r"last token must be of text, got positions \[\[3, 4, 5\]\]"),
    ({"model_inputs": {"position_ids": IDS + 51}}, "need 65 positions with their model_inputs, but target has 64"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused_by_name(options, message, model_of):
    decoder = SpeculativeDecoder(model_of("qwen2_5_vl"), PromptLookup(), "chain")
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.generate(**{"input_ids": IDS, "max_new_tokens": 11} | options)


def test_positions_that_images_move_are_not_those_of_longrope(model_of, monkeypatch):
    decoder = SpeculativeDecoder(model_of("qwen2_5_vl"), PromptLookup(), "chain")
    monkeypatch.setattr(decoder._target, "rope_limit", 60)
    with pytest.raises(ValueError, match="target has rotary embeddings of type longrope, which need positions 0, 1, 2"):
        decoder.generate(**apart(shown("qwen2_5_vl")), max_new_tokens=4)


def test_what_a_past_shows_is_not_shown_again_or_to_others(model_of):
    decoder = SpeculativeDecoder(model_of("qwen2_5_vl"), PromptLookup(), "chain")
    prompts, new = shown("qwen2_5_vl", batch=2), {"max_new_tokens": 4}
    one = decoder.generate(**apart(shown("qwen2_5_vl")), **OURS, **new).cache
    first = decoder.generate(**apart(prompts), **OURS, **new)
    ids, mask, past = first.sequences, padded(prompts["attention_mask"], 4), first.cache
    types = {"mm_token_type_ids": mask}
    far = decoder.generate(IDS, **OURS, **new, model_inputs={"position_ids": IDS + 50})
    with pytest.raises(ValueError, match="need 67 positions with their model_inputs, but target has 64"):
        decoder.generate(far.sequences, 10, past=far.cache)
    with pytest.raises(ValueError, match="model_inputs mm_token_type_ids cannot be given with past"):
        decoder.generate(ids, **new, attention_mask=mask, past=past, model_inputs=types)
    with pytest.raises(ValueError, match=r"past has 2 texts with model_inputs.*, got 1 prompts"):
        decoder.generate(ids[:1], **new, past=past)
    with pytest.raises(ValueError, match=r"must begin with the first \[11, 6\] tokens of text b, got"):
        decoder.generate(ids.flip(0), **new, past=past)
    with pytest.raises(ValueError, match=r"must begin with the first \[11\] tokens of .*got .* \[0\] tokens"):
        decoder.generate(ids[:1, :1], **new, past=one)


def test_images_that_no_tokens_follow_and_targets_without_eyes_are_refused(model_of, tiny_pair):
    decoder, prompts = SpeculativeDecoder(model_of("llava"), PromptLookup(), "chain"), apart(shown("llava"))
    why = r"model_inputs pixel_values: read as text, .* images, audio and embeddings must end before that token"
    with pytest.raises(ValueError, match=why):
        decoder.generate(prompts["input_ids"][:, :-4], 8, model_inputs=prompts["model_inputs"])
    with pytest.raises(ValueError, match="'inputs_embeds', but LlamaForCausalLM runs by LlamaForward, which"):
        SpeculativeDecoder(*tiny_pair).generate(IDS, 8, model_inputs={"inputs_embeds": torch.zeros(1, 3, 16)})
    with decoder.serve() as service, pytest.raises(TypeError, match="submit has no option 'model_inputs'"):
        service.submit(IDS[0], model_inputs={"pixel_values": prompts["model_inputs"]["pixel_values"]})
