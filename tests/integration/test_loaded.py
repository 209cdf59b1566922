"""What a user loads and a reader enters, by `python bench/loaded.py`; CONTRIBUTING.md says what may rise."""

import pytest
from bench_scripts import script
from kernel_cases import needs_compiler

pytestmark = pytest.mark.integration
OF_GPUS = {
    "nucleus.py", "sampling_kernel.py", "filter_cuts.py", "sharing.py", "launches.py", "decision.py", "walk.py",
    "traversal_kernel.py", "kernel.py", "launch.py", "variant.py", "tickets.py",
}  # fmt: skip
OF_GROWING_TREES = {"ordering.py", "slots.py", "growing.py", "assembly.py", "growing_kernel.py"}


def test_a_user_loads_no_more_than_today():
    loaded = script("loaded")
    size = loaded.size_of(loaded.files_of(loaded.PROGRAMS["loaded"]))
    assert size.files <= 74, size
    assert size.lines <= 13_290, size


@needs_compiler
def test_a_cpu_that_decodes_loads_no_more_than_today():
    loaded = script("loaded")
    files = loaded.files_of(loaded.PROGRAMS["decoded"])
    size = loaded.size_of(files)
    assert size.files <= 79, size
    assert size.lines <= 14_319, size
    assert not {path.name for path in files} & (OF_GPUS | OF_GROWING_TREES)
    assert {"step_kernels.py", "verification.py"} < {path.name for path in files}  # of kernels/native/


def test_a_reader_enters_no_more_than_today():
    loaded = script("loaded")
    size = loaded.size_of(loaded.files_of(loaded.PROGRAMS["entered"]))
    assert size.files <= 47, size
    assert size.density <= 9.0, size
