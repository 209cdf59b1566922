"""Calibrating a target whose weights are read in every pass: few passes, trees of hundreds of nodes, and their plan."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from profile_cases import greedy_counts, profile_of

from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder, calibrate, calibration
from heavypath.speculative.calibration import ways_to_draft
from heavypath.speculative.cli.app import main
from heavypath.speculative.drafts.kinds import as_draft, describe
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import STREAMED, Profile
from heavypath.speculative.streaming.file import WeightFile
from heavypath.speculative.streaming.load import load_streamed
from heavypath.speculative.streaming.stream import READERS
from heavypath.speculative.visits import StreamedVisits
from heavypath.speculative.walking import Extent, walk, walk_together

SECONDS = 0.04  # that a pass reads, about


@pytest.fixture(scope="module")
def folder(demo_pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    for part in (demo_pair.target, demo_pair.tokenizer):
        part.save_pretrained(path)
    return path


@pytest.fixture
def slow(folder):
    """A target of which a pass takes long to read and little to compute; and how many passes there were."""
    target, passes = load_streamed(folder, "12M"), []
    stream = stream_of(target)
    layers = stream.layers

    def read(file, memory, offset):
        WeightFile.read(file, memory, offset)
        time.sleep(READERS * SECONDS * len(memory) / 36e6)  # as many read at the same time

    stream.slots.read = read
    stream.on_take = lambda layer: passes.append(layer) if layer == layers - 1 else None
    yield target, passes
    stream.close()


def test_ways_counted_in_the_same_passes_count_what_they_count_alone(demo_pair):
    target = LlamaForward(demo_pair[0], "target")
    draft, prompts = as_draft(demo_pair[1], target, demo_pair[0]), [torch.tensor([5, 6, 7]), torch.tensor([9])]
    wanted = [(way, Filters(each)) for each in (0.0, 0.8) for way in ways_to_draft(each, "cpu")[:4]]
    extent = Extent(tokens=10, sequences=3)
    together = walk_together(target, draft, prompts, wanted, extent, seed=4)
    for (way, filters), found in zip(wanted, together, strict=True):
        alone = walk(target, draft, prompts, way, filters, extent, seed=4)
        assert torch.equal(found.accepted, alone.accepted)
        assert torch.equal(found.reached, alone.reached)
        assert torch.equal(found.ranks[0], alone.ranks[0])
        torch.testing.assert_close(found.moments, alone.moments)
    assert len({tuple(found.ranks[0].flatten().tolist()) for found in together}) > 3, "ways differ"


@pytest.mark.slow
@pytest.mark.usefixtures("any_noise")
def test_a_streamed_target_is_calibrated_in_few_passes_to_trees_of_a_hundred_nodes(demo_pair, slow):
    target, passes = slow
    lines: list[str] = []
    profile = calibrate(
        target, demo_pair[1], temperatures=(0.0,), sizes=(1, 8, 64, 128), tokens=10, sequences=4, limit=3.0,
        on_progress=lines.append,
    )  # fmt: skip
    assert len(passes) <= 80
    assert any(line.startswith("a pass takes 0.") for line in lines)
    assert any("acceptance, token 9 of up to 10" in line for line in lines)
    costs = profile.costs.at(1)
    assert profile.costs.batches == (1,)
    assert costs.step[1] >= 0.8 * SECONDS
    assert costs.step[64] <= 2 * costs.step[1], "flat, but for other work on the machine"
    assert profile.environment[STREAMED] == pytest.approx(36, abs=1)
    assert len(profile.plan("sequoia", Filters(0.0)).plan.tree) >= 16


def test_a_visit_takes_no_passes_but_those_of_its_steps(demo_pair, slow):
    target, passes = slow
    visits = StreamedVisits(target, demo_pair[1], [torch.tensor([5, 6, 7, 8])], levels=4)
    for size, steps in ((1, 2), (64, 1)):
        before = len(passes)
        assert visits(size, 0).step == 0.0, "nothing is warmed up"
        timed = visits(size, 1)
        assert steps <= len(passes) - before <= 2
        assert timed.step >= 0.5 * SECONDS
    assert timed.level > 0


def test_a_limit_is_eighty_passes_or_refused_before_anything_is_counted_if_that_is_too_little(
    demo_pair, slow, monkeypatch
):
    target, passes = slow
    with pytest.raises(ValueError, match=r"0\.\d+ s, so that acceptance cannot be counted in 0\.5 s; give a limit"):
        calibrate(target, demo_pair[1], limit=0.5)
    assert len(passes) <= 3
    monkeypatch.setattr(calibration, "LIMIT", 1.0)

    def say(line):
        if found := re.search(r"a pass takes ([\d.]+) s, and calibrating up to (\d+) s", line):
            raise InterruptedError(found[1], found[2])

    with pytest.raises(InterruptedError) as stopped:
        calibrate(target, demo_pair[1], on_progress=say)
    seconds, limit = map(float, stopped.value.args)
    assert limit == pytest.approx(80 * seconds, rel=0.15)
    assert seconds >= 0.8 * SECONDS


def test_a_profile_of_another_memory_is_refused(demo_pair, slow):
    made_up = profile_of(greedy_counts([[60, 20], [40, 10]], [100, 60]), step={1: 1.0, 64: 1.1}, level=0.01)
    target, draft = map(describe, demo_pair[:2])
    in_memory = replace(made_up, target=target, draft=draft, verifier=None)
    streamed = replace(in_memory, environment=in_memory.environment | {STREAMED: 36})
    assert len(SpeculativeDecoder(slow[0], demo_pair[1], "top-k", profile=streamed).tree_for(Filters(0.0))) > 1
    for target, profile, message in (
        (demo_pair[0], streamed, "of which a pass reads 36 MB, got one that reads 0 MB"),
        (slow[0], in_memory, "of which a pass reads 0 MB, got one that reads 36 MB"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(target, demo_pair[1], "top-k", profile=profile)


@pytest.mark.slow
@pytest.mark.usefixtures("any_noise")
def test_the_command_calibrates_within_a_memory_and_generate_takes_the_profile(
    folder, demo_pair, tmp_path, monkeypatch, capsys
):
    draft, out = tmp_path / "draft", tmp_path / "profile.json"
    demo_pair[1].save_pretrained(draft)
    whole, given = calibration.calibrate, {}

    def few(target, *rest, **options):
        given.update(options, streamed=stream_of(target) is not None)
        return whole(target, *rest, **options | {"sizes": (1, 8), "tokens": 8, "sequences": 2, "limit": 2.5})

    monkeypatch.setattr(calibration, "calibrate", few)
    pair = ["--target", str(folder), "--draft", str(draft), "--memory", "12M"]
    assert main(["calibrate", *pair, "--temperature", "0", "--out", str(out)]) == 0
    assert given["streamed"]
    assert given["limit"] is None, "as long as passes take"
    assert Profile.load(out).environment[STREAMED] > 30
    capsys.readouterr()
    assert main(["generate", "import os", *pair, "--profile", str(out), "--max-new-tokens", "4", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["new_tokens"] == 4
    assert stats["bytes_read"] > 0
    assert main(["plan", str(out)]) == 0
    assert "times as fast as plain decoding, limited by" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("step", "level", "limit", "free"), [
    ({1: 1.0, 16: 1.05, 64: 6.0}, 1e-4, "compute", 16),
    ({1: 1.0, 16: 1.0, 64: 1.0}, 0.3, "drafting", 64),
    ({1: 1.0, 16: 1.0, 64: 1.0}, 1e-4, "acceptance", 64),
])  # fmt: skip
def test_a_plan_says_what_limits_it(step, level, limit, free):
    entry = greedy_counts([[600_000, 200_000]] * 6, [1_000_000] * 6)
    profile = profile_of(entry, step=step, level=level)
    planned = profile.plan("top-k", Filters(0.0))
    found = profile.limit("top-k", planned)
    assert (found.limited_by, found.free_nodes) == (limit, pytest.approx(free, abs=1))
    assert found.without_that > 1.05 * planned.plan.speedup
    if limit == "acceptance":
        cost = planned.plan.expected_tokens / planned.plan.speedup
        assert found.without_that == pytest.approx((planned.plan.tree.depth + 1) / cost)
    else:
        freed = {"step": dict.fromkeys(step, 1.0)} if limit == "compute" else {"level": 0.0}
        other = profile_of(entry, **{"step": step, "level": level} | freed)
        assert found.without_that == pytest.approx(other.plan("top-k", Filters(0.0)).plan.speedup)
