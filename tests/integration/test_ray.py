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

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # Ray's own

LINES = 1000


@pytest.fixture(scope="module")
def cluster():
    """The address of two nodes, each with one processor."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    yield made.address
    made.shutdown()


def answers(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def actors():
    """The processes of decoders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"ray::_Actor" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
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
    nodes = {actor.node_id for actor in alive(cluster)}
    assert len(nodes) == 2, "a decoder on each node"
    os.kill(actors()[0], signal.SIGKILL)
    wait_for(300, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert 300 <= answers(out) < LINES
    again = subprocess.run(command, capture_output=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    assert all(line["response"]["status_code"] == 200 for line in found)


def alive(address):
    from ray.util.state import list_actors

    return list_actors(address=address, filters=[("state", "=", "ALIVE"), ("class_name", "=", "_Actor")])
