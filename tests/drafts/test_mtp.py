"""Layers for multi-token prediction: their laws are those of the formulas, below drafted nodes too, and refusals."""

import re

import pytest
import torch
from families import tiny
from mtp_checkpoints import IN_MTP, KINDS, oracle_of, padded, prefix_of, save_target_with_mtp, stack_experts
from safetensors.torch import load_file, save_file
from tiny_models import transformers_greedy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.candidate_generator import MTPCandidateGenerator

from heavypath.speculative import SpeculativeDecoder, TokenTree, goodness_of_fit, joint_law, load_draft
from heavypath.speculative.drafts.kinds import as_draft, describe
from heavypath.speculative.drafts.mtp.draft import MtpHead
from heavypath.speculative.models.forward_of import forward_of

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5]])
TREE = TokenTree([-1, 0, 1, 1, 0, 4])
OF_TRANSFORMERS = ("glm4_moe", "deepseek_v3", "mellum")  # whose layers its own generate reads
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def saved_target(kind, folder, **options):
    """The target, as transformers loads it, and the tensors of its layer by their published names."""
    _, own = save_target_with_mtp(kind, folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder), own


def assert_laws(decoder, oracle, monkeypatch, texts=1):
    """All that is drafted in a text, node by node: each node's law against a pass from nothing over its path."""
    fed, draft = [], decoder._draft
    call = type(draft).__call__

    def noted(self, feed, cache):
        logits = call(self, feed, cache)
        tokens = feed.tokens[0, -1:] if feed.news else feed.tokens[0]
        fed.append((feed.news > 0, tokens.tolist(), feed.parent_rows[0].tolist(), feed.cache_rows[0].tolist(), logits))
        return logits

    monkeypatch.setattr(type(draft), "__call__", noted)
    out = decoder.generate(PROMPT, 12, temperature=0.8, seed=2)
    whole, paths, depths = out.sequences[0].tolist(), {}, []
    for is_root, tokens, parents, rows, logits in fed:
        if is_root:
            text, paths = whole[: rows[-1] + 1], {rows[-1]: []}
            assert text[-1] == tokens[0]
        else:
            paths |= {row: [*paths[up], token] for row, up, token in zip(rows, parents, tokens, strict=True)}
        for place, row in enumerate(rows[-1:] if is_root else rows):
            expected = oracle.laws(text, paths[row])[-1].softmax(-1)
            torch.testing.assert_close(logits[0, place].double().softmax(-1), expected, rtol=0, atol=1e-5)
            depths.append(len(paths[row]))
    assert [depths.count(depth) > 4 for depth in range(2)] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_laws_are_those_of_the_formulas_below_the_root_and_below_nodes(kind, tmp_path, monkeypatch):
    """Of the published tensors, in fp64, with neither transformers' layers nor its loader."""
    target, own = saved_target(kind, tmp_path)
    head = load_draft(tmp_path, target)
    assert isinstance(head, MtpHead)
    assert_laws(SpeculativeDecoder(target, head, tree=TREE), oracle_of(kind, target, own), monkeypatch)


@pytest.mark.parametrize("stacked", ["mtp.", "model.layers."])
def test_experts_may_be_stacked_in_the_layer_or_in_the_target_alone(stacked, tmp_path, monkeypatch):
    target, own = saved_target("qwen3_5_moe_text", tmp_path, change=lambda tensors: stack_experts(tensors, stacked))
    decoder = SpeculativeDecoder(target, load_draft(tmp_path, target), tree=TREE)
    assert_laws(decoder, oracle_of("qwen3_5_moe_text", target, own), monkeypatch)


def test_the_layer_of_a_model_that_reads_images_drafts_for_the_whole_model(tmp_path, monkeypatch):
    _, own = save_target_with_mtp("qwen3_5", tmp_path)
    target = AutoModelForImageTextToText.from_pretrained(tmp_path)
    decoder = SpeculativeDecoder(target, load_draft(tmp_path, target), tree=TREE)
    assert_laws(decoder, oracle_of("qwen3_5", target, own), monkeypatch)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_proposals_are_those_of_transformers_own_generate(kind, tmp_path, monkeypatch):
    """Greedily, where it drafts one token a step, and so does a chain of one."""
    target, _ = saved_target(kind, tmp_path)
    # transformers knows the layers by their numbers, 46, 61 and 92.
    target._keys_to_ignore_on_load_unexpected = [re.escape(prefix_of(kind, target))]
    target.config.num_mtp_layers = 1
    if kind == "mellum":
        target.config.mtp_layer_types, target.config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    theirs, ours, steps = {}, {}, MTPCandidateGenerator.get_candidates  # what is proposed behind so many tokens

    def noted(self, input_ids, *args, **kwargs):
        found = steps(self, input_ids, *args, **kwargs)
        theirs[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), use_mtp=True, **options)
    decoder = SpeculativeDecoder(target, load_draft(tmp_path, target), tree=TokenTree.chain(1))
    call = type(decoder._draft).__call__

    def drafted(self, feed, cache):
        logits = call(self, feed, cache)
        ours[int(feed.prefix_lengths) + 1] = logits[0].argmax(-1).tolist()
        return logits

    monkeypatch.setattr(type(decoder._draft), "__call__", drafted)
    out = decoder.generate(PROMPT, 16)
    assert torch.equal(out.sequences, text)
    both = [length for length in ours if theirs.get(length)]  # which texts have roots in may differ by one token
    assert [ours[length] for length in both] == [theirs[length] for length in both]
    assert len(both) > 5


@pytest.mark.parametrize(("kind", "attention"), [
    ("glm4_moe", "eager"), ("deepseek_v3", "heavypath"), ("mellum", "sdpa"), ("mellum", "heavypath"),
    *((kind, "sdpa") for kind in RECURRENT),
])  # fmt: skip
def test_texts_are_the_targets_with_past_and_in_batches(kind, attention, tmp_path):
    target, _ = saved_target(kind, tmp_path)
    target.set_attn_implementation(attention)
    decoder = SpeculativeDecoder(target, load_draft(tmp_path, target), tree_size=6)
    text = transformers_greedy(target, PROMPT, 14)
    first = decoder.generate(PROMPT, 8, eos_token_id=None)
    again = decoder.generate(first.sequences, 6, eos_token_id=None, past=first.cache)
    assert torch.equal(again.sequences, text)
    assert again.stats.reused_tokens > (4 if kind in RECURRENT else 8)  # a state of the prompt, whose rows are whole
    ids, mask = padded(PROMPT)
    out = decoder.generate(ids, 14, attention_mask=mask, eos_token_id=None)
    assert torch.equal(out.sequences[1:], text)
    assert torch.equal(out.sequences[:1, 1:], transformers_greedy(target, PROMPT[:, 1:], 14))


@pytest.mark.parametrize(("verifier", "sequences"), [
    ("traversal", 2_000),
    *(pytest.param(each, 20_000, marks=pytest.mark.slow) for each in ("rejection", "traversal", "held")),
])  # fmt: skip
def test_the_joint_law_of_four_tokens_is_the_targets(verifier, sequences, tmp_path):
    """By enumeration, of a target with recurrent layers."""
    target, _ = saved_target("qwen3_5_text", tmp_path, vocab_size=7)
    decoder = SpeculativeDecoder(target, load_draft(tmp_path, target), "sequoia", tree_size=6, verifier=verifier)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    out = decoder.generate(prompt.expand(sequences, -1), max_new_tokens=4, temperature=1.5, seed=5)
    assert out.stats.tokens_per_step > 1.2
    fit = goodness_of_fit(out.sequences[:, prompt.shape[1] :], joint_law(target, prompt[0], 4, temperature=1.5))
    assert fit.is_lossless(), str(fit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_is_no_draft_of_its_own_where_it_has_no_such_layer(kind, tmp_path):
    """Without the layer's tensors the folder holds a model, which may draft for itself or for another target."""
    target, _ = saved_target(kind, tmp_path)
    text = target.config.get_text_config()
    assert describe(load_draft(tmp_path, target)).startswith(f"mtp-{text.model_type} layer, ")
    target.save_pretrained(tmp_path)
    assert not isinstance(load_draft(tmp_path, target), MtpHead)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, f"{name}.weight") for kind in KINDS for name in KINDS[kind].names[:4]]
)
def test_every_tensor_that_is_missing_is_named(kind, name, tmp_path):
    prefix = "mtp." if KINDS[kind].names == IN_MTP else "model.layers.2."
    target, _ = saved_target(kind, tmp_path, change=lambda tensors: tensors.pop(prefix + name))
    message = f"1 tensors are missing: {re.escape(prefix + name)}; expected those of an MTP layer"
    with pytest.raises(ValueError, match=f"the MTP layers in '.*' cannot draft for this target: {message}"):
        load_draft(tmp_path, target)


def test_a_tensor_that_is_not_known_is_named(tmp_path):
    extra = {"model.layers.2.mlp.extra.weight": torch.zeros(2)}
    target, _ = saved_target("glm4_moe", tmp_path, change=lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"1 tensors are not known: model.layers.2.mlp.extra.weight; expected those"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize(("kind", "key", "value", "message"), [
    ("glm4_moe", "num_mtp_layers", 2, "expected one layer, which drafts all levels, got 2"),
    ("qwen3_5_text", "mtp_num_hidden_layers", 3, "expected one layer, which drafts all levels, got 3"),
    ("glm4_moe", "quantization_config", {"quant_method": "fp8"}, "they are quantized"),
    ("qwen3_next", "mtp_use_dedicated_embeddings", True, "gives mtp_use_dedicated_embeddings True, which is not known"),
    ("mellum", "mtp_layer_types", ["full_attention"], None),
    ("hy_v3", "mtp_mlp_layer_types", ["other"], "the target has no layer with attention and an MLP of kind 'other'"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(kind, key, value, message, tmp_path):
    """And what config.json gives of the layer is taken."""
    target, _ = saved_target(kind, tmp_path)
    setattr(target.config, key, value)
    if message is None:
        assert load_draft(tmp_path, target).layer.config.layer_types == value
        return
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, target)


def test_several_layers_are_refused(tmp_path):
    extra = {"mtp.layers.1.input_layernorm.weight": torch.ones(32)}
    target, _ = saved_target("qwen3_5_text", tmp_path, change=lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match="expected one layer, which drafts all levels, got 2"):
        load_draft(tmp_path, target)


def test_layers_of_types_that_are_not_known_are_refused(tmp_path):
    """ERNIE's have names of their own, and public programs differ in whether a norm comes before its lm_head."""
    target = tiny("ernie4_5_moe", **{f"moe_{name}": 4 for name in ("num_experts", "intermediate_size")}, moe_k=2)
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.mtp_emb_norm.0.weight": torch.ones(32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="those of type 'ernie4_5_moe' are not known, expected deepseek_v3, exaone"):
        load_draft(tmp_path, target)


def test_a_layer_with_norms_of_another_class_than_the_targets_last_is_refused(tmp_path):
    """transformers makes it of the first norm of the target's last layer, here a recurrent one's."""
    layers = ["full_attention", "linear_attention"]

    def of_the_first(tensors):
        for name in [name for name in tensors if name.startswith("mtp.layers.0.linear")]:
            del tensors[name]
        for name in [name for name in tensors if "layers.0.self_attn" in name]:
            tensors[name.replace("model.", "mtp.")] = torch.zeros_like(tensors[name])

    target, _ = saved_target("qwen3_5_text", tmp_path, change=of_the_first, layer_types=layers)
    with pytest.raises(ValueError, match="with norms of type Qwen3_5RMSNormGated, and the target's last is a Qwen3_5"):
        load_draft(tmp_path, target)


def test_a_layer_of_another_target_is_refused(tmp_path):
    target, _ = saved_target("glm4_moe", tmp_path)
    head = load_draft(tmp_path, target)
    other = AutoModelForCausalLM.from_config(type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 3}))
    with pytest.raises(
        ValueError, match="was made for a target of 2 layers of width 32, got one of 3 layers of width 32"
    ):
        as_draft(head, forward_of(other.eval(), "target"), other)
