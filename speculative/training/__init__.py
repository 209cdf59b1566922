"""Training of drafts: a head, a block draft or a draft model learns the target's distributions, see `distillation`."""
