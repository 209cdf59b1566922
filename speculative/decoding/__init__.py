"""The loop: draft a tree, score it with the target, verify, commit; again until every sequence has ended."""
