"""Scores of sequences that are sampled each in its own way, against the filters of one distribution."""

import itertools

import numpy as np
import pytest
import torch
from devices import DEVICE, PLACES, run_on
from kernel_cases import NATIVE, needs_compiler

from heavypath.kernels.filtering import Filters, filtered_scores
from heavypath.kernels.native.recording import recorded
from heavypath.kernels.sequence_scores import sequence_scores, settings_of

FILTERS = [
    Filters(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.6, 1.0, 2.5), (None, 1, 5, 2000), (None, 0.3, 0.95), (None, 0.1)
    )
]
SETTINGS = torch.tensor([settings_of(each) for each in FILTERS], dtype=torch.float64)
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])


def of_sequences(impl):
    """Filters of sequences, and their settings: for the interpreter few, which have each temperature."""
    step = 29 if impl == "triton" else 1
    return FILTERS[::step], SETTINGS[::step]


def scores_by(impl, logits, settings):
    return run_on(PLACES.get(impl, "cpu"), sequence_scores, logits, settings, impl=impl)


def logits_with_ties(vocab_size, sequences, nodes=2):
    logits = 3 * torch.randn(sequences, nodes, vocab_size)
    logits[:, :, ::7] = logits[:, :, :1].clone()
    if vocab_size > 9:
        logits[:, -1, 3:9] = -torch.inf
    return logits


@IMPLS
@pytest.mark.parametrize("vocab_size", [1, 7, 4097])
def test_scores_are_to_the_bit_those_of_each_sequences_own_filters(impl, vocab_size):
    filters_of, settings = of_sequences(impl)
    logits = logits_with_ties(vocab_size, len(filters_of), nodes=1 if vocab_size > 1000 else 2)
    found = scores_by(impl, logits, settings).numpy()
    for own, filters, scores in zip(logits.numpy(), filters_of, found, strict=True):
        if filters.temperature == 0:
            expected = np.full(own.shape, -np.inf, np.float32)
            expected[np.arange(len(own)), own.argmax(-1)] = 0
        else:
            expected = filtered_scores(own, own.max(-1, keepdims=True), filters)
        assert np.array_equal(scores, expected)


@IMPLS
def test_rows_apart_and_rows_that_are_no_distributions(impl):
    settings = of_sequences(impl)[1][[0, -1]]
    logits = logits_with_ties(33, len(settings), nodes=3)
    part, apart = logits[:, ::2, :20], torch.stack([settings, settings.flip(0)], 1)[:, 0]
    assert torch.equal(scores_by(impl, part, apart), sequence_scores(part.clone(), settings, impl="torch"))
    logits[:, 0], logits[:, 1, 3], logits[:, 2, 4] = -torch.inf, torch.nan, torch.inf
    found = scores_by(impl, logits, settings)
    assert (found[:, 0] == -torch.inf).all()
    assert found[:, 1].isnan().all()
    assert found[:, 2].isnan().any(-1).all()


@IMPLS
def test_settings_may_lie_in_columns(impl):
    """As they do if a tensor was made for each setting, [4, B], and transposed."""
    settings = of_sequences(impl)[1]
    columns = settings.T.contiguous().T
    assert columns.stride() == (1, len(settings))
    logits = logits_with_ties(33, len(settings))
    assert torch.equal(scores_by(impl, logits, columns), sequence_scores(logits, settings, impl="torch"))


@IMPLS
def test_settings_that_fp32_does_not_have_are_the_nearest_that_it_has(impl):
    """A temperature below 1e-45 is 0 in fp32, one above 4e38 infinite; a top_p below 1e-45 is 0."""
    filters_of = [Filters(1e-50, top_k=3), Filters(1e-300, None, 0.9, 0.1), Filters(1e39), Filters(1.0, None, 1e-46)]
    logits = logits_with_ties(33, len(filters_of))
    found = scores_by(impl, logits, torch.tensor([*map(settings_of, filters_of)], dtype=torch.float64)).numpy()
    for own, filters, scores in zip(logits.numpy(), filters_of, found, strict=True):
        with np.errstate(over="ignore"):
            expected = filtered_scores(own, own.max(-1, keepdims=True), filters)
        assert np.array_equal(scores, expected)


@IMPLS
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 4), torch.float32), ((1, 4), torch.float64), ((2, 3), torch.float64)]
)
def test_settings_that_do_not_fit_are_refused_and_not_read(impl, shape, dtype):
    got = rf"got {dtype} \[{shape[0]}, {shape[1]}\]"
    with pytest.raises(ValueError, match=rf"settings must be torch.float64 \[2, 4\], one row for each sequence, {got}"):
        scores_by(impl, torch.zeros(2, 1, 5), torch.ones(shape, dtype=dtype))


def test_logits_that_the_kernel_does_not_take_are_refused():
    with pytest.raises(ValueError, match=r"takes fp32, fp16 or bf16 logits, got torch\.float64"):
        scores_by("triton", torch.zeros(1, 1, 5).double(), SETTINGS[:1])


@needs_compiler
def test_a_recording_reads_settings_when_it_is_replayed():
    logits, rows = logits_with_ties(33, 1), SETTINGS[:1].clone()
    for settings in (rows, rows.repeat(1, 2)[:, ::2]):  # the second is copied
        with recorded() as recording:
            scores = sequence_scores(logits, settings)
        assert recording.obstacle is None
        for each in SETTINGS:
            settings.copy_(each[None])
            recording.replay()
            assert torch.equal(scores, sequence_scores(logits, each[None]))


def test_scores_are_right_in_any_schedule(adversary):
    """Of sequences each with its own filters, temperature 0 among them; of two chunks, with ties."""
    filters = [Filters(0.0), Filters(0.6, top_k=9), Filters(2.0)]
    settings = torch.tensor([settings_of(each) for each in filters], dtype=torch.float64)
    logits = (3 * torch.randn(3, 1, 4_200)).round()
    given = logits.to(DEVICE), settings.to(DEVICE)
    assert torch.equal(*(sequence_scores(*given, impl=impl) for impl in ("triton", "torch")))
    adversary.met("_scores_kernel", "_cuts_kernel")
