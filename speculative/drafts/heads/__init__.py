"""Trained heads: drafts that read the target's hidden states, of a layer or less (EAGLE)."""
