"""Output for people: text while it arrives, and the trace of a generation as a page."""
