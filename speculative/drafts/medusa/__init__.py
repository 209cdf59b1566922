"""Medusa heads: drafts that predict the tokens at the next positions from one hidden state of the target."""
