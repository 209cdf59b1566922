"""Training of drafts: a head or a plain draft learns the target's distributions. `distil` puts it together."""
