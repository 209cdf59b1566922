"""Greedy text of real models is that of transformers, by every kind of method and draft."""

import pytest
from real_texts import assert_greedy

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.real
METHODS = ("chain", "sequoia", "ersd", "rsd-s", "dyspec")
NEW_TOKENS = 32


@pytest.mark.parametrize("draft", ["lookup", "recall", "exit"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_of_smollm2(smollm, questions, draft_of, greedy, method, draft):
    target, _ = smollm
    decoder = SpeculativeDecoder(target, draft_of(draft), method)
    for prompt in questions:
        ours = decoder.generate(prompt, NEW_TOKENS, 0.0).sequences
        assert_greedy(target, ours, greedy(target, prompt, NEW_TOKENS))


@pytest.mark.parametrize("draft", ["recall", "translated"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_of_gemma(gemma, texts, draft_of, greedy, method, draft):
    target, _ = gemma
    decoder = SpeculativeDecoder(target, draft_of(draft), method)
    for prompt in texts:
        ours = decoder.generate(prompt, NEW_TOKENS, 0.0).sequences
        assert_greedy(target, ours, greedy(target, prompt, NEW_TOKENS))
