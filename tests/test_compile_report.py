"""The compile report: its command on a small case, what it reads in machine code, and what it calls a fault."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
CASE = "bf16 D64 64x1"
LISTING = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.U8 R2, desc[UR4][R2.64] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   DEPBAR.LE SB0, 0xa ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR4][R4.64] ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/              @!P2 BRA `(.L_x_2) ;
        /*0080*/                   STL.64 [R1+0x8], R8 ;
.L_x_3:
        /*0090*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR4][R4.64] ;
        /*00a0*/              @!P2 BRA `(.L_x_3) ;
        /*00b0*/                   LDG.E R7, desc[UR4][R4.64] ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   BRA `(.L_x_4);
"""

ROW = {
    "arch": 90,
    "kernel": "attention",
    "case": "a case",
    "registers": 255,
    "warps": 8,
    "spill": 0,
    "shared": 227 * 1024,
    "tensor_memory": 0,
    "fit": 1,
    "dot": "HGMMA",
    "half_rows": 64,
    "load": "LDGSTS.128",
    "load_bytes": 16,
    "ahead": 2,
    "waits": 1,
    "loop": {"HGMMA": 12},
}


@pytest.fixture(scope="module")
def compile_report():
    specification = importlib.util.spec_from_file_location("compile_report", BENCH / "compile_report.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, BENCH / "compile_report.py", "--case", CASE, "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads(path.read_text())


@pytest.mark.slow
def test_the_command_reports_every_kernel_of_a_case_on_every_architecture(done):
    process, report = done
    assert process.returncode == 0, process.stderr
    assert report["faults"] == []
    units = {(row["arch"], row["kernel"]): row["dot"] for row in report["rows"]}
    attention = {(80, "tree_attention"): "HMMA", (90, "tree_attention"): "HGMMA", (100, "tree_attention"): "UTCHMMA"}
    assert units == attention | {(arch, "merge"): "" for arch in (80, 90, 100)}
    lines = process.stdout.splitlines()
    assert all(len(line) <= 140 for line in lines)
    for row in report["rows"]:
        assert any(line.split()[0] == row["kernel"] and f" {row['registers']} " in line for line in lines if line)
        assert row["case"] == CASE
        assert 0 < row["registers"] <= 255
        assert row["warps"] in (1, 2, 4, 8, 16)
        assert 0 < row["fit"] <= 32
        assert row["loop"]
        if row["kernel"] == "tree_attention":
            assert row["load"] == "LDGSTS.128"
            assert row["ahead"] > 0
            assert row["loop"]["MUFU"] >= 32  # a power of two for each of 64 x 64 scores, in 128 threads


def test_the_command_fails_and_says_why_where_shared_memory_is_short():
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import compile_report
compile_report.GPUS[90] = compile_report.Gpu(132, 8)
compile_report.main(["--arch", "90", "--case", {CASE!r}])
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert f"sm_90 tree_attention {CASE}: it takes" in process.stderr
    assert "KiB of shared memory, and 8 are there" in process.stderr


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spill": 8}, "spills 8 bytes"),
        ({"shared": 228 * 1024}, "takes 228.0 KiB of shared memory, and 227 are there"),
        ({"dot": "HMMA"}, "takes products with HMMA, not HGMMA"),
        ({"dot": "HGMMA+HMMA"}, "takes products with HGMMA+HMMA, not HGMMA"),
        ({"waits": 12}, "waits for each HGMMA"),
        ({"load": "LDG.64", "load_bytes": 8}, "loads 8 bytes at a time, not 16"),
    ],
)
def test_a_row_is_at_fault_for_one_thing(compile_report, change, fault):
    row = compile_report.Row(**ROW)
    assert compile_report.faults_of(row) == []
    assert compile_report.faults_of(row._replace(**change)) == [f"sm_90 attention a case: it {fault}"]


@pytest.mark.parametrize("change", [{"half_rows": 16}, {"arch": 80}, {"arch": 100}])
def test_small_products_and_other_architectures_need_no_wgmma(compile_report, change):
    row = compile_report.Row(**ROW)._replace(dot="HMMA", shared=1024)
    assert compile_report.faults_of(row) != []
    assert compile_report.faults_of(row._replace(**change)) == []


@pytest.mark.parametrize("half_rows", [0, 64])
def test_wide_loads_are_asked_of_16_bit_products(compile_report, half_rows):
    row = compile_report.Row(**ROW)._replace(half_rows=half_rows, load_bytes=4)
    assert bool(compile_report.faults_of(row)) == (half_rows > 0)


def test_the_inner_loop_takes_products_and_copies_asynchronously_if_any_does(compile_report):
    instructions, labels = compile_report.parse(LISTING)
    loop = compile_report.inner_loop(instructions, labels, {"HGMMA"})
    assert [instruction.name for instruction in loop] == ["DEPBAR", "LDGSTS", "HGMMA", "BRA"]
    assert [instruction.groups_left for instruction in loop] == [10, 0, 0, 0]
    without_copies = [instruction for instruction in instructions if instruction.name != "LDGSTS"]
    shortest = compile_report.inner_loop(
        without_copies, {".L_x_1": 1, ".L_x_2": 4, ".L_x_3": 8, ".L_x_4": 11}, {"HGMMA"}
    )
    assert [instruction.name for instruction in shortest] == ["LDG", "HGMMA", "BRA"]
    assert compile_report.inner_loop(instructions, labels, {"HMMA"}) == instructions


def test_widths_are_read_in_bytes(compile_report):
    instructions, _ = compile_report.parse(LISTING)
    sizes = [(instruction.name, instruction.bytes) for instruction in instructions if "LD" in instruction.name]
    assert sizes == [("LDC", 4), ("LDG", 1), ("LDGSTS", 16), ("LDGSTS", 16), ("LDG", 4)]
    assert [instruction.bytes for instruction in instructions if instruction.name == "STL"] == [8]


@pytest.mark.parametrize(
    ("arch", "registers", "warps", "shared", "tensor_memory", "programs"),
    [
        (90, 32, 1, 0, 0, 32),  # the most there are
        (90, 255, 8, 0, 0, 1),  # 65,536 registers are 8 warps of 32 x 256
        (90, 128, 8, 0, 0, 2),
        (90, 129, 8, 0, 0, 1),  # 136 are given: 15 warps, 12 in fours
        (90, 32, 4, 113 * 1024, 0, 2),
        (80, 32, 4, 113 * 1024, 0, 1),
        (100, 32, 4, 0, 256, 2),  # columns of tensor memory
    ],
)
def test_programs_that_fit_are_counted_by_hand(compile_report, arch, registers, warps, shared, tensor_memory, programs):
    assert compile_report.programs_that_fit(arch, registers, warps, shared, tensor_memory) == programs
