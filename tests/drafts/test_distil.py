"""`distil` from the texts to a draft that decodes, for tiny targets, and its command."""

import json
import math
import os
import signal
from dataclasses import replace
from itertools import count

import pytest
import torch
from block_checkpoints import random_block
from command_line import save_llama
from distil_cases import TINY, greedy, overlaps, silent, texts
from families import tiny
from full_disk import file_size
from head_training_cases import VOCABULARY, random_rows, tiny_head, tiny_target
from tiny_models import tiny_llama
from transformers import LlamaForCausalLM

from heavypath.speculative import (
    MedusaHeads,
    SpeculativeDecoder,
    distil,
    distillation,
    draft_of_layers,
    load_draft,
    most_frequent,
    new_block,
    new_head,
    new_medusa,
)
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.medusa.heads import MedusaConfig
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.training import own_text
from heavypath.speculative.training.beginnings import default_taps
from heavypath.speculative.training.documents import Document
from heavypath.speculative.training.learning import learn
from heavypath.speculative.trees.tails import TRAINED_HEAD

PROMPT = random_rows(3, 1, 6).tokens.long()
NONE = torch.zeros(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("head", "tv-kl"), ("few tokens", "lk"), ("layers", "tv-kl"), ("model", "lk"), ("block", "tv-kl"),
        ("block of few tokens", "lk"), ("medusa", "tv-kl"),
    ],
)  # fmt: skip
def test_every_kind_of_draft_learns_and_loads_again(kind, loss, tmp_path):
    target, documents, folder = tiny_target(), texts(), tmp_path / "draft"
    torch.manual_seed(1)
    drafts = {
        "head": lambda: new_head(target),
        "few tokens": lambda: new_head(target, most_frequent(documents, 20, VOCABULARY)),
        "layers": lambda: draft_of_layers(target, [1]),
        "model": lambda: LlamaForCausalLM(target.config),
        "block": lambda: new_block(target),
        "block of few tokens": lambda: new_block(target, most_frequent(documents, 20, VOCABULARY), term="vanilla"),
        "medusa": lambda: new_medusa(target, 3),
    }
    draft, settings = drafts[kind](), replace(TINY, loss=loss, epochs=3)
    record = distil(draft, target, documents, folder, settings, say=silent)
    assert all(late > early + 0.02 for early, late in zip(*overlaps(record), strict=True))
    weights = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    assert {"config.json", weights, "record.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "record.json").read_text())["settings"]["rate"] == TINY.rate
    assert record["tokens"] == record["steps"] * TINY.tokens_per_step
    assert {"target", "draft", "seconds", "loss", "machine", "versions"} <= record.keys()
    loaded = load_draft(folder, target)
    assert isinstance(loaded, LlamaForCausalLM) or loaded.config == draft.config
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, draft.state_dict()[name]), name
    for each in (draft, loaded):
        out = SpeculativeDecoder(target, each, tree_size=8).generate(PROMPT, max_new_tokens=12)
        assert torch.equal(out.sequences, greedy(target, PROMPT, 12))


def test_a_draft_has_the_targets_dtype_and_exact_rotary_frequencies_and_the_target_is_as_it_was(tmp_path):
    target = tiny_target().requires_grad_(True).bfloat16()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    head = new_head(target)
    frequencies = head.rotary_emb.inv_freq.clone()
    distil(head, target, texts(), tmp_path / "head", TINY, say=silent)
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    assert torch.equal(head.rotary_emb.inv_freq, frequencies)
    assert load_draft(tmp_path / "head", target).fc.weight.dtype == torch.bfloat16
    SpeculativeDecoder(target, head, tree_size=8).generate(PROMPT, max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "block", "medusa", "medusa, one head a step"])
def test_a_training_that_was_interrupted_goes_on_to_the_same_draft_with_its_own_settings_alone(
    kind, tmp_path, monkeypatch
):
    """By Ctrl-C during step 7, after which there is a checkpoint, as after each third step."""
    monkeypatch.setattr(own_text, "ROWS_AT_ONCE", 4)
    target, documents, parts = tiny_target(), texts(), tmp_path / "parts"
    settings = replace(TINY, epochs=2, checkpoint_steps=3, one_head="one" in kind)

    def draft(seed):
        torch.manual_seed(seed)
        if kind.startswith("medusa"):
            return new_medusa(target, 3)
        return tiny_head(seed) if kind == "head" else new_block(target, block_size=4)

    whole, first, second = draft(1), draft(1), draft(2)
    expected = distil(whole, target, documents, tmp_path / "whole", settings, say=silent)
    assert expected["steps"] >= 10

    steps, handler = count(1), signal.getsignal(signal.SIGINT)

    def learn_or_stop(*arguments):
        if next(steps) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return learn(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(distillation, "learn", learn_or_stop)
        with pytest.raises(KeyboardInterrupt):
            distil(first, target, documents, parts, settings, say=silent)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (parts / "config.json").exists()
    with pytest.raises(ValueError, match="got loss 'lk', before 'tv-kl'"):
        distil(draft(2), target, documents, parts, replace(settings, loss="lk"), resume=True, say=silent)
    found = distil(second, target, documents, parts, settings, resume=True, say=silent)
    for name, weight in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight), name
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    assert not (parts / "training").exists()


@pytest.mark.slow
def test_on_a_full_disk_a_training_ends_and_goes_on_when_there_is_room(tmp_path):
    target, folder = tiny_target(), tmp_path / "head"
    with file_size(1000), pytest.raises(OSError, match=r"cannot write .*rows.pt', is the disk full"):
        distil(tiny_head(1), target, texts(), folder, TINY, say=silent)
    with file_size(20_000), pytest.raises(OSError, match=r"cannot write .*checkpoint.pt', is the disk full"):
        distil(tiny_head(1), target, texts(), folder, TINY, say=silent)
    assert [file.name for file in (folder / "training").iterdir()] == ["rows.pt"]
    distil(tiny_head(1), target, texts(), folder, TINY, resume=True, say=silent)
    assert load_draft(folder, target).config.acceptance is not None


def test_what_cannot_be_trained_is_refused(tmp_path):
    target, documents, folder = tiny_target(), texts(), tmp_path / "head"

    def refused(match, draft=None, documents=documents, target=target, resume=False, **settings):
        draft = draft or new_head(target)
        with pytest.raises(ValueError, match=match):
            distil(draft, target, documents, folder, replace(TINY, **settings), resume=resume, say=silent)

    refused(r"at most 2048, the target's positions, got 4096", length=4096, tokens_per_step=4096)
    refused(r"must share a vocabulary, got 24 and 12 tokens", draft=tiny_head(1, vocab_size=12, draft_vocab_size=12))
    refused("is for a target of width 8, got a target of width 16", draft=tiny_head(1, target_hidden_size=8))
    refused(r"reads the hidden states \[1, 9\], the target has 0 \.\. 3", draft=tiny_head(1, taps=(1, 9)))
    refused("drafts all levels at once", draft=tiny_head(1, mask_token_id=3))
    windows = r"with windows and convolutions is not trained here; make one by new_block\(target\)"
    refused(windows, draft=random_block(target, term="dflash", conv_size=2, conv_group=4))
    own = {"windows": (None, None), "term": "domino", "options": {"rank": 4, "state": 4, "plain": 0}}
    refused(
        "with rows that predict .* own token and the term 'domino'", draft=random_block(target, from_root=False, **own)
    )
    refused("depths of a block draft is its block_size, 7, got 5", draft=new_block(target), depths=5)
    refused("two blocks of 9 tokens, got 16", draft=new_block(target, block_size=9))
    refused("depths of Medusa heads is their number, 5, got 4", draft=new_medusa(target), depths=4)
    refused("one_head is for Medusa heads, got a draft of type EagleHead", one_head=True)
    refused("length must be larger than the depths, .* got 16", draft=new_medusa(target, 15))
    other = tiny_llama(0, VOCABULARY, 1, hidden_size=32)
    refused("Medusa heads are for a target of width 32, got a target of width 16", draft=new_medusa(other))
    without_layers = MedusaHeads(MedusaConfig(2, 0, 16, VOCABULARY, owns_lm_heads=True))
    refused(r"Medusa heads without layers .*; make some by new_medusa\(target\)", draft=without_layers)
    refused("depths and decay must be None", draft=draft_of_layers(target, [0]), depths=3, decay=0.5)
    refused("a step takes 128 rows, the data have", tokens_per_step=2048)
    refused("the data have token 24, the target has 24", documents=[Document(torch.tensor([24]).int(), NONE)])
    refused("in training mode", target=tiny_target().train())
    refused("no training to resume", resume=True)
    for name, value in {"epochs": 0, "loss": "kl", "written": 2, "length": 6, "depths": 0, "rate": -1.0}.items():
        refused(rf"{name} must be .*, got {value!r}", **{name: value})
    folder.mkdir(exist_ok=True)
    (folder / "mine.txt").touch()
    refused("is not empty; give a new one")


def test_a_new_head_is_of_the_targets_shape_and_reads_what_official_heads_do(demo_pair):
    config = new_head(demo_pair.target).config
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (320, 864, 10)
    assert (config.num_key_value_heads, config.head_dim, config.taps, config.tap_norms) == (5, 32, (2, 4, 5), True)
    assert not config.owns_lm_head
    assert default_taps(32) == (2, 16, 29)
    assert [default_taps(layers) for layers in (1, 2, 3, 6, 7)] == [(1,), (1, 2), (1, 2, 3), (2, 4, 6), (2, 3, 4)]


def test_a_new_block_is_of_the_targets_shape_and_reads_states_before_the_last_norm(demo_pair):
    config = new_block(demo_pair.target).config
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (320, 864, 10)
    assert (config.taps, config.block_size, config.layers, config.options["rank"]) == ((2, 4, 5), 7, 3, 80)
    assert config.options["variant"] == "gated"
    assert (config.mask_token_id, config.from_root, config.causal) == (1023, True, (False,) * 3)
    assert new_block(tiny_target()).config.taps == (1, 2)
    for wrong, said in ({"term": "domino"}, "term must be one of"), ({"layers": 0}, "must be 1 or more"):
        with pytest.raises(ValueError, match=said):
            new_block(demo_pair.target, **wrong)


def test_a_head_of_fewer_tokens_has_the_targets_rows_of_the_most_frequent():
    target = tiny_target()
    documents = [Document(torch.tensor([5, 5, 5, 3, 3, 9]).int(), torch.tensor([9, 7]).int())]
    tokens = most_frequent(documents, 3, VOCABULARY)
    assert tokens.tolist() == [3, 5, 9]
    head = new_head(target, tokens)
    assert (head.d2t + torch.arange(3)).tolist() == [3, 5, 9]
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[tokens])
    with pytest.raises(ValueError, match=r"1 \.\. 24 tokens, the target's, got 25"):
        most_frequent(documents, 25, VOCABULARY)


def test_a_draft_of_layers_is_the_target_without_the_others():
    target, tokens = tiny_target(), random_rows(1).tokens.long()
    torch.testing.assert_close(draft_of_layers(target, [0, 1, 2])(tokens).logits, target(tokens).logits)
    draft = draft_of_layers(target, [0, 2])
    del target.model.layers[1]
    target.config.num_hidden_layers = 2
    torch.testing.assert_close(draft(tokens).logits, target(tokens, use_cache=False).logits)
    assert not draft.get_input_embeddings().weight.requires_grad
    assert draft.model.norm.weight.requires_grad
    for wrong in ([], [3], [0, 0], [-1]):
        with pytest.raises(ValueError, match=r"different indices of the target's layers, 0 \.\. 1, got"):
            draft_of_layers(target, wrong)


def test_layers_whose_mlp_follows_from_their_number_are_refused_in_words():
    target = tiny("qwen3_moe", mlp_only_layers=[0])
    with pytest.raises(ValueError, match=r"of the layers \[1\] alone would have other tensors .*; take other layers"):
        draft_of_layers(target, [1])
    assert draft_of_layers(target, [0]).config.num_hidden_layers == 1


def test_the_command_refuses_in_one_line(heavypath, tmp_path):
    text, config = tmp_path / "a.txt", tmp_path / "config.json"
    text.write_text("import os\n")
    config.write_text("{}")
    for arguments, said in {
        (text, "--layers", "0,x"): "--layers must be numbers of the target's layers",
        (text, "--layers", "0", "--config", config): "--layers and --config are of different kinds",
        (text, "--layers", "0", "--depths", 3): "--depths is of --kind head or block or medusa, not of model",
        (text, "--kind", "block", "--config", config): "--config is of --kind model, not of block",
        (text, "--term", "rnn"): "--term is of --kind block, not of head",
        (text, "--kind", "block", "--term", "rn"): "--term must be one of gated, vanilla, rnn, none, got 'rn'",
        (text, "--kind", "model"): "--kind model needs --layers",
        (text, "--kind", "tree"): "--kind must be one of head, model, block, medusa, got 'tree'",
        (text, "--kind", "block", "--one-head"): "--one-head is of --kind medusa, not of block",
        (text, "--kind", "medusa", "--draft-vocab-size", 20): "--draft-vocab-size is of --kind head or block, not of",
        (text, "--config", config): "cannot make a causal language model of --config",
        (text, "--loss", "kl"): "loss must be one of tv-kl, lk, got 'kl'",
        (text,): "give more text or shorter rows",
        (text, "--draft-vocab-size", "2000"): "1 .. 1024 tokens",
    }.items():
        code, _, errors = heavypath("distil", *arguments, "--out", tmp_path / "out")
        assert (code, len(errors.splitlines())) == (1, 1)
        assert said in errors
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["--layers", "--config", "--draft-vocab-size", "block", "medusa"])
def test_the_command_trains_each_kind_of_draft_and_generate_takes_it(kind, heavypath, tmp_path):
    model, words = tmp_path / "target", [f"w{number}" for number in range(VOCABULARY)]
    save_llama(model, words)
    target = tiny_target()
    target.save_pretrained(model)
    (tmp_path / "data.txt").write_text(" ".join(words[token] for token in random_rows(5, 1, 900).tokens[0].tolist()))
    target.config.save_pretrained(tmp_path / "config")
    values = {"--layers": "0,2", "--config": tmp_path / "config" / "config.json", "--draft-vocab-size": 20}
    chosen = (kind, values[kind]) if kind in values else ("--kind", kind)
    short = ("--length", 40, "--tokens-per-step", 160, "--epochs", 1)
    draft = ("--target", model, *chosen, "--out", tmp_path / "draft")
    code, _, errors = heavypath("distil", tmp_path / "data.txt", *draft, *short)
    assert (code, "drafts with it" in errors) == (0, True)
    continued = ("generate", "w3 w5", "--target", model, "--max-new-tokens", 8)
    code, text, _ = heavypath(*continued, "--draft", tmp_path / "draft")
    assert code == 0
    assert text == heavypath(*continued, "--method", "autoregressive")[1]


@pytest.mark.parametrize("kind", ["head", "block", "medusa"])
def test_a_draft_without_a_measured_answer_is_saved_without_an_acceptance(kind, tmp_path):
    """Each row's answer is its last token, where nothing is measured, since deeper levels would be beyond the row."""
    target, rows = tiny_target(), random_rows(11, 40, 16).tokens.int()
    documents = [Document(row, row[:15], ((15, 16),)) for row in rows]
    draft = {"head": new_head, "block": new_block, "medusa": lambda target: new_medusa(target, 3)}[kind](target)
    record = distil(draft, target, documents, tmp_path / "draft", replace(TINY, written=0.0), say=silent)
    assert math.isnan([*record["held_out"].values()][-1]["overlap"][0])
    assert draft.config.acceptance is load_draft(tmp_path / "draft", target).config.acceptance is None


@pytest.mark.parametrize("kind", ["head", "block", "medusa"])
def test_a_default_tree_is_planned_with_the_acceptance_that_the_training_measured(kind, tmp_path):
    target = tiny_target()
    draft = {"head": new_head, "block": new_block, "medusa": lambda target: new_medusa(target, 3)}[kind](target)
    record = distil(draft, target, texts(), tmp_path / "draft", TINY, say=silent)
    loaded = load_draft(tmp_path / "draft", target)
    last = [*record["held_out"].values()][-1]
    measured = last["same_likeliest_token"][0], last["overlap"][0]
    assert loaded.config.acceptance == draft.config.acceptance == measured
    used = as_draft(loaded, forward_of(target, "target"), target)
    assert (used.usual_acceptance(0.0).first, used.usual_acceptance(0.7).first) == measured
    assert used.usual_acceptance(0.0).harder == TRAINED_HEAD.harder
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    for wrong in ([0.5], [0.5, 1.5], "0.5"):
        config["heavypath"]["acceptance"] = wrong
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="acceptance"):
            load_draft(tmp_path / "draft", target)
    del config["heavypath"]["acceptance"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    unknown = as_draft(load_draft(tmp_path / "draft", target), forward_of(target, "target"), target)
    assert unknown.usual_acceptance(0.0) == TRAINED_HEAD
