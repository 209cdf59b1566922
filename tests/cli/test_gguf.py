"""GGUF files: the model and tokenizer that are read from them, what is kept of them, and one line for each refusal."""

import importlib.metadata
import re
import struct
import sys
import time
from functools import partial

import gguf
import pytest
import torch
from gguf_files import END, TEXT, TURN, byte_tokenizer, gguf_llama, write_gguf, write_header
from in_time import in_time
from tiny_models import transformers_greedy
from transformers import AutoModelForCausalLM

from heavypath.speculative import SpeculativeDecoder, Translated, load_draft, load_target
from heavypath.speculative.files import gguf_models as reading
from heavypath.speculative.files.gguf_header import read_header
from heavypath.speculative.loading import load_pair

PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a target's and a draft's file, and the target."""
    folder = tmp_path_factory.mktemp("gguf")
    model = gguf_llama()
    write_gguf(model, folder / "target.gguf")
    write_gguf(gguf_llama(1, num_hidden_layers=1), folder / "draft.gguf")
    return folder, model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heavypath" / "gguf"


@pytest.fixture
def reads(monkeypatch):
    """The files that transformers reads from then on."""
    files, read = [], AutoModelForCausalLM.from_pretrained

    def reading(*arguments, **options):
        files.extend([options["gguf_file"]] if "gguf_file" in options else [])
        return read(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    return files


def kept(cache):
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_model_tokenizer_and_template_are_those_that_were_written(made):
    folder, model = made
    target, tokenizer = load_target(folder / "target.gguf")
    assert target.dtype == torch.float32
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(target.state_dict()[name], weight, rtol=0, atol=0)
    own = byte_tokenizer()
    assert tokenizer.get_vocab() == own.get_vocab()
    for text in (TEXT, "a <user>b<turn>", "naïve  ☃\n\n"):
        assert tokenizer(text).input_ids == own(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == own.decode(own(text).input_ids)
    assert tokenizer.chat_template == own.chat_template
    assert target.generation_config.eos_token_id == [END, TURN]
    prompt = own(PROMPT, return_tensors="pt").input_ids
    expected = transformers_greedy(model, prompt, 24)
    draft = load_draft(folder / "draft.gguf", target)
    ours = SpeculativeDecoder(target, draft).generate(prompt, 24, 0.0, eos_token_id=[])
    assert torch.equal(ours.sequences, expected)


def test_the_second_start_reads_what_was_kept(made, cache, reads, tmp_path, caplog):
    folder, _ = made
    first, _ = load_target(folder / "target.gguf")
    said = [record.getMessage() for record in caplog.records if "once" in record.getMessage()]
    assert len(said) == 1
    assert str(folder / "target.gguf") in said[0]
    assert str(cache) in said[0]
    (tmp_path / "other name").mkdir()
    copy = tmp_path / "other name" / "copy.gguf"
    copy.write_bytes((folder / "target.gguf").read_bytes())
    caplog.clear()
    again, _ = load_target(copy.parent)  # a folder with one file
    assert reads == [str(folder / "target.gguf")]
    assert not [record for record in caplog.records if "once" in record.getMessage()]
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    load_target(copy, dtype=torch.bfloat16)
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1  # of the last weight
    copy.write_bytes(content)
    changed, _ = load_target(copy)
    assert len(reads) == 3
    assert not all(torch.equal(one, other) for one, other in zip(first.parameters(), changed.parameters(), strict=True))
    assert len(kept(cache)) == 3


def test_quantised_weights_are_those_of_the_package_in_the_dtype_that_is_asked_for(made, tmp_path):
    _, model = made
    write_gguf(model, tmp_path / "q8.gguf", kind="Q8_0")
    target, _ = load_target(tmp_path / "q8.gguf", dtype=torch.bfloat16)
    rows = model.lm_head.weight.detach().numpy()
    eight = gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, eight), eight))
    assert target.dtype == torch.bfloat16
    assert torch.equal(target.lm_head.weight, expected.to(torch.bfloat16))
    assert not torch.equal(expected, model.lm_head.weight)


def test_a_file_of_the_working_directory_is_not_taken_for_another_of_its_name(made, tmp_path, monkeypatch):
    folder, model = made
    write_gguf(gguf_llama(7), tmp_path / "target.gguf")
    monkeypatch.chdir(tmp_path)
    target, _ = load_target(folder / "target.gguf")
    assert torch.equal(target.lm_head.weight, model.lm_head.weight)
    other, _ = load_target("target.gguf")
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("draft", ["recall", "early-exit:1", "draft.gguf"])
def test_the_command_takes_files(heavypath, made, draft):
    folder, model = made
    named = folder / draft if draft.endswith(".gguf") else draft
    given = ("generate", PROMPT, "--target", folder / "target.gguf", "--draft", named, "--max-new-tokens", 12)
    code, output, errors = heavypath(*given)
    assert code == 0, errors
    prompt = byte_tokenizer()(PROMPT, return_tensors="pt").input_ids
    model.generation_config.eos_token_id = [END, TURN]
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, pad_token_id=0)
    assert output == byte_tokenizer().decode(text[0, prompt.shape[1] :], skip_special_tokens=True) + "\n"


def test_a_draft_of_another_vocabulary_is_translated(made, tmp_path):
    folder, _ = made
    target, _ = load_target(folder / "target.gguf")
    other = read_header(folder / "draft.gguf").metadata
    assert other["tokenizer.ggml.eot_token_id"] == TURN
    content = (folder / "draft.gguf").read_bytes().replace(b"<turn>", b"<else>")
    (tmp_path / "draft.gguf").write_bytes(content)
    assert isinstance(load_draft(tmp_path / "draft.gguf", target), Translated)


SCALED = [
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {},
    ),
    ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "written"), SCALED, ids=lambda one: one.get("rope_type", "file"))
def test_positions_are_scaled_as_the_file_says(rope, written, tmp_path):
    """transformers' own loader of 5.23 leaves it out."""
    model = gguf_llama(rope_parameters=rope | {"rope_theta": 5e5})
    tensors = {}
    if rope["rope_type"] == "llama3":  # llama.cpp's converter: plain frequencies over those of the model
        plain = 5e5 ** (-torch.arange(0, model.config.head_dim, 2) / model.config.head_dim)
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    metadata = {f"llama.rope.{key}": value for key, value in written.items()}
    write_gguf(model, tmp_path / "scaled.gguf", metadata=metadata, tensors=tensors)
    target, _ = load_target(tmp_path / "scaled.gguf")
    prompt = torch.randint(3, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(target(prompt).logits, model(prompt).logits, rtol=1e-4, atol=1e-4)


def test_two_threads_load_one_after_the_other(made, monkeypatch):
    """Loads that overlap can leave transformers' `no_tie_weights` in force for all later models."""
    read, inside, overlaps = AutoModelForCausalLM.from_pretrained, [], []

    def reading(*arguments, **options):
        overlaps.append(len(inside))
        inside.append(1)
        time.sleep(0.05)
        inside.pop()
        return read(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    loaded = in_time(*(partial(load_target, made[0] / f"{name}.gguf") for name in ("target", "draft")))
    assert not [each for each in loaded if isinstance(each, BaseException)]
    assert overlaps == [0] * 4, "the file, and the model made of it, of each"


def test_two_threads_read_a_file_once(made, reads, cache):
    loaded = in_time(*2 * [lambda: load_target(made[0] / "target.gguf")])
    assert not [each for each in loaded if isinstance(each, BaseException)]
    assert len(reads) == 1
    assert len(kept(cache)) == 1


def test_what_killed_processes_left_is_removed_and_failures_leave_nothing(made, cache, monkeypatch):
    left = cache / ".making-killed" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(reading, "_plain", fail)
    with pytest.raises(ValueError, match="out of luck"):
        load_target(made[0] / "target.gguf")
    assert kept(cache) == []


def test_a_full_disk_is_said_before_anything_is_read(made, reads, monkeypatch):
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda _: reading.shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OSError, match=r"needs 0.0 GB in .* set XDG_CACHE_HOME"):
        load_target(made[0] / "target.gguf")
    assert not reads


def of_another_architecture(folder):
    return (folder / "target.gguf").read_bytes().replace(b"llama", b"klama")


def of_another_version(folder):
    content = (folder / "target.gguf").read_bytes()
    return content[:4] + struct.pack("<I", 9) + content[8:]


def of_another_type(folder):
    content, name = (folder / "target.gguf").read_bytes(), b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # after the number of dimensions, and one of them
    return content[:at] + struct.pack("<I", 200) + content[at + 4 :]


REFUSED = {
    "other.gguf": (lambda folder: b"safetensors", "it is no GGUF file: it begins with b'safe', expected b'GGUF'"),
    "empty.gguf": (lambda folder: b"", "it begins with b'', expected b'GGUF'"),
    "header.gguf": (lambda folder: (folder / "target.gguf").read_bytes()[:3000], "damaged, or cut off by the end of"),
    "four.gguf": (lambda folder: b"GGUF", "damaged, or cut off by the end of the file at byte 4"),
    "cut.gguf": (lambda folder: (folder / "target.gguf").read_bytes()[:-40], "it is cut off: its tensor "),
    "version.gguf": (of_another_version, "it is of version 9 of GGUF; expected 2 or 3"),
    "type.gguf": (of_another_type, "its tensor 'output_norm.weight' is of type 200, which the package gguf lacks"),
    "m-00002-of-00003.gguf": (
        lambda folder: (folder / "target.gguf").read_bytes(),
        "one of 3 parts of a model, and transformers reads models in one file alone; join them by `llama-gguf-split "
        "--merge m-00001-of-00003.gguf m.gguf`",
    ),
    "klama.gguf": (
        of_another_architecture,
        f"transformers {importlib.metadata.version('transformers')} cannot read the target",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_read_are_refused_in_one_line(heavypath, made, cache, tmp_path, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content(made[0]))
    code, output, errors = heavypath("generate", "x", "--target", tmp_path / name)
    assert code == 1
    assert not output
    assert message in errors.splitlines()[-1], errors
    assert not cache.exists() or kept(cache) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": ["blk.1.ffn_up"]}, r"the file lacks 1 tensors of the model, first 'model.layers.1.mlp.up_proj"),
        ({"tokenizer": False}, "cannot read the target"),
        ({"metadata": {"split.count": 2}}, "it is one of 2 parts of a model"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, r"in a way that is not read here \(.*'longrope'"),
        ({"tensors": {"rope_freqs.weight": [1.0, 2.0, 3.0, 4.0]}}, "are not those of a Llama 3"),
        ({"tensors": {"rope_factors_long.weight": [1.0] * 4}}, r"not read here .*rope_factors_long"),
    ],
)
def test_models_that_would_be_read_in_part_are_refused(made, cache, tmp_path, options, message):
    write_gguf(made[1], tmp_path / "part.gguf", **options)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path / "part.gguf")
    assert not cache.exists() or kept(cache) == []


@pytest.mark.parametrize(("architecture", "keys", "message"), [
    ("dflash", {"block_size": 16}, "this file has no dflash.attention.sliding_window. Only the number of"),
    ("dflash-draft", {}, "this file has no dflash-draft.attention.sliding_window"),
    ("dflash", {"attention__sliding_window": 2048}, "whether a block's rows are causal. Only the number of accepted"),
    ("eagle3", {}, "it is a trained draft of architecture 'eagle3'"),
])  # fmt: skip
def test_trained_drafts_are_refused_with_what_such_files_leave_out(made, cache, tmp_path, architecture, keys, message):
    """Before anything is unpacked. A window that is missing would show in the number of accepted tokens alone."""
    write_header(tmp_path / "draft.gguf", architecture, **keys)
    target, _ = load_target(made[0] / "target.gguf")
    before = kept(cache)
    with pytest.raises(ValueError, match=f"cannot read the draft '.*draft.gguf': .*{re.escape(message)}"):
        load_draft(tmp_path / "draft.gguf", target)
    assert kept(cache) == before


def test_tensors_that_transformers_leaves_out_are_said(made, tmp_path, caplog):
    write_gguf(made[1], tmp_path / "more.gguf", tensors={"blk.0.attn_q.bias": [1.0] * 32})
    target, _ = load_target(tmp_path / "more.gguf")
    count = sum(parameter.numel() for parameter in target.parameters())
    assert f"of {count} parameters of this file, whose tensors have {count + 32} numbers" in caplog.text


def test_a_folder_of_several_files_is_refused_by_their_names(made):
    with pytest.raises(ValueError, match=r"has 2 GGUF files; give one of draft.gguf, target.gguf"):
        load_pair(str(made[0]))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_what_installs_it(heavypath, made, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, errors = heavypath("generate", "x", "--target", made[0] / "target.gguf")
    assert code == 1
    assert f"needs the package {missing}: `pip install gguf accelerate`" in errors.splitlines()[-1]
