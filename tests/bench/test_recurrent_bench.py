"""bench/recurrent.py: all rules in miniature, each beside a state for each node."""

import json

from bench_scripts import script
from kernel_cases import needs_compiler

recurrent = script("recurrent")


@needs_compiler
def test_rules_are_timed_beside_a_state_for_each_node(tmp_path, capsys):
    path = tmp_path / "rows.json"
    recurrent.main(["--miniature", "--threads", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["rule"] for row in rows] == ["delta", "kda", "ssd"]
    assert all(min(row["of_states"]) > 0 and max(row["of_layer"]) < 1 for row in rows)
    assert "of layer" in capsys.readouterr().out
