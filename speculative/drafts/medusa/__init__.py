"""Medusa heads: drafts that say from one hidden state of the target what stands at each of the next places."""
