"""bench/recurrent.py: all rules in miniature beside a state for each node, and steps beside those of attention."""

import json

import pytest
from bench_scripts import script
from kernel_cases import needs_compiler

recurrent = script("recurrent")


@pytest.mark.slow
@needs_compiler
def test_rules_are_timed_beside_a_state_for_each_node(tmp_path, capsys):
    path = tmp_path / "rows.json"
    recurrent.main(["--miniature", "--threads", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    rows, steps = found["rows"], found["steps"]
    assert [row["rule"] for row in rows] == ["delta", "kda", "ssd"]
    assert all(min(row["of_states"]) > 0 and max(row["of_layer"]) < 1 for row in rows)
    assert [row["target"] for row in steps] == ["olmo2", "qwen3_5_text", "granitemoehybrid", "lfm2"]
    assert all(row["step_ms"] > 0 and min(row["of_dense"]) > 0 for row in steps)
    assert "of layer" in capsys.readouterr().out
