"""Detect forked processes: a process forked from a service's has its objects, but not the thread that decodes."""

import os


class Process:
    """Remembers the process that created this object, to detect that it is used in a forked one."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_this_one(self) -> bool:
        """Whether the current process created this object."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Raise RuntimeError in a forked process, where waiting would never end because nothing decodes."""
        if not self.is_this_one:
            raise RuntimeError(
                f"the service decodes in process {self._number}; this is process {os.getpid()}, forked from it, in "
                "which nothing decodes: submit, wait and close there, or make a service here by decoder.serve()"
            )
