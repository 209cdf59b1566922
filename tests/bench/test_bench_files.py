"""bench/: what is predicted is measured, and gpu.sh leaves one archive."""

import json
import os
import re
import subprocess
import sys
import tarfile

import pytest
from bench_scripts import BENCH, script


def test_every_command_of_this_folder_that_a_text_names_is_there():
    """Of the documentation, the list of changes, the Makefile and the package; what is gone is named by its commit."""
    root, sweeps = BENCH.parent, script("decoding").SWEEPS
    texts = [
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
        root / "Makefile",
        root / "pyproject.toml",
        BENCH / "gpu.sh",
    ]
    for path in [*texts, *(root / "kernels").rglob("*.py"), *(root / "speculative").rglob("*.py")]:
        text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
        for name in re.findall(r"(?<![:/\w])bench/[\w/]+\.(?:py|sh)\b", text):
            assert (root / name).exists(), f"{path.name}: {name}"
        for sweep in re.findall(r"--sweep ([\w-]+)", text):
            assert sweep in sweeps, f"{path.name}: {sweep}"


def test_every_prediction_names_a_row_that_is_measured_and_says_where_it_comes_from():
    """By the cases that the scripts have; fields are looked up in what they write."""
    kernels = {f"kernel_{name}": script(f"bench_{name}")
               for name in ("attention", "sampling", "verification", "ordering", "compaction")}  # fmt: skip
    figures = json.loads((BENCH / "predictions.json").read_text())["figures"]
    places = [json.dumps([each["file"], each["where"], each.get("field"), each.get("kernels")]) for each in figures]
    assert len(set(places)) == len(places)
    sources = "".join(path.read_text() for path in (BENCH.parent / "kernels").rglob("*.py"))
    for each in figures:
        assert {"file", "where", "unit", "predicted", "from"} <= each.keys()
        assert {"H100", "H200"} == each["predicted"].keys() == each["range"].keys()
        assert all(low <= each["predicted"][gpu] <= high for gpu, (low, high) in each["range"].items()), each
        assert ("field" in each) != ("kernels" in each)
        if bench := kernels.get(each["file"]):
            assert each["where"]["case"] in map(str, bench.CASES)
            assert each["where"]["way"] in bench.WAYS
        for kernel in re.findall(r"\w+_kernel", each.get("kernels", "")):
            assert f"def {kernel}(" in sources, f"no kernel is named {kernel} any more"


def test_what_was_measured_stands_beside_what_was_predicted(tmp_path):
    kernels = [{"name": "x_gemm", "microseconds": 3.0}, {"name": "y", "microseconds": 9.0}]
    rows = [{"method": "b"}, {"method": "a", "step": {"ms": 0.004}, "kernels": kernels}]
    results = {"environment": {"device": "NVIDIA H100 80GB"}, "rows": rows}
    (tmp_path / "large.json").write_text(json.dumps(results))
    common = {"where": {"method": "a"}, "predicted": {"H200": 1, "H100": 2}, "unit": "us", "from": "thin air"}
    predictions = [
        common | {"file": "large", "field": "step.ms", "times": 1000, "bar": 3, "range": {"H100": [1, 5]}},
        common | {"file": "large", "kernels": "gemm|nvjet"},
        common | {"file": "large", "field": "absent"},
        common | {"file": "absent", "field": "step.ms"},
    ]
    found = [[*line.values()][1:5] for line in script("predict").compared(tmp_path, predictions)]
    assert found == [["4 us", "2 (H100, 1 to 5)", "2.00", "3 missed"], ["3 us", "2 (H100)", "1.50", ""]]
    benchmarks = {"benchmarks": [{"extra_info": {"method": "a", "device": "NVIDIA H200", "microseconds": 2.0}}]}
    (tmp_path / "kernel.json").write_text(json.dumps(benchmarks))
    found = script("predict").compared(tmp_path, [common | {"file": "kernel", "field": "microseconds"}])
    assert [line["predicted"] for line in found] == ["1 (H200)"]


def test_results_are_measured_again_by_the_commands_that_they_name():
    again = script("again")
    (command,) = again.commands(["efficiency"])
    assert command[1:4] == ["bench/decoding.py", "--sweep", "nodes"]
    assert command[-2:] == ["--json", str(BENCH / "results" / "efficiency-cpu.json")]
    (command,) = again.commands(["linear"])
    assert command[-2:] == ["--benchmark-json", str(BENCH / "results" / "linear-cpu.json")]
    (command,) = again.commands(["suite-demo"])
    assert command[1:5] == ["-m", "heavypath.speculative", "compare", "--suite"]
    assert command[-2:] == ["--save", str(BENCH / "results" / "suite-demo-cpu.json")]
    with pytest.raises(ValueError, match=r"expected names of .*efficiency.*, got nothing"):
        again.commands(["nothing"])


def gpu_sh(*arguments, **environment):
    command = ["bash", BENCH / "gpu.sh", *arguments]
    given = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, **given, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def files_of(part, text):
    """The test files of a part of gpu.sh that takes those of kernels, and the words of tests that a miniature runs."""
    body = re.search(rf"run_{part}\(\) {{\n(.*?)\n}}\n", text, re.S)[1]
    words = "".join(re.findall(r'some\+?="([^"$]+)"', body)).split(" or ")
    kernels = re.search(r"local kernels=\(([^)]+)\)", body)[1].split()
    further = re.findall(r"tests/core/(test_\w+\.py)\)", body)
    return [*(f"kernels/test_{name}.py" for name in kernels), *(f"core/{name}" for name in further)], words


@pytest.mark.parametrize("part", ["tests", "others"])
def test_in_miniature_a_test_of_each_kernel_is_tried(part):
    files, words = files_of(part, (BENCH / "gpu.sh").read_text())
    assert len(files) > 9
    assert len(words) > 9
    for file in files:
        names = re.findall(r"^def (test_\w+)", (BENCH.parent / "tests" / file).read_text(), re.M)
        assert any(word in name for word in words for name in names), file


WITHOUT_A_GPU = {  # what is in these files is of a CPU, of references, or of compiling
    "adversary", "compiling", "filtering", "launches", "leaders", "linear", "looked_up", "native", "native_cache",
    "native_steps", "noise", "operators", "top_down", "verification", "verification_oracle",
}  # fmt: skip


def test_the_tests_of_every_kernel_are_in_a_part_for_a_gpu():
    text = (BENCH / "gpu.sh").read_text()
    tried = {file for part in ("tests", "others") for file in files_of(part, text)[0]}
    there = {f"kernels/{path.name}" for path in (BENCH.parent / "tests" / "kernels").glob("test_*.py")}
    assert {f"kernels/test_{name}.py" for name in WITHOUT_A_GPU} == there - tried
    assert {file for file in tried if file.startswith("kernels/")} <= there


def test_a_test_that_hangs_is_named_and_ended():
    text = (BENCH / "gpu.sh").read_text()
    steps = dict(re.findall(r'step ([\w-]+) \d+ (?:"\$\{played\[@\]\}" env \w+=0 )?"\$\{pytest\[@\]\}" (.*)', text))
    assert len(steps) > 5
    assert [name for name, rest in steps.items() if not rest.startswith('"${named[@]}"')] == ["soak"]  # which is long


@pytest.mark.slow
@pytest.mark.parametrize("part", ["first", "large", "tests", "kernels", "others", "stream", "more", "races"])
def test_everything_for_a_gpu_runs_in_miniature(part, tmp_path):
    done = gpu_sh(tmp_path, part, sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed: none" in done.stdout
    assert (tmp_path / f"{part}.tar.gz").exists()


def test_on_a_gpu_each_step_is_tried_and_one_archive_left_even_if_all_fail(tmp_path):
    """By a Python that says that there is no GPU, and fails at all else."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && echo 0 0 0 0\n')
    python.chmod(0o755)
    done = gpu_sh(out, "first", python)
    steps = ["first-machine", "first-head", "first-attention", "weight-stream", "first-texts", "first-kernels"]
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("failed: " + " ".join(f"{step} (exit 1)" for step in steps))
    with tarfile.open(out / "first.tar.gz") as archive:
        kept = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    assert kept.keys() == {"environment.log", "failed.txt", *(f"{step}.log" for step in steps)}
    assert kept["failed.txt"].splitlines() == [f"{step} (exit 1)" for step in steps]
    refused = gpu_sh(tmp_path, "test")
    assert refused.returncode == 2
    assert "first|large|tests|kernels|others|stream|more|races" in refused.stderr


def test_the_limits_of_a_parts_steps_add_up_to_less_than_its_time(tmp_path):
    """By a Python that says that there are two GPUs, and fails at all else; each step prints its limit."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && echo 1 2 0 0\n')
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text("#!/bin/sh\nexit 1\n")
    for each in (python, sanitizer):
        each.chmod(0o755)
    out.mkdir()
    (out / "profile.json").touch()
    done = gpu_sh(out, "all", python, PATH=f"{tmp_path}:{os.environ['PATH']}")
    parts = re.split(r"^=== (\w+)\n", done.stdout, flags=re.M)[1:]
    sums = {
        part: sum(map(int, re.findall(r"^--- [\w-]+: \d+ s of (\d+)", text, re.M)))
        for part, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert [*sums] == ["first", "large", "tests", "kernels", "others", "stream", "more", "races"]
    assert all(100 < seconds <= 530 for seconds in sums.values()), sums
    assert sum([*sums.values()][:4]) < 36 * 60
    assert "memcheck" in done.stdout
