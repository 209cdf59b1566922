"""bench/: what a script is told to write is written, into a folder that it makes."""

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
ELSEWHERE = ("picture_trace.py", "theory_figures.py")  # a temporary folder; the folder that theory.py has made


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import common

    yield common
    sys.modules.pop("common", None)


def test_results_are_written_into_a_folder_that_is_made(common, tmp_path):
    path = tmp_path / "new" / "folder" / "results.json"
    common.write_results(path, {"device": "cpu"}, rows=[1, 2])
    assert json.loads(path.read_text()) == {"environment": {"device": "cpu"}, "rows": [1, 2]}
    common.write_results(None, {})


def test_every_file_that_a_script_writes_gets_its_folder():
    """Each line of bench/ that writes a file stands beside one that makes its folder."""
    lacking = []
    for script in sorted(BENCH.glob("*.py")):
        lines = script.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if ".write_text(" not in line and "savefig(" not in line:
                continue
            near = "\n".join(lines[max(0, number - 3) : number + 1])
            if "made(" not in near and "mkdir(" not in near and script.name not in ELSEWHERE:
                lacking.append(f"{script.name}:{number + 1}")
    assert not lacking, lacking
