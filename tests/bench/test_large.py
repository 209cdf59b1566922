"""bench/large.py and bench/peers.py decode with enlarged models: they must compute what the shipped ones do."""

import pytest
import torch
from bench_scripts import script

from heavypath.speculative.demo import demo_prompts

TOKENS, VOCABULARY = 1024, 1500


@pytest.mark.slow
@torch.no_grad()
def test_an_enlarged_model_has_the_small_ones_logits_and_reads_random_numbers_everywhere(demo_pair):
    """Each in another way: more layers or not, heads twice or four times as large, with and without groups."""
    bench, ids = script("large"), demo_pair.tokenizer(demo_prompts()[0], return_tensors="pt").input_ids
    for small, widths in (
        (demo_pair.target, bench.Widths(10, 768, 12, 1000)), (demo_pair.draft, bench.Widths(1, 768, 6, 500)),
    ):  # fmt: skip
        large = bench.enlarged(small, widths, VOCABULARY)
        logits = large(ids).logits
        assert logits.shape[-1] == VOCABULARY
        assert (logits[..., :TOKENS] - small(ids).logits).abs().max() < 1e-4
        assert logits[..., TOKENS:].max() < -1e4
        for name, weight in large.named_parameters():
            assert (weight == 0).float().mean() < 1e-4, name  # a few of the shipped ones are
            assert weight.dim() < 2 or weight.std(1).min() > 0, name


@torch.no_grad()
def test_a_widened_model_computes_the_same(demo_pair):
    ids = demo_pair.tokenizer("def read(self, size=-1):\n    return", return_tensors="pt").input_ids
    for model in demo_pair[:2]:
        wide = script("enlarging").widened(model, 2)
        assert wide.config.num_key_value_heads == 2 * model.config.num_key_value_heads
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
