"""bench/large.py decodes with enlarged models: they must compute what the shipped ones do."""

import importlib
from pathlib import Path

import pytest
import torch
from tiny_models import assert_same_text, transformers_greedy

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts

BENCH = Path(__file__).parents[2] / "bench"
TOKENS, VOCABULARY = 1024, 1500


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("large")


@pytest.fixture(scope="module")
def large_pair(bench, demo_pair):
    """Each in another way: more layers or not, heads twice or four times as large, with and without groups."""
    target = bench.enlarged(demo_pair.target, bench.Widths(10, 768, 12, 1000), VOCABULARY)
    draft = bench.enlarged(demo_pair.draft, bench.Widths(1, 768, 6, 500), VOCABULARY)
    return target, draft


@torch.no_grad()
def test_an_enlarged_model_has_the_small_ones_logits_and_no_others(demo_pair, large_pair):
    ids = demo_pair.tokenizer("\n".join(demo_prompts()[:3]), return_tensors="pt").input_ids
    for small, large in zip(demo_pair, large_pair, strict=False):
        logits = large(ids).logits
        assert logits.shape[-1] == VOCABULARY
        assert (logits[..., :TOKENS] - small(ids).logits).abs().max() < 1e-4
        assert logits[..., TOKENS:].max() < -1e4


def test_an_enlarged_model_reads_random_numbers_everywhere(large_pair):
    for large in large_pair:
        for name, weight in large.named_parameters():
            assert (weight == 0).float().mean() < 1e-4, name  # a few of the shipped ones are
            if weight.dim() == 2:
                assert weight.std(1).min() > 0, name


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
def test_the_enlarged_pair_writes_the_shipped_pairs_text_in_as_many_steps(method, demo_pair, large_pair):
    ids = demo_pair.tokenizer(demo_prompts()[0], return_tensors="pt").input_ids
    for temperature in (0.0, 0.6):
        small, large = (
            SpeculativeDecoder(*pair, method, tree_size=8).generate(ids, 24, temperature=temperature)
            for pair in (demo_pair[:2], large_pair)
        )
        assert torch.equal(small.sequences, large.sequences)
        assert small.stats.steps == large.stats.steps


def test_widths_that_cannot_hold_the_model_are_refused(bench, demo_pair):
    for widths in (bench.Widths(7, 768, 12, 1000), bench.Widths(8, 320, 10, 864), bench.Widths(8, 768, 16, 1000)):
        with pytest.raises(ValueError, match="expected"):
            bench.enlarged(demo_pair.target, widths, VOCABULARY)
    with pytest.raises(ValueError, match="1024 tokens"):
        bench.enlarged(demo_pair.target, bench.Widths(8, 768, 12, 1000), 1000)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_dyspec_grows_up_to_768_nodes_in_a_batch_of_prompts(temperature, demo_pair):
    """The greedy texts, or for the first prompt the text that it has alone under the same seed."""
    target, draft, tokenizer = demo_pair
    rows = [tokenizer(text, return_tensors="pt").input_ids[0] for text in (demo_prompts()[0], "import os\n")]
    longest = max(map(len, rows))
    assert min(map(len, rows)) < longest
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    decoder = SpeculativeDecoder(target, draft, "dyspec", tree_size=768, max_depth=12, threshold=0.003)
    options = {"max_new_tokens": 12, "temperature": temperature, "eos_token_id": None}
    out = decoder.generate(ids, attention_mask=mask, pad_token_id=0, **options)
    assert 100 < out.stats.nodes / out.stats.steps <= 768
    if temperature > 0:
        assert torch.equal(out.sequences[0], decoder.generate(rows[0][None], **options).sequences[0])
        return
    for row, text in zip(rows, out.sequences, strict=True):
        assert_same_text(target, text[None, longest - len(row) :], transformers_greedy(target, row[None], 12))
