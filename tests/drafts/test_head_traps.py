"""What others got wrong when they loaded heads or ran them, each named after it: it must not happen here."""

import re

import pytest
import torch
from head_checkpoints import (
    LAYERS,
    TEXT,
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

from heavypath.speculative.drafts.heads.checkpoint import load_head, save_head


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def agrees(head, kind, tensors, target):
    """Whether a head computes what one of that kind does."""
    return torch.allclose(driven(head, target), oracle(kind, tensors, target), rtol=0, atol=1e-5)


def refused(folder, target, config, tensors, *expected):
    with pytest.raises(ValueError, match="cannot draft for this target") as caught:
        load_head(write(folder, config, tensors), target)
    for part in expected:
        assert re.search(part, str(caught.value)), caught.value


def test_norm_output_of_specforge_means_a_norm_before_lm_head(target, tmp_path):
    """SpecForge's default; elsewhere, and beside norms before fc, it is EAGLE-3.1."""
    fed_raw, fed_normed = variant(), variant(feeds_back_normed=True)
    tensors = official(fed_raw)
    specforge = load_head(write(tmp_path / "a", settings(fed_raw, norm_output=True), tensors), target)
    assert agrees(specforge, fed_raw, tensors, target)
    assert not agrees(specforge, fed_normed, tensors, target)
    config, renamed = as_speculators(fed_normed)
    speculators = load_head(write(tmp_path / "b", config, renamed), target)
    assert agrees(speculators, fed_normed, tensors, target)
    with_norms = variant(tap_norms=True, feeds_back_normed=True)
    tensors = official(with_norms)
    third = load_head(write(tmp_path / "c", settings(with_norms, norm_output=True), tensors), target)
    assert agrees(third, with_norms, tensors, target)
    not_said = load_head(write(tmp_path / "d", settings(with_norms), tensors), target)
    assert agrees(not_said, variant(tap_norms=True), tensors, target)


def test_norm_before_residual_is_false_where_it_is_not_given(target, tmp_path):
    raw, normed = variant(), variant(norm_before_residual=True)
    tensors = official(raw)
    for name, (config, renamed) in {"a": (settings(raw), tensors), "b": as_speculators(raw)}.items():
        config.pop("norm_before_residual", None)
        head = load_head(write(tmp_path / name, config, renamed), target)
        assert agrees(head, raw, tensors, target)
        assert not agrees(head, normed, tensors, target)
        head = load_head(write(tmp_path / name, config | {"norm_before_residual": True}, renamed), target)
        assert agrees(head, normed, tensors, target)


@pytest.mark.parametrize(
    ("ids", "taps"),
    [((1, 3, 4), (2, 4, 5)), ((2, 4, 5), (2, 4, 5)), ((3, 5, 7), (3, 5, 7)), ((0, 3, 6), (0, 3, 6)), (None, (2, 4, 5))],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layer_ids_name_outputs_if_the_first_is_one_and_inputs_otherwise(ids, taps, nested, target, tmp_path):
    kind = variant(taps=taps)
    given = {"eagle_aux_hidden_state_layer_ids": ids}
    given = {"eagle_config": {**given, "use_aux_hidden_state": True}} if nested else given
    head = load_head(write(tmp_path, settings(kind, **given), official(kind)), target)
    assert head.config.taps == taps
    assert agrees(head, kind, official(kind), target)


def test_a_head_may_read_other_than_three_layers(target, tmp_path):
    kind = variant(taps=(2, 3, 4, 5, 6))
    given = {"eagle_aux_hidden_state_layer_ids": kind.taps}
    assert agrees(
        load_head(write(tmp_path, settings(kind, **given), official(kind)), target), kind, official(kind), target
    )


@pytest.mark.parametrize("ids", [(2, 5, LAYERS), (1, 5, LAYERS - 1)])
def test_the_last_layer_before_the_final_norm_is_not_taken_for_what_is_behind_it(ids, target, tmp_path):
    config = settings(variant(), eagle_aux_hidden_state_layer_ids=ids)
    refused(
        tmp_path, target, config, official(variant()), "that of the last, 7, is not to be had before the .* final norm"
    )
    config = settings(variant(), eagle_aux_hidden_state_layer_ids=(2, 5, LAYERS + 1))
    refused(
        tmp_path, target, config, official(variant()), "hidden states 2, 5, 9, expected 0 to 7 of a target of 8 layers"
    )


@pytest.mark.parametrize("taps", [(1, 3, 4), (2, 5, LAYERS)])
def test_hidden_states_that_the_official_keys_leave_open_are_saved_without_doubt(taps, target, tmp_path):
    kind = variant()
    config = settings(kind, heavypath={"taps": taps, "feeds_back_normed": True})
    head = load_head(write(tmp_path / "a", config, official(kind)), target)
    save_head(head, tmp_path / "b")
    again = load_head(tmp_path / "b", target)
    assert again.config == head.config
    assert (again.config.taps, again.config.feeds_back_normed) == (taps, True)
    assert agrees(again, variant(taps=taps, feeds_back_normed=True), official(kind), target)


@pytest.mark.parametrize("options", [{}, {"generation": 1}], ids=["eagle-3", "eagle-1"])
def test_positions_may_be_shifted_all_alike_but_the_root_is_not_one_too_far(options, target, tmp_path):
    kind = variant(**options)
    head = load_head(write(tmp_path, settings(kind), official(kind)), target)
    entries = len(TEXT) - 1
    ours = driven(head, target)
    torch.testing.assert_close(driven(head, target, positions=range(1, entries + 3)), ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(oracle(kind, official(kind), target, first_position=1), ours, rtol=0, atol=1e-5)
    too_far = driven(head, target, positions=[*range(entries), entries + 1, entries + 2])
    assert (too_far - ours)[-2:].abs().max() > 1e-3


ROPES = {
    "rope_theta": {"rope_theta": 12345.0},
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    "rope_scaling": {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 12345.0}},
    "rope_scaling of images": {"rope_theta": 12345.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
}


@pytest.mark.parametrize("given", ROPES.values(), ids=ROPES)
def test_the_rotary_base_is_the_heads_own_wherever_it_is_written(given, target, tmp_path):
    kind = variant(theta=12345.0)
    head = load_head(write(tmp_path, settings(kind, **given), official(kind)), target)
    assert agrees(head, kind, official(kind), target)
    assert not agrees(head, variant(theta=target.config.rope_parameters["rope_theta"]), official(kind), target)


@pytest.mark.parametrize(
    "given", [{"rope_theta": None}, {"rope_theta": None, "rope_scaling": {"rope_type": "default"}}]
)
def test_the_rotary_base_is_10000_where_none_is_written(given, target, tmp_path):
    head = load_head(write(tmp_path, settings(variant(), **given), official(variant())), target)
    assert agrees(head, variant(theta=10000.0), official(variant()), target)


def test_scaled_rotary_settings_are_taken_and_those_that_depend_on_the_length_are_refused(target, tmp_path, caplog):
    scaling = {"type": "linear", "factor": 4.0}
    head = load_head(write(tmp_path, settings(variant(), rope_scaling=scaling), official(variant())), target)
    plain = load_head(write(tmp_path, settings(variant()), official(variant())), target)
    assert torch.equal(head.rotary_emb.inv_freq, plain.rotary_emb.inv_freq / 4)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    head = load_head(write(tmp_path, settings(variant(), rope_scaling=scaling), official(variant())), target)
    assert not torch.equal(head.rotary_emb.inv_freq, plain.rotary_emb.inv_freq)
    assert not caplog.records, "transformers has nothing to warn of"
    save_head(head, tmp_path / "saved")
    assert load_head(tmp_path / "saved", target).config == head.config
    for kind in ("dynamic", "longrope"):
        config = settings(variant(), rope_scaling={"rope_type": kind, "factor": 2.0})
        refused(tmp_path, target, config, official(variant()), f"type '{kind}', expected default, linear")
    config = settings(variant(), partial_rotary_factor=0.5)
    refused(tmp_path, target, config, official(variant()), "partial_rotary_factor 0.5; expected")


def test_max_position_embeddings_neither_sizes_a_table_nor_refuses_a_text(target, tmp_path):
    text = torch.arange(200).remainder(VOCAB).tolist()
    head = load_head(write(tmp_path, settings(variant(), max_position_embeddings=4), official(variant())), target)
    expected = oracle(variant(), official(variant()), target, text)
    torch.testing.assert_close(driven(head, target, text), expected, rtol=0, atol=1e-5)


def test_a_head_of_eagle_1_is_not_normed_where_a_llama_is(target, tmp_path):
    kind = variant(generation=1)
    head = load_head(write(tmp_path, settings(kind), official(kind)), target)
    names = {name for name in head.state_dict() if "norm" in name}
    assert names == {"layers.0.post_attention_layernorm.weight"}
    for norm in ("norm.weight", "layers.0.input_layernorm.weight"):  # not dropped in silence either
        refused(tmp_path, target, settings(kind), official(kind) | {norm: torch.ones(16)}, f"not known: {norm}")


def test_the_bias_of_fc_is_not_dropped(target, tmp_path):
    kind = variant(generation=1, biases=("fc",))
    head = load_head(write(tmp_path, settings(kind, bias=False), official(kind)), target)
    assert agrees(head, kind, official(kind), target)
    head.fc.bias.zero_()
    assert not agrees(head, kind, official(kind), target)


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("biases", [(), ("q_proj", "k_proj", "v_proj")], ids=["none", "qkv"])
def test_biases_are_those_of_the_tensors_whatever_the_config_says(said, biases, target, tmp_path):
    for generation in (1, 3):
        kind = variant(generation=generation, biases=biases)
        config = settings(kind, attention_bias=said, qkv_bias=said, bias=said, mlp_bias=said)
        head = load_head(write(tmp_path, config, official(kind)), target)
        assert agrees(head, kind, official(kind), target)


def test_its_own_embedding_and_lm_head_are_kept_though_the_targets_would_fit(target, tmp_path):
    kind = variant(drafted=VOCAB, own_embedding=True)
    tensors = official(kind)
    head = load_head(write(tmp_path, settings(kind), tensors), target)
    assert torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"])
    assert not torch.equal(head.embed_tokens.weight, target.model.embed_tokens.weight)


def test_an_lm_head_that_is_missing_is_the_targets_or_refused_but_never_random(target, tmp_path):
    kind = variant(drafted=VOCAB, own_lm_head=False)
    assert load_head(write(tmp_path, settings(kind), official(kind)), target).lm_head is None
    kind = variant(own_lm_head=False)
    missing = "missing: lm_head.weight; the target's cannot stand in", "40 tokens, for a head of width 16 and 24"
    refused(tmp_path, target, settings(kind), official(kind), *missing)
    kind = variant(own_lm_head=False, drafted=VOCAB, width=12, own_embedding=True)
    refused(tmp_path, target, settings(kind), official(kind), "missing: lm_head.weight; the target's cannot")


def test_tie_word_embeddings_does_not_resize_the_lm_head(target, tmp_path):
    kind = variant(own_embedding=True)
    head = load_head(write(tmp_path, settings(kind, tie_word_embeddings=True), official(kind)), target)
    assert head.lm_head.weight.shape == (24, 16)
    assert agrees(head, kind, official(kind), target)
    kind = variant(own_embedding=True, own_lm_head=False, drafted=VOCAB)  # left out, since it is the embedding
    tensors = official(kind)
    head = load_head(write(tmp_path, settings(kind, tie_word_embeddings=True), tensors), target)
    assert agrees(head, kind, tensors | {"lm_head.weight": tensors["embed_tokens.weight"]}, target)


def test_d2t_of_absolute_ids_is_refused(target, tmp_path):
    kind = variant()
    tensors, all_of_them = official(kind), torch.arange(24)
    ids = tensors["d2t"] + all_of_them
    for given in (ids, ids.flip(0), all_of_them):
        refused(tmp_path, target, settings(kind), tensors | {"d2t": given}, "d2t holds absolute ids .* subtract")
        without = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
        refused(tmp_path, target, settings(kind), without | {"d2t": given}, "d2t holds absolute ids .* subtract")


def test_offsets_that_look_like_ids_are_believed_where_t2d_confirms_them(target, tmp_path):
    kind = variant(drafted=VOCAB // 2)
    every_other = {"d2t": torch.arange(VOCAB // 2), "t2d": torch.arange(VOCAB) % 2 == 0}
    head = load_head(write(tmp_path, settings(kind), official(kind) | every_other), target)
    assert torch.equal(head.d2t, torch.arange(VOCAB // 2))


def test_d2t_is_an_identity_where_it_is_zero_and_absent_with_all_tokens(target, tmp_path):
    kind = variant(drafted=VOCAB)
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    head = load_head(write(tmp_path, settings(kind), official(kind) | zeros), target)
    assert head.d2t is None
    assert agrees(head, kind, official(kind), target)
    kind = variant()
    first = {"d2t": torch.zeros(24, dtype=torch.int32), "t2d": torch.arange(VOCAB) < 24}
    head = load_head(write(tmp_path, settings(kind), official(kind) | first), target)
    assert torch.equal(head.d2t, torch.zeros(24, dtype=torch.long))
    tensors = official(kind)
    for wrong in (torch.zeros(23, dtype=torch.long), torch.zeros(24)):
        refused(
            tmp_path,
            target,
            settings(kind),
            tensors | {"d2t": wrong},
            r"d2t is torch.*expected integers of shape \[24\]",
        )
    twice = torch.zeros(24, dtype=torch.long)
    twice[1] = -1
    refused(tmp_path, target, settings(kind), tensors | {"d2t": twice}, "23 different ones; expected 24 different ones")


@pytest.mark.parametrize("said", [1, 5, 32])
def test_num_hidden_layers_may_lie(said, target, tmp_path):
    for options in ({"layers": 2}, {"layers": 1}, {"generation": 1, "layers": 2}):
        kind = variant(**options)
        head = load_head(write(tmp_path, settings(kind, num_hidden_layers=said), official(kind)), target)
        assert agrees(head, kind, official(kind), target)


def test_a_layer_that_is_half_there_is_refused(target, tmp_path):
    kind = variant(layers=2)
    tensors = official(kind)
    tensors.pop("layers.1.mlp.up_proj.weight")
    refused(tmp_path, target, settings(kind), tensors, "missing: layers.1.mlp.up_proj.weight")


def test_norms_that_the_config_promises_are_not_left_out(target, tmp_path):
    refused(tmp_path, target, settings(variant(), fc_norm=True), official(variant()), r"missing: fc_norm\.0\.weight")
    config = settings(variant(), norm_before_fc=True)
    refused(tmp_path, target, config, official(variant()), r"missing: input_norm\.weight")


def test_the_layer_norms_of_hass_are_refused_by_name(target, tmp_path):
    config, tensors = as_speculators(variant(generation=1, own_embedding=False), layernorms=True)
    more = {f"{name}.weight": torch.ones(16) for name in ("embedding_layernorm", "pre_lm_head_layernorm")}
    refused(tmp_path, target, config, tensors | more, "not known: embedding_layernorm.weight, pre_lm_head_layernorm")
