"""What the checkpoints of all trained heads have in common: one way to read them, and one to refuse them."""

import copy
import json
import re
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from block_checkpoints import variant as block_variant
from block_checkpoints import zlab
from head_checkpoints import official, settings, tiny_target, variant, write
from medusa_checkpoints import published
from mtp_checkpoints import save_target_with_mtp
from safetensors.torch import load_file

from heavypath.speculative.drafts.blocks.checkpoint import load_block
from heavypath.speculative.drafts.trained import is_trained_head, load_trained_head
from heavypath.speculative.files import checkpoint
from heavypath.speculative.files.checkpoint import Checkpoint

MODEL = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.safetensors.index.json", "medusa_lm_head.pt")
MTP = "model.layers.2."


class Published(NamedTuple):
    """A checkpoint. files: whole, in pieces, pickled, pickled in pieces; one: the name of a tensor"""

    target: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    files: tuple[str, ...]
    one: str


def eagle(folder, generation):
    kind = variant(generation=generation)
    layer = "midlayer" if generation == 3 else "layers.0"
    return Published(tiny_target(), settings(kind), official(kind), MODEL, f"{layer}.mlp.down_proj.weight")


def block(folder):
    config, tensors = zlab(block_variant())
    return Published(tiny_target(), config, tensors, MODEL, "hidden_norm.weight")


def medusa(folder):
    target = tiny_target()
    config = {"medusa_num_heads": 5, "hidden_size": 16, "vocab_size": 40}
    return Published(target, config, published(target), MEDUSA, "1.0.linear.bias")


def mtp(folder):
    target, _ = save_target_with_mtp("glm4_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    return Published(target, config, load_file(folder / "model.safetensors"), MODEL, f"{MTP}hnorm.weight")


class Harmful:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


KINDS = {
    "eagle-1": lambda folder: eagle(folder, 1),
    "eagle-3": lambda folder: eagle(folder, 3),
    "block": block,
    "medusa": medusa,
    "mtp": mtp,
}


@pytest.fixture(params=KINDS)
def given(request, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    return KINDS[request.param](folder)


def loaded(folder, given, file=0, **changed):
    """The head of a folder with the weights in files of one kind; changed: other fields of `given`."""
    given = given._replace(**changed)
    write(folder, given.config, given.tensors, given.files[file])
    assert is_trained_head(folder, given.target.config)
    return load_trained_head(folder, given.target)


def refused(folder, given, *expected, **changed):
    with pytest.raises(ValueError, match=r"the .* cannot draft for this target: ") as caught:
        loaded(folder, given, **changed)
    assert str(folder) in str(caught.value)
    for part in expected:
        assert re.search(part, str(caught.value)), caught.value


def assert_equal(one, other):
    assert one.config == other.config
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_weights_in_pieces_are_those_of_one_file(given, tmp_path):
    assert_equal(loaded(tmp_path / "pieces", given, 1), loaded(tmp_path / "whole", given))


PICKLED = pytest.mark.parametrize("given", [kind for kind in KINDS if kind != "mtp"], indirect=True)


@PICKLED
def test_pickled_weights_are_those_of_safetensors(given, tmp_path):
    whole = loaded(tmp_path / "whole", given)
    for file in range(2, len(given.files)):
        assert_equal(loaded(tmp_path / given.files[file], given, file), whole)


@pytest.mark.parametrize("given", ["mtp"], indirect=True)
def test_pickled_weights_that_transformers_does_not_load_are_refused(given, tmp_path):
    refused(tmp_path / "pickle", given, r"they are in pytorch_model\.bin, a pickle; expected safetensors", file=2)


@PICKLED
def test_pickles_that_hold_more_than_tensors_are_refused(given, tmp_path, capsys):
    name, file = given.one, given.files[2]
    for tensors, message in (
        ({name: Harmful()}, f"cannot read the weights in .*{file}"),
        ({name: {}}, f"'{name}' in .* is a dict; expected tensors by name"),
        (torch.ones(3), f"{file}' has a Tensor; expected tensors by name"),
    ):
        with pytest.raises(ValueError, match=message):
            load_trained_head(write(tmp_path, given.config, tensors, file), given.target)
    assert "ran" not in capsys.readouterr().out


@PICKLED
def test_a_folder_without_files_is_refused(given, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is neither a folder with a config\.json"):
        load_trained_head(tmp_path, given.target)
    write(tmp_path, given.config, given.tensors, given.files[0])
    (tmp_path / given.files[0]).unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights of .* expected one of .*\.safetensors, "):
        load_trained_head(tmp_path, given.target)


def test_a_missing_piece_is_named(given, tmp_path):
    loaded(tmp_path / "pieces", given, 1)
    piece = min((tmp_path / "pieces").glob("*-of-*"))
    piece.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks '{piece.name}', which {given.files[1]} names; fetch it again"):
        load_trained_head(tmp_path / "pieces", given.target)


@pytest.mark.parametrize(("given", "key", "have", "gives"), [
    ("eagle-1", "hidden_size", 16, 24), ("eagle-1", "vocab_size", 40, 50), ("eagle-3", "intermediate_size", 24, 32),
    ("eagle-3", "draft_vocab_size", 24, 30), ("eagle-3", "target_hidden_size", 16, 24),
    ("block", "hidden_size", 16, 24), ("block", "draft_vocab_size", 40, 24),
    ("medusa", "hidden_size", 16, 24), ("medusa", "vocab_size", 40, 50),
], indirect=["given"])  # fmt: skip
def test_a_config_that_describes_other_weights_is_refused_with_both_numbers(given, key, have, gives, tmp_path):
    assert loaded(tmp_path / "a", given, config=given.config | {key: have})
    expected = f"config.json gives {key} {gives}, and the tensors are of {have}: one of the two is of another draft"
    refused(tmp_path / "a", given, expected, config=given.config | {key: gives})


@pytest.mark.parametrize("given", ["mtp"], indirect=True)
def test_a_target_whose_config_describes_other_weights_is_refused_with_both_numbers(given, tmp_path):
    other = copy.copy(given.target)
    other.config = copy.copy(other.config)
    other.config.hidden_size = 48
    changed = {"config": given.config | {"hidden_size": 48}, "target": other}
    refused(tmp_path / "a", given, r"weight has shape \[32.*\], expected \[48.*\]", **changed)


def test_every_file_is_looked_for_once(given, tmp_path):
    loaded(tmp_path, given)
    with patch.object(checkpoint, "cached_file", side_effect=checkpoint.cached_file) as noted:
        load_trained_head(tmp_path, given.target)
    asked = [file for (_, file), _ in noted.call_args_list]
    assert {"config.json", given.files[0]} <= {*asked}
    assert len(asked) == len({*asked})


@pytest.mark.parametrize("given", ["block"], indirect=True)
def test_what_is_beside_the_weights_is_of_their_revision(given, tmp_path, monkeypatch):
    write(tmp_path, given.config, given.tensors)
    torch.save(torch.ones(16), tmp_path / "mask_embedding.pt")
    asked = []

    def fetched(name, file, **options):
        asked.append((name, options))
        return str(tmp_path / file) if (tmp_path / file).is_file() else None

    monkeypatch.setattr(checkpoint, "cached_file", fetched)
    head = load_block(Checkpoint("somebody/draft", revision="v2", local_files_only=True), given.target)
    assert torch.equal(head.mask_embedding, torch.ones(16))
    assert asked == [("somebody/draft", {"revision": "v2", "local_files_only": True})] * 3
