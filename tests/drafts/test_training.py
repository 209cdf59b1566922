"""What trainings are made of: teachers, students, attention to chains, batches in parts, and the loop."""

import os
import signal

import pytest
import torch
from head_training_cases import random_rows, tiny_head, tiny_target
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from heavypath.speculative.models.structure import structure_of
from heavypath.speculative.training import chains, learning, loop
from heavypath.speculative.training.chains import ChainAttention, joined_attention, masked_attention
from heavypath.speculative.training.learning import Learnt, learn
from heavypath.speculative.training.losses import lk, tv_kl
from heavypath.speculative.training.memory import Parts
from heavypath.speculative.training.optimization import Optimization, Progress, Schedule
from heavypath.speculative.training.student import student_of_head, student_of_model
from heavypath.speculative.training.teacher import Teacher, logits_behind

SHAPE = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "llama": tiny_target,
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=24, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    ),
}
TOKENS = random_rows(1, 2, 12).tokens.long()


@pytest.mark.parametrize("name", MODELS)
def test_a_teacher_says_what_the_model_itself_computes_and_leaves_it_as_it_was(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    before = structure_of(model)
    teacher = Teacher(model, (0, 1, 3))
    taught = teacher(TOKENS.to(torch.int16))
    logits = teacher.logits(taught.hidden[:, 4:7])
    assert structure_of(model) == before
    with torch.no_grad():
        out = model(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(logits, out.logits[:, 4:7])
    torch.testing.assert_close(taught.taps, torch.stack([out.hidden_states[tap] for tap in (0, 1, 3)], 2))
    torch.testing.assert_close(taught.hidden, out.hidden_states[-1])


def test_a_teacher_without_the_hidden_states_that_are_read_is_refused():
    with pytest.raises(ValueError, match=r"reads the hidden states \[1, 4\], the target has 0 \.\. 3"):
        Teacher(tiny_target(), (1, 4))


def test_a_model_is_whole_again_if_its_logits_fail():
    model = tiny_target()
    with pytest.raises(RuntimeError):
        logits_behind(model, torch.zeros(1, 1, 5))
    assert model.model(TOKENS).last_hidden_state.shape == (2, 12, 16)


def test_attention_to_chains_is_one_function_on_all_devices():
    torch.manual_seed(4)
    query, *states = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(7))
    keys, values = states[:3], states[3:]
    outputs, gradients = [], []
    for attention in (joined_attention, masked_attention):
        out = attention(query, keys, values)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.sin().sum(), [query, *states]))
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_attention_to_chains_takes_the_masked_form_off_the_cpu(monkeypatch):
    monkeypatch.setattr(chains, "joined_attention", None)
    query, key = torch.empty(1, 2, 5, 8, device="meta"), torch.empty(1, 1, 5, 8, device="meta")
    attend = ChainAttention(layers=1)
    for _ in range(3):
        assert attend(query, key, key).shape == (1, 2, 5, 8)


@pytest.mark.parametrize("loss", [tv_kl, lk])
@pytest.mark.parametrize("logits_at_once", [learning.LOGITS_AT_ONCE, 5 * 2 * 24])  # one piece, and several
def test_a_plain_draft_has_the_gradients_of_its_loss_written_out(loss, logits_at_once, monkeypatch):
    monkeypatch.setattr(learning, "LOGITS_AT_ONCE", logits_at_once)
    torch.manual_seed(5)
    draft, target = LlamaForCausalLM(tiny_target().config).eval(), tiny_target()
    with torch.no_grad():
        target_logprobs = target(TOKENS).logits.log_softmax(-1)
    teacher = Teacher(target)
    losses, overlaps = loss(target_logprobs, draft(TOKENS).logits)
    parameters = list(draft.parameters())
    expected = torch.autograd.grad(losses.mean(), parameters)
    learnt = learn(student_of_model(draft), teacher(TOKENS), teacher.logits, loss, [1.0] * 5)
    torch.testing.assert_close(learnt.loss, losses.mean().detach())
    torch.testing.assert_close(learnt.overlaps, overlaps.mean().detach()[None])
    for parameter, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, theirs, atol=1e-6, rtol=1e-4)


def test_a_head_of_fewer_tokens_learns_from_the_whole_distribution_of_the_target():
    tokens = torch.tensor([1, 2, 3, 5, 8, 13, 21])
    head, target = tiny_head(6, draft_vocab_size=7, owns_lm_head=True), tiny_target()
    assert head.d2t is not None
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


def gradients_in_parts(
    rows_at_once: int, fitting: int = 99, loss=tv_kl
) -> tuple[Learnt, list[torch.Tensor], list[str]]:
    """Of a batch of 8 rows; more rows than `fitting` are too many. Also what was said."""
    head, target = tiny_head(7), tiny_target()
    student, teacher, said = student_of_head(head, target), Teacher(target, (1, 2, 3)), []
    batch = random_rows(2, 8, 12).tokens

    def of_part(part: torch.Tensor) -> Learnt:
        learnt = learn(student, teacher(part), teacher.logits, loss, [1.0, 0.5], len(part) / len(batch))
        if len(part) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return learnt

    found = Parts(rows_at_once, "lower length", said.append).run(batch, of_part, head.zero_grad)
    learnt = Learnt(sum(each.loss for each in found), sum(each.overlaps for each in found))
    return learnt, [weight.grad for weight in head.parameters()], said


@pytest.mark.parametrize("rows_at_once", [2, 3, 1])
def test_a_batch_in_parts_has_the_gradients_of_the_whole(rows_at_once):
    whole, expected, _ = gradients_in_parts(8)
    learnt, gradients, said = gradients_in_parts(rows_at_once)
    assert not said
    for ours, theirs in zip([*learnt, *gradients], [*whole, *expected], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_out_of_memory_halves_the_rows_and_starts_the_batch_again():
    _, expected, _ = gradients_in_parts(8)
    _, gradients, said = gradients_in_parts(8, fitting=2)
    assert said == ["out of memory; going on with 4 rows at a time", "out of memory; going on with 2 rows at a time"]
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_one_row_that_is_too_large_is_an_error_that_says_what_to_lower():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory with one row; lower length"):
        gradients_in_parts(8, fitting=0)


def test_the_cpus_allocator_runs_out_of_memory_too():
    sizes = []

    def allocate(part: torch.Tensor) -> int:
        sizes.append(len(part))
        torch.empty(len(part) - 1, 2**60, dtype=torch.int8)  # an exabyte, but for one row
        return len(part)

    assert sum(Parts(4, "free some", print).run(torch.zeros(4, 1), allocate)) == 4
    assert sizes == [4, 2, 1, 1, 1, 1]


def test_another_error_is_none_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        Parts(4, "free some", print).run(torch.zeros(4, 1), lambda part: part @ part)


class Counter:
    """A model of one weight that learns the number of each batch, in a loop of twelve steps."""

    def __init__(self, folder, stop_at=None):
        self.model, self.stop_at, self.seen = nn.Linear(2, 2), stop_at, []
        nn.init.ones_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        schedule = Schedule(12, 1, 6, matrix_rate=0.1, vector_rate=0.1, weight_decay=0.0)
        self.optimization = Optimization(self.model, schedule)
        self.checkpoint = folder / "checkpoint.pt"

    def gradients(self, batch: int) -> Learnt:
        self.seen.append(batch)
        loss = (self.model(torch.eye(2)) * torch.arange(4.0).view(2, 2) - batch).square().mean()
        loss.backward()
        if len(self.seen) == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return Learnt(loss.detach(), torch.zeros(1))

    def run(self, resume: bool) -> None:
        checkpoints = loop.Checkpoints(self.checkpoint, every=5, resume=resume)
        loop.train(self.optimization, range(100), self.gradients, checkpoints, Progress(12, 1, lambda line: None))


def test_a_training_that_ctrl_c_ends_leaves_a_checkpoint_of_whole_steps(tmp_path):
    (tmp_path / "whole").mkdir()
    whole, first, second = Counter(tmp_path / "whole"), Counter(tmp_path, stop_at=7), Counter(tmp_path)
    whole.run(resume=False)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        first.run(resume=False)
    assert signal.getsignal(signal.SIGINT) is handler
    second.run(resume=True)
    assert first.seen + second.seen == whole.seen == [*range(12)]
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


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
