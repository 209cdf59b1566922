"""Heads that do not fit the target, or are not whole, are refused by name, and nothing is loaded in silence."""

import re

import pytest
import torch
from head_checkpoints import LAYERS, VOCAB, as_speculators, official, settings, tiny_target, variant, write

from heavypath.speculative.drafts.heads.checkpoint import load_head

FIRST, FULL = {"generation": 1}, {"drafted": VOCAB}
HEADS = {"eagle-3": {}, "eagle-1": FIRST}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def refused(folder, target, options, *expected, tensors=(), without=(), **given):
    """The message has all that is expected; tensors are changed or left out, settings are given."""
    kind = variant(**options)
    found = {name: tensor for name, tensor in (official(kind) | dict(tensors)).items() if name not in without}
    with pytest.raises(ValueError, match="cannot draft for this target") as caught:
        load_head(write(folder, settings(kind, **given), found), target)
    for part in expected:
        assert re.search(part, str(caught.value)), caught.value


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_every_tensor_that_is_missing_or_of_another_shape_is_named(options, target, tmp_path):
    for name, tensor in official(variant(**options)).items():
        named = re.escape(name.replace("midlayer.", "layers.0."))
        if name not in ("t2d", "embed_tokens.weight"):
            refused(tmp_path, target, options, named, "missing", without=[name])
        sizes = ("fc.weight", "d2t", "t2d", "q_proj.weight", "gate_proj.weight", "lm_head.weight")
        if not name.endswith(sizes):  # of these the sizes are taken
            wider = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
            shapes = (re.escape(str([*each.shape])) for each in (wider, tensor))
            refused(tmp_path, target, options, named, *shapes, tensors={name: wider})


ONES, IDS = torch.ones(16), official(variant())["d2t"] + torch.arange(24)
CASES = {
    "2 tensors are not known: layers.0.self_attn.sinks, mask_embedding": (
        {}, {"tensors": {"mask_embedding": torch.zeros(1), "layers.0.self_attn.sinks": torch.zeros(4)}},
    ),
    "has 'layers.0.hidden_norm.weight' twice, once as": ({}, {"tensors": {"layers.0.hidden_norm.weight": ONES}}),
    r"fc\.weight is torch\.int8; expected floating point": (
        {}, {"tensors": {"fc.weight": torch.zeros(16, 48, dtype=torch.int8)}},
    ),
    # EAGLE-1 has no norms where a Llama has them; they are not dropped in silence either
    r"not known: norm\.weight": (FIRST, {"tensors": {"norm.weight": ONES}}),
    r"not known: layers\.0\.input_layernorm\.weight": (FIRST, {"tensors": {"layers.0.input_layernorm.weight": ONES}}),
    r"missing: layers\.1\.mlp\.up_proj\.weight": ({"layers": 2}, {"without": ["layers.1.mlp.up_proj.weight"]}),
    # norms that the config promises are not left out
    r"missing: fc_norm\.0\.weight": ({}, {"fc_norm": True}),
    r"missing: input_norm\.weight": ({}, {"norm_before_fc": True}),
    # an lm_head is the target's or refused, but never random
    "missing: lm_head.weight; the target's cannot stand in.*40 tokens, for a head of width 16 and 24": (
        {"own_lm_head": False}, {},
    ),
    "missing: lm_head.weight; the target's cannot stand in.*width 12": (
        FULL | {"own_lm_head": False, "width": 12, "own_embedding": True}, {},
    ),
    # the last layer before the final norm is not taken for what is behind it
    "outputs of layers 1, 4, 7; that of the last, 7, is not to be had before the .* final norm": (
        {}, {"eagle_aux_hidden_state_layer_ids": (2, 5, LAYERS)},
    ),
    "outputs of layers 1, 5, 7; that of the last, 7, is not to be had": (
        {}, {"eagle_aux_hidden_state_layer_ids": (1, 5, LAYERS - 1)},
    ),
    "hidden states 2, 5, 9, expected 0 to 7 of a target of 8 layers": (
        {}, {"eagle_aux_hidden_state_layer_ids": (2, 5, LAYERS + 1)},
    ),
    "type 'dynamic', expected default, linear": ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "partial_rotary_factor 0.5; expected": ({}, {"partial_rotary_factor": 0.5}),
    r"d2t is torch.int64 of shape \[23\], expected integers of shape \[24\]": (
        {}, {"tensors": {"d2t": torch.zeros(23).long()}},
    ),
    "23 different ones; expected 24 different ones": ({}, {"tensors": {"d2t": -(torch.arange(24) == 1).long()}}),
    "d2t holds absolute ids .* subtract": ({}, {"tensors": {"d2t": IDS}}),
    "d2t holds absolute ids of tokens, .* subtract": ({}, {"tensors": {"d2t": IDS.flip(0)}, "without": ["t2d"]}),
    "d2t holds absolute ids of tokens, expected offsets.* subtract": ({}, {"tensors": {"d2t": torch.arange(24)}}),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_what_is_no_head_for_this_target_is_refused(message, target, tmp_path):
    options, changes = CASES[message]
    refused(tmp_path, target, options, message, **changes)


def test_the_layer_norms_of_hass_are_refused_by_name(target, tmp_path):
    config, tensors = as_speculators(variant(generation=1, own_embedding=False), layernorms=True)
    more = {f"{name}.weight": torch.ones(16) for name in ("embedding_layernorm", "pre_lm_head_layernorm")}
    with pytest.raises(ValueError, match=r"not known: embedding_layernorm\.weight, pre_lm_head_layernorm"):
        load_head(write(tmp_path, config, tensors | more), target)


def test_a_table_of_rotary_angles_is_not_needed(target, tmp_path):
    more = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert load_head(write(tmp_path, settings(variant()), official(variant()) | more), target)


def test_a_target_of_another_width_is_refused(tmp_path):
    wide = tiny_target(width=24)
    expected = r"fc\.weight has shape \[16, 48\], expected \[16, 72\]", "states 2, 4, 5 of width 24", "give the target"
    refused(tmp_path, wide, {"own_embedding": True}, *expected)
    missing = "missing: embed_tokens.weight", "of width 24 and 40 tokens, for a head of width 16 and 24 tokens"
    refused(tmp_path, wide, {}, *missing)
    refused(tmp_path, wide, FIRST, r"fc\.weight has shape \[16, 32\], expected \[16, 40\]")


def test_a_target_of_another_vocabulary_is_refused(tmp_path):
    other = tiny_target(vocab=20)
    shapes = r"weight has shape \[40, 16\], expected \[20, 16\].*give the target"
    refused(tmp_path, other, FIRST, f"embed_tokens.{shapes}")
    refused(tmp_path, other, FULL, f"lm_head.{shapes}", vocab_size=20)
    refused(tmp_path, other, {}, r"t2d has shape \[40\], expected \[20\]", vocab_size=20)
    refused(tmp_path, other, {}, "vocab_size 40, expected the target's", without=["t2d"])
    refused(tmp_path, other, {}, "d2t.*expected 24 different ones", without=["t2d"], vocab_size=20)


def test_an_index_names_files_of_its_own_folder_alone(target, tmp_path):
    folder = write(tmp_path / "head", settings(variant()), official(variant()))
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../elsewhere.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json' names '\.\./elsewhere.*', expected files of its own folder"):
        load_head(folder, target)


def test_a_config_that_is_no_json_is_refused(target, tmp_path):
    write(tmp_path, {}, official(variant()))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match="cannot read"):
        load_head(tmp_path, target)
