"""The tokens that followed the last tokens of a text before: in a sorted corpus, and in the text itself."""
