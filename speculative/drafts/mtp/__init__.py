"""Layers for multi-token prediction that are in a target's own checkpoint, as a draft."""
