"""Several texts at a time: a batch of prompts of different lengths, and a service."""

import pytest
import torch
from real_texts import QUESTIONS, assert_greedy, trimmed

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.real


@pytest.mark.parametrize("draft", ["recall", "exit"])
@pytest.mark.parametrize("method", ["sequoia", "ersd", "dyspec"])
def test_a_batch_of_four(smollm, draft_of, greedy, method, draft):
    target, tokenizer = smollm
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS[:4]]
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    assert int(inputs.attention_mask.min()) == 0
    decoder = SpeculativeDecoder(target, draft_of(draft), method)
    ours = decoder.generate(inputs.input_ids, 32, 0.0, attention_mask=inputs.attention_mask).sequences
    for row, mask in zip(ours, inputs.attention_mask, strict=True):
        start = int((mask == 0).sum())
        alone = row[None, start:]
        assert_greedy(target, alone, greedy(target, row[None, start : len(mask)], 32))


def test_a_service_answers_each_request_as_alone(smollm, questions, draft_of, greedy):
    target, _ = smollm
    plain = SpeculativeDecoder(target, method="autoregressive")
    with SpeculativeDecoder(target, draft_of("recall"), "ersd").serve(slots=4, max_tokens=256) as service:
        prompts = [prompt[0].tolist() for prompt in questions[:8]]
        exact = [service.submit(prompt, 32) for prompt in prompts]
        sampled = [service.submit(prompt, 32, temperature=0.8, seed=seed) for seed, prompt in enumerate(prompts)]
        for prompt, completion in zip(questions, exact, strict=False):
            text = torch.tensor([prompt[0].tolist() + completion.result().tokens])
            assert_greedy(target, text, greedy(target, prompt, 32))
        for seed, (prompt, completion) in enumerate(zip(questions, sampled, strict=False)):
            alone = plain.generate(prompt, 32, 0.8, seed=0, sequence_ids=torch.tensor([seed])).sequences
            expected = trimmed(target, alone)[0]
            assert prompt[0].tolist() + completion.result().tokens == expected.tolist()
