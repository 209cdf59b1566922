"""Helpers of tests/drafts/test_composite.py and its neighbours."""

import torch
from head_cases import logits_over as logits_of_head

from heavypath.speculative import (
    PromptLookup,
)


@torch.no_grad()
def logits_of(draft, target, text, path):
    """The logits of a simple draft after a text and a path of drafted tokens, by a pass over all of it."""
    whole = torch.cat([text, torch.tensor(path, dtype=torch.long)])
    if isinstance(draft, PromptLookup):
        probs = followed(text.tolist(), whole.tolist(), draft)
        return torch.tensor(probs).log()
    if isinstance(draft, torch.nn.Module) and hasattr(draft, "generate"):
        return draft(whole[None]).logits[0, -1]
    return logits_of_head(draft, target, text, path)


def followed(text, context, options, vocab=7):
    """`searched` over a vocabulary of another size."""
    probs = [0.0] * vocab
    for length in range(options.max_ngram, options.min_ngram - 1, -1):
        suffix = context[-length:]
        places = [i + length for i in range(len(text) - length) if text[i : i + length] == suffix]
        if len(suffix) == length and places:
            for age, place in enumerate(reversed(places), start=1):
                probs[text[place]] += 0.5**age
            break
    return probs


def law_of(logits):
    """Probabilities; zeros of logits that propose nothing."""
    logits = logits.float()
    return logits.softmax(-1) if logits.max() > -torch.inf else torch.zeros_like(logits)
