"""Six turns of a chat, each computing its new tokens alone."""

import pytest
from real_texts import assert_greedy

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.real
TURNS = (
    "My name is Ada. Name three animals.", "And three more?", "Which of them can fly?", "Write one line about it.",
    "Now the same in capital letters.", "What is my name?",
)  # fmt: skip


@pytest.mark.parametrize("draft", ["recall", "exit"])
@pytest.mark.parametrize("method", ["sequoia", "ersd"])
def test_six_turns(smollm, draft_of, greedy, method, draft):
    target, tokenizer = smollm
    decoder = SpeculativeDecoder(target, draft_of(draft), method)
    text, past = "", None
    for turn in TURNS:
        text += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer(text, return_tensors="pt").input_ids
        out = decoder.generate(prompt, 32, 0.0, past=past)
        assert_greedy(target, out.sequences, greedy(target, prompt, 32))
        past = out.cache
        text += tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True) + "<|im_end|>\n"
    assert prompt.shape[1] > 150
