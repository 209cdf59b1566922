"""Layers for multi-token prediction: as transformers loads and runs them, below drafted nodes too, and refusals."""

import json

import pytest
import torch
from mtp_checkpoints import KINDS, LAYERS, save_target_with_mtp
from tiny_models import transformers_greedy
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator

from heavypath.speculative import SpeculativeDecoder, TokenTree, load_draft
from heavypath.speculative.drafts.kinds import as_draft, describe
from heavypath.speculative.drafts.mtp.draft import MtpHead
from heavypath.speculative.models.forward_of import forward_of

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5]])
TREE = TokenTree([-1, 0, 1, 1, 0, 4])


@pytest.fixture(params=[*KINDS])
def saved(request, tmp_path, monkeypatch):
    """The target, as transformers loads it, and its MTP model; the folder of both."""
    made, mtp = save_target_with_mtp(request.param, tmp_path)
    # transformers knows the layers by their numbers, 46, 61 and 92.
    monkeypatch.setattr(type(made), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])
    return AutoModelForCausalLM.from_pretrained(tmp_path), mtp.eval(), tmp_path


@torch.no_grad()
def reference_laws(target, mtp, text, below):
    """The laws after a text and after each of drafted tokens below it, by transformers' modules, from nothing."""
    found, outs = [], []
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][:, :-1]
    with mtp.layers[0].register_forward_hook(lambda layer, given, out: outs.append(out[:, -1:])):
        for count in range(len(below) + 1):
            tokens = torch.tensor([[*text[1:], *below[:count]]])
            positions = torch.arange(1, tokens.shape[1] + 1)[None]
            _, logits, _ = mtp(tokens, states, torch.ones_like(tokens), positions, MtpCache(config=mtp.config))
            found.append(logits[0, -1].log_softmax(-1))
            states = torch.cat([states, outs[-1]], 1)
    return torch.stack(found)


def test_laws_are_transformers_own_below_the_root_and_below_nodes(saved, monkeypatch):
    """All that is drafted in a text, node by node: each node's law against a pass from nothing over its path."""
    target, mtp, folder = saved
    head = load_draft(folder, target)
    assert isinstance(head, MtpHead)
    for name, weight in head.layer.state_dict().items():
        assert torch.equal(weight, mtp.layers[0].state_dict()[name]), name
    decoder = SpeculativeDecoder(target, head, tree=TREE)
    draft, fed = decoder._draft, []
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
            expected = reference_laws(target, mtp, text, paths[row])[-1]
            assert torch.allclose(logits[0, place].log_softmax(-1), expected, atol=1e-4)
            depths.append(len(paths[row]))
    assert [depths.count(depth) > 4 for depth in range(2)] == [True, True]


def test_proposals_are_those_of_transformers_own_generate(saved, monkeypatch):
    """Greedily, where it drafts one token a step, and so does a chain of one."""
    target, _, folder = saved
    theirs, ours, steps = {}, {}, MTPCandidateGenerator.get_candidates  # what is proposed behind so many tokens

    def noted(self, input_ids, *args, **kwargs):
        found = steps(self, input_ids, *args, **kwargs)
        theirs[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), use_mtp=True, **options)
    decoder = SpeculativeDecoder(target, load_draft(folder, target), tree=TokenTree.chain(1))
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


@pytest.mark.parametrize("attention", ["eager", "heavypath"])
@pytest.mark.few(1)
def test_texts_are_the_targets_with_past_and_in_batches(saved, attention):
    target, _, folder = saved
    target.set_attn_implementation(attention)
    decoder = SpeculativeDecoder(target, load_draft(folder, target), tree_size=6)
    text = transformers_greedy(target, PROMPT, 14)
    first = decoder.generate(PROMPT, 8, eos_token_id=None)
    again = decoder.generate(first.sequences, 6, eos_token_id=None, past=first.cache)
    assert torch.equal(again.sequences, text)
    assert again.stats.reused_tokens > 8
    ids = torch.cat([torch.nn.functional.pad(PROMPT[:, 1:], (1, 0)), PROMPT])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    out = decoder.generate(ids, 14, attention_mask=mask, eos_token_id=None)
    assert torch.equal(out.sequences[1:], text)
    assert torch.equal(out.sequences[:1, 1:], transformers_greedy(target, PROMPT[:, 1:], 14))


def test_a_whole_model_is_no_draft_of_its_own_where_it_has_no_such_layer(saved):
    """Without the layer's tensors the folder holds a model, which may draft for itself or for another target."""
    target, _, folder = saved
    assert describe(load_draft(folder, target)).startswith(f"mtp-{target.config.model_type} layer, ")
    target.save_pretrained(folder)
    assert not isinstance(load_draft(folder, target), MtpHead)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop(f"model.layers.{LAYERS}.hnorm.weight"),
     rf"1 tensors are missing: model.layers.{LAYERS}.hnorm.weight; expected those of an MTP layer"),
    (lambda tensors: tensors.update({f"model.layers.{LAYERS}.mlp.extra.weight": torch.zeros(2)}),
     rf"1 tensors are not known: model.layers.{LAYERS}.mlp.extra.weight; expected those of an MTP layer"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path, monkeypatch):
    target, _ = save_target_with_mtp("glm4_moe", tmp_path, change)
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"the MTP layers in '.*' cannot draft for this target: .*{message}"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("num_mtp_layers", 2, "expected one layer, which drafts all levels, got num_mtp_layers=2"),
    ("model_type", "qwen3_next", "those of type 'qwen3_next' are not known, expected deepseek_v3 or glm4_moe"),
    ("quantization_config", {"quant_method": "fp8"}, "they are quantized"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(key, value, message, tmp_path, monkeypatch):
    target, _ = save_target_with_mtp("glm4_moe", tmp_path)
    if key == "model_type":
        written = json.loads((tmp_path / "config.json").read_text()) | {"model_type": value}
        (tmp_path / "config.json").write_text(json.dumps(written))
        monkeypatch.setattr(type(target.config), "model_type", value)
    else:
        setattr(target.config, key, value)
    with pytest.raises(ValueError, match=message):
        load_draft(tmp_path, target)


def test_a_layer_of_another_target_is_refused(saved):
    target, _, folder = saved
    head = load_draft(folder, target)
    other = AutoModelForCausalLM.from_config(type(target.config)(**target.config.to_dict() | {"num_hidden_layers": 3}))
    with pytest.raises(
        ValueError, match="was made for a target of 2 layers of width 32, got one of 3 layers of width 32"
    ):
        as_draft(head, forward_of(other.eval(), "target"), other)
