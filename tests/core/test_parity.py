"""Greedy text of every method is that of transformers' generate, token for token, on held-out prompts of the demo pair.

In fp32. Two exact programs may round otherwise, so where two texts part, the logits of the two tokens are compared: a
gap under 1e-4 is a tie, and any other gap fails.
"""

from functools import cache

import pytest
import torch
from bench_scripts import script
from texts_with_rules import left_padded
from tiny_models import assert_same_text, transformers_greedy

from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts

corpus = script("demo_pair.corpus")
BATCH = 14


@pytest.fixture(scope="module")
def written(demo_pair):
    """The tokens of a prompt, and those with what transformers writes after it alone."""

    @cache
    def text(prompt, new_tokens):
        ids = demo_pair.tokenizer(prompt, return_tensors="pt").input_ids
        return ids[0].tolist(), transformers_greedy(demo_pair.target, ids, new_tokens)[0]

    return text


@pytest.mark.parametrize(("method", "nightly"), [
    ("sequoia", False), ("dyspec", False),  # the conformance suite has all of them, of random models
    *(pytest.param(method, True, marks=pytest.mark.slow) for method in METHODS),
])  # fmt: skip
def test_texts_of_every_method_are_those_of_transformers(method, nightly, demo_pair, written):
    """Of one prompt; nightly of the shipped ones and 32 more from files that no model was trained on, in batches."""
    (target, draft, tokenizer), prompts, new_tokens = demo_pair, demo_prompts()[:1], 32
    if nightly:
        prompts = [*dict.fromkeys([*demo_prompts(), *corpus.choose_prompts(corpus.read_corpus(), tokenizer, 100)])][:56]
        new_tokens = 128
        assert len(prompts) >= 50
    tree = {} if method == "autoregressive" else {"tree_size": 5}  # by default a batch drafts where that pays
    decoder = SpeculativeDecoder(target, draft, method, **tree)
    for first in range(0, len(prompts), BATCH):
        texts = [written(prompt, new_tokens) for prompt in prompts[first : first + BATCH]]
        given, expected = zip(*texts, strict=True)
        out = decoder.generate(**left_padded(given), max_new_tokens=new_tokens)
        assert out.stats.new_tokens == new_tokens * len(given)
        assert method == "autoregressive" or out.stats.tokens_per_step > 1.2
        ours = [row[-len(text) :] for text, row in zip(expected, out.sequences, strict=True)]
        assert_same_text(target, ours, expected)
        if nightly:
            alone = decoder.generate(torch.tensor([given[0]]), max_new_tokens=new_tokens)
            assert_same_text(target, alone.sequences, expected[:1])


@pytest.mark.parametrize("rank", [1, 2])
def test_another_token_is_no_tie(rank, demo_pair, written):
    """The oracle's own test: a likely but lesser token in place of one is found."""
    prompt, expected = written(demo_prompts()[0], 32)
    wrong, place = expected[None].clone(), len(prompt) + 20
    with torch.inference_mode():
        wrong[0, place] = demo_pair.target(wrong[:, :place]).logits[0, -1].topk(3).indices[rank]
    with pytest.raises(AssertionError, match=f"part at token {place}"):
        assert_same_text(demo_pair.target, wrong, expected[None])
