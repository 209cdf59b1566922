"""Drafts, which propose tokens: a model, layers of the target, the sequence so far, a corpus, or a user's own."""
