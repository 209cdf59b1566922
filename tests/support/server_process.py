"""Helpers of tests/serving/test_serve_command.py and its neighbours."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

PATIENCE = 120
ARGUMENTS = [sys.executable, "-m", "heavypath.speculative", "serve", "--port", "0"]


@contextmanager
def process(*arguments, **environment):
    """The command, once it serves: (process, base address, what it said until then)."""
    started = subprocess.Popen(
        [*ARGUMENTS, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    watchdog = threading.Timer(PATIENCE, started.kill)
    watchdog.start()
    try:
        said = []
        for line in started.stderr:
            said.append(line)
            if found := re.search(r"serving (\S+) by \S+ at (http://\S+)/v1", line):
                yield started, found[2], said
                break
        else:
            pytest.fail("".join(said))
    finally:
        watchdog.cancel()
        started.kill()
        started.communicate()
