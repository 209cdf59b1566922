"""Block drafts as published: every layout has the laws of the formulas, and what is not understood is refused by name.

The oracle computes them row by row, of the tensors alone. Most cases are what would be wrong in silence: nothing but
the number of accepted tokens shows a shifted row, another mask, or the states of another layer.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from block_checkpoints import KEPT, LAYOUTS, OWN, TEXT, Oracle, deepspec, driven, loaded, tensors_of, variant, zlab
from head_checkpoints import LAYERS, VOCAB, WIDTH, tiny_target, write
from rounding import SMALL_MODEL

from heavypath.speculative import BlockHead, SpeculativeDecoder, load_draft
from heavypath.speculative.drafts.blocks.checkpoint import is_block, load_block
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.drafts.trained import is_trained_head
from heavypath.speculative.files.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def published(folder, target, name):
    options, write_as = LAYOUTS[name]
    kind = variant(**options)
    config, tensors = write_as(kind)
    return loaded(folder, target, kind, config, tensors), kind


@pytest.mark.parametrize("text", [TEXT, TEXT[:3], TEXT[:1]], ids=["eleven tokens", "three", "one"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_laws_of_the_formulas(name, text, target, tmp_path):
    head, kind = published(tmp_path, target, name)
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    oracle, path = Oracle(kind, tensors_of(kind), target, text), (8, 9, 2, 7)[: kind.block - 2 + kind.shift]
    expected = torch.stack([oracle.after(path[:depth]) for depth in range(len(path) + 1)])
    torch.testing.assert_close(driven(head, target, text, path), expected.float(), rtol=0, atol=SMALL_MODEL)


def test_a_causal_block_does_not_depend_on_the_masks_that_follow_and_another_does(target, tmp_path):
    for name, same in (("JetSpec", True), ("z-lab", False)):
        head, kind = published(tmp_path / name, target, name)
        short, whole = driven(head, target, TEXT), driven(head, target, TEXT, (8, 9, 2))[:1]
        fewer = Oracle(variant(**vars(kind) | {"block": 2}), tensors_of(kind), target, TEXT).after()
        torch.testing.assert_close(short, whole, rtol=0, atol=SMALL_MODEL)
        assert torch.allclose(short[0], fewer.float(), atol=SMALL_MODEL) == same


def test_a_folder_of_any_layout_is_a_block_draft_and_load_draft_takes_it(target, tmp_path):
    for name in LAYOUTS:
        published(tmp_path / name, target, name)
        assert is_block(Checkpoint(tmp_path / name))
        head = load_draft(tmp_path / name, target)
        assert isinstance(head, BlockHead)
        assert re.search(r"\w draft of blocks of \d, \d layers, \d+ parameters", describe(head))
    target.save_pretrained(tmp_path / "model")
    assert not is_block(Checkpoint(tmp_path / "model"))
    assert not is_trained_head(tmp_path)


def test_a_copy_of_the_targets_tensors_is_not_kept_and_any_other_is(target, tmp_path):
    head, _ = published(tmp_path / "copies", target, "DeepSpec")
    assert head.embed_tokens is head.lm_head is None
    config, tensors = deepspec(variant(shift=1, ids=(-1, 2, 5)))
    tensors["model.lm_head.weight"][0, 0] += 1
    head = load_block(write(tmp_path / "other", config, tensors), target)
    assert head.embed_tokens is None
    assert head.lm_head is not None


def refused(folder, target, message, kind=None, tensors=(), without=(), config=None, **given):
    kind = kind or variant()
    found = {name: tensor for name, tensor in (tensors_of(kind) | dict(tensors)).items() if name not in without}
    settings = (config or zlab(kind)[0]) | given
    with pytest.raises(ValueError, match=r"the block draft .* cannot draft for this target") as caught:
        load_block(write(folder, settings, found), target)
    assert re.search(message, str(caught.value)), caught.value


def test_every_tensor_that_is_missing_or_of_another_shape_is_named(target, tmp_path):
    kind = variant(drafted=KEPT, **OWN)
    for name, tensor in tensors_of(kind).items():
        sizes = ("fc.weight", "d2t", "t2d", "q_proj.weight", "gate_proj.weight", "lm_head.weight")
        if name not in ("t2d", "embed_tokens.weight", "lm_head.weight"):
            refused(tmp_path, target, f"{re.escape(name)}.*missing|missing.*{re.escape(name)}", kind, without=[name])
        if not name.endswith(sizes):
            wider = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
            shapes = ".*".join(re.escape(str([*each.shape])) for each in (wider, tensor))
            refused(tmp_path, target, f"{re.escape(name)}.*{shapes}", kind, tensors={name: wider})


CHOOSING = variant(term="selector", selected=6, conv=2)
DSPARK = variant(term="vanilla", shift=1)
DOMINO = variant(term="domino")
LIKE_DOMINO = {"projector_type": "domino", "emb_dim": 4, "gru_hidden_dim": 8}
INSIDE = {"mask_token_id": 39, "target_layer_ids": [1, 3, 6]}
CASES = {
    r"1 tensors are not known: layers\.0\.self_attn\.sinks": {
        "tensors": {"layers.0.self_attn.sinks": torch.zeros(4)}},
    r"fc\.weight is torch\.int8; expected floating point": {"tensors": {"fc.weight": torch.zeros(16, 48).char()}},
    "fc.weight is missing; it is another kind of draft": {"without": ["fc.weight"]},
    "kind 'linear', which is not supported": {"dflash_config": INSIDE | {"projector_type": "linear"}},
    "must give gru_hidden_dim, a positive number, got None": {
        "kind": DOMINO, "dflash_config": INSIDE | {"projector_type": "domino", "emb_dim": 4}},
    r"embed_proj\.0\.weight has shape \[4, 22\], expected \[4, 24\]": {
        "kind": DOMINO, "dflash_config": INSIDE | LIKE_DOMINO},
    "pure_draft_prefix_len 5, expected 0 to 4": {
        "kind": DOMINO, "dflash_config": INSIDE | LIKE_DOMINO | {"pure_draft_prefix_len": 5}},
    r"missing: logit_head\.embed_proj\.2\.weight": {"kind": DOMINO, "without": ["embed_proj.2.weight"]},
    "gives use_bias_gate: True, which is not known": {
        "kind": DOMINO, "dflash_config": INSIDE | LIKE_DOMINO | {"use_bias_gate": True}},
    "kind 'dspark of Gemma 4', which is not": {"architectures": ["Gemma4DSparkModel"]},
    "kind 'Qwen3DSpine2Model', which is not supported; expected dflash, dspark, dflash2, .*, or JetSpec": {
        "architectures": ["Qwen3DSpine2Model"], "tensors": {"transfer_ready": torch.tensor(True)}},
    "kind 'DFly2DraftModel', which is not": {"architectures": ["DFly2DraftModel"], "dflash_config": None, **INSIDE},
    "gives lilicorr_num_heads: 4, which is not known": {"dflash_config": INSIDE | {"lilicorr_num_heads": 4}},
    "kind 'TreeBlast', which is not": {"architectures": ["Qwen3ForCausalLM", "TreeBlast"]},
    "block_size is 5, and 16 in dflash_config": {"dflash_config": INSIDE | {"block_size": 16}},
    "kind 'dspine of speculators', which is not": {"speculators_model_type": "dspine"},
    "'transfer_ready' in .* is a single number; no tensor of a draft": {"tensors": {"transfer_ready": torch.tensor(2)}},
    r"mask_embedding has shape \[4\], expected \[16\]": {"tensors": {"mask_embedding": torch.zeros(4)}},
    "gives attention_sink_bias: True, which is not known": {"attention_sink_bias": True},
    "gives use_swa: True, which is not known": {"dflash_config": INSIDE | {"use_swa": True}},
    "gives depth_scale: 2, which is not known": {"dflash_config": INSIDE | {"depth_scale": 2, "more": None}},
    "layers 1, 7; expected some of the target's 8 but the last": {
        "dflash_config": INSIDE | {"target_layer_ids": [1, 7]}},
    "layers -2; expected some": {"dflash_config": INSIDE | {"target_layer_ids": [-2]}},
    "num_target_layers 36, the target has 8; give the": {"num_target_layers": 36},
    r"fc.weight has shape \[16, 48\], expected \[16, 32\] to read": {
        "dflash_config": INSIDE | {"target_layer_ids": [1, 3]}},
    "mask_token_id, a token of the target's 40, got None": {"dflash_config": {"target_layer_ids": [1, 3, 6]}},
    "mask_token_id, a token of the target's 40, got 40": {"dflash_config": INSIDE | {"mask_token_id": 40}},
    "target_layer_ids, or aux_hidden_state_layer_ids": {
        "dflash_config": {"mask_token_id": 39}, "num_target_layers": None},
    "must give selector_top_k, 1 to 40 tokens to choose from, got 0": {"kind": CHOOSING, "dflash_config": INSIDE},
    "conv_kernel_size 3, and the tensors are of 2": {
        "kind": CHOOSING, "dflash_config": INSIDE | {"conv_kernel_size": 3, "selector_top_k": 4}},
    r"missing: layers\.1\.mlp_conv\.base_kernel": {"kind": CHOOSING, "without": ["layers.1.mlp_conv.base_kernel"]},
    "markov_rank 8, and the tensors are of 4": {"kind": DSPARK, "markov_rank": 8},
    "markov_head_type 'rnn', and the tensors are of 'vanilla'": {
        "kind": DSPARK, "markov_head_type": "rnn"},
    "gives markov_rank: 256, which is not known": {"markov_rank": 256},
    "markov_rank 256, and the tensors are of 0": {"architectures": ["DSparkDraftModel"], "markov_rank": 256},
    r"missing: markov_head\.markov_w2\.weight": {"kind": DSPARK, "without": ["markov_head.markov_w2.weight"]},
    "must give block_size, a positive number, got None": {"block_size": None},
    "block_size 100000, expected at most 1024": {"block_size": 100_000},
    "final_logit_softcapping -1.0, expected a number above 0": {"final_logit_softcapping": -1.0},
    "output_multiplier 0, expected a number above 0": {"output_multiplier": 0},
    "block_size 1, a block of the root alone": {"block_size": 1},
    "layer_types .*chunked_attention.*, expected full": {"layer_types": ["full_attention", "chunked_attention"]},
    "layer_types .*expected full_attention or sliding_attention for each of 2": {"layer_types": ["full_attention"]},
    "must give sliding_window, a positive number, got None": {"layer_types": ["sliding_attention"] * 2},
    "use_sliding_window, and no layer_types": {"use_sliding_window": True, "layer_types": None, "sliding_window": 8},
    "type 'dynamic', expected default, linear": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    r"4 tensors are missing: layers\.0\.self_attn\.k_norm": {
        "without": [f"layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk"]},
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_what_is_not_understood_is_refused_by_its_name(message, target, tmp_path):
    refused(tmp_path, target, message, **CASES[message])


def with_mask(target, folder, saved, **more):
    """A draft with a file of the embedding of masks beside its weights."""
    write(folder, zlab(variant())[0] | more, tensors_of(variant()))
    torch.save(saved, folder / "mask_embedding.pt")
    return load_draft(folder, target)


@pytest.mark.parametrize("layout", ["z-lab", "JetSpec", "SpecForge, shift_label", "DSpark"])
def test_an_embedding_of_masks_in_a_file_is_that_of_masks_alone(layout, target, tmp_path):
    """The same as if it were the row of their token, where no token of the text is that one."""
    head, _ = published(tmp_path, target, layout)
    mask = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    torch.save(mask.bfloat16(), tmp_path / "mask_embedding.pt")
    own = load_draft(tmp_path, target)
    changed = copy.deepcopy(target)
    with torch.no_grad():
        changed.model.embed_tokens.weight[head.config.mask_token_id] = mask.bfloat16().float()
    assert not torch.equal(driven(own, target, TEXT)[0], driven(head, target, TEXT)[0])
    for ours, theirs in zip(driven(own, target, TEXT), driven(head, changed, TEXT), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("saved", [
    torch.ones(1, WIDTH), {"mask_token_id": 39, "embedding": torch.ones(WIDTH)}, {"mask_embedding": torch.ones(WIDTH)},
    {"weight": torch.ones(1, 1, WIDTH), "mask_token_id": torch.tensor(39)},
])  # fmt: skip
def test_such_a_file_may_have_a_dictionary(saved, target, tmp_path):
    assert torch.equal(with_mask(target, tmp_path, saved).mask_embedding, torch.ones(WIDTH))


@pytest.mark.parametrize(("saved", "message"), [
    (torch.ones(WIDTH + 1), r"mask_embedding has shape \[17\], expected \[16\]"),
    (torch.ones(2, WIDTH), r"mask_embedding.pt has mask_embedding of shape \[2, 16\]; expected one tensor \[H\]"),
    ({"mask_token_id": 38, "embedding": torch.ones(WIDTH)}, "is of mask_token_id 38, and config.json gives 39"),
    ({"a": torch.ones(WIDTH), "b": torch.ones(WIDTH)}, r"a of shape \[16\], b of shape \[16\]; expected one tensor"),
    ("words", "mask_embedding, a str; expected one tensor"), ({}, "has nothing; expected one tensor"),
    (torch.ones(WIDTH, dtype=torch.long), "mask_embedding is torch.int64; expected floating point"),
    (Path("x"), "cannot read the weights in .*mask_embedding.pt"),
])  # fmt: skip
def test_such_a_file_of_something_else_is_refused(saved, message, target, tmp_path):
    with pytest.raises(ValueError, match=message):
        with_mask(target, tmp_path, saved)


@pytest.mark.parametrize("name", ["embeddings.pt", "lm_head.safetensors", "d2t.pt", "mask_embedding.safetensors"])
def test_a_file_of_a_part_that_is_not_read_is_named(name, target, tmp_path):
    write(tmp_path, *zlab(variant()))
    (tmp_path / "optimizer.pt").touch()
    load_block(tmp_path, target)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"beside the weights there is {name}, which is not read; put its tensors"):
        load_block(tmp_path, target)


def test_another_target_is_refused(tmp_path):
    wide = tiny_target(width=24)
    refused(tmp_path, wide, "the target's cannot stand in, of width 24 and 40 tokens, for a head of width 16")
    shapes = r"fc\.weight has shape \[16, 48\], expected \[16, 72\].*give the target"
    refused(tmp_path, wide, shapes, variant(**OWN))
    refused(tmp_path, tiny_target(layers=LAYERS - 2), "num_target_layers 8, the target has 6")
    other = tiny_target(vocab=VOCAB + 10)
    refused(tmp_path, other, r"lm_head.weight has shape \[40, 16\], expected \[50, 16\]", variant(**OWN))
    head = loaded(tmp_path / "head", tiny_target(), variant(), *zlab(variant()))
    with pytest.raises(ValueError, match="for a target of width 16 with 40 tokens, got one of width 16 with 50"):
        SpeculativeDecoder(other, head)


class NormedEmbedding(torch.nn.Embedding):
    """As the targets of these assistants have it."""

    def __init__(self, weight):
        super().__init__(*weight.shape, _weight=weight)
        self.embed_norm = torch.nn.RMSNorm(weight.shape[1], elementwise_affine=False)

    def forward(self, tokens):
        return self.embed_norm(super().forward(tokens))


@pytest.mark.parametrize("normed", [False, True])
def test_an_assistant_of_transformers_proposes_what_their_own_generator_does(normed, tmp_path):
    """Saved by their class; two calls of their generator, the second of which has seen two more tokens."""
    target = tiny_target()
    if normed:
        target.set_input_embeddings(NormedEmbedding(target.get_input_embeddings().weight))
    theirs = pytest.importorskip("transformers", "5.23")  # the first that has one
    torch.manual_seed(4)
    config = theirs.MuseGlimmerAssistantConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, block_size=5, mask_token_id=39, target_layer_ids=[1, 3, 6], sliding_window=32,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    assistant = theirs.MuseGlimmerAssistantModel(config).eval()
    for name, weight in assistant.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    assistant.save_pretrained(tmp_path)
    head = load_block(tmp_path, target)
    ends = target.get_input_embeddings(), target.get_output_embeddings()
    settings = theirs.GenerationConfig(max_length=64, do_sample=False)
    generator = theirs.generation.DFlashTokenCandidateGenerator(assistant, *ends, settings)
    with torch.inference_mode():
        for length, read, matches in ((6, slice(0, 5), 0), (9, slice(5, 8), 2)):
            states = target(torch.tensor([TEXT[: length - 1]]), output_hidden_states=True).hidden_states
            places = {"position_ids": torch.arange(length)[None], "attention_mask": torch.ones(1, length).long()}
            given = {"hidden_states": [each[:, read] for each in states]}
            tokens, logits = generator.get_candidates(
                torch.tensor([TEXT[:length]]), places, theirs.utils.ModelOutput(given), is_first_iteration=False,
                n_last_matches=matches,
            )  # fmt: skip
            ours = driven(head, target, TEXT[:length], tokens[0, length:-1].tolist())
            torch.testing.assert_close(ours, logits[0], rtol=0, atol=1e-4)
            assert torch.equal(ours.argmax(-1), tokens[0, length:])
