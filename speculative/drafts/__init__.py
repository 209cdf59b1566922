"""Drafts, which propose tokens: a model, the target's own first layers, the text so far, a corpus, or one's own."""
