"""Sampled text of real models: `ersd` writes that of plain decoding under the same seed."""

import pytest
import torch

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.real


@pytest.mark.parametrize("draft", ["lookup", "recall", "exit"])
def test_answers_of_smollm2(smollm, questions, draft_of, draft):
    plain = SpeculativeDecoder(smollm[0], method="autoregressive")
    drafted = SpeculativeDecoder(smollm[0], draft_of(draft), "ersd")
    for seed, prompt in enumerate(questions[:6]):
        expected = plain.generate(prompt, 32, 0.8, seed=seed).sequences
        assert torch.equal(drafted.generate(prompt, 32, 0.8, seed=seed).sequences, expected)


@pytest.mark.parametrize("draft", ["recall", "translated"])
def test_texts_of_gemma(gemma, texts, draft_of, draft):
    plain = SpeculativeDecoder(gemma[0], method="autoregressive")
    drafted = SpeculativeDecoder(gemma[0], draft_of(draft), "ersd")
    for seed, prompt in enumerate(texts):
        expected = plain.generate(prompt, 32, 0.8, seed=seed).sequences
        assert torch.equal(drafted.generate(prompt, 32, 0.8, seed=seed).sequences, expected)
