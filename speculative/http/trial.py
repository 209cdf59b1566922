"""Compile grammars in a separate process first, so that one that crashes or takes too long only fails its request."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).with_name("grammar_process.py")
STARTING = 60.0  # seconds until the process must be ready


class Trial:
    """A process that compiles grammars. It starts with the first one, and again after it was ended.

    seconds: time limit for compiling; memory: memory limit in bytes, above what the process uses at its start

    To be used by one thread at a time. The process ends with this one, or by `close`.
    """

    def __init__(self, seconds: float, memory: int):
        self._seconds, self._memory = seconds, memory
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str, what: str) -> None:
        """Raise ValueError for a grammar source that cannot be compiled, or not within the limits.

        Raises RuntimeError if the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed from outside
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
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # no reserved 64 MiB arenas, so that the memory limit is exact
        start_new_session=True,  # so that Ctrl-C only reaches the server
    )


def _answer(process: subprocess.Popen[str], source: str | None, seconds: float) -> str | None:
    """The answer of the process to a source, or its first line; None if the process ended or had to be killed."""
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
    with suppress(BrokenPipeError):  # the process has ended, which reading will notice
        into.write(f"{line}\n")
        into.flush()
