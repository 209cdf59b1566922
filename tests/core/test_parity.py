"""Greedy text of every method is that of transformers' generate, token for token, on held-out prompts of the demo pair.

In fp32. Two exact programs may round otherwise, so where two texts part, the logits of the two tokens are compared: a
gap under 1e-4 is a tie, which is printed, and transformers goes on from our text; any other gap fails.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.demo.corpus import choose_prompts, read_corpus

pytestmark = pytest.mark.slow
NEW_TOKENS = 128
TIE = 1e-4
BATCH = 14


def greedy(model, ids, new_tokens):
    """transformers' own greedy text; the mask keeps it from taking prompt tokens for padding."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)


@pytest.fixture(scope="module")
def prompts(demo_pair):
    """LongTensors [1, length]: the shipped prompts, and 32 more openings from files that no model was trained on."""
    held_out = dict.fromkeys([*demo_prompts(), *choose_prompts(read_corpus(), demo_pair.tokenizer, 100)])
    return [demo_pair.tokenizer(text, return_tensors="pt").input_ids for text in list(held_out)[:56]]


@pytest.fixture(scope="module")
def texts(demo_pair, prompts):
    """What transformers writes behind each prompt, one at a time."""
    return [greedy(demo_pair.target, ids, NEW_TOKENS) for ids in prompts]


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
        theirs = greedy(model, going_on, ours.shape[1] - place - 1) if place + 1 < ours.shape[1] else going_on
    return found


def report(method, number, found):
    for place, gap in found:
        print(f"{method}, prompt {number}, token {place}: a tie, logits {gap:.1e} apart")


def test_there_are_fifty_held_out_prompts(demo_pair, prompts):
    assert len(prompts) >= 50
    assert len({tuple(ids[0].tolist()) for ids in prompts}) == len(prompts)
    assert all(30 <= ids.shape[1] <= 80 for ids in prompts)


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_every_method_are_the_texts_of_transformers(method, demo_pair, prompts, texts):
    target, draft, _ = demo_pair
    decoder = SpeculativeDecoder(target, draft, method)
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        longest = max(ids.shape[1] for ids in batch)
        left = [longest - ids.shape[1] for ids in batch]
        padded = torch.cat([torch.nn.functional.pad(ids, (pad, 0)) for pad, ids in zip(left, batch, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(left)[:, None]).long()
        out = decoder.generate(padded, max_new_tokens=NEW_TOKENS, attention_mask=mask)
        assert out.stats.new_tokens == NEW_TOKENS * len(batch)
        for row, pad in enumerate(left):
            report(method, first + row, ties(target, out.sequences[row : row + 1, pad:], texts[first + row]))


@pytest.mark.parametrize("method", METHODS)
def test_single_texts_of_every_method_are_those_of_transformers(method, demo_pair, prompts, texts):
    target, draft, _ = demo_pair
    decoder = SpeculativeDecoder(target, draft, method)
    for number in range(0, len(prompts), BATCH):
        out = decoder.generate(prompts[number], max_new_tokens=NEW_TOKENS)
        report(method, number, ties(target, out.sequences, texts[number]))


def test_a_tie_is_told_and_gone_past():
    """The oracle's own test: two tokens with one row of the output layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, initializer_range=0.4, eos_token_id=None, **sizes)).eval()
    prompt = torch.tensor([[3, 1, 4]])
    first = int(greedy(model, prompt, 1)[0, 3])
    twin = (first + 1) % 31
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[first]
    theirs = greedy(model, prompt, 12)
    other = twin + first - int(theirs[0, 3])
    ours = greedy(model, torch.cat([prompt, torch.tensor([[other]])], 1), 11)
    assert (3, 0.0) in ties(model, ours, theirs)
    ours[0, -1] = (ours[0, -1] + 7) % 31
    with pytest.raises(AssertionError, match="part at token 14"):
        ties(model, ours, theirs)


@pytest.mark.parametrize("rank", [1, 2])
def test_another_token_is_no_tie(rank, demo_pair, prompts, texts):
    """The oracle's own test: a likely but lesser token in place of one is found."""
    wrong, place = texts[0].clone(), prompts[0].shape[1] + 40
    with torch.inference_mode():
        wrong[0, place] = demo_pair.target(wrong[:, :place]).logits[0, -1].topk(3).indices[rank]
    with pytest.raises(AssertionError, match=f"part at token {place}"):
        ties(demo_pair.target, wrong, texts[0])
