"""Threads: which processes are the command, how its threads wait, and when a machine counts as busy."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from in_time import in_time

from heavypath.speculative.costs.threads import Load, running, usable_cores
from heavypath.speculative.serving.arrivals import Arrivals
from heavypath.speculative.serving.completion import Completion
from heavypath.speculative.streaming.slots import LayerSlots
from heavypath.speculative.waiting import is_command, wait_passively


def test_the_command_is_known_by_its_name_and_by_that_of_the_package():
    assert is_command(["/somewhere/bin/heavypath", "info"], ["python", "/somewhere/bin/heavypath", "info"])
    for module in ("heavypath", "heavypath.speculative"):
        assert is_command(["-m", "info"], ["python", "-X", "dev", "-m", module, "info"])
    assert not is_command(["-m", "tests"], ["python", "-m", "pytest", "heavypath.speculative"])
    assert not is_command(["-c"], ["python", "-c", "import heavypath.speculative"])
    assert not is_command(["/home/someone/program.py"], ["python", "/home/someone/program.py", "heavypath"])
    assert not is_command([], [])


def test_a_users_own_setting_of_how_threads_wait_stays():
    environment = {}
    wait_passively(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "100"), ("KMP_BLOCKTIME", "1")):
        environment = {name: value}
        wait_passively(environment)
        assert environment == {name: value}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "sleeps"),
    [
        (("-m", "heavypath.speculative", "info", "-v"), True),
        (("-c", "from heavypath.speculative import METHODS"), False),
    ],
)
def test_the_commands_threads_sleep_while_they_wait_and_other_programs_choose(arguments, sleeps):
    """What GNU's OpenMP itself says when PyTorch is imported, after which nothing changes it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    ours["OMP_DISPLAY_ENV"] = "verbose"
    done = subprocess.run([sys.executable, *arguments], env=ours, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not lines:
        pytest.skip("PyTorch came with another OpenMP than GNU's")
    assert (int(lines[0].split("'")[1]) == 0) == sleeps


def test_a_machine_is_busy_if_fewer_cores_are_free_than_there_are_threads():
    assert not Load(0.2, 2, 2).busy
    assert Load(1.0, 2, 2).busy
    assert not Load(1.0, 2, 1).busy
    assert Load(3.1, 2, 1).busy
    assert not Load(4.0, 64, 64).busy
    assert Load(20.0, 64, 64).busy
    assert str(Load(3.14, 2, 1)) == "load 3.1 on 2 cores, 1 thread"


def test_what_counts_is_the_work_of_the_moment_on_the_cores_that_may_be_used(monkeypatch):
    """Of core 0 all, of core 1 a quarter, in which waiting for a disk is no work; core 2 belongs to others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    moments = iter([
        "cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 50 700 30 1 2 3 0 0\ncpu1 10 0 5 70 3 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\n",
        "cpu 9 9 9 9 9 9 9 9\ncpu0 105 1 52 700 30 1 3 4 0 0\ncpu1 12 0 5 75 4 0 0 0 0 0\ncpu2 9 0 0 0 0 0 0 0 0 0\n",
    ])  # fmt: skip

    class Stat:
        def read_text(self, encoding):
            return next(moments)

    assert running(Stat(), 0) == pytest.approx(1 + 2 / 8)


def test_the_average_of_a_minute_counts_where_the_system_tells_no_more(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0, 0))
    (tmp_path / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    assert running(tmp_path / "stat", 0) == running(tmp_path / "missing", 0) == 1.5


def test_a_containers_share_of_the_cores_counts(tmp_path):
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000", cores), ("100000 100000", 1), ("50000 100000", 1), ("6400000 100000", cores)):
        quota.write_text(text + "\n")
        assert usable_cores(quota) == min(cores, expected)
    assert usable_cores(tmp_path / "absent") == cores


@pytest.mark.skipif(sys.gettrace() is not None, reason="Ctrl-C may leave the lock of what records coverage held")
@pytest.mark.parametrize("asked", [LayerSlots([], [], 2).counts, Arrivals(4).wake, partial(Completion().since, 0)])
def test_ctrl_c_at_any_time_leaves_no_lock_to_others(asked):
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 50:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                for _ in range(10_000):
                    asked()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may still come
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    in_time(asked)
