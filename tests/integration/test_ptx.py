"""Kernels run as PTX (tests/support/ptx): faults that are put into them, or into their PTX, are found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tests" / "kernels"


class Fault(NamedTuple):
    """A change of a file of kernels/; the test that finds it, and what it says."""

    file: str
    original: str
    changed: str
    test: str
    found: str


FAULTS = {
    "a missing barrier": Fault(
        "cache_compaction.py", "    tl.debug_barrier()  # one thread's destination is another's source\n", "",
        "test_cache_compaction.py::test_rows_move_by_hand_and_are_read_before_they_are_written", "no barrier between",
    ),
    "a stride of 32 bits": Fault(
        "layers/gated.py", "    row = row.to(tl.int64)\n", "", "test_layer_kernels.py::test_far", "outside all tensors",
    ),
    "a fused multiply-add": Fault(
        "layers/rotary.py", "enable_fp_fusion=False", "enable_fp_fusion=True",
        "test_layer_kernels.py::test_rotary_and_cache_rows_are_those_of_transformers", "it is the same arithmetic",
    ),
    "a mask dropped at a tile's edge": Fault(
        "layers/gated.py", "rounded(opened * y, out, INTERPRETED), mask=inside", "rounded(opened * y, out, INTERPRETED)",
        "test_layer_kernels.py::test_gate_and_up_of_one_product_are_multiplied_as_by_transformers", "outside all tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_found(name, tmp_path):
    fault = FAULTS[name]
    package = tmp_path / "heavypath"
    shutil.copytree(ROOT / "kernels", package / "kernels")
    (package / "speculative").symlink_to(ROOT / "speculative")
    (package / "__init__.py").symlink_to(ROOT / "speculative" / "package" / "__init__.py")
    changed = package / "kernels" / fault.file
    source = changed.read_text()
    assert source.count(fault.original) == 1
    changed.write_text(source.replace(fault.original, fault.changed))
    done = run("-m", "pytest", "-p", "ptx.plugin", "-x", "-q", str(KERNELS / fault.test), first=tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert fault.found in done.stdout


EDITED = """
import re, sys
import ptx.plugin as plugin, pytest
from functools import cache
from ptx.emulator import Emulated

pattern, test = sys.argv[1:]
plugin.emulated = cache(lambda kernel: Emulated(re.sub(pattern, "", kernel.asm["ptx"])))
sys.exit(pytest.main(["-p", "ptx.plugin", "-x", "-q", test], [plugin]))
"""


@pytest.mark.parametrize(("missing", "found"), [
    (r"bar\.sync\s+0;", "no barrier between"),
    (r"cp\.async\.wait_group\s+\S+;", "nothing has written"),
    (r"wgmma\.fence\S*;", "no wgmma.fence"),
    (r"wgmma\.wait_group\S*\s+\S+;", "products on their way"),
    (r"fence\.proxy\.async\S*;", "no fence.proxy.async"),
])  # fmt: skip
def test_what_is_missing_in_ptx_is_found(missing, found):
    """In attention on sm_90, whose products are wgmma and whose keys come by asynchronous copies."""
    test = KERNELS / "test_tree_attention.py::test_many_rows"
    done = run("-c", EDITED, missing, str(test))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert found in done.stdout


def run(*arguments: str, first: Path = ROOT / ".editable") -> subprocess.CompletedProcess[str]:
    """Python with a package of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(first), str(ROOT / "tests" / "support")))
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
