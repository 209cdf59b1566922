"""The shipped pair is what its record and its training script say."""

import json

import torch
from safetensors import safe_open

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import FOLDER, demo_prompts
from heavypath.speculative.demo.train import draft_config, target_config
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.acceptance import measure_acceptance

RECORD = json.loads((FOLDER / "record.json").read_text())


def test_the_pair_is_small_and_its_weights_are_safetensors_in_half_precision():
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in files) <= 24e6
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for name in ("target", "draft"):
        with safe_open(FOLDER / name / "model.safetensors", "pt") as weights:
            assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_the_models_have_the_shapes_that_the_script_trains(demo_pair):
    for model, config in ((demo_pair.target, target_config()), (demo_pair.draft, draft_config())):
        assert not model.training
        assert model.dtype == torch.float32
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            assert getattr(model.config, field) == getattr(config, field)
        assert model.config.num_key_value_heads < model.config.num_attention_heads


def test_the_tokenizer_gives_back_any_text(demo_pair):
    for text in (*demo_prompts(), "déjà vu 🌲\n\tif x:\r\n        pass", ""):
        ids = demo_pair.tokenizer(text).input_ids
        assert demo_pair.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert max(ids, default=0) < len(demo_pair.tokenizer) == demo_pair.target.config.vocab_size


def test_texts_of_different_lengths_are_padded_on_the_left(demo_pair):
    batch = demo_pair.tokenizer(["def f(x):", "x"], return_tensors="pt", padding=True)
    assert batch.attention_mask[1].tolist() == [0] * (batch.input_ids.shape[1] - 1) + [1]
    out = SpeculativeDecoder(demo_pair.target, demo_pair.draft).generate(**batch, max_new_tokens=8)
    alone = SpeculativeDecoder(demo_pair.target, demo_pair.draft).generate(batch.input_ids[1:, -1:], max_new_tokens=8)
    assert out.sequences[1, -8:].tolist() == alone.sequences[0, -8:].tolist()


def test_prompts_are_different_and_have_the_promised_length(demo_pair):
    prompts = demo_prompts()
    assert len(set(prompts)) == len(prompts) >= 20
    assert all(30 <= len(demo_pair.tokenizer(prompt).input_ids) <= 80 for prompt in prompts)


def test_the_draft_fits_the_target_on_held_out_text():
    assert RECORD["overlap_at_temperature_1"] >= 0.58
    assert RECORD["loss"]["target"]["held_out"] < RECORD["loss"]["draft"]["held_out"]


def test_default_acceptance_is_the_recorded_one_at_temperature_0_6():
    assert list(DEFAULT_ACCEPTANCE) == RECORD["acceptance"]["0.6"]["unconditional"]


def test_recorded_acceptance_is_about_that_of_the_prompts(demo_pair):
    """The prompts are held-out text too, though a small part of it."""
    target, draft, tokenizer = demo_pair
    total, positions = torch.zeros(8, dtype=torch.float64), 0
    for prompt in demo_prompts():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        total += ids.numel() * measure_acceptance(target, draft, ids, temperature=1.0)
        positions += ids.numel()
    recorded = torch.tensor(RECORD["acceptance"]["1.0"]["unconditional"], dtype=torch.float64)
    assert (total / positions - recorded).abs().max() < 0.08
