"""The decoding loop: draft a tree, score it with the target, verify, commit, until all sequences have ended."""
