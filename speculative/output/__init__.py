"""What people look at: text as it arrives, and the trace of a generation as a page."""
