"""A process that compiles grammars before the server does: what ends it, or takes too long, costs one request alone."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).with_name("grammar_process.py")
STARTING = 60.0  # seconds that the process may take until it is ready


class Trial:
    """Compiles a source in a process, which starts with the first one, and anew after one that ended it.

    seconds: that compiling may take; memory: bytes that it may take, more than the process had

    For one thread at a time. The process ends with this one, or by `close`.
    """

    def __init__(self, seconds: float, memory: int):
        self._seconds, self._memory = seconds, memory
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str, what: str) -> None:
        """Raise ValueError for a source that cannot be compiled, or not within the limits.

        Raises RuntimeError where the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # somebody else has ended it
        if self._process is None:
            self._process = _started(self._memory)
            if _answer(self._process, None, STARTING) is None:
                self.close()
                raise RuntimeError("the process that compiles grammars does not start")
        error = _answer(self._process, source, self._seconds)
        if error is None:
            self.close()
            error = f"it takes more than {self._seconds:g} seconds, or too much memory or depth, to compile"
        if error:
            raise ValueError(f"the {what} cannot be followed: {error}")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started(memory: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # none of 64 MiB in reserve, so that what it takes is what it has
        start_new_session=True,  # Ctrl-C is the server's
    )


def _answer(process: subprocess.Popen[str], source: str | None, seconds: float) -> str | None:
    """The answer of the process, of a source or at its beginning; None where it has ended, or had to be ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()
    watch = threading.Timer(seconds, lambda: (late.set(), process.kill()))
    watch.start()
    try:
        if source is not None:
            _write(process.stdin, json.dumps(source))
        line = process.stdout.readline()
    finally:
        watch.cancel()
        watch.join()
    return json.loads(line) if line.endswith("\n") and not late.is_set() else None


def _write(into: IO[str], line: str) -> None:
    with suppress(BrokenPipeError):  # it has ended, which is seen where it is read
        into.write(f"{line}\n")
        into.flush()
