"""Targets larger than a device in numbers: the formulas by hand, trees by brute force, and the papers' own rows."""

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
from bench_scripts import script
from families import tiny
from profile_cases import greedy_counts, profile_of

from heavypath.kernels.filtering import Filters
from heavypath.speculative.costs.estimates import Work
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.trees.planning import expected_tokens, greedy_tree, sequoia_tree

command = script("simulate")
formulas, hardware, shapes = (script(f"simulation.{name}") for name in ("formulas", "hardware", "shapes"))
Setting, simulate = formulas.Setting, formulas.simulate
DEVICES, SHAPES, ModelSize = hardware.DEVICES, shapes.SHAPES, shapes.ModelSize

PUBLISHED = {  # billions of parameters, by the models' cards
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-22b": 21.8, "llama-2-70b": 68.98, "vicuna-33b": 32.5,
    "tinyllama-1.1b": 1.10, "llama-3-8b": 8.03, "llama-3-70b": 70.55,
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.9, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213,
    "llama-3.3-70b": 70.55, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-14b": 14.77, "qwen3-32b": 32.76,
}  # fmt: skip
# Round numbers: a byte takes a second by the link, a tenth from memory, and an operation a thousandth.
PLAIN = hardware.Hardware(memory=1e3, bandwidth=10, peak=1e3, link=1, wire=2, collective=3, reached=(1.0, 1.0, 1.0))
TARGET = ModelSize(weights=1000, layers=10, hidden=4, vocab=8, itemsize=2)
DRAFT = ModelSize(weights=10, layers=1, hidden=4, vocab=8, itemsize=2)
SMALL = (10 * 6 + 30) * 2e-6  # seconds of small kernels


def streamed(**other):
    return Setting(PLAIN, TARGET, **{"memory": 400.0, **other})


def test_shapes_have_the_parameters_that_their_models_are_known_for():
    assert {*PUBLISHED} == {*SHAPES}
    for name, shape in SHAPES.items():
        assert shape.weights + shape.embedding == pytest.approx(1e9 * PUBLISHED[name], rel=0.005)
        assert shape.nbytes == 2 * shape.weights


def test_the_shape_of_a_folder_is_that_of_the_model_in_it(demo_pair, tmp_path):
    target = demo_pair.target
    target.config.save_pretrained(tmp_path)
    shape, work = shapes.shape_of(str(tmp_path)), Work.of(LlamaForward(target))
    assert (shape.weights, shape.nbytes, shape.layers) == (work.weights, work.weight_bytes, work.layers)
    assert shape.stored_in(4).nbytes == work.weights / 2
    with pytest.raises(ValueError, match=r"expected a folder with config\.json or one of llama-2-7b"):
        shapes.shape_of("llama-2-8b")


def test_a_mixture_of_experts_reads_those_that_the_nodes_choose(tmp_path):
    model = tiny("mixtral", hidden_size=32)  # of 4 experts 2 for a token
    model.config.save_pretrained(tmp_path)
    shape, work = shapes.shape_of(str(tmp_path)), Work.of(forward_of(model, "target"))
    assert (shape.weights, shape.experts, shape.chosen) == (work.weights, work.expert_weights, 0.5)
    assert shape.experts == 2 * 4 * 3 * 32 * model.config.intermediate_size
    others = shape.weights - shape.experts
    assert shape.used == others + shape.experts / 2
    assert [shape.read(rows) / 4 for rows in (1, 2)] == [others + shape.experts / 2, others + shape.experts * 3 / 4]
    dense, sparse = (replace(TARGET, experts=experts, chosen=0.1) for experts in (0, 900))
    one, other = (Setting(PLAIN, target, memory=3000.0).parts(2, 0) for target in (dense, sparse))
    assert (one.memory, other.memory) == pytest.approx((200, 200 - 180 * 0.81))
    assert (one.products, other.products) == pytest.approx((4, 4 * 0.19))
    best = [simulate(Setting(PLAIN, target, memory=3000.0), [0.6, 0.2, 0.1]).best for target in (dense, sparse)]
    assert len(best[1].tree) < len(best[0].tree)


def test_a_pass_reads_what_there_is_no_room_for_and_the_longer_of_reading_and_computing_counts():
    setting = streamed()
    assert setting.streamed == 2000 - 400
    assert setting.reading == 1600
    assert setting.step(1, 0) == 1600
    nodes = 900  # whose products take 2 * 900 * 1000 / 1000 s, and weights 2000 / 10 s
    assert setting.step(nodes, 0) == pytest.approx(math.hypot(1800, 200) + SMALL)
    assert setting.parts(nodes, 0) == formulas.StepSeconds(1600, 200, 1800, 0, 0, pytest.approx(SMALL))
    assert streamed(ahead=False).step(nodes, 0) == pytest.approx(1600 + math.hypot(1800, 200) + SMALL)
    assert streamed(memory=None).streamed == 1000, "of a device of 1000 bytes"
    assert streamed(memory=3000.0).streamed == 0
    beside = Setting(PLAIN, TARGET, replace(DRAFT, embedding=5))
    assert beside.streamed == 2000 - (1000 - 20 - 10), "the draft takes of the device"
    assert Setting(PLAIN, replace(TARGET, embedding=100), memory=400.0).streamed == 2000 - (400 - 200)


def test_drafting_is_hidden_as_far_as_layers_have_places():
    setting = streamed(draft=DRAFT)
    level = 2 + (6 + 6) * 2e-6 + 10e-6  # 20 bytes from memory; kernels; a draw
    assert setting.drafting(50, 3) == pytest.approx(3 * level + 2 * 50 * 10 / 1000)
    hidden = 1600 * formulas.AHEAD / 10
    assert setting.step(50, 3) == 1600, "shorter than two layers"
    deep = 400
    assert setting.drafting(50, deep) > hidden
    assert setting.step(50, deep) == pytest.approx(1600 + setting.drafting(50, deep) - hidden)
    wide = 5000  # compute decides, which has to wait for the tree
    assert setting.step(wide, 3) == pytest.approx(setting.drafting(wide, 3) + setting.device(wide))
    slow = streamed(draft=DRAFT, ahead=False)
    assert slow.step(50, 3) == pytest.approx(1600 + slow.device(50) + slow.drafting(50, 3))


def test_trees_are_free_up_to_as_many_nodes_as_the_formula_says():
    llama = SHAPES["llama-2-70b"]
    for device in DEVICES.values():
        setting = Setting(device, llama, memory=4e9)
        nodes = setting.free_nodes
        assert setting.device(round(nodes)) == pytest.approx(setting.reading, rel=0.01)
        assert setting.step(round(0.9 * nodes), 0) == setting.step(1, 0)
        assert setting.step(round(2 * nodes), 0) > 1.9 * setting.step(1, 0)
        share = setting.streamed / llama.nbytes
        assert nodes == pytest.approx(llama.itemsize / 2 * device.computes / device.brings * share, rel=0.01)
    # The figures of the docstring:
    assert Setting(DEVICES["rtx-4090"], llama, memory=0.0).free_nodes == pytest.approx(3700, rel=0.01)
    assert Setting(DEVICES["rtx-4090"], llama, memory=1e12).free_nodes == pytest.approx(115, rel=0.01)
    assert Setting(DEVICES["cpu"], replace(llama, itemsize=4), memory=0.0).free_nodes == pytest.approx(200, rel=0.01)


def test_ranks_share_weights_and_tell_each_other_sums_and_logits():
    alone, four = streamed(memory=3000.0), streamed(memory=3000.0, ranks=4)
    each, part = 3 * 2, 2 * 3 / 4 / 2  # latency of two doublings; 2 bytes to three of four, at 2 bytes a second
    told = (2 * 10 + 1) * (each + 2 * part * 7 * 4) + each + part * 7 * 8
    assert four.telling(7) == pytest.approx(told)
    assert four.device(7) - four.telling(7) - SMALL == pytest.approx((alone.device(7) - SMALL) / 4)
    assert alone.telling(7) == 0
    assert streamed(memory=400.0, ranks=4).streamed == 500 - 400, "each has room of its own"
    with pytest.raises(ValueError, match="2 ranks tell each other something"):
        Setting(replace(PLAIN, wire=0.0), TARGET, ranks=2)


@pytest.mark.parametrize("ahead", [True, False])
def test_measured_plain_decoding_says_how_fast_the_link_is(ahead):
    assert streamed(plain=700.0, ahead=ahead).step(1, 0) == pytest.approx(700.0)
    with pytest.raises(ValueError, match="the device alone takes longer"):
        streamed(plain=100.0, ahead=ahead)


def test_the_best_tree_is_that_of_all_trees():
    """By every size and depth; what drafting hides is left out of choosing."""
    rates, sizes = [0.5, 0.2, 0.1], (1, 2, 3, 5, 8, 13, 400)
    setting = streamed(draft=replace(DRAFT, weights=900))
    found = simulate(setting, rates, sizes)
    assert [len(row.tree) for row in found.rows] == [*sizes]
    assert found.best.gain == max(row.gain for row in found.rows)
    assert found.rows[0].gain == 1
    for row, size in zip(found.rows, sizes, strict=True):
        possible = [depth for depth in range(min(size, 12)) if (3 ** (depth + 1) - 1) // 2 >= size]
        device = max(setting.reading, setting.device(size))
        best = max(
            (greedy_tree(rates, size, depth) for depth in possible),
            key=lambda tree: expected_tokens(tree, rates) / (device + setting.drafting(size, tree.depth)),
        )
        assert row.tree.depth == best.depth
        assert row.gain == pytest.approx(row.tokens * found.plain / setting.step(size, best.depth))


@pytest.mark.parametrize(("change", "limit"), [
    ({"draft": replace(DRAFT, weights=40_000)}, "drafting"),
    ({"hardware": replace(PLAIN, peak=50.0)}, "products"),
    ({"hardware": replace(PLAIN, wire=1e-3), "ranks": 4, "memory": 1e4}, "telling"),
    ({}, "acceptance"),
])  # fmt: skip
def test_what_limits_a_gain_is_what_costs_it_most(change, limit):
    setting = replace(streamed(draft=DRAFT), **change)
    found = simulate(setting, [0.6, 0.2], (1, 2, 4, 8, 16, 64))
    assert found.limit == limit
    if limit == "acceptance":
        assert found.unlimited == pytest.approx((found.best.tree.depth + 1) * found.plain / found.best.seconds)
    else:
        free = simulate(replace(setting, without=frozenset({limit})), [0.6, 0.2], (1, 2, 4, 8, 16, 64))
        assert found.unlimited == pytest.approx(free.best.gain * found.plain / free.plain)
        assert found.unlimited > 1.05 * found.best.gain


@pytest.mark.parametrize(("make", "message"), [
    (lambda: replace(PLAIN, link=0.0), "expected figures above 0"),
    (lambda: replace(PLAIN, reached=(1.0, 1.2, 1.0)), "reached"),
    (lambda: streamed(memory=-1.0), "memory must be bytes"),
    (lambda: streamed(without=frozenset({"link"})), "without must be among products, drafting, telling"),
    (lambda: simulate(streamed(), [0.6], ()), "sizes must be numbers of nodes"),
    (lambda: simulate(streamed(), [1.6], (1, 2)), "acceptance must lie in"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_papers_rows_follow_from_their_own_constants():
    """And from nothing else: what is simulated does not read what it is compared with."""
    offloading = script("offloading")

    rows = [row for row in offloading.rows() if row.tokens is not None]
    far = [(row.device, row.target) for row in rows if abs(row.ratio - 1) > 0.15]
    assert len(rows) == 42
    assert far == [("rtx-2080-ti", "llama-2-13b"), ("a100-40gb", "llama-2-70b")]
    for row in rows:
        assert row.setting.step(1, 0) == pytest.approx(row.setting.plain), "the baseline went in"
        assert replace(row, seconds=2 * row.seconds).simulated == row.simulated
        assert row.setting.hardware is DEVICES[row.device]
        assert 1 < row.step / row.setting.plain < 2.2
    own = offloading.own_rows()
    assert len(own) == 4
    assert all(row.setting.plain is None and abs(row.ratio - 1) < 0.04 for row in own), "of this repository's stream"
    assert fmean(abs(row.ratio - 1) for row in rows) == pytest.approx(0.047, abs=0.0005)
    assert sum(abs(row.flat - 1) <= 0.15 for row in rows) == 28
    assert fmean(abs(row.flat - 1) for row in rows) == pytest.approx(0.120, abs=0.0005)
    assert len(offloading.simulated(None)["rows"]) == len(offloading.rows()) + len(own)


def simulated(capsys, options):
    """What the command says of each setting."""
    command.main([*options.split(), "--json"])
    return json.loads(capsys.readouterr().out)["settings"]


def test_the_command_says_what_trees_bring_and_what_limits_them(capsys):
    command.main(["--nodes", "1,64,256"])
    text = " ".join(capsys.readouterr().out.split())
    assert "llama-2-70b drafted for by llama-2-7b, on rtx-4090" in text
    assert "limited by acceptance" in text
    assert "Up to N* = 3,430 nodes a tree costs as much as a token" in text
    one, eight, many = simulated(capsys, "--device a100-40gb --ranks 1,8,64")
    assert [one["ranks"], eight["ranks"], many["ranks"]] == [1, 8, 64]
    assert one["streamed_bytes"] > 1e11
    assert eight["streamed_bytes"] == 0
    assert one["best"]["takes_longest"] == "reading"
    assert one["best"]["nodes"] > eight["best"]["nodes"]
    assert many["limit"] == "telling"
    gains = [row["speedup"] for row in one["rows"]]
    assert gains == sorted(gains)


def test_the_commands_figures_can_be_ones_own(capsys):
    options = "--device cpu --link 4 --target llama-2-7b --draft tinyllama-1.1b --memory 3G --acceptance 0.7,0.1"
    (found,) = simulated(capsys, f"{options} --nodes 1,32 --one-by-one")
    setting = Setting(
        replace(DEVICES["cpu"], link=4e9), SHAPES["llama-2-7b"], SHAPES["tinyllama-1.1b"], 3e9, ahead=False
    )
    expected = simulate(setting, [0.7, 0.1], (1, 32))
    assert found["plain_seconds"] == pytest.approx(expected.plain)
    assert found["best"]["speedup"] == pytest.approx(expected.best.gain)
    (known,) = simulated(capsys, "--link 10 --nodes 1")
    assert known["plain_seconds"] == pytest.approx(known["streamed_bytes"] / 10e9), "all of what is given is reached"
    (quarter,) = simulated(capsys, "--device cpu --bits 4 --nodes 1")
    room = 16e9 - SHAPES["llama-2-7b"].nbytes - 2 * SHAPES["llama-2-7b"].embedding
    four = SHAPES["llama-2-70b"].stored_in(4)
    assert quarter["streamed_bytes"] == pytest.approx(four.nbytes - (room - four.embedding / 2))


def test_the_acceptance_can_be_that_of_a_profile(capsys, tmp_path):
    profile = profile_of(greedy_counts([[600_000, 200_000]] * 6, [1_000_000] * 6))
    profile.save(tmp_path / "profile.json")
    (found,) = simulated(capsys, f"--profile {tmp_path / 'profile.json'} --nodes 1,8")
    row, rates = found["rows"][1], profile.plan("sequoia", Filters(0.0)).acceptance.rates()
    assert row["tokens"] == pytest.approx(expected_tokens(sequoia_tree(rates, 8, row["depth"]), rates))


@pytest.mark.parametrize(("options", "message"), [
    (["--ranks", "1,two"], "--ranks: must be numbers with commas between them, got '1,two'"),
    (["--bits", "0"], "bits of a weight must be above 0"),
    (["--profile", "x.json"], "x.json"),
])  # fmt: skip
def test_the_command_says_what_is_wrong_with_its_options(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        command.main(options)
    assert message in capsys.readouterr().err
