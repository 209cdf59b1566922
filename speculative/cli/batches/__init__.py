"""`heavypath batch`: answer files of requests."""
