"""What trainings are made of: teachers, students, attention to chains, losses and batches in parts."""

import math

import numpy as np
import pytest
import torch
from families import tiny
from head_training_cases import random_rows, tiny_head, tiny_target
from transformers import LlamaForCausalLM

from heavypath.speculative.models.structure import structure_of
from heavypath.speculative.training import chains, learning
from heavypath.speculative.training.chains import ChainAttention, joined_attention, masked_attention
from heavypath.speculative.training.learning import Learnt, learn
from heavypath.speculative.training.losses import LOSSES, lk, overlap_and_divergence, tv_kl
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import Optimization, Schedule
from heavypath.speculative.training.student import student_of_head, student_of_model
from heavypath.speculative.training.teacher import Teacher, logits_behind

MODELS = {
    "llama": {}, "gemma2": {"final_logit_softcapping": 2.0}, "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0}, "mixtral": {}, "gpt2": {},
}  # fmt: skip
TOKENS = random_rows(1, 2, 12).tokens.long()


@pytest.mark.parametrize("name", MODELS)
def test_a_teacher_says_what_the_model_itself_computes_and_leaves_it_as_it_was(name):
    model = tiny(name, **MODELS[name])
    before, teacher = structure_of(model), Teacher(model, (0, 2))
    taught = teacher(TOKENS.to(torch.int16))
    logits = teacher.logits(taught.hidden[:, 4:7])
    assert structure_of(model) == before
    with torch.no_grad():
        out = model(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(logits, out.logits[:, 4:7])
    torch.testing.assert_close(taught.taps, torch.stack([out.hidden_states[tap] for tap in (0, 2)], 2))
    torch.testing.assert_close(taught.hidden, out.hidden_states[-1])


def test_a_model_is_whole_again_if_its_logits_fail():
    model = tiny_target()
    with pytest.raises(ValueError, match=r"reads the hidden states \[1, 4\], the target has 0 \.\. 3"):
        Teacher(model, (1, 4))
    with pytest.raises(RuntimeError):
        logits_behind(model, torch.zeros(1, 1, 5))
    assert model.model(TOKENS).last_hidden_state.shape == (2, 12, 16)


def test_attention_to_chains_is_one_function_on_all_devices(monkeypatch):
    """Off the CPU it takes the masked form."""
    torch.manual_seed(4)
    query, *states = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(7))
    outputs, gradients = [], []
    for attention in (joined_attention, masked_attention):
        out = attention(query, states[:3], states[3:])
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.sin().sum(), [query, *states]))
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(chains, "joined_attention", None)
    query, key = torch.empty(1, 2, 5, 8, device="meta"), torch.empty(1, 1, 5, 8, device="meta")
    attend = ChainAttention(layers=1)
    assert [attend(query, key, key).shape for _ in range(3)] == [(1, 2, 5, 8)] * 3


@pytest.mark.parametrize(("loss", "positions", "share"), [(tv_kl, learning.POSITIONS_AT_ONCE, 1.0), (lk, 5 * 2, 0.4)])
def test_a_plain_draft_has_the_gradients_of_its_loss_written_out(loss, positions, share, monkeypatch):
    """Of the positions that it predicts, all or a share of them."""
    monkeypatch.setattr(learning, "POSITIONS_AT_ONCE", positions)
    torch.manual_seed(5)
    predicts = torch.rand(TOKENS.shape) < share
    draft, target = LlamaForCausalLM(tiny_target().config).eval(), tiny_target()
    with torch.no_grad():
        target_logprobs = target(TOKENS).logits.log_softmax(-1)
    teacher = Teacher(target)
    losses, overlaps = (each[predicts] for each in loss(target_logprobs, draft(TOKENS).logits))
    parameters = list(draft.parameters())
    expected = torch.autograd.grad(losses.mean(), parameters)
    taught = teacher(TOKENS)._replace(predicts=predicts)
    learnt = learn(student_of_model(draft), taught, teacher.logits, loss, [1.0] * 5)
    torch.testing.assert_close(learnt.loss, losses.mean().detach())
    torch.testing.assert_close(learnt.overlaps, overlaps.mean().detach()[None])
    torch.testing.assert_close([each.grad for each in parameters], [*expected], atol=1e-6, rtol=1e-4)


def test_a_head_of_fewer_tokens_learns_from_the_whole_distribution_of_the_target():
    tokens = torch.tensor([1, 2, 3, 5, 8, 13, 21])
    head, target = tiny_head(6, draft_vocab_size=7, owns_lm_head=True), tiny_target()
    head.d2t.copy_(tokens - torch.arange(7))
    student, teacher = student_of_head(head, target), Teacher(target, (1, 2, 3))
    rows = teacher(TOKENS)
    (outputs,) = student.outputs(rows, 1)
    draft_logits = torch.full((2, 11, 24), -torch.inf).index_copy(2, tokens, head.lm_head(head.norm(outputs)))
    with torch.no_grad():
        target_probs = target(TOKENS).logits[:, 1:].softmax(-1)
    overlap = torch.minimum(target_probs, draft_logits.softmax(-1)).sum(-1).mean()
    learnt = learn(student, rows, teacher.logits, tv_kl, [1.0])
    torch.testing.assert_close(learnt.overlaps, overlap.detach()[None])


def gradients_in_parts(rows_at_once, fitting=99):
    """Of a batch of 8 rows; more rows than `fitting` are too many. Also what was said."""
    head, target = tiny_head(7), tiny_target()
    student, teacher, said = student_of_head(head, target), Teacher(target, (1, 2, 3)), []
    batch = random_rows(2, 8, 12).tokens
    predicts = torch.rand(batch.shape, generator=torch.Generator().manual_seed(9)) < 0.4

    def of_part(part: torch.Tensor) -> Learnt:
        taught = teacher(batch[part])._replace(predicts=predicts[part])
        learnt = learn(student, taught, teacher.logits, tv_kl, [1.0, 0.5], predicts)
        if len(part) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return learnt

    found = RowsAtATime(rows_at_once, "lower length", said.append).run(torch.arange(8), of_part, head.zero_grad)
    learnt = sum(each.loss for each in found), sum(each.overlaps for each in found)
    return [*learnt, *(weight.grad for weight in head.parameters())], said


@pytest.mark.parametrize(("rows_at_once", "fitting", "said"), [
    (3, 99, []),
    (8, 2, ["out of memory; going on with 4 rows at a time", "out of memory; going on with 2 rows at a time"]),
])  # fmt: skip
def test_a_batch_in_parts_has_the_gradients_of_the_whole(rows_at_once, fitting, said):
    """Out of memory halves the rows, and starts the batch again."""
    whole, _ = gradients_in_parts(8)
    parts, told = gradients_in_parts(rows_at_once, fitting)
    assert told == said
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_what_is_out_of_memory_and_what_to_lower_then():
    """The CPU's allocator runs out of memory, too; another error is none of memory."""
    with pytest.raises(torch.OutOfMemoryError, match="out of memory with one row; lower length"):
        gradients_in_parts(1, fitting=0)
    with pytest.raises(RuntimeError, match="shapes"):
        RowsAtATime(4, "free some", print).run(torch.zeros(4, 1), lambda part: part @ part)
    sizes = []

    def allocate(part: torch.Tensor) -> int:
        sizes.append(len(part))
        torch.empty(len(part) - 1, 2**60, dtype=torch.int8)  # an exabyte, but for one row
        return len(part)

    assert sum(RowsAtATime(3, "free some", print).run(torch.zeros(3, 1), allocate)) == 3
    assert sizes == [3, 1, 1, 1]


def test_what_is_frozen_does_not_learn_and_rows_for_tokens_learn_by_adamw():
    target = tiny_target().requires_grad_(True)
    target.model.norm.weight.requires_grad_(False)
    schedule = Schedule(3, 1, 1, matrix_rate=0.1, vector_rate=0.1, weight_decay=0.1)
    optimization = Optimization(target, schedule)
    names = {id(weight): name for name, weight in target.named_parameters()}
    by_token, rest = ([names[id(each)] for each in group["params"]] for group in optimization.adamw.param_groups)
    assert by_token == ["model.embed_tokens.weight"]
    assert "model.norm.weight" not in rest
    assert all("layernorm" in name for name in rest)
    assert len(optimization.muon.param_groups[0]["params"]) == 3 * 7


def by_formula(name: str, target: np.ndarray, logits: np.ndarray, share: float) -> float:
    """A loss in fp64, with lambda of the LK loss given, as no gradient goes through it."""
    draft = np.exp(logits) / np.exp(logits).sum()
    kept = target / target.sum()
    overlap, kl = np.minimum(target, draft).sum(), (kept * np.log(kept / draft)).sum()
    return 1 - overlap + 0.5 * kl if name == "tv-kl" else share * kl + (1 - share) * (1 - overlap)


@pytest.mark.parametrize("tokens", [9, 12])  # of the target; the draft has nine of them
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_by_formula_and_gradients_those_of_finite_differences(name, tokens):
    generator = np.random.default_rng(3)
    target = generator.dirichlet(np.ones(tokens))[:9]
    logits = generator.normal(size=9)
    overlap = np.minimum(target, np.exp(logits) / np.exp(logits).sum()).sum()
    share = math.exp(-3 * overlap)
    given = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    loss, said = LOSSES[name](torch.tensor(target, dtype=torch.float32).log(), given)
    assert said.item() == pytest.approx(overlap)
    assert loss.item() == pytest.approx(by_formula(name, target, logits, share), rel=1e-5)
    loss.backward()
    for place, step in enumerate(1e-6 * np.eye(9)):
        above, below = (by_formula(name, target, logits + sign * step, share) for sign in (1, -1))
        assert given.grad[place].item() == pytest.approx((above - below) / 2e-6, abs=2e-6)


def test_tokens_that_the_draft_lacks_count_in_the_overlap_and_kl_is_of_the_others():
    kept = torch.tensor([0.5, 0.3])  # of three tokens
    overlap, divergence = overlap_and_divergence(kept.log(), torch.tensor([0.6, 0.4]).log())
    assert overlap.item() == pytest.approx(0.5 + 0.3)
    given_kept = kept / kept.sum()
    expected = (given_kept * (given_kept / torch.tensor([0.6, 0.4])).log()).sum().item()
    assert divergence.item() == pytest.approx(expected, abs=1e-6)


def test_tokens_that_the_target_rules_out_have_a_loss_and_gradients():
    for loss in LOSSES.values():
        logits = torch.zeros(3, requires_grad=True)
        value, _ = loss(torch.tensor([0.5, 0.5, 0.0]).log(), logits)
        value.backward()
        assert torch.isfinite(torch.cat([value[None], logits.grad])).all()
