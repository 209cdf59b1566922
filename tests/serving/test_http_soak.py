"""A server under clients that leave, do not read or send nonsense: bench/soak.py, for a minute, finds nothing wrong."""

import os

import pytest
from bench_scripts import script

MINUTES = os.environ.get("SOAK_MINUTES", "1")


@pytest.mark.slow
def test_a_minute_of_load_loses_nothing_changes_no_text_and_leaves_nothing(monkeypatch):
    soak = script("soak")
    monkeypatch.setattr("sys.argv", ["soak.py", "--minutes", MINUTES, "--threads", "1"])
    assert soak.main() == 0
