"""Whether sampled outputs, and the outputs of a verification, have exactly the target's distribution."""
