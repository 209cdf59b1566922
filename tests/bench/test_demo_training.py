"""The training of the shipped head: its batches, and a training that goes on after a stop."""

from dataclasses import replace

import pytest
import torch
from bench_scripts import script
from head_training_cases import agreement, random_rows, tiny_head, tiny_target

head_training = script("demo_pair.head_training")
SETTINGS = head_training.HeadTraining(
    steps=8, warmup_steps=1, decay_steps=4, tokens_per_step=64,
    phases=(head_training.HeadPhase(5, 16, 2), head_training.HeadPhase(3, 32, 3)),
    corpus_sets=(head_training.RowSet(8, 32), head_training.RowSet(16, 16)), sampled_rows=0, decay=0.7,
)  # fmt: skip


def test_batches_go_through_all_phases_with_every_row_long_enough():
    rows = [random_rows(5, 8, 32), random_rows(6, 16, 16)]
    batches = list(head_training.tap_batches(rows, SETTINGS))
    assert [(*batch.tokens.shape, depths) for batch, depths in batches] == [(4, 16, 2)] * 5 + [(2, 32, 3)] * 3
    pieces = [*rows[0].tokens[:, :16], *rows[0].tokens[:, 16:], *rows[1].tokens]
    for batch, _ in batches[:5]:
        for row in batch.tokens:
            assert sum(torch.equal(row, piece) for piece in pieces) == 1


PHASES = (head_training.HeadPhase(20, 16, 3), head_training.HeadPhase(10, 32, 3))


def trained(head, target, folder, resume=False):
    """The head after a training on texts of the target."""
    folder.mkdir(exist_ok=True)
    settings = replace(SETTINGS, steps=30, decay_steps=15, phases=PHASES)
    documents = [random_rows(8, 1, 600).tokens[0]]
    rows = head_training.ask_for_taps(target, documents, (1, 2, 3), settings, folder, resume=resume)
    head_training.train_head(head, target, rows, settings, folder, resume=resume)
    return head


@pytest.mark.slow
def test_a_training_raises_the_overlap_and_continues_as_if_it_had_not_been_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target, interrupted, held_out = tiny_target(), tmp_path / "interrupted", random_rows(9, 8, 32).tokens.long()
    whole = trained(tiny_head(7), target, tmp_path / "whole")
    before, after = (agreement(head, target, held_out, 3)[0] for head in (tiny_head(7), whole))
    assert (after > before + 0.05).all()
    monkeypatch.setattr(head_training, "CHECKPOINT_STEPS", 3)
    step_taken = head_training.Optimization.step

    def step_or_stop(self, step):
        if step == 4:
            raise RuntimeError("killed")
        step_taken(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(head_training.Optimization, "step", step_or_stop)
        with pytest.raises(RuntimeError, match="killed"):
            trained(tiny_head(7), target, interrupted)
    again = trained(tiny_head(10), target, interrupted, resume=True)
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), atol=1e-6, rtol=1e-5)
