"""Load in one piece, with clients that are slow, leave, or send nonsense: every text is right, and memory stays flat.

SOAK_MINUTES says how long, by default one minute.
"""

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from http_server import NAME, ask, eventually, metrics, open_stream, post, running

from heavypath.speculative import SpeculativeDecoder

pytestmark = pytest.mark.slow
MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
PROMPTS = [f"def read_{number}(path, size={number}):" for number in range(40)]
MOST_GROWTH = 64 << 20  # bytes, after the first quarter


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def body_of(number):
    """Greedy or sampled under a seed, in several forms."""
    made = {"model": NAME, "prompt": PROMPTS[number], "max_tokens": 8 + number % 9, "seed": number}
    made["temperature"] = 0.9 * (number % 2)
    return made | [{}, {"logprobs": 2, "echo": True}, {"presence_penalty": 0.5}, {"n": 2}][number % 4]


def test_ten_minutes_of_load_lose_nothing_and_leave_nothing(demo_pair):
    decoder = SpeculativeDecoder(demo_pair.target, demo_pair.draft, "ersd")
    wrong, right, over = [], [0], threading.Event()
    with (
        decoder.serve(slots=4, max_tokens=128) as service,
        running(service, demo_pair.tokenizer, max_tokens=128) as base,
    ):
        expected = [[each["text"] for each in post(base, body_of(number))[1]["choices"]] for number in range(40)]

        def well_behaved(seed):
            made = random.Random(seed)
            while not over.is_set():
                number = made.randrange(40)
                status, answer = post(base, body_of(number))
                if status == 429:
                    time.sleep(0.05)
                elif status != 200 or [each["text"] for each in answer["choices"]] != expected[number]:
                    wrong.append((number, status))
                else:
                    right[0] += 1

        def ill_behaved(seed):
            made = random.Random(seed)
            while not over.is_set():
                content = body_of(made.randrange(40)) | {"stream": True}
                match made.randrange(4):
                    case 0:  # leaves in the stream
                        with open_stream(base, content) as connection:
                            connection.recv(100)
                    case 1:  # leaves at once
                        open_stream(base, content).close()
                    case 2:  # does not read for a while
                        with open_stream(base, content, buffer=4096):
                            time.sleep(0.3)
                    case _:
                        junk = made.randbytes(made.randrange(400))
                        ask(base, "POST", "/v1/completions", json.dumps({"prompt": junk.hex(), "stop": 4}).encode())
                time.sleep(made.uniform(0, 0.05))

        threads = [threading.Thread(target=well_behaved, args=[seed]) for seed in range(6)]
        threads += [threading.Thread(target=ill_behaved, args=[seed]) for seed in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(15 * MINUTES)
        early = resident()
        time.sleep(45 * MINUTES)
        over.set()
        for thread in threads:
            thread.join()
        eventually(lambda: metrics(base)["heavypath_running"] == metrics(base)["heavypath_waiting"] == 0)
        late = resident()
    print(f"{right[0]} texts right, {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
    assert wrong == []
    assert right[0] > 0
    assert late - early < MOST_GROWTH
