"""Greedy text of every method is that of transformers' generate, token for token, on held-out prompts of the demo pair.

In fp32. Two exact programs may round otherwise, so where two texts part, the logits of the two tokens are compared: a
gap under 1e-4 is a tie, which is printed, and transformers goes on from our text; any other gap fails.
"""

import pytest
import torch
from tiny_models import TIE, transformers_greedy

from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.demo.corpus import choose_prompts, read_corpus

pytestmark = pytest.mark.slow
NEW_TOKENS, BATCH = 128, 14


@pytest.fixture(scope="module")
def texts(demo_pair):
    """Prompts, LongTensors [1, length], and what transformers writes after each, one at a time.

    The shipped prompts, and 32 more openings from files that no model was trained on.
    """
    held_out = dict.fromkeys([*demo_prompts(), *choose_prompts(read_corpus(), demo_pair.tokenizer, 100)])
    prompts = [demo_pair.tokenizer(text, return_tensors="pt").input_ids for text in list(held_out)[:56]]
    assert len({tuple(ids[0].tolist()) for ids in prompts}) >= 50
    assert all(30 <= ids.shape[1] <= 80 for ids in prompts)
    return [(ids, transformers_greedy(demo_pair.target, ids, NEW_TOKENS)) for ids in prompts]


@torch.inference_mode()
def ties(model, ours, theirs):
    """(place, gap) of each tie at which ours [1, length] parts from transformers' text."""
    found = []
    while not torch.equal(ours, theirs):
        place = int((ours != theirs).nonzero()[0, 1])
        logits = model(ours[:, :place]).logits[0, -1]
        gap = abs(float(logits[ours[0, place]] - logits[theirs[0, place]]))
        assert gap < TIE, f"texts part at token {place}, where the candidates' logits differ by {gap}"
        found.append((place, gap))
        going_on = ours[:, : place + 1]
        left = ours.shape[1] - place - 1
        theirs = transformers_greedy(model, going_on, left) if left else going_on
    return found


@pytest.mark.parametrize("method", METHODS)
def test_texts_of_every_method_are_those_of_transformers(method, demo_pair, texts):
    """In batches, and one of each batch alone."""
    target, draft, _ = demo_pair
    decoder = SpeculativeDecoder(target, draft, method)
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        longest = max(ids.shape[1] for ids, _ in batch)
        left = [longest - ids.shape[1] for ids, _ in batch]
        padded = torch.cat([torch.nn.functional.pad(ids, (pad, 0)) for pad, (ids, _) in zip(left, batch, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(left)[:, None]).long()
        out = decoder.generate(padded, max_new_tokens=NEW_TOKENS, attention_mask=mask)
        assert out.stats.new_tokens == NEW_TOKENS * len(batch)
        ours = [out.sequences[row : row + 1, pad:] for row, pad in enumerate(left)]
        alone = decoder.generate(batch[0][0], max_new_tokens=NEW_TOKENS).sequences
        for text, expected in [*zip(ours, [text for _, text in batch], strict=True), (alone, batch[0][1])]:
            print(method, first, "ties (token, gap):", ties(target, text, expected))


@pytest.mark.parametrize("rank", [1, 2])
def test_another_token_is_no_tie(rank, demo_pair, texts):
    """The oracle's own test: a likely but lesser token in place of one is found."""
    wrong, place = texts[0][1].clone(), texts[0][0].shape[1] + 40
    with torch.inference_mode():
        wrong[0, place] = demo_pair.target(wrong[:, :place]).logits[0, -1].topk(3).indices[rank]
    with pytest.raises(AssertionError, match=f"part at token {place}"):
        ties(demo_pair.target, wrong, texts[0][1])
