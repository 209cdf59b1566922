"""Cuts of rows: a kernel keeps of every row what the filters' reference keeps."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import DEVICE
from torch import Tensor

from heavypath.kernels import filter_cuts as module
from heavypath.kernels.filter_cuts import CHUNK, filter_cuts
from heavypath.kernels.filtering import LEAST_TEMPERATURE, Filters, filtered_scores
from heavypath.kernels.noise import Noise, Stream
from heavypath.kernels.nucleus import launch_tokens

FILTERS = [
    Filters(top_k=1), Filters(top_k=7), Filters(top_p=0.5), Filters(0.6, top_p=0.95), Filters(top_p=1e-6),
    Filters(min_p=0.1), Filters(min_p=1.0), Filters(0.8, 20, 0.9, 0.01), Filters(1.3, top_k=4, top_p=0.5),
    Filters(LEAST_TEMPERATURE, 3, 0.9), Filters(1e38, top_p=0.5),
]  # fmt: skip


def kept_by_reference(logits: Tensor, filters: Filters) -> np.ndarray:
    """Which tokens of [R, V] the filters keep."""
    rows = logits.float().numpy()
    with np.errstate(all="ignore"):
        return filtered_scores(rows, rows.max(-1, keepdims=True), filters) > -np.inf


def kept_by(logits: Tensor, filters: Filters) -> np.ndarray:
    """Which tokens of [R, V] the kernel's cuts keep."""
    cuts = filter_cuts(logits.to(DEVICE)[None], filters)
    x, token = logits.float(), torch.arange(logits.shape[-1])
    cut, end = (field.cpu()[:, None] for field in cuts)
    return (((x > cut) | ((x == cut) & (token < end))) & (x > -torch.inf)).numpy()


def some_rows(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Any numbers; a few different ones, with many ties; and a row with tokens that are excluded."""
    rows = 3 * torch.randn(3, vocab_size)
    rows[1] = rows[1].round()
    rows[2, ::3] = -torch.inf if vocab_size > 1 else 0
    return rows.to(dtype)


@pytest.mark.parametrize(("vocab_size", "dtype", "filters"), [
    *((37, torch.float16, filters) for filters in FILTERS), (CHUNK.value + 1, torch.bfloat16, FILTERS[7]),
    *(pytest.param(size, dtype, filters, marks=pytest.mark.slow) for filters in FILTERS for size in (2, 3, 999, 9000)
      for dtype in (torch.float32, torch.float16, torch.bfloat16) if filters.drop(size)),
], ids=str)  # fmt: skip
def test_the_cuts_keep_what_the_reference_keeps(vocab_size, dtype, filters):
    for scale in (0.03, 1, 8):
        logits = scale * some_rows(vocab_size, dtype)[vocab_size == CHUNK.value + 1 :]
        assert (kept_by(logits, filters) == kept_by_reference(logits, filters)).all()


def test_filters_that_drop_nothing_have_no_cuts():
    assert filter_cuts(torch.randn(1, 2, 37), Filters(0.7, top_k=37, top_p=1.0)) is None


def test_of_equal_tokens_the_first_are_kept_in_whichever_chunk_they_are():
    size = 2 * CHUNK.value + 5
    logits = torch.full((1, size), -20.0).bfloat16()
    logits[0, [3, CHUNK.value - 1, CHUNK.value, 2 * CHUNK.value + 4]] = 7.0
    for count in (1, 3, 4):
        kept = kept_by(logits, Filters(top_p=(count - 0.5) / 4))  # each has a quarter of the mass
        assert kept.nonzero()[1].tolist() == [3, CHUNK.value - 1, CHUNK.value, 2 * CHUNK.value + 4][:count]


@pytest.mark.parametrize("low", [-3e38, torch.finfo(torch.float32).min])
def test_numbers_far_below_the_others_do_not_hide_the_cut(low):
    logits = torch.full((1, 60), low)
    logits[0, 20:40] = torch.arange(20.0)
    for filters in (Filters(top_k=30), Filters(top_p=0.9)):
        assert (kept_by(logits, filters) == kept_by_reference(logits, filters)).all(), filters


def test_the_cut_of_min_p_is_exact_to_the_bit():
    logits = torch.nextafter(torch.ones(1, 3), torch.tensor([[2.0, 1.0, 0.0]]))
    assert kept_by(logits, Filters(min_p=1.0)).tolist() == [[True, False, False]]


def test_a_row_without_a_distribution_has_no_cut():
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    for filters in (Filters(top_k=2), Filters(top_p=0.5), Filters(min_p=0.5)):
        cuts = filter_cuts(logits.to(DEVICE)[None], filters)
        assert cuts.cut.isnan().tolist() == [True, True, True, False]


def test_rows_may_lie_apart_and_in_several_trees():
    whole = torch.randn(2, 2, 50).bfloat16().to(DEVICE)
    filters = Filters(0.9, top_p=0.8)
    for apart in (whole[:, 1:, :41], whole[..., ::3], whole.mT[:, :3]):
        for view, copied in zip(filter_cuts(apart, filters), filter_cuts(apart.contiguous(), filters), strict=True):
            assert torch.equal(view, copied)


@pytest.mark.parametrize("filters", [Filters(top_k=3), Filters(0.8, 9, 0.8, 0.01)], ids=str)
def test_the_cuts_are_right_in_any_schedule(adversary, filters):
    logits = torch.randn(2, CHUNK.value + 3).bfloat16()
    assert (kept_by(logits, filters) == kept_by_reference(logits, filters)).all()
    adversary.met("_cuts_kernel")


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls are counted in the interpreter")
def test_a_row_of_which_a_grammar_leaves_a_few_tokens_takes_no_more_passes_than_others(monkeypatch):
    made, opened = [], module.open_pass
    monkeypatch.setattr(module, "open_pass", lambda *given: made.append(given) or opened(*given))
    logits = torch.full((1, 3 * CHUNK.value), -torch.inf).bfloat16()
    logits[0, :900] = 3 * torch.randn(900)
    kept = kept_by(logits, Filters(top_k=20))
    assert (kept == kept_by_reference(logits, Filters(top_k=20))).all()
    assert len(made) <= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls are counted in the interpreter")
def test_the_prediction_counts_the_passes_that_the_search_takes(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    predicted = importlib.import_module("predict_filters")
    made = []
    opened = module.open_pass
    logits = torch.from_numpy(predicted.model_rows(1, 608, "bf16")).bfloat16()
    monkeypatch.setattr(module, "open_pass", lambda *given: made.append(given) or opened(*given))
    for filters, name in ((Filters(top_k=50), "top-k 50"), (Filters(top_p=0.9), "top-p 0.9")):
        made.clear()
        filter_cuts(logits[None], filters)
        assert len(made) == len(predicted.passes_of(logits[0].float().numpy(), name, 16))
    for k, noise_row in ((1, 5), (8, 2)):
        made.clear()
        noise = Noise(0, torch.tensor([noise_row]))
        launch_tokens(logits, k, Filters(top_p=0.9), noise=noise, stream=Stream.DRAFT)
        assert len(made) == len(predicted.passes_of_draw(logits[0].float().numpy(), 0.9, k, 16, noise_row))
    assert predicted.predict("top-k 50", "bf16", 2000, 1).passes >= 1
