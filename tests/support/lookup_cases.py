"""Helpers of tests/drafts/test_drafts.py and its neighbours."""

VOCAB = 4


def searched(text, context, options):
    """Probabilities of what followed the longest suffix of `context` that occurred in `text`."""
    for length in range(options.max_ngram, options.min_ngram - 1, -1):
        suffix = context[-length:]
        followed = [text[i + length] for i in range(len(text) - length) if text[i : i + length] == suffix]
        if len(suffix) == length and followed:
            probs = [0.0] * VOCAB
            for age, token in enumerate(reversed(followed), start=1):
                probs[token] += 0.5**age
            return probs
    return [0.0] * VOCAB
