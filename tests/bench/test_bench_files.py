"""bench/: what a script is told to write is written, into a folder that it makes."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
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


def test_every_prediction_names_a_row_that_is_measured_and_says_where_it_comes_from(monkeypatch):
    """By the cases that the scripts have; fields are looked up in what they write."""
    monkeypatch.syspath_prepend(str(BENCH))
    import kernel_attention
    import kernel_sampling
    import kernel_verification

    cases = {
        script.__name__: {str(case) for case in script.CASES}
        for script in (kernel_attention, kernel_sampling, kernel_verification)
    }
    figures = json.loads((BENCH / "predictions.json").read_text())["figures"]
    assert len(
        {json.dumps([each["file"], each["where"], each.get("field"), each.get("kernels")]) for each in figures}
    ) == len(figures)
    for each in figures:
        assert {"file", "where", "unit", "predicted", "from"} <= each.keys()
        assert {"H100", "H200"} == each["predicted"].keys()
        assert ("field" in each) != ("kernels" in each)
        if each["file"] in cases:
            assert each["where"]["case"] in cases[each["file"]]
        for kernel in re.findall(r"\w+_kernel", each.get("kernels", "")):
            sources = "".join(path.read_text() for path in (BENCH.parent / "kernels").rglob("*.py"))
            assert f"def {kernel}(" in sources, f"no kernel is named {kernel} any more"


def test_what_was_measured_stands_beside_what_was_predicted(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    from against_predictions import compared

    row = {
        "method": "a",
        "step": {"ms": 0.004},
        "kernels": [{"name": "x_gemm", "microseconds": 3.0}, {"name": "y", "microseconds": 9.0}],
    }
    results = {"environment": {"device": "NVIDIA H100 80GB"}, "rows": [{"method": "b"}, row]}
    (tmp_path / "large.json").write_text(json.dumps(results))
    common = {"where": {"method": "a"}, "predicted": {"H200": 1, "H100": 2}, "unit": "us", "from": "thin air"}
    predictions = [
        common | {"file": "large", "field": "step.ms", "times": 1000, "bar": 3},
        common | {"file": "large", "kernels": "gemm|nvjet"},
        common | {"file": "large", "field": "absent"},
        common | {"file": "absent", "field": "step.ms"},
    ]
    found = compared(tmp_path, predictions)
    assert [line[1:5] for line in found] == [["4 us", "2 (H100)", "2.00", "3 missed"], ["3 us", "2 (H100)", "1.50", ""]]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["first", "tests", "large", "kernels", "stream", "more", "tiles"])
def test_everything_for_a_gpu_runs_in_miniature(part, tmp_path):
    done = subprocess.run(
        ["bash", str(BENCH / "gpu.sh"), str(tmp_path), part, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: none" in done.stdout
    assert (tmp_path / f"{part}.tar.gz").exists()


def test_on_a_gpu_each_step_is_tried_and_one_archive_left_even_if_all_fail(tmp_path):
    """By a Python that says that there is no GPU, and fails at all else."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && echo 0 0 0 0 0\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(BENCH / "gpu.sh"), str(out), "first", str(python)], capture_output=True, text=True, check=False
    )
    steps = ["first-machine", "linear_gpu", "first-texts", "first-kernels", "first-large"]
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("failed: " + " ".join(f"{step} (exit 1)" for step in steps))
    with tarfile.open(out / "first.tar.gz") as archive:
        kept = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    assert kept.keys() == {"environment.log", "failed.txt", *(f"{step}.log" for step in steps)}
    assert kept["failed.txt"].splitlines() == [f"{step} (exit 1)" for step in steps]


def test_a_part_that_is_not_there_is_refused(tmp_path):
    done = subprocess.run(
        ["bash", str(BENCH / "gpu.sh"), str(tmp_path), "test"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "first|tests|large|kernels|stream|more|tiles" in done.stderr
