"""Drafts that propose nothing, or in some sequences only, under every processor that reads a whole distribution."""

import pytest
import torch
from texts_with_rules import EOS
from tiny_models import tiny_llama
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as theirs

from heavypath.speculative import Lookahead, PromptLookup, Recall, SpeculativeDecoder

IDS = torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 2]])  # of which the first alone repeats itself
DRAFTS = {"lookup": PromptLookup, "recall": Recall, "lookahead": Lookahead, "model": lambda: tiny_llama(2)}
SETTINGS = [
    {"top_h": 0.9},
    {"eta_cutoff": 0.2},
    {"epsilon_cutoff": 0.05, "top_h": 0.5},
    {"typical_p": 0.8, "min_p": 0.1},
    {"no_repeat_ngram_size": 2, "eta_cutoff": 0.1, "repetition_penalty": 1.2},
    {"exponential_decay_length_penalty": (2, 1.2), "top_h": 0.8},
    {"sequence_bias": {(1,): 2.0}, "top_h": 0.7, "remove_invalid_values": True},
    {"begin_suppress_tokens": [1, 2], "suppress_tokens": [3], "eta_cutoff": 0.3},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["sequoia", "dyspec", "rsd-s", "specinfer"])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_warpers_are_not_shown_what_nobody_proposes(settings, name, method, monkeypatch):
    target = tiny_llama(1)
    config = GenerationConfig(do_sample=True, eos_token_id=EOS, pad_token_id=0, **settings)
    monkeypatch.setattr(target, "generation_config", config)
    out = SpeculativeDecoder(target, DRAFTS[name](), method).generate(IDS, 10)
    assert out.sequences.shape[0] == 2


def test_no_processor_is_shown_a_row_without_any_token():
    """A user's own, too; and the greedy text is that of transformers."""

    def needs_a_distribution(input_ids, scores):
        assert (scores > -torch.inf).any(-1).all()
        entropy = torch.distributions.Categorical(logits=scores).entropy()[:, None]
        return scores - entropy * torch.arange(scores.shape[1])

    target = tiny_llama(1)
    own = [theirs.NoRepeatNGramLogitsProcessor(3), theirs.TopHLogitsWarper(0.9), needs_a_distribution]
    usual = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    expected = target.generate(IDS, **usual, logits_processor=LogitsProcessorList(own))
    for draft in (PromptLookup(), Recall(), Lookahead()):
        out = SpeculativeDecoder(target, draft).generate(IDS, 10, eos_token_id=None, logits_processor=own)
        assert torch.equal(out.sequences, expected)
