"""bench/weight_stream.py: in miniature it runs and keeps its rows, and the best amounts are chosen by their gains."""

import json

from bench_scripts import script

from heavypath.kernels.layers.measured import Amounts

weight_stream = script("weight_stream")


def test_in_miniature_it_keeps_a_row_for_each_way(tmp_path):
    path = tmp_path / "rows.json"
    weight_stream.main(["--miniature", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows[:2]] == ["products", "pass"]
    assert rows[1]["gain"] == 1


def test_amounts_are_chosen_by_the_gains_of_all_rows():
    def chosen(**gains):
        return weight_stream.best_amounts(
            [
                {"way": "pass", "gain": 1.0},
                *(
                    {"way": f"ahead {name[1:].replace('_', '/')}", "gain": gain}
                    for name, of in gains.items()
                    for gain in of
                ),
            ]
        )

    assert chosen(_16_6=(1.2, 0.9), _32_12=(1.05, 1.04)) == Amounts(32_000_000, 12_000_000)
    assert chosen(_16_6=(1.004, 1.005)) is None
    assert chosen() is None
