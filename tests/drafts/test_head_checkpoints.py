"""Heads as published: every layout and variant has the logits of the formulas, and what does not fit is refused."""

import json
import re

import huggingface_hub.constants
import pytest
import torch
from harmful_files import Harmful
from head_checkpoints import (
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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from heavypath.speculative import PromptLookup, load_draft
from heavypath.speculative.drafts.heads import files
from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head, save_head
from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.loading import load_pair

ATTENTION = ("q_proj", "k_proj", "v_proj")
FULL = {"drafted": VOCAB}
OFFICIAL = {
    "eagle-1": {"generation": 1},
    "eagle-1 with the bias of fc": {"generation": 1, "biases": ("fc",)},
    "eagle-1 of Qwen2": {"generation": 1, "biases": ("fc", *ATTENTION)},
    "eagle-1 of two layers": {"generation": 1, "layers": 2},
    "eagle-1 with the target's embedding": {"generation": 1, "own_embedding": False},
    "eagle-1 with an lm_head": {"generation": 1, "own_lm_head": True},
    "eagle-3": {},
    "eagle-3 with an embedding": {"own_embedding": True},
    "eagle-3 of all tokens": FULL,
    "eagle-3 with the target's lm_head": {**FULL, "own_lm_head": False},
    "eagle-3 of another width": {"width": 12, "heads": 3, "kv_heads": 1, "head_dim": 4, "own_embedding": True},
    "eagle-3 with biases": {"biases": ("fc", *ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj")},
    "eagle-3 with norms of queries and keys": {"head_norms": True},
    "eagle-3 of three layers": {"layers": 3},
    "eagle-3 with another rotary base": {"theta": 1e6},
}
VLLM = {
    "speculators": {},
    "speculators, norm before residual": {"norm_before_residual": True},
    "speculators, norm before fc": {"norm_before_fc": True},
    "speculators of Qwen3": {"head_norms": True, "norm_before_residual": True, "theta": 1e6},
    "speculators of two layers": {"layers": 2},
    "speculators, other layers": {"taps": (3, 5, 7)},
    "speculators, eagle-3.1 by norm before fc": {"norm_before_fc": True, "feeds_back_normed": True},
    "speculators, eagle-3.1": {"tap_norms": True, "feeds_back_normed": True},
    "speculators, eagle-1": {"generation": 1, "own_embedding": False},
    "speculators, eagle-1 with the bias of fc": {"generation": 1, "own_embedding": False, "biases": ("fc",)},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def assert_same(head, kind, tensors, target):
    """Both are compared along a chain: over the text with features, and two levels below."""
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    torch.testing.assert_close(driven(head, target), oracle(kind, tensors, target), rtol=0, atol=1e-5)
    if kind.drafted < VOCAB:
        assert torch.equal(head.d2t, tensors["d2t"])
    else:
        assert head.d2t is None


def assert_returns(head, target, folder):
    """Saved and loaded again it is the same, bit by bit; logits but for MKL, which rounds by where its operands lie."""
    save_head(head, folder)
    again = load_head(folder, target)
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    torch.testing.assert_close(driven(again, target), driven(head, target), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OFFICIAL.values(), ids=OFFICIAL)
def test_official_heads_have_the_logits_of_the_formulas(options, target, tmp_path):
    kind = variant(**options)
    tensors = official(kind)
    head = load_head(write(tmp_path / "theirs", settings(kind), tensors), target)
    assert_same(head, kind, tensors, target)
    assert_returns(head, target, tmp_path / "ours")


@pytest.mark.parametrize("options", VLLM.values(), ids=VLLM)
def test_heads_of_speculators_have_the_logits_of_the_formulas(options, target, tmp_path):
    kind = variant(**options)
    config, tensors = as_speculators(kind)
    tensors |= {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.zeros(kind.drafted, 16)}
    head = load_head(write(tmp_path / "theirs", config, tensors), target)
    assert_same(head, kind, official(kind), target)
    assert_returns(head, target, tmp_path / "ours")


@pytest.mark.parametrize("options", [{"tap_norms": True}, {"norm_before_fc": True}], ids=["fc_norm", "norm_before_fc"])
def test_heads_of_eagle_3_1_in_the_official_layout(options, target, tmp_path):
    kind = variant(**options, feeds_back_normed=True)
    tensors = official(kind)
    head = load_head(write(tmp_path, settings(kind, norm_output=True), tensors), target)
    assert head.config.feeds_back_normed
    assert_same(head, kind, tensors, target)


@pytest.mark.parametrize("how", files.WEIGHTS)
@pytest.mark.parametrize("options", [{"generation": 1}, {}], ids=["eagle-1", "eagle-3"])
def test_weights_are_read_from_any_file_whole_or_in_pieces(how, options, target, tmp_path):
    kind = variant(**options)
    tensors = official(kind)
    assert_same(load_head(write(tmp_path, settings(kind), tensors, how), target), kind, tensors, target)
    assert is_head(tmp_path)


def test_names_may_have_the_prefix_of_a_model(target, tmp_path):
    kind = variant()
    tensors = official(kind)
    prefixed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}
    assert_same(load_head(write(tmp_path, settings(kind), prefixed), target), kind, tensors, target)


def test_safetensors_are_preferred_to_pickles(target, tmp_path):
    kind = variant()
    tensors = official(kind)
    write(tmp_path, settings(kind), {"fc.weight": torch.zeros(1)}, "pytorch_model.bin")
    assert_same(load_head(write(tmp_path, settings(kind), tensors), target), kind, tensors, target)


def test_pickles_that_hold_more_than_tensors_are_refused(target, tmp_path, capsys):
    kind = variant(generation=1)
    with pytest.raises(ValueError, match=r"cannot read the weights in .*pytorch_model\.bin"):
        load_head(write(tmp_path, settings(kind), {"fc.weight": Harmful()}, "pytorch_model.bin"), target)
    with pytest.raises(ValueError, match=r"'state' in .* is a dict; expected tensors by name"):
        load_head(write(tmp_path, settings(kind), {"state": {}}, "pytorch_model.bin"), target)
    assert "ran" not in capsys.readouterr().out


def test_an_index_names_files_of_its_own_folder_alone(target, tmp_path):
    kind = variant()
    folder = write(tmp_path / "head", settings(kind), official(kind))
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../elsewhere.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json' names '\.\./elsewhere.*', expected files of its own folder"):
        load_head(folder, target)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A name of a head in a cache as the hub's client keeps it, without a network."""
    kind = variant()
    repository = tmp_path / "models--somebody--head"
    for revision in ("1" * 40, "2" * 40):
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        write(snapshot, settings(kind, rms_norm_eps=1e-5 * int(revision[0])), official(kind))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    (repository / "refs" / "second").write_text("2" * 40)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(huggingface_hub.constants, name, str(tmp_path), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return "somebody/head"


@pytest.mark.parametrize("local_files_only", [False, True])
def test_a_name_is_looked_up_in_the_cache_without_a_network(cached, local_files_only, target):
    kind = variant()
    head = load_head(cached, target, local_files_only=local_files_only)
    assert_same(head, kind, official(kind), target)
    assert is_head(cached)
    assert load_head(cached, target, revision="second").config.rms_norm_eps == 2e-5
    with pytest.raises(FileNotFoundError, match="'somebody/else' is neither a folder with a config"):
        load_head("somebody/else", target)
    assert not is_head("somebody/else")


def test_nothing_is_fetched_but_config_and_weights(target, tmp_path, monkeypatch):
    folder, asked = write(tmp_path, settings(variant()), official(variant())), []

    def fetched(name, file, *, revision, local_files_only):
        asked.append((name, file, revision, local_files_only))
        return str(folder / file) if (folder / file).is_file() else None

    monkeypatch.setattr(files, "cached_file", fetched)
    load_head("somebody/head", target, revision="v2")
    assert asked == [("somebody/head", file, "v2", False) for file in ("config.json", "model.safetensors")]


def test_a_folder_without_files_is_refused(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is neither a folder with a config\.json"):
        load_head(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(settings(variant())))
    with pytest.raises(FileNotFoundError, match=r"no weights of .* expected one of model\.safetensors, "):
        load_head(tmp_path, target)
    (tmp_path / "config.json").write_text("[")
    write(tmp_path / "x", {}, official(variant()))
    (tmp_path / "x" / "config.json").write_text("[")
    with pytest.raises(ValueError, match="cannot read"):
        load_head(tmp_path / "x", target)


def test_a_whole_model_is_no_head(target, tmp_path):
    target.save_pretrained(tmp_path)
    assert not is_head(tmp_path)
    with pytest.raises(ValueError, match=r"fc\.weight, .* is missing; .* AutoModelForCausalLM"):
        load_head(tmp_path, target)


def test_a_head_is_known_by_its_tensors_or_its_config(tmp_path):
    config, tensors = settings(variant(generation=1)), official(variant(generation=1))
    assert "eagle" not in json.dumps(config).lower()
    assert is_head(write(tmp_path / "a", config, tensors))
    without_fc = {name: tensor for name, tensor in official(variant()).items() if name != "fc.weight"}
    assert is_head(write(tmp_path / "b", settings(variant()), without_fc))
    assert not is_head(write(tmp_path / "c", config | {"architectures": ["Eagle2_5_VL"]}, without_fc))


def test_a_head_may_be_saved_where_it_came_from(target, tmp_path):
    kind = variant(generation=1)
    head = load_head(write(tmp_path, settings(kind), official(kind)), target)
    save_head(head, tmp_path)
    assert_same(head, kind, official(kind), target)
    assert [*sorted(path.name for path in tmp_path.iterdir())] == ["config.json", "model.safetensors"]


def test_load_draft_takes_heads_and_models_by_one_argument(target, tmp_path):
    kind = variant()
    head = load_draft(write(tmp_path / "head", settings(kind), official(kind)), target)
    assert isinstance(head, EagleHead)
    target.save_pretrained(tmp_path / "model")
    model = load_draft(str(tmp_path / "model"), target)
    assert torch.equal(model.lm_head.weight, target.lm_head.weight)
    assert isinstance(load_draft("prompt-lookup", target), PromptLookup)
    with pytest.raises(FileNotFoundError, match="the draft 'nothing' is neither a folder nor a model"):
        load_draft("nothing", target)


def test_a_pair_may_be_a_model_and_a_head(demo_pair, tmp_path):
    target = demo_pair.target
    config = HeadConfig(
        generation=3,
        hidden_size=24,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=target.config.vocab_size,
        taps=(2, target.config.num_hidden_layers),
        owns_embedding=True,
        owns_lm_head=True,
    )
    save_head(EagleHead(config), tmp_path / "head")
    assert load_pair(None, str(tmp_path / "head")).draft.config == config
    target.save_pretrained(tmp_path / "target")
    demo_pair.tokenizer.save_pretrained(tmp_path / "target")
    pair = load_pair(str(tmp_path / "target"), str(tmp_path / "head"))
    assert pair.draft.config == config
    assert load_draft(tmp_path / "head", pair).config == config
    other = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="target and draft must share one vocabulary"):
        load_draft(tmp_path / "head", pair)


def test_a_head_has_the_targets_dtype_but_its_rotary_table_does_not(target, tmp_path):
    folder = write(tmp_path, settings(variant()), official(variant()))
    for wanted, given in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        head = load_head(folder, target, dtype=given)
        assert {parameter.dtype for parameter in head.parameters()} == {wanted}
        assert head.d2t.dtype == torch.long
        assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert load_head(folder, tiny_target().to(torch.bfloat16)).fc.weight.dtype == torch.bfloat16
    assert load_head(folder, target, device="cpu").fc.weight.device.type == "cpu"


def refused(folder, target, config, tensors, *expected):
    """The message of the error, which must have all that is expected."""
    with pytest.raises(ValueError, match="cannot draft for this target") as caught:
        load_head(write(folder, config, tensors), target)
    for part in expected:
        assert re.search(part, str(caught.value)), caught.value


@pytest.mark.parametrize("kind", [variant(), variant(generation=1)], ids=["eagle-3", "eagle-1"])
def test_every_tensor_that_is_missing_is_named(kind, target, tmp_path):
    tensors = official(kind)
    for name in tensors.keys() - {"t2d", "embed_tokens.weight"}:
        some = {other: tensor for other, tensor in tensors.items() if other != name}
        refused(tmp_path, target, settings(kind), some, re.escape(name.replace("midlayer.", "layers.0.")), "missing")


@pytest.mark.parametrize("kind", [variant(), variant(generation=1)], ids=["eagle-3", "eagle-1"])
def test_every_tensor_of_another_shape_is_named_with_both_shapes(kind, target, tmp_path):
    tensors = official(kind)
    for name in tensors.keys() - {"fc.weight", "d2t", "t2d"}:
        if name.endswith(("q_proj.weight", "gate_proj.weight", "lm_head.weight")):
            continue  # of these the sizes are taken
        wider = tensors | {name: torch.zeros(tensors[name].shape[0] + 1, *tensors[name].shape[1:])}
        shapes = (re.escape(str([*tensor.shape])) for tensor in (wider[name], tensors[name]))
        refused(tmp_path, target, settings(kind), wider, re.escape(name.replace("midlayer.", "layers.0.")), *shapes)


def test_tensors_that_are_not_known_are_named(target, tmp_path):
    config, tensors = settings(variant()), official(variant())
    more = {"mask_hidden": torch.zeros(1), "layers.0.self_attn.sinks": torch.zeros(4)}
    refused(tmp_path, target, config, tensors | more, "2 tensors are not known: layers.0.self_attn.sinks, mask_hidden")
    twice = {"layers.0.hidden_norm.weight": torch.ones(16)}
    refused(tmp_path, target, config, tensors | twice, "has 'layers.0.hidden_norm.weight' twice, once as")
    more = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load_head(write(tmp_path, config, tensors | more), target)
    refused(tmp_path, target, config, tensors | {"fc.weight": torch.zeros(16, 48, dtype=torch.int8)}, "fc.*int8")


def test_a_target_of_another_width_is_refused(tmp_path):
    wide = tiny_target(width=24)
    kind = variant(own_embedding=True)
    expected = (
        r"fc\.weight has shape \[16, 48\], expected \[16, 72\]",
        "states 2, 4, 5 of width 24",
        "give the target",
    )
    refused(tmp_path, wide, settings(kind), official(kind), *expected)
    missing = ("missing: embed_tokens.weight", "of width 24 and 40 tokens, for a head of width 16 and 24 tokens")
    refused(tmp_path, wide, settings(variant()), official(variant()), *missing)
    kind = variant(generation=1)
    refused(tmp_path, wide, settings(kind), official(kind), r"fc\.weight has shape \[16, 32\], expected \[16, 40\]")


def test_a_target_of_another_vocabulary_is_refused(tmp_path):
    more, fewer = tiny_target(vocab=60), tiny_target(vocab=20)
    for other in (more, fewer):
        kind = variant(generation=1)
        expected = rf"embed_tokens.weight has shape \[40, 16\], expected \[{other.vocab_size}, 16\].*give the target"
        refused(tmp_path, other, settings(kind), official(kind), expected)
        kind = variant(**FULL)
        expected = rf"lm_head.weight has shape \[40, 16\], expected \[{other.vocab_size}, 16\].*give the target"
        refused(tmp_path, other, settings(kind, vocab_size=other.vocab_size), official(kind), expected)
        kind = variant()
        expected = rf"t2d has shape \[40\], expected \[{other.vocab_size}\]"
        refused(tmp_path, other, settings(kind, vocab_size=other.vocab_size), official(kind), expected)
        tensors = official(kind)
        tensors.pop("t2d")
        refused(tmp_path / "other", other, settings(kind), tensors, "vocab_size 40, expected the target's")
    refused(tmp_path / "other", fewer, settings(kind, vocab_size=20), tensors, "d2t.*expected 24 different ones")
