"""What is built for a release: archives that are equal to the byte, and a workflow that does what .ci/run does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_workflow_has_the_targets_of_the_script():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^for target in (.*); do$", script, re.M)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert [*jobs["target"]["strategy"]["matrix"]["target"], "test"] == targets.split()
    made = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert made == {
        "make ${{ matrix.target }}", "make test PYTHON=python${{ matrix.python }}", "make wheels hub hub-generate",
        "make test-avx2",
    }  # fmt: skip
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ["test", "test-avx2", "wheels", "hub", "hub-generate", *targets.split()]:
        assert re.search(rf"^{target}:", makefile, re.M), target
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert jobs["test"]["strategy"]["matrix"]["python"] == classifiers


@pytest.mark.integration
def test_equal_sources_make_equal_archives(tmp_path):
    program = (
        "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    )
    found = []
    for name in ("one", "another"):
        source = tmp_path / name
        subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
        subprocess.run(
            [sys.executable, "-c", program, tmp_path / f"{name}-dist"], cwd=source, check=True, capture_output=True
        )
        found.append({path.name: path.read_bytes() for path in (tmp_path / f"{name}-dist").iterdir()})
    assert len(found[0]) == 2
    assert found[0] == found[1]
