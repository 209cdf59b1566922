"""The compile report: its command on a small case, what it keeps, and its faults."""

import json
import subprocess
import sys
from functools import partial

import pytest
from bench_scripts import BENCH, script
from fresh_python import python

pytestmark = pytest.mark.integration

report, machine_code = map(script, ("compile_report", "machine_code"))
record = report
FUSED = """
import re, sys
sys.path.insert(0, BENCH)
from machine_code import compile_for

launched = []
compile_for(90, launched.append)
from compile_cases import CASES
for name in sys.argv[1:]:
    CASES[name]()
    kernel = launched.pop()
    print(name, *re.findall(r"fma\\.\\S*f\\d\\S*", kernel.asm["ptx"]), *["may fuse"] * kernel.metadata.enable_fp_fusion)
"""
CASE = "bf16 D64 64x1"
FIGURES = {
    "kernel": "attention", "registers": 255, "warps": 8, "spill": 0, "shared": 227 * 1024, "tensor_memory": 0, "fit": 1,
    "dot": "HGMMA", "half_rows": 64, "load": "LDGSTS.128", "load_bytes": 16, "ahead": 2, "waits": 1, "loop": 300,
    "wgmma": 12, "fp32": 140, "special": 33, "seconds": 4.0,
}  # fmt: skip


def figures(**change):
    return machine_code.Figures(**FIGURES | change)


def row(arch=90, **change):
    """A row of sm_90 without a fault, with some of its figures changed."""
    return report.Row(arch, "a case", figures(**change))


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.json"
    done = run(BENCH / "compile_report.py", "--case", CASE, "--anew", "--json", path)
    return done, json.loads(path.read_text())


@pytest.mark.slow
def test_the_command_reports_every_kernel_of_a_case_on_every_architecture(done):
    process, report = done
    assert process.returncode == 0, process.stderr
    assert report["faults"] == []
    units = {(row["arch"], row["kernel"]): row["dot"] for row in report["rows"]}
    attention = {(80, "tree_attention"): "HMMA", (90, "tree_attention"): "HGMMA", (100, "tree_attention"): "UTCHMMA"}
    assert units == attention
    lines = process.stdout.splitlines()
    assert all(len(line) <= 140 for line in lines)
    for row in report["rows"]:
        assert any(line.split()[0] == row["kernel"] and f" {row['registers']} " in line for line in lines if line)
        assert row["case"] == CASE
        assert 0 < row["registers"] <= 255
        assert row["warps"] in (1, 2, 4, 8, 16)
        assert 0 < row["fit"] <= 32
        assert row["loop"] > 0
        if row["kernel"] == "tree_attention":
            assert row["load"] == "LDGSTS.128"
            assert row["ahead"] > 0
            assert row["special"] >= 32  # a power of two for each of 64 x 64 scores, in 128 threads


def test_the_command_fails_and_says_why_where_shared_memory_is_short():
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import compile_report
compile_report.GPUS[90] = compile_report.GPUS[90]._replace(shared=8)
compile_report.main(["--arch", "90", "--case", {CASE!r}, "--anew"])
"""
    process = run("-c", program)
    assert process.returncode == 1
    assert f"sm_90 tree_attention {CASE}: it takes" in process.stderr
    assert "KiB of shared memory, and 8 are there" in process.stderr


@pytest.mark.slow
def test_a_compiler_that_dies_takes_one_case_with_it(tmp_path):
    program = tmp_path / "program.py"  # a file, since the processes that compile import it
    program.write_text(f"""
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, {str(BENCH)!r})
import compile_report
compile_report.CASES["a case"] = os.abort
if __name__ == "__main__":
    for name, done in compile_report.compile_apart(90, ["a case", "mask of 32"]).items():
        print(name, done if isinstance(done, str) else [row.kernel for row in done.values()])
""")
    process = run(program)
    assert process.stdout.splitlines() == ["a case the compiler died", "mask of 32 ['pack']"], process.stderr


@pytest.mark.slow
def test_a_tree_of_one_node_compiles():
    """Triton 3.6, unlike later ones, fails on memory accesses in a loop that it knows takes no turn."""
    process = run(BENCH / "compile_report.py", "--arch", "90", "--case", "kseq bf16 1 nodes", "--anew")
    assert process.returncode == 0, process.stderr


def test_layers_round_each_product_before_they_add():
    """As the modules of transformers do. Neither the PTX has a fused product and sum, nor may ptxas make one."""
    names = ["rotary bf16 12:12 D64", "rotary fp16 32:8 D128", "rotary fp32 8:8 D256", "rotary bf16 32:8 D128 normed"]
    names += ["norm bf16 K768 added", "gate bf16 F11008"]
    process = python("-c", FUSED.replace("BENCH", repr(str(BENCH))), *names)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == names


def test_a_product_that_is_fused_with_a_sum_of_other_lanes_is_found():
    """Of the lines of a tree reduction; the register is moved on the way, as Triton does."""
    other = "shfl.sync.bfly.b32 \t%r7, %r6, 16, 31, -1;"
    fused, plain = "fma.rn.f32 \t%r9, %r2, %r3, %r8;", "add.f32 \t%r9, %r6, %r8;"
    lines = [f"\t{line}" for line in ("mul.f32 \t%r6, %r2, %r3;", other, "mov.b32 \t%r8, %r7;")]
    assert report.sums_by_lane("\n".join([*lines, fused])) == [fused]
    assert report.sums_by_lane("\n".join([*lines, plain, "fma.rn.f32 \t%r9, %r8, %r3, %r2;"])) == []


@pytest.mark.parametrize(("change", "fault"), [
    ({"spill": 8}, "spills 8 bytes"),
    ({"shared": 228 * 1024}, "takes 228.0 KiB of shared memory, and 227 are there"),
    ({"dot": "HMMA"}, "takes products with HMMA, not HGMMA"),
    ({"dot": "HGMMA+HMMA"}, "takes products with HGMMA+HMMA, not HGMMA"),
    ({"waits": 12}, "waits for each HGMMA"),
    ({"load": "LDG.64", "load_bytes": 8}, "loads 8 bytes at a time, not 16"),
])  # fmt: skip
def test_a_row_is_at_fault_for_one_thing(change, fault):
    assert report.faults_of(row()) == []
    assert report.faults_of(row(**change)) == [f"sm_90 attention a case: it {fault}"]


def test_small_products_and_other_architectures_need_no_wgmma_nor_others_wide_loads():
    for change in ({"half_rows": 16}, {"arch": 80}, {"arch": 100}):
        assert report.faults_of(row(**{"dot": "HMMA", "shared": 1024} | change)) == []
    assert report.faults_of(row(half_rows=0, load_bytes=4)) == []


@pytest.mark.parametrize(("arch", "registers", "warps", "shared", "tensor_memory", "programs"), [
    (90, 32, 1, 0, 0, 32),  # the most there are
    (90, 255, 8, 0, 0, 1),  # 65,536 registers are 8 warps of 32 x 256
    (90, 128, 8, 0, 0, 2),
    (90, 129, 8, 0, 0, 1),  # 136 are given: 15 warps, 12 in fours
    (90, 32, 4, 113 * 1024, 0, 2),
    (80, 32, 4, 113 * 1024, 0, 1),
    (100, 32, 4, 0, 256, 2),  # columns of tensor memory
])  # fmt: skip
def test_programs_that_fit_are_counted_by_hand(arch, registers, warps, shared, tensor_memory, programs):
    assert machine_code.programs_that_fit(arch, registers, warps, shared, tensor_memory) == programs


COMMENTED = '''"""Adds one."""

def add(x):  # to a number
    """x + 1"""
    return x + 1

def nothing():
    """Does nothing."""
'''
BARE = """
def add(x): return (x + 1)
def nothing(): pass
"""


def test_comments_and_docstrings_are_no_code():
    assert record.code(COMMENTED) == record.code(BARE)
    assert record.code(BARE) != record.code(BARE.replace("1", "2"))


def test_a_case_depends_on_the_modules_that_it_imports_and_on_theirs():
    used = record.modules_used("def case():\n    from heavypath.kernels.cache_compaction import compact_cache\n")
    assert {"cache_compaction", "implementation"} <= set(used)
    assert "sampling" not in used
    used = record.modules_used("import heavypath.kernels.verification")
    assert {"verifying.launches", "verifying.decision", "verifying.traversal_kernel", "nucleus"} <= set(used)
    assert "noise" in record.modules_used("import heavypath.kernels.sampling")
    assert record.modules_used("from heavypath.kernels import noise") == record.modules_used(
        "import heavypath.kernels.noise"
    )
    assert record.modules_used("from heavypath.speculative import TokenTree\nimport torch\n") == []


def test_a_key_changes_with_the_code_the_arguments_the_architecture_and_the_modules(monkeypatch):
    case = report.CASES["bf16 V999 k4"]
    key = record.key_of(90, "a case", case)
    assert key == record.key_of(90, "a case", partial(case.func, *case.args, **case.keywords))
    others = [
        record.key_of(80, "a case", case),
        record.key_of(90, "a case", partial(case.func, *case.args[:-1], 5, **case.keywords)),
        record.key_of(90, "a case", partial(report.CASES["64 nodes"].func, *case.args, **case.keywords)),
    ]
    original = record.module_code
    monkeypatch.setattr(record, "module_code", lambda name: original(name) + "pass" * (name == "noise"))
    others.append(record.key_of(90, "a case", case))
    assert len({key, *others}) == 5


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Files of figures in a folder of their own, and a compiler of which every kernel comes out alike."""
    compiled = []

    def compile_all(cases):
        cases = list(cases)
        compiled.append(sorted(cases))
        return {case: {"one": figures()} for case in cases}

    monkeypatch.setattr(record, "CACHE", tmp_path / "build" / "cache.json")
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(report, "compile_all", compile_all)
    return compiled


def test_what_this_machine_compiled_is_not_compiled_again(kept):
    names = list(report.CASES)[:12]
    first = report.find([80, 90], names, anew=False)
    again = report.find([80, 90], names, anew=False)
    report.find([90], names, anew=True)
    assert [len(cases) for cases in kept] == [24, 0, 12]
    assert first.kernels == again.kernels
    assert again.origin == "24 cases: 0 compiled now, 24 before on this machine, 0 as recorded"


def test_of_what_the_repository_keeps_some_is_compiled_again_and_must_agree(kept):
    names = list(report.CASES)[:20]
    kernels = report.find([90], names, anew=False).kernels
    keys = {(arch, name): record.key_of(arch, name, report.CASES[name]) for arch, name in kernels}
    record.write_record(record.RECORD, {keys[case]: found for case, found in kernels.items()})
    record.CACHE.unlink()
    found = report.find([90], names, anew=False)
    assert len(kept[-1]) == 2
    assert found.disagreements == []
    assert found.origin == "20 cases: 2 compiled now, 0 before on this machine, 18 as recorded"

    wrong = {name: row._replace(registers=7) for name, row in next(iter(kernels.values())).items()}
    record.write_record(record.RECORD, dict.fromkeys(keys.values(), wrong))
    record.CACHE.unlink()
    found = report.find([90], names, anew=False)
    assert len(found.disagreements) == 2
    assert found.disagreements[0].endswith("record.json is wrong: attention: registers 7 became 255")
    assert len(report.find([90], names, anew=False).disagreements) == 4  # two more are tried, and two are known
