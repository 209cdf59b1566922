"""The training of Medusa heads: its loss and gradients by formula, what it gains, and one random head a step."""

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch
from distil_cases import TINY, overlaps, silent, texts
from head_training_cases import VOCABULARY, random_rows, tiny_target
from medusa_checkpoints import published, write
from safetensors.torch import load_file
from tiny_models import tiny_llama
from transformers import LlamaForCausalLM

from heavypath.speculative import SpeculativeDecoder, distil, load_draft, new_medusa
from heavypath.speculative.drafts.medusa.checkpoint import load_medusa
from heavypath.speculative.drafts.medusa.saving import save_medusa
from heavypath.speculative.training import learning
from heavypath.speculative.training.learning import learn, measure_agreement
from heavypath.speculative.training.losses import LOSSES, tv_kl
from heavypath.speculative.training.medusa import one_at_random, student_of_medusa
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import Optimization, Schedule
from heavypath.speculative.training.teacher import Teacher

HEADS, TOKENS = 3, random_rows(2, 2, 12).tokens.long()
WEIGHTS = [0.8**head for head in range(HEADS)]


def by_formula(name: str, tensors: dict[str, torch.Tensor], target) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each head and its overlap, [K] each, written out position by position; nothing of the package."""
    with torch.no_grad():
        states = target(TOKENS, output_hidden_states=True).hidden_states[-1]
        target_probs = target(TOKENS).logits.softmax(-1)
    losses, overlaps = [], []
    for head in range(HEADS):
        of_head = []
        for row in range(len(TOKENS)):
            for at in range(TOKENS.shape[1] - HEADS):  # as many tokens for each head
                x, layer = states[row, at], 0
                while f"{head}.{layer}.linear.weight" in tensors:
                    inner = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
                    x, layer = x + inner * torch.sigmoid(inner), layer + 1
                draft = (tensors.get(f"{head}.{layer}.weight", target.lm_head.weight) @ x).softmax(-1)
                probs = target_probs[row, at + head + 1]  # of token at + head + 2
                overlap, kl = torch.minimum(probs, draft).sum(), (probs * (probs / draft).log()).sum()
                share = 0.5 if name == "tv-kl" else torch.exp(-3 * overlap.detach())
                of_head.append((share * kl + (1 if name == "tv-kl" else 1 - share) * (1 - overlap), overlap.detach()))
        losses.append(torch.stack([loss for loss, _ in of_head]).mean())
        overlaps.append(torch.stack([overlap for _, overlap in of_head]).mean())
    return torch.stack(losses), torch.stack(overlaps)


@pytest.mark.parametrize(
    ("name", "layers", "owns", "weights"),
    [("tv-kl", 1, True, WEIGHTS), ("lk", 2, False, WEIGHTS), ("tv-kl", 2, True, [0.0, 2.4, 0.0])],
)
@pytest.mark.parametrize("positions", [4, 100], ids=["in pieces", "at once"])
def test_the_loss_and_its_gradients_are_those_of_the_formula(
    positions, name, layers, owns, weights, tmp_path, monkeypatch
):
    """Heads of weight 0 get no gradients, so that no optimizer moves them."""
    monkeypatch.setattr(learning, "POSITIONS_AT_ONCE", positions * len(TOKENS))
    target = tiny_target()
    tensors = published(target, HEADS, layers, owns)
    heads = load_medusa(write(tmp_path, tensors), target)
    student, teacher = student_of_medusa(heads, target), Teacher(target)
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    losses, overlaps = by_formula(name, tensors, target)
    expected = (torch.tensor(weights) * losses).sum()
    expected.backward()
    learnt = learn(student, teacher(TOKENS), teacher.logits, LOSSES[name], weights)
    torch.testing.assert_close(learnt.loss, expected.detach())
    kept = torch.tensor(weights) > 0
    torch.testing.assert_close(learnt.overlaps, overlaps.where(kept, torch.nan), equal_nan=True)
    found = {
        named.replace("heads.", "").replace("layers.", ""): each for named, each in student.module.named_parameters()
    }
    for named, tensor in tensors.items():
        head, rest = named.split(".", 1)
        own = found[f"{head}.lm_head.weight" if rest == f"{layers}.weight" else named.replace("linear.", "")]
        assert (own.grad is None) == (weights[int(head)] == 0)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, tensor.grad, rtol=1e-4, atol=1e-6)
    measured, _ = measure_agreement(student, teacher, TOKENS, 5, RowsAtATime(1, "lower it", print))
    torch.testing.assert_close(measured, overlaps)


def test_new_heads_say_what_the_target_says_next_and_a_step_changes_their_own_weights():
    """Muon those of layers, AdamW lm_heads and biases; the module that learns shares their memory."""
    target = tiny_target()
    heads = new_medusa(target, 2, layers=2)
    states, logits = Teacher(target)(TOKENS).hidden.flatten(0, 1), target(TOKENS).logits.flatten(0, 1)
    torch.testing.assert_close(heads(states, target.lm_head), logits[:, None].expand(-1, 2, -1))
    shared = new_medusa(target, 2, own_lm_heads=False)
    torch.testing.assert_close(shared(states, target.lm_head), logits[:, None].expand(-1, 2, -1))
    student, teacher = student_of_medusa(heads, target), Teacher(target)
    optimization = Optimization(student.module, Schedule(3, 1, 1, matrix_rate=0.1, vector_rate=0.1, weight_decay=0.1))
    assert [len(optimization.muon.param_groups[0]["params"])] == [2 * 2]
    assert [len(group["params"]) for group in optimization.adamw.param_groups] == [2, 2 * 2]
    before = {name: tensor.clone() for name, tensor in heads.by_name().items()}
    learn(student, teacher(TOKENS), teacher.logits, tv_kl, [1.0, 0.0])
    optimization.step(0)
    for name, tensor in heads.by_name().items():
        assert torch.equal(tensor, before[name]) == name.startswith("1."), name
    for wrong in ({"heads": 0}, {"layers": 0}):
        with pytest.raises(ValueError, match="heads and layers must be 1 or more, got"):
            new_medusa(target, **wrong)


def counting_target() -> LlamaForCausalLM:
    """After a token it says the next number, with a probability of 0.9 or more for most."""
    target = tiny_llama(0, VOCABULARY, 1, initializer_range=0.1, max_position_embeddings=2048).requires_grad_(False)
    rows = torch.nn.functional.normalize(torch.randn(VOCABULARY, target.config.hidden_size), dim=-1)
    target.model.embed_tokens.weight.copy_(4 * rows)
    target.lm_head.weight.copy_(2 * rows.roll(1, 0))
    return target


@pytest.mark.parametrize(("one_head", "epochs"), [(False, 5), (True, 18)], ids=["all heads", "one head a step"])
def test_training_lowers_the_loss_and_more_tokens_are_accepted(one_head, epochs, tmp_path):
    """New heads draft the token that the target says next, which is always one too low here."""
    target, prompt = counting_target(), random_rows(3, 2, 6).tokens.long()
    teacher, heads = Teacher(target), new_medusa(target, HEADS).eval()
    settings = replace(TINY, epochs=epochs, written=1.0, one_head=one_head)
    rows = teacher((torch.arange(12)[None] + torch.tensor([[3], [20]])) % VOCABULARY)

    def loss() -> float:
        return learn(student_of_medusa(heads, target), rows, teacher.logits, tv_kl, WEIGHTS).loss.item()

    def tokens_per_step() -> float:
        decoder = SpeculativeDecoder(target, heads, tree_size=8)
        return decoder.generate(prompt, max_new_tokens=40, temperature=0.0).stats.tokens_per_step

    lost, accepted = loss(), tokens_per_step()
    record = distil(heads, target, texts(), tmp_path / "heads", settings, say=silent)
    assert accepted < 1.2
    assert tokens_per_step() > 2.5
    assert loss() < 0.6 * lost
    before, after = overlaps(record)
    assert all(late > early + 0.05 for early, late in zip(before, after, strict=True))
    assert (record["draft"], len(after), record["settings"]["depths"]) == ("medusa", HEADS, HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("owns", [True, False], ids=["own lm_heads", "the target's lm_head"])
def test_what_was_saved_loads_as_the_same_heads_and_is_read_by_the_formula(owns, dtype, tmp_path):
    target = tiny_target().to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in published(target, HEADS, layers=2, owns=owns).items()}
    heads = load_medusa(write(tmp_path / "first", tensors), target)
    save_medusa(heads, tmp_path / "saved", "tiny/target")
    saved = load_file(tmp_path / "saved" / "medusa_lm_head.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    again, states = load_draft(tmp_path / "saved", target), torch.randn(5, 16, dtype=dtype)
    assert again.config == heads.config
    assert torch.equal(again(states, target.lm_head), heads(states, target.lm_head))
    found = json.loads((tmp_path / "saved" / "config.json").read_text())
    named = {"medusa_num_heads": HEADS, "medusa_num_layers": 2, "base_model_name_or_path": "tiny/target"}
    assert named.items() <= found.items()
    save_medusa(again, tmp_path / "saved", "tiny/target")  # where its own tensors came from


def test_one_random_head_a_step_has_the_same_loss_on_average():
    weights = torch.tensor([*islice(one_at_random(WEIGHTS, seed=4), 3000)])
    assert ((weights > 0).sum(1) == 1).all()
    torch.testing.assert_close(weights.mean(0), torch.tensor(WEIGHTS), rtol=0.15, atol=0)
    again = [*islice(one_at_random(WEIGHTS, seed=4), 20)]
    assert again == [*islice(one_at_random(WEIGHTS, seed=4), 20)] != [*islice(one_at_random(WEIGHTS, seed=5), 20)]
