"""Output for people: streamed text, scores, and the trace of a generation as a file or a web page."""
