"""Models by their names: what is fetched from the Hub, what is not, and one line for each way in which it fails."""

import json
import os
import re
import socket
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from command_line import assert_refused
from head_checkpoints import official, settings, tiny_target, variant, write
from medusa_checkpoints import published as medusa_tensors
from medusa_checkpoints import write as write_medusa
from played_hub import HIDDEN, LOCKED, point_to
from safetensors.torch import load_file, save_file

from heavypath.speculative import MedusaHeads, SpeculativeDecoder, load_draft, load_streamed
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.files.hub import find_folder
from heavypath.speculative.loading import load_pair

ARGUMENTS = ("one two", "--max-new-tokens", 4)
UNREADABLE = {
    "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice", "modeling.py": b"raise SystemExit",
    "onnx/model.onnx": b"other", "original/params.json": b"{}", "README.md": b"# Model", "flax_model.msgpack": b"other",
}  # fmt: skip


@pytest.fixture
def published(hub, folders):
    """The Hub with a target and a draft, and what else repositories have."""
    for name in ("target", "draft"):
        hub.publish(f"someone/{name}", folders / name)
        hub.repositories[f"someone/{name}"] |= UNREADABLE
    return hub


def fetched(hub, name):
    return {line.split(" ", 1)[1] for line in hub.asked if line.startswith(f"{name} ")}


def test_names_are_fetched_once_without_code_pickles_or_other_formats(heavypath, published, folders):
    expected = heavypath("generate", *ARGUMENTS, "--target", folders / "target", "--draft", folders / "draft", "--json")
    given = ("generate", *ARGUMENTS, "--target", "someone/target", "--draft", "someone/draft", "--json")
    code, output, errors = heavypath(*given)
    assert code == 0, errors
    assert json.loads(output)["token_ids"] == json.loads(expected[1])["token_ids"]
    for name in ("target", "draft"):
        own = {path.name for path in (folders / name).iterdir()}
        assert fetched(published, f"someone/{name}") == own
    published.asked.clear(), published.calls.clear()
    assert heavypath(*given, "--offline")[0] == heavypath(*given)[0] == 0
    assert not published.asked
    assert not published.calls, "what the cache has is taken without a network"


def test_what_the_cache_has_in_part_is_completed(published, folders):
    folder = find_folder("target", "someone/target")
    for files, lacking in (
        (["model.safetensors"], "weights"),
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer"),
    ):
        for file in files:
            (folder / file).unlink()
        with pytest.raises(FileNotFoundError, match=f"has no {lacking} in the Hugging Face cache"):
            find_folder("target", "someone/target", local_files_only=True)
        find_folder("target", "someone/target")
        assert all((folder / file).is_file() for file in files)


def test_a_draft_without_a_tokenizer_is_taken_as_it_is_where_nobody_can_be_asked(hub, folders, monkeypatch):
    hub.publish("someone/draft", folders / "no tokenizer")
    folder = find_folder("draft", "someone/draft")
    hub.refusals["someone/draft"] = (500, None)
    assert (
        find_folder("draft", "someone/draft") == find_folder("draft", "someone/draft", local_files_only=True) == folder
    )


def test_weights_of_several_files_and_no_others(hub, folders):
    tensors = load_file(folders / "target" / "model.safetensors")
    hub.publish("someone/shards", folders / "target", "model.safetensors")
    half = len(tensors) // 2
    shards = {"a-1.safetensors": dict([*tensors.items()][:half]), "b-2.safetensors": dict([*tensors.items()][half:])}
    for file, part in shards.items():
        save_file(part, folders / file, {"format": "pt"})
        hub.repositories["someone/shards"][file] = (folders / file).read_bytes()
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    hub.repositories["someone/shards"] |= {
        "model.safetensors.index.json": json.dumps(index).encode(), "model-fp16.safetensors": b"other",
    }  # fmt: skip
    pair = load_pair("someone/shards")
    assert torch.equal(pair.target.lm_head.weight, tensors["lm_head.weight"])
    assert "model-fp16.safetensors" not in fetched(hub, "someone/shards")
    assert {*shards} < fetched(hub, "someone/shards")
    del hub.repositories["someone/shards"]["b-2.safetensors"]
    (find_folder("target", "someone/shards") / "b-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no weights that are read, .* with all files of an index"):
        load_pair("someone/shards")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_of_a_head_the_one_format_that_is_read_is_fetched(hub, file, tmp_path):
    target, other = tiny_target(), tmp_path / "model.bin"
    if file.startswith("medusa"):
        kind, name = MedusaHeads, write_medusa(tmp_path / "head", medusa_tensors(target))
    else:
        kind, name = EagleHead, tmp_path / "head"
        name.mkdir()
        write(name, settings(variant()), official(variant()))
        if file.endswith(".bin"):
            torch.save(load_file(name / "model.safetensors"), name / file)
            (name / "model.safetensors").unlink()
    torch.save({}, other)
    hub.publish("someone/head", name)
    hub.repositories["someone/head"] |= {"training_args.bin": b"", "optimizer.pt": b"", "head.py": b""}
    if file == "model.safetensors":
        hub.repositories["someone/head"]["pytorch_model.bin"] = other.read_bytes()
    assert isinstance(load_draft("someone/head", target), kind)
    assert fetched(hub, "someone/head") == {"config.json", file}
    assert isinstance(load_draft("someone/head", target, local_files_only=True), kind)


def test_parts_of_a_draft_in_files_of_their_own_come_too(hub, folders):
    hub.publish("someone/block", folders / "draft")
    hub.repositories["someone/block"] |= {"mask_embedding.pt": b"a", "lm_head.safetensors": b"b", "scheduler.pt": b"c"}
    find_folder("draft", "someone/block")
    assert {"mask_embedding.pt", "lm_head.safetensors"} < fetched(hub, "someone/block")
    assert "scheduler.pt" not in fetched(hub, "someone/block")


def test_a_draft_of_several_parts_and_a_streamed_target_have_names_too(published, demo_pair, folders):
    pair = load_pair("someone/target", "2*someone/draft+1*prompt-lookup")
    assert SpeculativeDecoder(pair.target, pair.draft).generate(torch.tensor([[1, 2]]), 4).sequences.shape == (1, 6)
    model = load_draft("someone/draft", pair, "someone/target")
    assert torch.equal(model.lm_head.weight, load_file(folders / "draft" / "model.safetensors")["lm_head.weight"])
    pytest.importorskip("accelerate")
    streamed = load_streamed("someone/target", "1M", local_files_only=True)
    assert torch.equal(streamed.lm_head.weight, pair.target.lm_head.weight)


def refused(heavypath, *models):
    outcome = heavypath("generate", *ARGUMENTS, *models)
    said = [line for line in outcome[2].splitlines() if line.startswith("heavypath: ")]
    bars = {line for line in outcome[2].splitlines() if not line.startswith("heavypath: ")}
    assert not [line for line in bars if "Traceback" in line or "Error" in line or "Retrying" in line]
    assert_refused((*outcome[:2], said[0] + "\n"), 1, ".")
    assert len(said) == 1
    return said[0]


FOLDER = "or give a folder with config.json and safetensors weights"


@pytest.mark.parametrize(("refusal", "message"), [
    ((404, HIDDEN), "no folder 'someone/model' here for the {role}, and no model of that name on {url} that you may"),
    ((401, HIDDEN), "check its spelling, log in by `hf auth login` or set HF_TOKEN if it is private"),
    ((401, LOCKED), "is on {url} for those alone who may read it: ask for access on {url}/someone/model and log in by"),
    ((403, LOCKED), "log in by `hf auth login` or set HF_TOKEN"),
    ((403, None), "is on {url} for those alone who may read it"),
    ((500, None), "cannot be fetched from {url} .*500.*; connect to it, or run `hf download someone/model` where"),
])  # fmt: skip
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_the_hub_refuses_is_said_with_both_ways(heavypath, hub, folders, role, refusal, message):
    hub.refusals["someone/model"] = refusal
    said = refused(heavypath, "--target", folders / "target", f"--{role}", "someone/model")
    assert re.search(message.format(role=role, url=hub.url), said)
    assert FOLDER in said


def test_a_gated_model_is_seen_by_its_files_and_by_its_config(heavypath, published):
    for locked in ({"config.json", "model.safetensors"}, {"model.safetensors"}):
        published.locked["someone/target"] = locked
        assert "ask for access on" in refused(heavypath, "--target", "someone/target")


@pytest.mark.parametrize("how", ["--offline", "HF_HUB_OFFLINE", "no network"])
def test_without_a_network_it_is_said_and_nothing_is_waited_for(heavypath, hub, monkeypatch, how):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    point_to(monkeypatch, nobody)
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = refused(heavypath, "--target", "someone/target", *(["--offline"] if how == "--offline" else []))
    assert "'someone/target' is no folder here" in said
    assert "`hf download someone/target`" in said
    assert FOLDER in said
    assert ("Connection refused" in said) == (how == "no network")


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (["config.json"], "has no config.json, so it is not in transformers' format"),
        (
            ["model.safetensors"],
            "has no weights that are read, expected model.safetensors or model.safetensors.index.json",
        ),
    ],
)
def test_repositories_of_other_formats_are_refused_before_anything_large_is_fetched(
    heavypath, hub, folders, without, message
):
    hub.publish("someone/other", folders / "target", *without)
    hub.repositories["someone/other"] |= UNREADABLE | {"model.Q4_K_M.gguf": b"GGUF"}
    assert message in refused(heavypath, "--target", "someone/other")
    assert fetched(hub, "someone/other") <= {"config.json"}


def test_another_kind_of_model_is_refused_by_its_config_alone(heavypath, hub, folders):
    hub.publish("someone/t5", folders / "t5")
    assert "is of type 't5'; expected a causal language model" in refused(heavypath, "--target", "someone/t5")
    assert fetched(hub, "someone/t5") == {"config.json"}


@pytest.mark.parametrize(("models", "message"), [
    (("--target", "model.Q4.gguf"), "there is no file 'model.Q4.gguf' for the target; expected a GGUF file"),
    (("--target", "target/config.json"), "the target 'target/config.json' is a file; give a folder"),
    (("--target", "no/such/folder"), "'no/such/folder' is neither a folder nor a name of the Hugging Face Hub"),
    (("--target", "./models"), "is neither a folder nor a name"),
    (("--target", "target", "--draft", "draft.gguf"), "there is no file 'draft.gguf' for the draft"),
    (("--target", "target", "--draft", "prompt_lookup"), "did you mean prompt-lookup? there is no folder 'prompt"),
    (("--target", "target", "--draft", "recal+demo-head"), "did you mean recall? there is no folder 'recal' here"),
    (("--target", "someone/targe"), "check its spelling"),
])  # fmt: skip
def test_what_is_neither_folder_nor_name_is_said(heavypath, published, folders, monkeypatch, models, message):
    monkeypatch.chdir(folders)
    assert message in refused(heavypath, *models)
    assert not published.asked


@pytest.mark.parametrize("line", ["generate x", "chat", "serve --port 0", "batch FILE --out OUT", "compare x"])
def test_what_is_wrong_beside_the_models_is_said_before_they_are_fetched(heavypath, published, tmp_path, line):
    (tmp_path / "FILE").write_text('"x"\n')
    words = [str(tmp_path / word) if word in ("FILE", "OUT") else word for word in line.split()]
    assert_refused(heavypath(*words, "--target", "someone/target", "--profile", "none.json"), 1, "there is no profile")
    assert not published.calls


COMMANDS = ("generate x", "chat", "serve --port 0", "batch FILE --out OUT", "compare x", "calibrate --draft recall",
            "layers", "distil FILE --out OUT")  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_that_loads_models_can_be_told_to_stay_offline(heavypath, hub, tmp_path, line):
    (tmp_path / "FILE").write_text('"x"\n')
    words = [str(tmp_path / word) if word in ("FILE", "OUT") else word for word in line.split()]
    hub.refusals["someone/target"] = (404, HIDDEN)
    outcome = heavypath(*words, "--target", "someone/target", "--offline")
    assert_refused(outcome, 1, "is not in the Hugging Face cache, and nothing may be fetched")
    assert_refused(heavypath(*words, "--target", "someone/target"), 1, "no model of that name on")


@pytest.mark.integration
def test_a_process_asks_the_hub_of_its_environment_and_shows_its_bar(published, tmp_path):
    known = {**os.environ, "HF_ENDPOINT": published.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    known = {name: value for name, value in known.items() if name not in ("HF_HUB_CACHE", "HF_TOKEN")}
    command = [sys.executable, "-m", "heavypath.speculative", "generate", "one two", "--max-new-tokens", "3"]
    command += ["--target", "someone/target"]
    done = subprocess.run(command, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no --draft: drafting from text already written (Recall), method ersd" in done.stderr
    assert "model.safetensors" in done.stderr or "Fetching" in done.stderr or "Downloading" in done.stderr
    published.asked.clear()
    again = subprocess.run(command, env=known | {"HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    lost = subprocess.run(
        [*command[:-1], "a/b"], env=known | {"HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True, text=True
    )
    said = [line for line in lost.stderr.splitlines() if "starting PyTorch" not in line]
    assert (lost.returncode, len(said)) == (1, 1)
