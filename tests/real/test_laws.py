"""The joint distribution of three sampled tokens, of a real model's own probabilities.

With top-k of 4 a text has 64 ways to go on, so that all of them can be written down: the passes over the 1 + 4 + 16
beginnings give each token's probabilities, as transformers' own filter leaves them. Tokens are numbered by their place
among those that can occur, because a table of 49,152^3 probabilities cannot be held.
"""

import pytest
import torch
from transformers import TopKLogitsWarper

from heavypath.speculative import SpeculativeDecoder, check_losslessness

pytestmark = pytest.mark.real
TOP, TEMPERATURE, TEXTS, BATCH = 4, 0.9, 1920, 64


@torch.no_grad()
def distributions(target, beginnings):
    """The probabilities of the next token after each beginning LongTensor[B, T], [B, V]."""
    logits = target(beginnings).logits[:, -1] / TEMPERATURE
    return TopKLogitsWarper(TOP)(None, logits).softmax(-1)


@pytest.fixture(scope="module")
def continuations(smollm):
    """A prompt, the numbers of the tokens that can follow, and the law of three of them by these numbers."""
    target, tokenizer = smollm
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    beginnings, chances = prompt, torch.ones(1)
    for _ in range(3):
        after, tokens = distributions(target, beginnings).topk(TOP, -1)
        chances = (chances[:, None] * after).flatten()
        beginnings = torch.cat([beginnings.repeat_interleave(TOP, 0), tokens.reshape(-1, 1)], 1)
    texts = beginnings[:, prompt.shape[1] :]
    known = texts.unique()
    law = torch.zeros(len(known), len(known), len(known), dtype=torch.float64)
    law[tuple(torch.searchsorted(known, texts.contiguous()).T)] = chances.double()
    return prompt[0], known, law / law.sum()


@pytest.mark.parametrize("draft", ["recall", "texts", "exit"])
@pytest.mark.parametrize("method", ["sequoia", "specinfer", "ersd"])
def test_three_tokens_have_the_models_law(smollm, draft_of, continuations, method, draft):
    """A Recall knows the texts of the batches before, so that it proposes more from batch to batch."""
    prompt, known, law = continuations
    decoder = SpeculativeDecoder(smollm[0], draft_of(draft), method, tree_size=7)

    def sample(prompts, seed):
        out = decoder.generate(prompts, 3, TEMPERATURE, top_k=TOP, seed=seed, eos_token_id=None)
        return torch.searchsorted(known, out.sequences[:, len(prompt) :].contiguous())

    fit = check_losslessness(sample, law, prompt, sequences=TEXTS, batch_size=BATCH)
    assert fit.is_lossless(), fit
