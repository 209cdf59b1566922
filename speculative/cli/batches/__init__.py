"""`heavypath batch`: files of requests."""
