"""Hidden states that a training keeps on disk: they are the target's, a resumed run finds them, and gradients agree."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from distil_cases import TINY, silent, texts
from head_training_cases import VOCABULARY, random_rows, tiny_head, tiny_target

from heavypath.speculative import distil, distillation
from heavypath.speculative.training import kept
from heavypath.speculative.training.kept import KeptStates, bytes_kept
from heavypath.speculative.training.learning import learn
from heavypath.speculative.training.losses import LOSSES
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.rows import Texts
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Taught, Teacher

ROWS = random_rows(4, 6, 12).tokens
EVERYWHERE = torch.ones(ROWS.shape, dtype=torch.bool)
TOKENS = torch.tensor([1, 2, 3, 5, 8, 13, 21])


def kept_states(folder, teacher, tokens=None, context=nullcontext, predicts=EVERYWHERE):
    parts = RowsAtATime(4, "lower length", print)
    return KeptStates(teacher, Texts(ROWS, predicts), tokens, folder, parts, context, silent)


def test_sums_are_computed_only_where_a_draft_predicts(tmp_path, monkeypatch):
    predicts = torch.rand(ROWS.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    teacher, counted, logits = Teacher(tiny_target(), (1,)), [], Teacher.logits
    monkeypatch.setattr(Teacher, "logits", lambda own, hidden: counted.append(hidden.shape[1]) or logits(own, hidden))
    chosen = torch.tensor([3, 1])
    taught = kept_states(tmp_path / "some", teacher, predicts=predicts)(chosen, 2)
    assert sum(counted) == predicts.sum()
    everywhere = kept_states(tmp_path / "all", teacher)(chosen, 2)
    torch.testing.assert_close(taught.sums, everywhere.sums.where(predicts[chosen, 2:], 0.0))
    assert taught.predicts.equal(predicts[chosen, 2:])
    assert taught.taps.equal(everywhere.taps)


def test_they_are_those_of_the_target_in_16_bits(tmp_path):
    target = tiny_target()
    states = kept_states(tmp_path, Teacher(target, (1, 3)))
    chosen = torch.tensor([5, 0, 2])
    taught = states(chosen, 3)
    whole = target(ROWS[chosen].long(), output_hidden_states=True)
    assert taught.tokens.equal(ROWS[chosen, 3:].long())
    torch.testing.assert_close(taught.taps[:, :, 0], whole.hidden_states[1][:, 3:], rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(taught.hidden, whole.hidden_states[3][:, 3:], rtol=2**-11, atol=1e-4)
    torch.testing.assert_close(taught.sums, whole.logits[:, 3:].logsumexp(-1), rtol=0, atol=2e-2)
    assert bytes_kept(ROWS, 16, 2) == sum(each.stat().st_size for each in tmp_path.iterdir())


def test_probabilities_have_a_sum_of_1_where_the_layers_run_in_bf16(tmp_path):
    teacher = Teacher(tiny_target(), (1,))
    states = kept_states(tmp_path, teacher, context=lambda: torch.autocast("cpu", torch.bfloat16))
    taught = states(torch.arange(6), 0)
    torch.testing.assert_close(taught.sums, teacher.logits(taught.hidden).logsumexp(-1), rtol=0, atol=1e-5)
    exact = teacher(ROWS)
    assert not torch.equal(taught.taps, exact.taps.bfloat16().float()), "the layers ran in bf16"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_those_of_the_whole_logits(loss, scaled, tmp_path, monkeypatch):
    """Also where the target scales its logits behind the lm_head."""
    target = tiny_target()
    if scaled:
        own = target.forward

        def forward(**given):
            out = own(**given)
            out.logits = 3 * torch.tanh(out.logits / 3)
            return out

        monkeypatch.setattr(target, "forward", forward)
    head = tiny_head(6, draft_vocab_size=7, owns_lm_head=True)
    head.d2t.copy_(TOKENS - torch.arange(7))
    student, teacher = student_of_head(head, target), Teacher(target, (1, 2, 3))
    states = kept_states(tmp_path, teacher, TOKENS)
    taught = states(torch.arange(3), 0)

    def gradients(rows: Taught, logits):
        head.zero_grad()
        found = learn(student, rows, logits, LOSSES[loss], [1.0, 0.5])
        return [*found, *(weight.grad for weight in head.parameters())]

    assert states.logits(taught.hidden).shape[-1] == 7
    expected = gradients(taught._replace(sums=None), teacher.logits)
    torch.testing.assert_close(gradients(taught, states.logits), expected, rtol=1e-4, atol=1e-6)
    assert target.get_output_embeddings().weight.shape[0] == VOCABULARY


def test_a_later_run_does_not_ask_the_target_again(tmp_path, monkeypatch):
    teacher = Teacher(tiny_target(), (1,))
    first = kept_states(tmp_path, teacher)(torch.arange(6), 0)
    monkeypatch.setattr(Teacher, "__call__", lambda *_: pytest.fail("the target read the rows again"))
    for own, before in zip(kept_states(tmp_path, teacher)(torch.arange(6), 0), first, strict=True):
        assert own.equal(before)


def test_a_run_that_was_interrupted_reads_all_rows_again(tmp_path, monkeypatch):
    teacher = Teacher(tiny_target(), (1,))
    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "logits", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            kept_states(tmp_path, teacher)
    assert kept_states(tmp_path, teacher)(torch.arange(6), 0).sums.min() > 0


def test_logits_that_depend_on_other_tokens_are_refused(tmp_path, monkeypatch):
    target = tiny_target()
    own = target.forward

    def forward(**given):
        out = own(**given)
        out.logits = out.logits - out.logits.mean(-1, keepdim=True)
        return out

    monkeypatch.setattr(target, "forward", forward)
    with pytest.raises(ValueError, match="depend on other tokens'; set keep=False"):
        kept_states(tmp_path, Teacher(target), TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "keeps"), [
    ({"epochs": 2}, True), ({"epochs": 2, "keep": False}, False), ({"epochs": 1, "keep": True}, True),
    ({"epochs": 1}, False),
])  # fmt: skip
def test_by_default_they_are_kept_for_several_epochs(settings, keeps, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(distillation, "KeptStates", lambda *given: made.append(1) or KeptStates(*given))
    head = tiny_head(1, draft_vocab_size=7, owns_lm_head=True)
    distil(head, tiny_target(), texts(), tmp_path / "head", replace(TINY, **settings), say=silent)
    assert bool(made) == keeps
    assert not (tmp_path / "head" / "training").exists()


@pytest.mark.slow
def test_a_training_goes_on_where_the_states_that_it_has_kept_fill_the_disk(tmp_path, monkeypatch):
    head = tmp_path / "head"
    settings = replace(TINY, epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "train", lambda *_: pytest.fail("the training stops here"))
        with pytest.raises(pytest.fail.Exception):
            distil(tiny_head(1), tiny_target(), texts(), head, settings, say=silent)
    usage = distillation.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(distillation.shutil, "disk_usage", lambda path: usage)
    distil(tiny_head(1), tiny_target(), texts(), head, settings, resume=True, say=silent)
    assert (head / "config.json").exists()


@pytest.mark.slow
def test_a_disk_without_room_is_named_first_and_the_training_goes_on_as_advised(tmp_path, monkeypatch):
    usage = distillation.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(distillation.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(kept.KeptStates, "_compute", lambda *_: pytest.fail("the target read rows"))
    with pytest.raises(
        OSError, match=r"tokens take .* GB, and there are .* GB in .*; give another folder, or keep=False"
    ):
        distil(tiny_head(1), tiny_target(), texts(), tmp_path / "head", replace(TINY, epochs=2), say=silent)
    advised = replace(TINY, epochs=2, keep=False)
    monkeypatch.setattr(distillation, "write_texts", lambda *_: pytest.fail("the target wrote its texts again"))
    distil(tiny_head(1), tiny_target(), texts(), tmp_path / "head", advised, resume=True, say=silent)
    assert (tmp_path / "head" / "config.json").exists()
