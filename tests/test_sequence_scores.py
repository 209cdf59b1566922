"""Scores of sequences that are sampled each in its own way, against the filters of one distribution."""

import itertools

import numpy as np
import pytest
import torch

from heavypath.kernels.filtering import Filters, filtered_scores
from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import recorded
from heavypath.kernels.noise import Noise
from heavypath.kernels.sampling import draw_unchecked
from heavypath.kernels.sequence_scores import sequence_scores, settings_of

FILTERS = [
    Filters(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.6, 1.0, 2.5), (None, 1, 5, 2000), (None, 0.3, 0.95), (None, 0.1)
    )
]
SETTINGS = torch.tensor([settings_of(each) for each in FILTERS], dtype=torch.float64)
IMPLS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(library() is None, reason="no C++ compiler")),
]


def logits_with_ties(vocab_size, nodes=3):
    logits = 3 * torch.randn(len(FILTERS), nodes, vocab_size)
    logits[:, :, ::7] = logits[:, :, :1].clone()
    if vocab_size > 9:
        logits[:, 1, 3:9] = -torch.inf
    return logits


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vocab_size", [1, 7, 999, 1024, 4097])
def test_scores_are_to_the_bit_those_of_each_sequences_own_filters(impl, vocab_size):
    logits = logits_with_ties(vocab_size)
    found = sequence_scores(logits, SETTINGS, impl=impl).numpy()
    for own, filters, scores in zip(logits.numpy(), FILTERS, found, strict=True):
        if filters.temperature == 0:
            expected = np.full(own.shape, -np.inf, np.float32)
            expected[np.arange(len(own)), own.argmax(-1)] = 0
        else:
            expected = filtered_scores(own, own.max(-1, keepdims=True), filters)
        assert np.array_equal(scores, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_draws_from_scores_are_those_from_logits_with_the_same_filters(impl):
    logits = logits_with_ties(101)
    scores = sequence_scores(logits, SETTINGS, impl=impl)
    rows = torch.arange(3)
    for own, filters, scored in zip(logits, FILTERS, scores, strict=True):
        count = 1 if filters.temperature == 0 else 4  # the other tokens have no score then
        expected = draw_unchecked(own, count, filters=filters, noise=Noise(5, rows))
        assert torch.equal(
            draw_unchecked(scored, count, filters=Filters(), noise=Noise(5, rows)).tokens, expected.tokens
        )


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_apart_and_rows_that_are_no_distributions(impl):
    logits = logits_with_ties(33, nodes=5)
    part = logits[:, ::2, :20]
    assert torch.equal(sequence_scores(part, SETTINGS, impl=impl), sequence_scores(part.clone(), SETTINGS, impl=impl))
    logits[:, 0], logits[:, 1, 3], logits[:, 2, 4] = -torch.inf, torch.nan, torch.inf
    found = sequence_scores(logits, SETTINGS, impl=impl)
    assert (found[:, 0] == -torch.inf).all()
    assert found[:, 1].isnan().all()
    assert found[:, 2].isnan().any(-1).all()


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_recording_reads_settings_when_it_is_replayed():
    logits, settings = logits_with_ties(33)[:1], SETTINGS[:1].clone()
    with recorded() as recording:
        scores = sequence_scores(logits, settings)
    assert recording.obstacle is None
    for each in SETTINGS:
        settings.copy_(each[None])
        recording.replay()
        assert torch.equal(scores, sequence_scores(logits, each[None]))


def test_there_is_no_kernel_for_gpus():
    with pytest.raises(ValueError, match="'auto', 'native' or 'torch', got 'triton'"):
        sequence_scores(torch.zeros(1, 1, 3), SETTINGS[:1], impl="triton")
