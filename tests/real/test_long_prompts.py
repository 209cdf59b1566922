"""A prompt of 2,000 tokens, four times as long as Gemma's windows."""

import pytest
from real_texts import STORY, assert_greedy

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.real


@pytest.mark.parametrize("draft", ["lookup", "translated"])
@pytest.mark.parametrize("method", ["sequoia", "ersd", "dyspec"])
def test_two_thousand_tokens(gemma, draft_of, greedy, method, draft):
    target, tokenizer = gemma
    prompt = tokenizer(STORY * 60, return_tensors="pt").input_ids[:, :2000]
    assert prompt.shape[1] == 2000 > 3 * target.config.sliding_window
    ours = SpeculativeDecoder(target, draft_of(draft), method).generate(prompt, 24, 0.0).sequences
    assert_greedy(target, ours, greedy(target, prompt, 24))
