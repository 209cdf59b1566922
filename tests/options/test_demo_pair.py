"""The shipped pair and head are what their records and their training scripts say."""

import json
from dataclasses import asdict

import pytest
import torch
from bench_scripts import script
from safetensors import safe_open

from heavypath.speculative import Retrieval, load_draft
from heavypath.speculative.demo import FOLDER, demo_prompts
from heavypath.speculative.drafts.heads.checkpoint import load_head
from heavypath.speculative.loading import SHIPPED, Pair
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE
from heavypath.speculative.training.learning import measure_agreement
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Teacher
from heavypath.speculative.trees.acceptance import measure_acceptance

training = script("train_demo_pair")
RECORD, OF_HEAD = (json.loads((folder / "record.json").read_text()) for folder in (FOLDER, FOLDER / "head"))


@pytest.fixture(scope="module")
def head(demo_pair):
    return load_head(FOLDER / "head", demo_pair.target)


def test_all_is_small_and_its_weights_are_safetensors_in_half_precision():
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    texts = [path for path in files if path.parent.name == "texts"]
    assert sum(path.stat().st_size for path in {*files} - {*texts}) <= 24e6
    assert sum(path.stat().st_size for path in texts) <= 8e6
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for name in ("target", "draft", "head"):
        with safe_open(FOLDER / name / "model.safetensors", "pt") as weights:
            tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    official = {"fc.weight", "fc_norm.2.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"}
    assert official < set(tensors), "a head in the official layout"
    assert sum(tensor.numel() for tensor in tensors.values()) == OF_HEAD["parameters"]
    assert {path.name for path in (FOLDER / "head").iterdir()} == {"config.json", "model.safetensors", "record.json"}


def test_texts_of_a_published_model_are_of_its_vocabulary_alone(demo_pair):
    texts = Retrieval.load(FOLDER / "texts" / "smollm2.safetensors")
    assert texts.tokens > 500_000
    assert texts.largest < 49_152
    with pytest.raises(ValueError, match="tokens of another vocabulary than the target's"):
        load_draft("smollm2-texts", Pair(demo_pair.target, None, demo_pair.tokenizer))


def test_a_folder_of_texts_may_have_a_plus_in_its_name(demo_pair, tmp_path):
    texts = tmp_path / "c++"
    texts.mkdir()
    (texts / "main.cc").write_text("int main() {}")
    draft = load_draft(f"retrieval:{texts}", Pair(demo_pair.target, None, demo_pair.tokenizer))
    assert isinstance(draft, Retrieval)


def test_a_package_without_texts_says_so(demo_pair, monkeypatch, tmp_path):
    monkeypatch.setitem(SHIPPED, "smollm2-texts", f"retrieval:{tmp_path / 'smollm2.safetensors'}")
    with pytest.raises(FileNotFoundError, match=r"built with HEAVYPATH_DEMO=0; .* or take the draft recall"):
        load_draft("smollm2-texts", Pair(demo_pair.target, None, demo_pair.tokenizer))


def test_the_models_have_the_shapes_that_the_scripts_train(demo_pair, head):
    for model, config in ((demo_pair.target, training.target_config()), (demo_pair.draft, training.draft_config())):
        assert not model.training
        assert model.dtype == torch.float32
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            assert getattr(model.config, field) == getattr(config, field)
        assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert head.config == training.head_config()
    assert OF_HEAD["training"]["phases"] == json.loads(json.dumps([asdict(phase) for phase in training.HEAD_PHASES]))


def test_the_tokenizer_gives_back_any_text_and_pads_on_the_left(demo_pair):
    tokenizer, prompts = demo_pair.tokenizer, demo_prompts()
    for text in (*prompts, "déjà vu 🌲\n\tif x:\r\n        pass", ""):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert max(ids, default=0) < len(tokenizer) == demo_pair.target.config.vocab_size
    mask = tokenizer(["def f(x):", "x"], return_tensors="pt", padding=True).attention_mask
    assert mask[1].tolist() == [0] * (mask.shape[1] - 1) + [1]
    assert len(set(prompts)) == len(prompts) >= 20
    assert all(30 <= len(tokenizer(prompt).input_ids) <= 80 for prompt in prompts)


def test_records_say_that_drafts_fit_the_target_and_the_head_better_than_the_model():
    overlap, of_head = RECORD["overlap_at_temperature_1"], OF_HEAD["overlap_at_temperature_1"]
    assert overlap >= 0.58
    assert of_head == sorted(of_head, reverse=True)
    assert of_head[0] >= 0.68
    assert of_head[4] >= max(0.6, overlap)
    assert RECORD["loss"]["target"]["held_out"] < RECORD["loss"]["draft"]["held_out"]
    assert list(DEFAULT_ACCEPTANCE) == RECORD["acceptance"]["0.6"]["unconditional"]


@pytest.mark.slow
def test_what_is_recorded_is_about_what_the_prompts_have(demo_pair, head):
    """They are held-out text too, though a small part of it."""
    target, draft, tokenizer = demo_pair
    student, teacher, parts = (
        student_of_head(head, target),
        Teacher(target, head.config.taps),
        RowsAtATime(2, "", print),
    )
    acceptance, overlaps, positions = torch.zeros(8, dtype=torch.float64), torch.zeros(5), 0
    for prompt in demo_prompts()[::2]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        acceptance += ids.numel() * measure_acceptance(target, draft, ids, temperature=1.0)
        overlaps += ids.numel() * measure_agreement(student, teacher, ids, 5, parts)[0]
        positions += ids.numel()
    recorded = torch.tensor(RECORD["acceptance"]["1.0"]["unconditional"], dtype=torch.float64)
    assert (acceptance / positions - recorded).abs().max() < 0.08
    assert (overlaps / positions - torch.tensor(OF_HEAD["overlap_at_temperature_1"])).abs().max() < 0.08
