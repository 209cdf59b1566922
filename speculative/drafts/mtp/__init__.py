"""Layers for multi-token prediction from a target's own checkpoint, as a draft."""
