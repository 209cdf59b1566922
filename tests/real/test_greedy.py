"""Texts of real models: greedy ones are those of transformers, `ersd` writes those of plain decoding under a seed."""

import pytest
import torch
from real_texts import assert_greedy

from heavypath.speculative import SpeculativeDecoder

pytestmark = [
    pytest.mark.real,
    pytest.mark.parametrize(("model", "draft"), [
        ("smollm2", "lookup"), ("smollm2", "recall"), ("smollm2", "exit"), ("smollm2", "texts"),
        ("smollm2", "mixture"), ("gemma", "recall"), ("gemma", "translated"),
    ]),
]  # fmt: skip
NEW_TOKENS = 32


@pytest.mark.parametrize("method", ["chain", "sequoia", "ersd", "rsd-s", "dyspec"])
def test_greedy_texts_are_those_of_transformers(prompted, draft_of, greedy, model, draft, method):
    target, prompts = prompted[model]
    decoder = SpeculativeDecoder(target, draft_of(draft), method)
    for prompt in prompts:
        ours = decoder.generate(prompt, NEW_TOKENS, 0.0).sequences
        assert_greedy(target, ours, greedy(target, prompt, NEW_TOKENS))


def test_sampled_texts_of_races_are_those_of_plain_decoding(prompted, draft_of, model, draft):
    target, prompts = prompted[model]
    plain, drafted = (
        SpeculativeDecoder(target, method="autoregressive"),
        SpeculativeDecoder(target, draft_of(draft), "ersd"),
    )
    for seed, prompt in enumerate(prompts[:6]):
        expected = plain.generate(prompt, NEW_TOKENS, 0.8, seed=seed).sequences
        assert torch.equal(drafted.generate(prompt, NEW_TOKENS, 0.8, seed=seed).sequences, expected)
