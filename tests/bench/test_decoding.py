"""bench/decoding.py: each sweep runs in miniature and keeps its rows."""

import json

import pytest
import torch
from bench_scripts import script

decoding = script("decoding")


@pytest.mark.slow
@pytest.mark.parametrize("sweep", decoding.SWEEPS)
def test_a_sweep_in_miniature_prints_and_keeps_its_rows(sweep, tmp_path, capsys):
    path, threads = tmp_path / "rows.json", torch.get_num_threads()
    try:
        decoding.main(["--sweep", sweep, "--miniature", "--threads", "1", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    written = json.loads(path.read_text())
    assert written["environment"]["sweep"] == sweep
    assert len(capsys.readouterr().out.splitlines()) >= len(written["rows"]) > 0


def test_sequences_end_after_their_own_numbers_of_tokens():
    ends = decoding.ends_at(torch.tensor([[1, 2], [3, 4]]), [1, 3])
    assert [ends(torch.tensor([[3, 4, *[0] * new]]), None) for new in (1, 2, 3)] == [False, False, True]
    assert ends(torch.tensor([[1, 2, 0]]), None)


def test_a_row_is_compared_within_its_round_and_each_round_begins_with_another_way():
    common, order, now = script("common"), [], [0.0]

    def way(name, seconds):
        order.append(name)
        now[0] += seconds

    ways = {"slow": lambda: way("slow", 4.0), "fast": lambda: way("fast", 2.0)}
    times = common.in_turns(ways, rounds=2, clock=lambda: now[0])
    assert times == {"slow": [4.0, 4.0], "fast": [2.0, 2.0]}
    assert order == ["fast", "slow", "slow", "fast", "fast", "slow"], "the first round warms up"
    assert common.times_as_fast(times, "fast", "slow") == (2, 2, 2)


def test_a_batch_takes_turns_by_steps_of_any_of_its_sequences():
    defaults = script("decoding_defaults")
    turns = []
    turn = defaults.Turn(turns, iter(range(100)).__next__)
    turns.append(turn)
    short, long = turn.streamers(2)
    for streamer in (short, long):
        streamer.put("prompt")
    steps = defaults.IN_A_ROW + 2
    for step in range(steps):
        if step < 3:
            short.put("tokens")
        long.put("tokens")
    # Of the steps 1 to 10 the first and the ninth, which follow another thread's, are not counted.
    assert len(turn.seconds) == steps - 2
