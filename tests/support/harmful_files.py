"""Helpers of tests/drafts/test_head_checkpoints.py and its neighbours."""


class Harmful:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)
