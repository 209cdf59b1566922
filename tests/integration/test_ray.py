"""`heavypath batch --ray` on two nodes of this machine."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heavypath.speculative.http.batches.cluster import on_cluster
from heavypath.speculative.http.batches.lines import parsed
from heavypath.speculative.http.batches.output import LineAnswer, Output

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # Ray's own

LINES = 1000


@pytest.fixture(scope="module")
def cluster():
    """The address of two nodes, each with a process that starts decoders."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    yield made.address
    made.shutdown()


def answers(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def actors():
    """The processes of decoders, and for each the one that started it, which each node has one of."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"ray::_Actor" in (entry / "cmdline").read_bytes():
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def test_each_line_is_answered_once_though_a_worker_and_the_driver_are_killed(cluster, tmp_path):
    made, source, out = random.Random(1), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": f"c{n}", "prompt": f"def f{n}(", "max_tokens": made.randint(1, 6)} for n in range(LINES)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "heavypath.speculative", "batch", str(source), "--out", str(out), "--ray", cluster]
    command += ["--workers", "2", "--threads", "1"]

    def wait_for(count, driver):
        end = time.monotonic() + 300
        while answers(out) < count and driver.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert driver.poll() is None, driver.stderr.read()

    driver = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_for(50, driver)
    assert len({*actors().values()}) == 2, "a decoder on each node"
    os.kill(min(actors()), signal.SIGKILL)
    wait_for(300, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert 300 <= answers(out) < LINES
    again = subprocess.run(command, capture_output=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    assert all(line["response"]["status_code"] == 200 for line in found)


def test_a_line_that_ends_actors_gets_an_error_and_those_beside_it_their_answers(cluster, tmp_path):
    lines = [parsed(number, b'"poison"' if number == 5 else b'"a"', {}) for number in range(24)]
    output = Output(tmp_path / "out.jsonl")
    on_cluster(cluster, 2, played, lines, output, 4, list)
    output.close()
    assert (output.done, output.bad) == (24, 1)
    (error,) = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["id"] == "line-5"


def test_a_decoder_that_cannot_be_made_ends_the_command(cluster, tmp_path):
    def make():
        raise ValueError("no models here")

    output = Output(tmp_path / "out.jsonl")
    with pytest.raises(ray.exceptions.RayActorError, match="no models here"):
        on_cluster(cluster, 2, make, [parsed(0, b'"a"', {})], output, 4, list)
    output.close()
    assert output.done == 0


def played():
    """A worker without models, whose service a line ends."""
    import asyncio

    class Worker:
        async def answer(self, line):
            if b"poison" in line.body:
                raise ConnectionError("the service has ended")
            await asyncio.sleep(0.3)
            return LineAnswer(200, {})

    return Worker()
