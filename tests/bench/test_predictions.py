"""Predictions for a GPU: sums of their parts, by counted launches, and what predictions.json has of them."""

import json
import re
from itertools import product

import pytest
from bench_scripts import BENCH, script

predict_step, predict_attention = script("predict_step"), script("predict_attention")
FIGURES = json.loads((BENCH / "predictions.json").read_text(encoding="utf-8"))["figures"]
LIKELY = predict_step.PICKS["likely"]


def test_an_eagle_step_has_each_term_that_arithmetic_by_hand_gives():
    """Llama-3.1-8B with an EAGLE-3 head on an H100, by ramps: bytes over 3 TB/s, and a number of launches each."""
    ramp, attention, small, gap = (getattr(predict_step, name).likely for name in ("RAMP", "ATTENTION", "SMALL", "GAP"))
    pair, way = predict_step.PAIRS["8B + EAGLE-3"], predict_step.WAYS["ramps"]
    parts = predict_step.step_seconds(pair, way, predict_step.BANDWIDTH["H100"], LIKELY)
    layer = 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)  # q, k, v, o, gate, up and down
    target = 32 * layer + 2 * 4096 * 128_256
    head = layer + 2 * 4096 * (4096 + 2 * 1024) + 2 * 4096 * 32_000  # with two states in; fewer tokens
    counted = json.loads((BENCH / "launches.json").read_text())["eagle-3, a vocabulary of its own"]
    others = counted["first pass"][2] + 4 * (counted["level"][2] - counted["draw of a level"][2])
    expected = {
        "target: reading weights": target / 3.0e12, "target: between products": 129 * ramp,
        "target: attention": 32 * attention, "target: other kernels": (4 * 32 + 2) * small,
        "draft: reading weights": 5 * head / 3.0e12, "draft: between products": 25 * ramp,
        "draft: attention": 5 * attention, "draft: other kernels": others * small,
        "draft: taps": 3 * 2 * 4096**2 / 3.0e12 + ramp + counted["taps"][2] * small,
        "beside: launches": (4 * counted["draw of a level"][2] + counted["last draw and verification"][2]) * small,
        "beside: drawing": 5 * predict_step.DRAW.likely, "beside: deciding": predict_step.DECIDE[128_256].likely,
    }  # fmt: skip
    assert parts == pytest.approx(expected, rel=1e-9)
    ahead = predict_step.step_seconds(pair, predict_step.WAYS["ahead"], predict_step.BANDWIDTH["H100"], LIKELY)
    saved = predict_step.AHEAD.likely * (32 * attention + (4 * 32 + 2) * small + 4 * 32 * gap)
    assert ahead == pytest.approx(expected | {"target: requested ahead": -saved}, rel=1e-9)


def test_a_block_round_differs_by_its_way_in_products_and_in_what_is_requested_ahead():
    bandwidth = predict_step.BANDWIDTH["H200"]
    ramps, ahead = (
        predict_step.block_seconds("dflash", 64, predict_step.WAYS[way], bandwidth, LIKELY)
        for way in ("ramps", "ahead")
    )
    target = 32 * 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096 * 128_256
    assert ramps["target: products"] == pytest.approx(target / 4.26e12 + 129 * predict_step.RAMP.likely)
    saved = predict_step.saved_seconds(predict_step.LLAMA_8B, 4 * 32 + 2, LIKELY)
    assert ahead == pytest.approx(ramps | {"target: requested ahead": -saved})


def test_counted_products_are_those_that_are_predicted():
    """As many as the models' shapes give, in the passes that were counted."""
    for pair in predict_step.PAIRS.values():
        counted = predict_step.COUNTED[pair.kind]
        assert counted["level"].products == len(pair.draft.products())
        assert counted["first pass"].products == len(pair.draft.products())
        assert counted["taps"].products == len(pair.draft.features)


@pytest.mark.parametrize("figure", [each for each in FIGURES if each["file"] == "kernel_attention"], ids=str)
def test_no_attention_is_predicted_above_what_its_loop_can_do(figure):
    """450 TFLOP/s of the tensor cores, and a copy's bandwidth."""
    numbers = re.match(r"verification N=(\d+) L=(\d+) heads=(\d+)/(\d+)", figure["where"]["case"])
    assert numbers
    nodes, prefix, heads, kv_heads = map(int, numbers.groups())
    for gpu, bandwidth in (("H100", 3.0e12), ("H200", 4.3e12)):
        microseconds = figure["predicted"][gpu]
        operations = 4 * heads * nodes * 128 * prefix
        assert operations / 450e12 < 1e-6 * microseconds
        assert 2 * 2 * kv_heads * 128 * prefix / bandwidth < 1e-6 * microseconds
        shape = predict_attention.Shape(nodes, prefix, heads, kv_heads)
        own = predict_attention.seconds(shape, predict_step.BANDWIDTH[gpu], LIKELY)
        assert microseconds == pytest.approx(1e6 * own, rel=0.01)


@pytest.mark.slow
def test_the_predicted_step_is_that_of_its_parts():
    every = predict_step.rows()
    for file, pair, field in product(("large", "head"), ("7B + 68M", "8B + EAGLE-3"), ("step_ms", "over_limit")):
        if (file == "large") != (pair == "7B + 68M"):
            continue
        rows = {row["gpu"]: row for row in every if row["kernels"] == f"{pair}, now"}
        found = [each for each in FIGURES if (each["file"], each.get("field")) == (file, field)]
        found = [each for each in found if each["where"]["method"] == "sequoia"]
        assert found
        for each in found:
            for gpu, row in rows.items():
                assert each["predicted"][gpu] == pytest.approx(row[field], rel=0.01)
