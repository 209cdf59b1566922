"""Logits processors and grammars: oracles of their texts, and what they are tried on."""

from functools import lru_cache

import torch
from tiny_models import assert_same_text
from transformers import LogitsProcessorList

from heavypath.kernels.filtering import filtered_logprobs


def odd_behind_even(input_ids, scores):
    """A callable of a user's own: behind an even token no token that has its last bit."""
    return scores.masked_fill(last_bits(scores.shape[1], scores.device) == (input_ids[:, -1:] & 1), -torch.inf)


@lru_cache
def last_bits(count, device):
    return torch.arange(count, device=device) & 1


def assert_same_or_tie(model, ours, theirs):
    """As `assert_same_text`, also of texts [1, any] that end at different places because they parted at a tie."""
    shortest = min(ours.shape[1], theirs.shape[1])
    assert_same_text(model, ours[:, :shortest], theirs[:, :shortest])
    if ours.shape != theirs.shape:
        assert not torch.equal(ours[:, :shortest], theirs[:, :shortest])


@torch.inference_mode()
def processed_law(model, prompt, processors, filters, length, end=None):
    """Joint probabilities [V ** length] of the next tokens, by enumeration; after the token `end` only it follows."""
    vocab, contexts, law = model.config.vocab_size, prompt[None], torch.ones(1).double()
    for _ in range(length):
        there = law > 0  # no processor is asked what follows a text that cannot come about
        step = torch.zeros(len(contexts), vocab).double()
        if end is not None:
            ended = (contexts[:, len(prompt) :] == end).any(1)
            step[ended, end] = 1.0
            there &= ~ended
        if there.any():
            logits = LogitsProcessorList(processors)(contexts[there], model(contexts[there]).logits[:, -1].float())
            step[there] = filtered_logprobs(logits, filters).exp().double()
        law = (law[:, None] * step).flatten()
        more = torch.arange(vocab).repeat(len(contexts))[:, None]
        contexts = torch.cat([contexts.repeat_interleave(vocab, 0), more], 1)
    return law


def references(length, link=lambda name: {"$ref": name}, last=None):
    """A JSON schema of references one after the other."""
    definitions = {f"a{index}": link(f"#/$defs/a{index + 1}") for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length}": last or {"type": "null"}}}
