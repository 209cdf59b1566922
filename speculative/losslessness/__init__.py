"""Does a sampler keep a target's law: the law of a few tokens exactly, and how far sampled texts depart from it."""
