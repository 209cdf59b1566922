"""Greedy text of every method is that of transformers' generate, token for token, on held-out prompts of the demo pair.

In fp32. Two exact programs may round otherwise, so where two texts part, the logits of the two tokens are compared: a
gap under 1e-4 is a tie, and any other gap fails.
"""

import pytest
import torch
from texts_with_rules import left_padded
from tiny_models import assert_same_text, transformers_greedy

from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.demo.corpus import choose_prompts, read_corpus

pytestmark = pytest.mark.slow
NEW_TOKENS, BATCH = 128, 14


@pytest.fixture(scope="module")
def texts(demo_pair):
    """Prompts, lists of tokens, and what transformers writes after each, one at a time: LongTensor[1, length].

    The shipped prompts, and 32 more openings from files that no model was trained on.
    """
    held_out = dict.fromkeys([*demo_prompts(), *choose_prompts(read_corpus(), demo_pair.tokenizer, 100)])
    prompts = [demo_pair.tokenizer(text).input_ids for text in list(held_out)[:56]]
    assert len({tuple(prompt) for prompt in prompts}) >= 50
    assert all(30 <= len(prompt) <= 80 for prompt in prompts)
    return [(each, transformers_greedy(demo_pair.target, torch.tensor([each]), NEW_TOKENS)) for each in prompts]


@pytest.mark.parametrize("method", METHODS)
def test_texts_of_every_method_are_those_of_transformers(method, demo_pair, texts):
    """In batches, and one of each batch alone."""
    target, draft, _ = demo_pair
    decoder = SpeculativeDecoder(target, draft, method)
    for first in range(0, len(texts), BATCH):
        prompts, expected = zip(*texts[first : first + BATCH], strict=True)
        out = decoder.generate(**left_padded(prompts), max_new_tokens=NEW_TOKENS)
        assert out.stats.new_tokens == NEW_TOKENS * len(prompts)
        ours = [row[-len(prompt) - NEW_TOKENS :] for prompt, row in zip(prompts, out.sequences, strict=True)]
        assert_same_text(target, ours, [text[0] for text in expected])
        alone = decoder.generate(torch.tensor([prompts[0]]), max_new_tokens=NEW_TOKENS)
        assert_same_text(target, alone.sequences, expected[0])


@pytest.mark.parametrize("rank", [1, 2])
def test_another_token_is_no_tie(rank, demo_pair, texts):
    """The oracle's own test: a likely but lesser token in place of one is found."""
    prompt, expected = texts[0]
    wrong, place = expected.clone(), len(prompt) + 40
    with torch.inference_mode():
        wrong[0, place] = demo_pair.target(wrong[:, :place]).logits[0, -1].topk(3).indices[rank]
    with pytest.raises(AssertionError, match=f"part at token {place}"):
        assert_same_text(demo_pair.target, wrong, expected)
