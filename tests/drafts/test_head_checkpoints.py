"""Heads as published: every layout and variant has the logits of the formulas, however its config.json says it.

What does not fit the target, or is not whole, is refused by name. Many of the cases are named after what others got
wrong when they loaded heads.
"""

import json
import re

import pytest
import torch
from block_checkpoints import block_of
from head_checkpoints import (
    LAYERS,
    VOCAB,
    as_speculators,
    driven,
    official,
    oracle,
    settings,
    tiny_target,
    variant,
    write,
)
from medusa_checkpoints import published
from medusa_checkpoints import write as write_medusa
from rounding import SMALL_MODEL
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from heavypath.speculative import BlockHead, MedusaHeads, load_draft, new_head
from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.saving import save_head
from heavypath.speculative.files.checkpoint import Checkpoint
from heavypath.speculative.loading import load_pair

ATTENTION = ("q_proj", "k_proj", "v_proj")
FIRST, FULL = {"generation": 1}, {"drafted": VOCAB}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
BIASED = {"attention_bias": True, "qkv_bias": True, "bias": True, "mlp_bias": True}
NO_THETA = {"rope_theta": None}
OFFICIAL = {  # what the head is, and what its config.json says besides
    "eagle-1": (FIRST, {}),
    "eagle-1 with the bias of fc": (FIRST | {"biases": ("fc",)}, {"bias": False}),
    "eagle-1 of Qwen2": (FIRST | {"biases": ("fc", *ATTENTION)}, {}),
    "eagle-1 of two layers": (FIRST | {"layers": 2}, {"num_hidden_layers": 32}),
    "eagle-1 with an lm_head": (FIRST | {"own_lm_head": True}, {}),
    "eagle-1 without the biases of its config": (FIRST, BIASED),
    "eagle-3": ({}, {}),
    "eagle-3 with an embedding": ({"own_embedding": True}, {"tie_word_embeddings": True}),
    "eagle-3 of all tokens": (FULL, {}),
    "eagle-3 with the target's lm_head": (FULL | {"own_lm_head": False}, {}),
    "eagle-3 of another width": (
        {"width": 12, "heads": 3, "kv_heads": 1, "head_dim": 4, "own_embedding": True}, {},
    ),
    "eagle-3 with biases": ({"biases": ("fc", *ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj")}, {}),
    "eagle-3 with other biases than its config has": ({"biases": ATTENTION}, dict.fromkeys(BIASED, False)),
    "eagle-3 without the biases of its config": ({}, BIASED),
    "eagle-3 with norms of queries and keys": ({"head_norms": True}, {}),
    "eagle-3 of three layers": ({"layers": 3}, {}),
    "eagle-3 of fewer layers than its config has": ({}, {"num_hidden_layers": 5}),
    "norm_output of SpecForge means a norm before lm_head": ({}, {"norm_output": True}),
    "eagle-3.1 by fc_norm": ({"tap_norms": True, "feeds_back_normed": True}, {"norm_output": True}),
    "eagle-3.1 by norm_before_fc": ({"norm_before_fc": True, "feeds_back_normed": True}, {"norm_output": True}),
    "norms before fc without norm_output": ({"tap_norms": True}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {"norm_before_residual": True}),
    "layer ids from 1 are outputs": ({"taps": (2, 4, 5)}, {LAYER_IDS: (1, 3, 4)}),
    "layer ids from 2 are inputs": ({"taps": (2, 4, 5)}, {LAYER_IDS: (2, 4, 5)}),
    "layer ids from 3 are inputs": ({"taps": (3, 5, 7)}, {LAYER_IDS: (3, 5, 7)}),
    "layer ids from 0 are inputs": ({"taps": (0, 3, 6)}, {LAYER_IDS: (0, 3, 6)}),
    "layer ids of eagle_config": ({"taps": (2, 4, 5)}, {"eagle_config": {LAYER_IDS: (1, 3, 4)}}),
    "no layer ids in eagle_config": ({}, {"eagle_config": {LAYER_IDS: None}}),
    "five layers are read": ({"taps": (2, 3, 4, 5, 6)}, {LAYER_IDS: (2, 3, 4, 5, 6)}),
    "own taps, 1 not shifted": (
        {"taps": (1, 3, 4), "feeds_back_normed": True}, {"heavypath": {"taps": (1, 3, 4), "feeds_back_normed": True}},
    ),
    "own taps, the last after the final norm": ({"taps": (2, 5, 8)}, {"heavypath": {"taps": (2, 5, 8)}}),
    "rope_theta": ({"theta": 1e6}, {}),
    "rope_theta in rope_parameters": (
        {"theta": 12345.0}, NO_THETA | {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    ),
    "rope_theta in rope_scaling": (
        {"theta": 12345.0}, NO_THETA | {"rope_scaling": {"type": "default", "rope_theta": 12345.0}},
    ),
    "rope_scaling of images": (
        {"theta": 12345.0}, {"rope_theta": 12345.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ),
    "no rope_theta": ({"theta": 10000.0}, NO_THETA),
    "no rope_theta in rope_scaling": ({"theta": 10000.0}, NO_THETA | {"rope_scaling": {"rope_type": "default"}}),
}  # fmt: skip
VLLM = {
    "speculators": {},
    "speculators, norm before residual": {"norm_before_residual": True},
    "speculators, eagle-3.1 by norm before fc": {"norm_before_fc": True, "feeds_back_normed": True},
    "speculators of Qwen3": {"head_norms": True, "norm_before_residual": True, "theta": 1e6},
    "speculators of two layers, others read": {"layers": 2, "taps": (3, 5, 7)},
    "speculators, fed back normed": {"feeds_back_normed": True},
    "speculators, eagle-3.1": {"tap_norms": True, "feeds_back_normed": True},
    "speculators, eagle-1": {"generation": 1, "own_embedding": False},
    "speculators, eagle-1 with the bias of fc": {"generation": 1, "own_embedding": False, "biases": ("fc",)},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def saved(folder, options=(), **given):
    """A checkpoint in the official layout; its kind and tensors."""
    kind = variant(**dict(options))
    return write(folder, settings(kind, **given), official(kind)), kind, official(kind)


def assert_same(head, kind, tensors, target):
    """Both are compared along a chain: over the text with features, and two levels below."""
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    torch.testing.assert_close(driven(head, target), oracle(kind, tensors, target), rtol=0, atol=SMALL_MODEL)
    if kind.drafted < VOCAB:
        assert torch.equal(head.d2t, tensors["d2t"])
    else:
        assert head.d2t is None


def assert_returns(head, target, folder):
    """Saved where it came from, and loaded again, it is the same, bit by bit."""
    save_head(head, folder)
    assert [*sorted(path.name for path in folder.iterdir())] == ["config.json", "model.safetensors"]
    again = load_head(folder, target)
    assert again.config == head.config
    torch.testing.assert_close(again.state_dict(), head.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(
        driven(again, target), driven(head, target), rtol=0, atol=SMALL_MODEL
    )  # MKL rounds by place


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_heads_have_the_logits_of_the_formulas(name, target, tmp_path):
    options, given = OFFICIAL[name]
    folder, kind, tensors = saved(tmp_path, options, **given)
    head = load_head(folder, target)
    assert_same(head, kind, tensors, target)
    assert_returns(head, target, folder)


@pytest.mark.parametrize("options", VLLM.values(), ids=VLLM)
def test_heads_of_speculators_have_the_logits_of_the_formulas(options, target, tmp_path):
    kind = variant(**options)
    config, tensors = as_speculators(kind)
    tensors |= {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.zeros(kind.drafted, 16)}
    head = load_head(write(tmp_path, config, tensors), target)
    assert_same(head, kind, official(kind), target)
    assert_returns(head, target, tmp_path)


def test_the_formulas_of_variants_with_the_same_tensors_differ(target):
    plain, tensors = oracle(variant(), official(variant()), target), official(variant())
    for options in ({"feeds_back_normed": True}, {"norm_before_residual": True}, {"theta": 5e5}, {"taps": (1, 3, 4)}):
        assert (oracle(variant(**options), tensors, target) - plain).abs().max() > 1e-3


def test_names_may_have_the_prefix_of_a_model_and_safetensors_are_preferred_to_pickles(target, tmp_path):
    kind, tensors = variant(), official(variant())
    write(tmp_path, settings(kind), {"fc.weight": torch.zeros(1)}, "pytorch_model.bin")
    prefixed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}
    assert_same(load_head(write(tmp_path, settings(kind), prefixed), target), kind, tensors, target)


def test_scaled_rotary_settings_are_taken(target, tmp_path, caplog):
    plain = load_head(saved(tmp_path / "plain")[0], target).rotary_emb.inv_freq
    linear = saved(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 4.0})[0]
    assert torch.equal(load_head(linear, target).rotary_emb.inv_freq, plain / 4)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    head = load_head(saved(tmp_path / "llama3", rope_scaling=llama3)[0], target)
    assert not torch.equal(head.rotary_emb.inv_freq, plain)
    assert not caplog.records, "transformers has nothing to warn of"
    save_head(head, tmp_path / "saved")
    assert load_head(tmp_path / "saved", target).config == head.config


def test_an_lm_head_that_was_left_out_is_the_embedding_that_it_is_tied_to(target, tmp_path):
    kind = variant(**FULL, own_embedding=True, own_lm_head=False)
    folder, _, tensors = saved(tmp_path, vars(kind), tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    assert_same(load_head(folder, target), kind, tensors, target)


def test_an_lm_head_of_the_targets_rows_can_be_left_to_the_target(target, tmp_path):
    tokens = torch.tensor([1, 2, 5, VOCAB - 1])
    head = new_head(target, tokens)
    save_head(head, tmp_path, with_lm_head=False)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = load_head(tmp_path, target)
    assert again.config == head.config
    torch.testing.assert_close(again.state_dict(), head.state_dict(), rtol=0, atol=0)
    assert torch.equal(again.lm_head.weight, target.lm_head.weight[tokens])
    offsets = {"d2t": again.d2t + VOCAB}
    save_file(load_file(tmp_path / "model.safetensors") | offsets, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t of shape .* leads to tokens"):
        load_head(tmp_path, target)
    quantised = tiny_target()
    quantised.lm_head = nn.Identity()
    quantised.lm_head.weight = None
    with pytest.raises(ValueError, match="takes its lm_head from the target, whose lm_head is a Identity without"):
        load_head(tmp_path, quantised)


@pytest.mark.parametrize(("drafted", "d2t", "t2d"), [
    (VOCAB // 2, torch.arange(VOCAB // 2), torch.arange(VOCAB) % 2 == 0),  # which look like ids, but t2d confirms them
    (24, torch.zeros(24, dtype=torch.int32), torch.arange(VOCAB) < 24),
    (VOCAB, torch.zeros(VOCAB).long(), torch.ones(VOCAB).bool()),
])  # fmt: skip
def test_offsets_of_tokens_are_taken_as_they_are(drafted, d2t, t2d, target, tmp_path):
    kind = variant(drafted=drafted)
    tensors = official(kind) | {"d2t": d2t, "t2d": t2d}
    head = load_head(write(tmp_path, settings(kind), tensors), target)
    assert_same(head, kind, tensors | {"d2t": d2t.long()}, target)


def test_a_head_is_known_by_its_tensors_or_its_config(target, tmp_path):
    config, tensors = settings(variant(generation=1)), official(variant(generation=1))
    assert "eagle" not in json.dumps(config).lower()
    assert is_head(Checkpoint(write(tmp_path / "a", config, tensors)))
    without_fc = {name: tensor for name, tensor in official(variant()).items() if name != "fc.weight"}
    assert is_head(Checkpoint(write(tmp_path / "b", settings(variant()), without_fc)))
    assert not is_head(Checkpoint(write(tmp_path / "c", config | {"architectures": ["Eagle2_5_VL"]}, without_fc)))
    target.save_pretrained(tmp_path / "model")
    assert not is_head(Checkpoint(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"fc\.weight, .* is missing; .* AutoModelForCausalLM"):
        load_head(tmp_path / "model", target)
    with pytest.raises(FileNotFoundError, match="is neither a folder with a config"):
        load_head(tmp_path / "nothing", target)


def test_a_head_has_the_targets_dtype_but_its_rotary_table_does_not(target, tmp_path):
    folder, *_ = saved(tmp_path)
    for given in (None, torch.bfloat16):
        head = load_head(folder, target, dtype=given)
        assert {parameter.dtype for parameter in head.parameters()} == {given or torch.float32}
        assert (head.d2t.dtype, head.rotary_emb.inv_freq.dtype) == (torch.long, torch.float32)
    assert load_head(folder, tiny_target().to(torch.bfloat16)).fc.weight.dtype == torch.bfloat16
    assert load_head(folder, target, device="cpu").fc.weight.device.type == "cpu"


@pytest.mark.parametrize("kind", [EagleHead, MedusaHeads, BlockHead])
def test_a_pair_may_be_a_model_and_a_head(kind, demo_pair, tmp_path):
    target, folder = demo_pair.target, tmp_path / "head"
    if kind is EagleHead:
        save_head(new_head(target), folder)
    elif kind is BlockHead:
        block_of(target, folder, head_dim=4, inner=8)
    else:
        write_medusa(folder, published(target, owns=False))
    assert isinstance(load_pair(None, str(folder)).draft, kind)
    target.save_pretrained(tmp_path / "target")
    demo_pair.tokenizer.save_pretrained(tmp_path / "target")
    pair = load_pair(str(tmp_path / "target"), str(folder))
    assert isinstance(pair.draft, kind)
    assert isinstance(load_draft(folder, pair), kind)
    other = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(folder)
    with pytest.raises(ValueError, match="target and draft must share one vocabulary"):
        load_draft(folder, pair)
    with pytest.raises(FileNotFoundError, match="the draft 'nothing' is no folder here and is not in"):
        load_draft("nothing", target)


@pytest.mark.parametrize(("shape", "key"), [((1, 1, 48), "mask_token_id"), ((1, 48), "ptd_token_id"),
                                            ((48,), "pard_token")])  # fmt: skip
def test_a_head_with_mask_hidden_drafts_all_levels_at_once(shape, key, target, tmp_path):
    """P-EAGLE: its other tensors are a head's, in both layouts."""
    kind = variant(layers=2)
    for config, tensors in ((settings(kind), official(kind)), as_speculators(kind, speculators_model_type="peagle")):
        mask = torch.randn(shape)
        folder = write(tmp_path / str(len(config)), config | {key: 39}, tensors | {"mask_hidden": mask})
        head = load_draft(folder, target)
        assert (head.config.mask_token_id, head.config.model_type) == (39, "p-eagle")
        assert torch.equal(head.mask_hidden, mask.flatten())
        assert_same(head, kind, official(kind), target)
        assert_returns(head, target, tmp_path / "again")
        for given in (None, 40, *(["<mask>"] if key == "pard_token" else [])):
            with pytest.raises(ValueError, match=r"mask_hidden, so config\.json must give .* of the target's 40, got"):
                load_head(write(folder, config | {key: given}, tensors | {"mask_hidden": mask}), target)


HEADS = {"eagle-3": {}, "eagle-1": FIRST}


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
