"""Typical acceptance, which keeps what the target finds likely enough and so changes the law of the text."""
