"""Scripts of bench/ that measure: each runs in miniature and keeps rows that fit together; parts of them by hand."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from bench_scripts import script
from kernel_cases import needs_compiler

from heavypath.kernels.layers.measured import Amounts

decoding, native = script("decoding"), script("native")


@pytest.fixture
def kept(tmp_path):
    """Run a script in miniature, with options; returns what it writes."""
    threads = torch.get_num_threads()

    def run(name, *options):
        path = tmp_path / "rows.json"
        script(name).main([*options, "--miniature", "--json", str(path)])
        return json.loads(path.read_text())

    yield run
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("sweep", decoding.SWEEPS)
def test_a_sweep_of_decoding_prints_and_keeps_its_rows(sweep, kept, capsys):
    written = kept("decoding", "--sweep", sweep, "--threads", "1")
    assert written["environment"]["sweep"] == sweep
    assert len(capsys.readouterr().out.splitlines()) >= len(written["rows"]) > 0


@needs_compiler
def test_compiled_products_have_a_row_for_each_number_of_nodes(kept):
    rows = kept("native", "--threads", "1")["rows"]
    assert [row["nodes"] for row in rows] == [*native.ROWS]
    assert all(row["bound ms"] == max(row["read ms"], row["multiply ms"]) for row in rows)
    weights = sum(each.weight.numel() for each in native.blocks_of(native.model_of("miniature", torch.float32)))
    block = 64  # outputs, of which the blocks of any processor are a divisor
    parts = ((128, 64), (64, 64), (256, 64), (64, 128))
    least = 2 * sum(outputs * columns for outputs, columns in parts) + 200 * 64
    assert least <= weights <= least + block * 64


@pytest.mark.slow
@needs_compiler
def test_recurrent_rules_are_timed_beside_a_state_for_each_node(kept, capsys):
    found = kept("recurrent", "--threads", "1")
    rows, steps = found["rows"], found["steps"]
    assert [row["rule"] for row in rows] == ["delta", "kda", "ssd"]
    assert all(min(row["of_states"]) > 0 and max(row["of_layer"]) < 1 for row in rows)
    assert [row["target"] for row in steps] == ["olmo2", "qwen3_5_text", "granitemoehybrid", "lfm2"]
    assert all(row["step_ms"] > 0 and min(row["of_dense"]) > 0 for row in steps)
    assert "of layer" in capsys.readouterr().out


def test_reading_weights_ahead_has_a_row_for_each_way(kept):
    rows = kept("weight_stream")["rows"]
    assert [row["way"] for row in rows[:2]] == ["products", "pass"]
    assert rows[1]["gain"] == 1


def test_tiles_of_attention_are_tried_and_the_best_of_all_shapes_is_named(kept, capsys):
    best_choice = script("tune_attention").best_choice
    rows = kept("tune_attention")["rows"]
    assert [(row["rows"], row["tiles"]) for row in rows] == [(256, "usual"), (64, "usual"), (128, "usual")]
    assert "best for all: MIN_SPLIT" in capsys.readouterr().out
    assert best_choice([row for row in rows if row["rows"] == 64]) is None, "stopped too early"
    usual = dict.fromkeys(((fewest, "usual") for fewest in (64, 128, 256)), 1.0)
    many = {(64, "usual"): 1.2, (64, "64/64/4/3"): 1.1, (128, "64/64/4/3"): 1.3}
    few = {(64, "usual"): 1.1, (128, "usual"): 0.8}  # of few rows, with which no other tiles are tried
    cut = {(256, "usual"): 1.0, (64, "usual"): 9.0}  # stopped within the shape
    gains = enumerate((usual | many, usual | few, cut))
    rows = [shape_of(nodes) | choice_of(*choice) | {"gain": gain} for nodes, of in gains for choice, gain in of.items()]
    assert best_choice(rows) == (64, "usual")
    rows += [shape_of(0) | choice_of(64, "64/32/4/4") | {"gain": 1.4}]
    assert best_choice(rows) == (64, "64/32/4/4")


def shape_of(nodes):
    return {"heads": "32/8", "nodes": nodes, "prefix": 128}


def choice_of(fewest, tiles):
    return {"rows": fewest, "tiles": tiles}


@pytest.mark.slow
def test_choices_of_attention_find_equal_caches_and_are_planned_anew(monkeypatch):
    tune, seen = script("tune_attention"), {}
    plans = Mock(wraps=tune.launch.plan_launch)
    monkeypatch.setattr(tune.launch, "plan_launch", plans)
    attend = tune.tree_attention

    def by_kernel(query, key, value, **mask):
        if key.stride() not in seen:
            seen[key.stride()] = key.shape
            attend(query, key, value, **mask, impl="triton")

    monkeypatch.setattr(tune, "tree_attention", by_kernel)
    rows = [*tune.rows_of(SimpleNamespace(heads=["4/2"], nodes=[11], prefix=[16]))]
    assert len(rows) == len(seen) == plans.call_count == 12
    assert {*seen.values()} == {(1, 2, 1024, tune.HEAD_DIM)}
    assert tune.launch.tiles_for is tune.USUAL_TILES


def test_caches_of_attention_are_more_than_a_second_cache_holds(monkeypatch):
    tune = script("tune_attention")
    assert tune.caches_of(1_000_000) == 32
    monkeypatch.setattr(tune, "DEVICE", "cuda")
    assert [tune.caches_of(nbytes) for nbytes in (1_000_000, 100_000_000)] == [200, 32]


@pytest.mark.parametrize(("gains", "amounts"), [
    ({"16/6": (1.2, 0.9), "32/12": (1.05, 1.04)}, Amounts(32_000_000, 12_000_000)), ({"16/6": (1.004, 1.005)}, None),
    ({}, None),
])  # fmt: skip
def test_amounts_to_read_ahead_are_chosen_by_the_gains_of_all_rows(gains, amounts):
    rows = [{"way": f"ahead {name}", "gain": gain} for name, each in gains.items() for gain in each]
    assert script("weight_stream").best_amounts([{"way": "pass", "gain": 1.0}, *rows]) == amounts


@pytest.mark.slow
def test_peers_without_llama_cpp_say_what_is_missing(kept, tmp_path, capsys):
    cells = kept("peers", "--pairs", "shipped", "--llama-cpp", str(tmp_path))["cells"]
    said = capsys.readouterr().out
    for each in ("without llama-completion, llama-speculative, llama-speculative-simple", "pip download", "--build"):
        assert each in said
    assert [(cell["pair"], cell["temperature"]) for cell in cells] == [("shipped", 0.0), ("shipped", 0.6)]
    assert all(row["equal"] == 1 for cell in cells if cell["temperature"] == 0 for row in cell["rows"])


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


def test_the_best_chain_is_chosen_by_other_rounds_than_those_it_is_compared_in():
    """Chains that are alike but for noise have a best one in either half of the rounds, which the other half belies."""
    defaults = script("decoding_defaults")

    def way(*step_ratios):
        made = defaults.Way(decoder=None)
        for ratio in step_ratios:
            stats = SimpleNamespace(
                nodes=8, steps_of=torch.tensor([4]), new_tokens=8, steps=4, seconds={"prefill": 0.0}
            )
            made.stats.append(stats)
            made.steps.append(ratio)
            made.step_ratios.append(ratio)
        return made

    plain, judged = way(1, 1, 1, 1), way(2, 2, 2, 2)
    chains = [way(1, 2, 1, 2), way(2, 1, 2, 1)]  # each is twice as fast in the rounds of one half
    speeds = defaults.Comparison(plain, 4, samples=False)
    assert speeds.over_best(judged, chains) == 1, "in the rounds that did not choose them both are as slow as it"
    assert speeds.over_best(judged, [way(1, 1, 1, 1)]) == 0.5
