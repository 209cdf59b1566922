"""The training of an EAGLE head: its loss, against entries run one by one, its loop, and the head that ships."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from head_training_cases import DEPTHS, VOCABULARY, WIDTH, random_rows, tiny_head, tiny_target
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

from heavypath.speculative import demo
from heavypath.speculative.demo import demo_prompts, head_training
from heavypath.speculative.demo.head_training import HeadPhase, HeadTraining, RowSet, TapRows, head_config
from heavypath.speculative.demo.train import HEAD_PHASES
from heavypath.speculative.drafts.heads.checkpoint import load_head
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training import learning
from heavypath.speculative.training.learning import learn, measure_agreement
from heavypath.speculative.training.losses import KL_WEIGHT, tv_kl
from heavypath.speculative.training.memory import Parts
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Taught, Teacher

FOLDER = demo.FOLDER / "head"
RECORD = json.loads((FOLDER / "record.json").read_text())
SETTINGS = HeadTraining(
    steps=8,
    warmup_steps=1,
    decay_steps=4,
    tokens_per_step=64,
    phases=(HeadPhase(5, 16, 2), HeadPhase(3, 32, 3)),
    corpus_sets=(RowSet(8, 32), RowSet(16, 16)),
    sampled_rows=0,
    decay=0.7,
)


def agreement(head: EagleHead, target: LlamaForCausalLM, tokens: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    student, teacher = student_of_head(head, target), Teacher(target, head.config.taps)
    return measure_agreement(student, teacher, tokens, depths, Parts(2, "lower it", print))


def taught(target: LlamaForCausalLM, work: Path) -> list[TapRows]:
    documents = [random_rows(8, 1, 600).tokens[0]]
    return head_training.ask_for_taps(target, documents, (1, 2, 3), SETTINGS, work, resume=False)


def one_entry(
    head: EagleHead, feature: Tensor, embedded: Tensor, position: int, seen: list[list[tuple[Tensor, Tensor]]]
) -> Tensor:
    """An entry's output [1, 1, H]; it sees each layer's keys and values in `seen`, and itself, which is put there."""
    layers = iter(seen)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = next(layers)
        layer.append((key, value))
        keys, values = (torch.cat(each, 2) for each in zip(*layer, strict=True))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return head(feature, embedded, head.rotary_emb(feature, torch.tensor([[position]])), attend)


def losses_one_by_one(head: EagleHead, rows: Taught, target: LlamaForCausalLM, depths: int) -> Tensor:
    """The loss and the overlap at every node of every chain: [depths, 2, chains]."""
    found = []
    embedding, target_head = target.model.embed_tokens.weight, target.lm_head.weight
    for tokens, taps, hidden in zip(rows.tokens.long(), rows.taps.float(), rows.hidden, strict=True):
        features = head.features([*taps.unbind(1)])[:, None, None]  # [length, 1, 1, H]
        target_probs = (hidden @ target_head.T).softmax(-1)  # [length, V]; row i is the law of token i + 1
        entries_seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.layers]
        for entry in range(len(tokens) - depths):
            output = one_entry(head, features[entry], embedding[tokens[entry + 1]][None, None], entry, entries_seen)
            chain, seen = [], [list(layer) for layer in entries_seen]
            for depth in range(depths):
                if depth:
                    embedded = embedding[tokens[entry + 1 + depth]][None, None]
                    output = one_entry(head, head.fed_back(output), embedded, entry + depth, seen)
                draft_probs = (head.before_lm_head(output)[0, 0] @ target_head.T).softmax(-1)
                wanted = target_probs[entry + 1 + depth]
                overlap = torch.minimum(wanted, draft_probs).sum()
                divergence = (wanted * (wanted / draft_probs).log()).sum()
                chain.append(torch.stack([1 - overlap + KL_WEIGHT * divergence, overlap]))
            found.append(torch.stack(chain))
    return torch.stack(found, -1)


@pytest.mark.parametrize("logits_at_once", [learning.LOGITS_AT_ONCE, 3 * 2 * VOCABULARY])  # one piece, and several
@pytest.mark.parametrize("depths", [1, DEPTHS])
@pytest.mark.parametrize(
    "variant", [{}, {"feeds_back_normed": True, "layers": 2}, {"generation": 1, "taps": (3,), "tap_norms": False}]
)
def test_the_loss_and_its_gradients_are_those_of_entries_run_one_by_one(variant, depths, logits_at_once, monkeypatch):
    monkeypatch.setattr(learning, "LOGITS_AT_ONCE", logits_at_once)
    head, target, rows = tiny_head(1, **variant), tiny_target(), random_rows(2)
    taps = rows.taps[:, :, : len(head.config.taps)]
    taught = Taught(rows.tokens, taps, torch.randn(*rows.tokens.shape, WIDTH))
    decay = 0.7 ** torch.arange(depths)
    loss, overlaps = learn(student_of_head(head, target), taught, target.lm_head, tv_kl, decay.tolist())
    losses = losses_one_by_one(head, taught, target, depths).mean(-1)
    expected = (losses[:, 0] * decay).sum()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(overlaps, losses[:, 1].detach(), atol=1e-5, rtol=1e-5)
    parameters = list(head.parameters())
    for parameter, theirs in zip(parameters, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(parameter.grad, theirs, atol=1e-5, rtol=1e-4)


def test_what_is_measured_is_the_overlap_of_every_node_of_every_chain():
    head, target = tiny_head(3), tiny_target()
    tokens = random_rows(4, 3, 12).tokens.long()
    with torch.no_grad():
        hidden = target.model(tokens, output_hidden_states=True).hidden_states
        taught = Taught(tokens, torch.stack([hidden[tap] for tap in head.config.taps], 2), hidden[-1])
        expected = losses_one_by_one(head, taught, target, 5)[:, 1].mean(-1)
    overlaps, top_1 = agreement(head, target, tokens, 5)
    torch.testing.assert_close(overlaps, expected, atol=1e-5, rtol=1e-5)
    assert ((top_1 >= 0) & (top_1 <= 1)).all()


def test_batches_go_through_all_phases_with_every_row_long_enough():
    rows = [random_rows(5, 8, 32), random_rows(6, 16, 16)]
    batches = list(head_training.tap_batches(rows, SETTINGS))
    assert [(*batch.tokens.shape, depths) for batch, depths in batches] == [(4, 16, 2)] * 5 + [(2, 32, 3)] * 3
    pieces = [*rows[0].tokens[:, :16], *rows[0].tokens[:, 16:], *rows[1].tokens]
    for batch, _ in batches[:5]:
        for row in batch.tokens:
            assert sum(torch.equal(row, piece) for piece in pieces) == 1


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_training_raises_the_overlap(uncompiled, tmp_path):
    head, target = tiny_head(7), tiny_target()
    held_out = random_rows(9, 8, 32).tokens.long()
    before, _ = agreement(head, target, held_out, 3)
    settings = replace(SETTINGS, steps=60, decay_steps=30, phases=(HeadPhase(60, 16, 3),))
    head_training.train_head(head, target, taught(target, tmp_path), settings, tmp_path, resume=False)
    after, _ = agreement(head, target, held_out, 3)
    assert (after > before + 0.05).all()


def test_an_interrupted_training_continues_as_if_it_had_not_been(uncompiled, tmp_path, monkeypatch):
    target, whole, parts, interrupted = tiny_target(), tiny_head(7), tiny_head(7), tmp_path / "interrupted"
    interrupted.mkdir()
    teacher = taught(target, tmp_path)
    head_training.train_head(whole, target, teacher, SETTINGS, tmp_path, resume=False)

    monkeypatch.setattr(head_training, "CHECKPOINT_STEPS", 3)
    step_taken = head_training.Optimization.step

    def step_or_stop(self, step):
        if step == 4:
            raise RuntimeError("killed")
        step_taken(self, step)

    monkeypatch.setattr(head_training.Optimization, "step", step_or_stop)
    with pytest.raises(RuntimeError, match="killed"):
        head_training.train_head(parts, target, teacher, SETTINGS, interrupted, resume=False)
    monkeypatch.setattr(head_training.Optimization, "step", step_taken)
    again = tiny_head(10)
    head_training.train_head(again, target, teacher, SETTINGS, interrupted, resume=True)
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_shipped_head_is_small_and_in_the_official_layout():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "record.json"}
    assert sum(files.values()) <= 4e6
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert {"fc.weight", "fc_norm.2.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"} < set(tensors)
    assert sum(tensor.numel() for tensor in tensors.values()) == RECORD["parameters"]


def test_the_shipped_head_has_the_shape_that_the_script_trains(demo_pair):
    head = load_head(FOLDER, demo_pair.target)
    assert head.config == head_config()
    assert RECORD["training"]["phases"] == json.loads(json.dumps([asdict(phase) for phase in HEAD_PHASES]))


def test_the_shipped_head_agrees_with_the_target_on_held_out_text_better_than_the_draft():
    overlaps = RECORD["overlap_at_temperature_1"]
    assert overlaps == sorted(overlaps, reverse=True)
    assert overlaps[0] >= 0.68
    assert overlaps[4] >= 0.6
    assert overlaps[4] > json.loads((FOLDER.parent / "record.json").read_text())["overlap_at_temperature_1"]


def test_recorded_overlaps_are_about_those_of_the_prompts(demo_pair):
    """The prompts are held-out text too, though a small part of it."""
    tokenizer = demo_pair.tokenizer
    target = demo_pair.target
    head, total, positions = load_head(FOLDER, target), torch.zeros(5), 0
    for prompt in demo_prompts():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        total += ids.numel() * agreement(head, target, ids, 5)[0]
        positions += ids.numel()
    assert (total / positions - torch.tensor(RECORD["overlap_at_temperature_1"])).abs().max() < 0.08
