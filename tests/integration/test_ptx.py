"""The machine for PTX in tests/support/ptx: a program by hand, and faults that are put into kernels and their PTX."""

import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ptx.emulator import PLAIN, Emulated, FaultError, Schedule

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tests" / "kernels"


# Thread t of 64 reads x[t], and writes 2 x[63 - t] + 1, which it takes from shared memory.
BY_HAND = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry reversed(.param .u64 .ptr .global reversed_param_0, .param .u64 reversed_param_1)
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [reversed_param_0];
	ld.param.b64 	%rd2, [reversed_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.s32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	setp.lt.s32 	%p1, %r1, 64;
	mov.u32 	%r2, 0x0;
	@%p1 ld.global.b32 { %r2 }, [ %rd4 + 0 ];
	mov.b32 	%r4, global_smem;
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r5, %r4, %r3;
	st.shared.b32 	[%r5], %r2;
	bar.sync 	0;
	xor.b32 	%r6, %r5, 252;
	ld.shared.b32 	%r8, [%r6];
	{ .reg .b32 two; mov.b32 two, 0f40000000; fma.rn.f32 %r11, %r8, two, 0f3F800000; }
	setp.lt.s32 	%p2, %r1, 21;
	@%p2 bra 	$L__BB0_2;
	st.global.b32 	[%rd5], {%r11};
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	@%p1 st.global.b32 [%rd5], {%r11};
$L__BB0_3:
	shfl.sync.bfly.b32 	%r13, %r11, 1, 31, -1;
	ret;
}
"""


@pytest.mark.parametrize(("original", "changed", "found"), [
    ("", "", None),
    ("bar.sync 	0;", "", "no barrier between|nothing has written"),
    ("%r1, 64;", "%r1, 63;", None),  # thread 63 takes no part, and reads 0
    ("[ %rd4 + 0 ]", "[ %rd4 + 4 ]", "a load of 4 bytes .* outside all tensors"),
    ("[ %rd4 + 0 ]", "[ %rd4 + 2 ]", "misaligned"),
    ("st.global.b32 	[%rd5],", "st.global.b32 	[%rd5+128],", "a store of 4 bytes .* outside all tensors"),
    ("st.shared.b32 	[%r5], %r2;", "", "nothing has written"),
    ("%r6, %r5, 252;", "%r6, %r5, 1276;", "0x100"),
    ("bra.uni 	$L__BB0_3;", "ret;", "takes no part"),  # the others exchange without these lanes
    ("ret;\n}", "bra.uni $L__BB0_3;\n}", "is it a hang"),
])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_program_by_hand_runs_as_it_says_or_fails_for_what_is_wrong(original, changed, found, seed, monkeypatch):
    monkeypatch.setattr("ptx.emulator.LIMIT", 10_000)
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    schedule = Schedule.drawn(random.Random(seed), seed) if seed else PLAIN
    kernel = Emulated(BY_HAND.replace(original, changed))
    hulls = [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in (x, y)]
    with nullcontext() if found is None else pytest.raises(FaultError, match=found):
        kernel.launch((1, 1, 1), 64, 256, [x.ctypes.data, y.ctypes.data], hulls, schedule)
        x[63] *= "63" not in changed
        assert np.array_equal(y, 2 * x[::-1] + 1)


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
        "test_cache_compaction.py::test_rows_are_moved_in_any_schedule", "no barrier between",
    ),
    "a stride of 32 bits": Fault(
        "attention/kernel.py", "eight = tl.full([], 8, tl.int64)", "eight = tl.full([], 8, tl.int32)",
        "test_tree_attention.py::test_rows_that_lie_past_two_to_the_31_elements", "outside all tensors",
    ),
    "a fused multiply-add": Fault(
        "layers/rotary.py", "enable_fp_fusion=False", "enable_fp_fusion=True",
        "test_layer_kernels.py::test_rotary_and_cache_rows_are_those_of_transformers", "it is the same arithmetic",
    ),
    "a product that threads round before they add it, or after": Fault(
        "filtering.py", "tl.sum(tl.where(sums == 0.0, 0.0, sums * weights))", "tl.sum(sums * weights)",
        "test_nucleus.py::test_rows_in_several_chunks_are_drawn_from_in_any_schedule", "different values to one",
    ),
    "a mask dropped at a tile's edge": Fault(
        "layers/gated.py", "y, out, INTERPRETED), mask=inside)", "y, out, INTERPRETED))",
        "test_layer_kernels.py::test_gate_and_up_of_one_product_are_multiplied_as_by_transformers",
        "outside all tensors",
    ),
    "a product in tf32 alone": Fault(
        "recurrent/blocks_kernel.py", 'out, input_precision="tf32x3"', 'out, input_precision="tf32"',
        "test_recurrent.py::test_kernels_give_what_the_references_give[ssd-dtype1]", r"< 2e-06",
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
    every = ("--every-variant", "-x", "-q")
    done = run("-m", "pytest", "-p", "ptx.plugin", *every, str(KERNELS / fault.test), first=tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search(fault.found, done.stdout), done.stdout


EDITED = """
import re, sys
import ptx.plugin as plugin, pytest
from functools import cache
from ptx.emulator import Emulated

pattern, test = sys.argv[1:]
plugin.emulated = cache(lambda kernel: Emulated(re.sub(pattern, "", kernel.asm["ptx"])))
sys.exit(pytest.main(["-p", "ptx.plugin", "--every-variant", "-x", "-q", test], [plugin]))
"""


@pytest.mark.parametrize(("missing", "found"), [
    (r"bar\.sync\s+0;", "no barrier between|nothing has written"),
    (r"cp\.async\.wait_group\s+\S+;", "nothing has written"),
    (r"wgmma\.fence\S*;", "no wgmma.fence"),
    (r"wgmma\.wait_group\S*\s+\S+;", "products on their way"),
    (r"fence\.proxy\.async\S*;", "no fence.proxy.async"),
])  # fmt: skip
def test_what_is_missing_in_ptx_is_found(missing, found):
    """In attention on sm_90, whose products are wgmma and whose keys come by asynchronous copies."""
    test = KERNELS / "test_tree_attention.py::test_blocks_are_masked_at_their_borders[a tree of three blocks-triton]"
    done = run("-c", EDITED, missing, str(test))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.search(found, done.stdout), done.stdout


def run(*arguments: str, first: Path = ROOT / ".editable") -> subprocess.CompletedProcess[str]:
    """Python with a package of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(first), str(ROOT / "tests" / "support")))
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
