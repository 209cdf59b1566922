"""Retrieval drafts: the tokens that followed the same context before, in a sorted corpus and in the sequence itself."""
