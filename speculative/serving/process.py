"""The process that a service decodes in: a process that was forked from it has all objects, and not the thread."""

import os


class Process:
    """The process in which this was made."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_this_one(self) -> bool:
        """True in that process."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Raise RuntimeError in another process: it was forked, and what it waits for would never come."""
        if not self.is_this_one:
            raise RuntimeError(
                f"the service decodes in process {self._number}; this is process {os.getpid()}, forked from it, in "
                "which nothing decodes: submit, wait and close there, or make a service here by decoder.serve()"
            )
