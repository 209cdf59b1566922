"""Compile grammars in a separate process first, so that one that crashes or takes too long only fails its request."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PROGRAM = Path(__file__).with_name("grammar_process.py")
WAITING = 60.0  # seconds that the process may take to get ready, and to answer on a busy machine


class Trial:
    """Compiles grammars in another process, to find out whether the server can compile them safely.

    The process starts with the first grammar, and again after one that exceeded the limits. It ends with the server's
    process, or by `close`. One thread at a time may use it.

    seconds: of a processor, the time limit for compiling a grammar
    memory:  memory limit in bytes, above what the process uses before it compiles
    """

    def __init__(self, seconds: float, memory: int):
        self._seconds = seconds
        self._memory = memory
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str, what: str) -> None:
        """Raise ValueError if a grammar cannot be compiled within the limits.

        source: the grammar as llguidance reads it
        what: its name in the message, such as "JSON schema"

        Raises RuntimeError if the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed from outside
        if self._process is None:
            self._process = _started(self._seconds, self._memory)
            if _answer(self._process, None) is None:
                self.close()
                raise RuntimeError("the process that compiles grammars does not start")
        error = _answer(self._process, source)
        if error is None:
            self.close()
            error = f"it takes more than {self._seconds:g} processor seconds, or too much memory or depth, to compile"
        if error:
            raise ValueError(f"the {what} cannot be followed: {error}")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started(seconds: float, memory: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(seconds), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # no reserved 64 MiB arenas, so that the memory limit is exact
        start_new_session=True,  # so that Ctrl-C only reaches the server
    )


def _answer(process: subprocess.Popen[str], source: str | None) -> str | None:
    """The next line of the process, decoded: its answer to `source`, an error message or "".

    source: the grammar to send first; None to only wait for a line

    Returns None if the process ended, or was killed since it took too long.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()
    watch = threading.Timer(WAITING, lambda: (late.set(), process.kill()))
    watch.start()
    try:
        if source is not None:
            with suppress(BrokenPipeError):  # the process has ended, which reading will notice
                process.stdin.write(f"{json.dumps(source)}\n")
                process.stdin.flush()
        line = process.stdout.readline()
    finally:
        watch.cancel()
        watch.join()
    return json.loads(line) if line.endswith("\n") and not late.is_set() else None
