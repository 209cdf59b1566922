"""bench/native.py: in miniature it keeps a row for each number of nodes, whose figures fit together."""

import json

import torch
from bench_scripts import script
from kernel_cases import needs_compiler

native = script("native")
pytestmark = needs_compiler


def test_in_miniature_it_keeps_a_row_for_each_number_of_nodes(tmp_path):
    path, threads = tmp_path / "rows.json", torch.get_num_threads()
    try:
        native.main(["--miniature", "--threads", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(path.read_text())["rows"]
    assert [row["nodes"] for row in rows] == [*native.ROWS]
    assert all(row["bound ms"] == max(row["read ms"], row["multiply ms"]) for row in rows)
    weights = sum(each.weight.numel() for each in native.blocks_of(native.model_of("miniature", torch.float32)))
    block = 64  # outputs, of which the blocks of any processor are a divisor
    parts = ((128, 64), (64, 64), (256, 64), (64, 128))
    least = 2 * sum(outputs * columns for outputs, columns in parts) + 200 * 64
    assert least <= weights <= least + block * 64
