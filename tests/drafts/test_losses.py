"""The losses that drafts learn by: values by hand, gradients by finite differences, and drafts of fewer tokens."""

import math

import numpy as np
import pytest
import torch

from heavypath.speculative.training.losses import LOSSES, lk, overlap_and_divergence, tv_kl

TARGET, DRAFT = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.35, 0.4])
OVERLAP = 0.25 + 0.3 + 0.2
KL = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.35) + 0.2 * math.log(0.5)


def test_the_losses_of_a_position_are_those_by_hand():
    loss, overlap = tv_kl(TARGET.log(), DRAFT.log())
    assert overlap.item() == pytest.approx(OVERLAP)
    assert loss.item() == pytest.approx(0.25 + 0.5 * KL, rel=1e-5)
    share = math.exp(-3 * OVERLAP)
    loss, overlap = lk(TARGET.log(), DRAFT.log())
    assert overlap.item() == pytest.approx(OVERLAP)
    assert loss.item() == pytest.approx(share * KL + (1 - share) * 0.25, rel=1e-5)


def by_formula(name: str, target: np.ndarray, logits: np.ndarray, share: float) -> float:
    """A loss in fp64, with lambda of the LK loss given, as no gradient goes through it."""
    draft = np.exp(logits) / np.exp(logits).sum()
    overlap, kl = np.minimum(target, draft).sum(), (target * np.log(target / draft)).sum()
    return 1 - overlap + 0.5 * kl if name == "tv-kl" else share * kl + (1 - share) * (1 - overlap)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    generator = np.random.default_rng(3)
    target = generator.dirichlet(np.ones(9))
    logits = generator.normal(size=9)
    draft = np.exp(logits) / np.exp(logits).sum()
    share = math.exp(-3 * np.minimum(target, draft).sum())
    given = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    LOSSES[name](torch.tensor(target, dtype=torch.float32).log(), given)[0].backward()
    assert given.grad is not None
    for place, step in enumerate(1e-6 * np.eye(9)):
        two_sided = (
            by_formula(name, target, logits + step, share) - by_formula(name, target, logits - step, share)
        ) / 2e-6
        assert given.grad[place].item() == pytest.approx(two_sided, abs=2e-6)


def test_tokens_that_the_draft_lacks_count_in_the_overlap_and_kl_is_of_the_others():
    kept = TARGET[:2]
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
        assert logits.grad is not None
        assert torch.isfinite(torch.cat([value[None], logits.grad])).all()
