"""Training of drafts: a head or a plain draft learns the target's distributions. `distil` is what users call."""
