"""One service and several clients: nobody's texts hold up another's, and who is alone has nearly everything."""

import threading
from types import SimpleNamespace

import pytest
import torch
from http_server import PATIENCE, eventually
from serving_cases import alone, held, tiny_llama

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.serving import Closed, QueueFull
from heavypath.speculative.serving.arrivals import Arrivals
from heavypath.speculative.serving.slots import BESIDE, ServiceSlots

LONG = {"max_new_tokens": 120, "eos_token_id": None, "temperature": 0.9}


def waiting(name, client=None, group=None):
    """What `Arrivals` looks at of a text."""
    completion = SimpleNamespace(is_cancelled=False)
    return SimpleNamespace(name=name, client=client, group=group, completion=completion, interrupted=lambda: None)


def order_of(arrivals):
    return [arrivals.pop().name for _ in range(len(arrivals))]


def serve(**limits):
    return SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd").serve(**limits)


def test_clients_take_turns_and_so_do_a_clients_requests():
    arrivals = Arrivals(20)
    for name, group in (("a1", 1), ("a2", 1), ("a3", 1), ("a4", 2), ("a5", 2), ("b1", 1), ("b2", 1)):
        arrivals.put(waiting(name, name[0].upper(), group))
    assert order_of(arrivals) == ["a1", "b1", "a4", "b2", "a2", "a5", "a3"]
    assert arrivals.pop() is None
    for name in ("a1", "a2"):
        arrivals.put(waiting(name, "A"))
    assert arrivals.pop(lambda client, waiting: client != "A" or [*waiting] != ["A"]) is None
    assert len(arrivals) == 2
    nobodys = Arrivals(20)
    for name in range(20):
        nobodys.put(waiting(name))
    assert order_of(nobodys) == [*range(20)]


def test_a_client_fills_half_of_the_queue_and_what_is_cancelled_takes_no_place():
    arrivals = Arrivals(8)
    for name in range(4):
        arrivals.put(waiting(name, "A", name))
    with pytest.raises(QueueFull, match="4 requests of this client are waiting"):
        arrivals.put(waiting(4, "A"))
    others = [waiting(name, "B") for name in range(3)]
    for each in others:
        arrivals.put(each)
    others[0].completion.is_cancelled = True
    arrivals.put(waiting(3, "B"))
    arrivals.put(waiting(4, "B"))  # in the place of the cancelled one
    with pytest.raises(QueueFull, match="8 requests are waiting, as many as may"):
        arrivals.put(waiting(0, "C"))
    others[0].interrupted = lambda: "cancelled"
    assert arrivals.interrupted() == [(others[0], "cancelled")]
    assert len(arrivals) == 8
    assert sorted(order_of(arrivals)) == [0, 1, 1, 2, 2, 3, 3, 4]


def watched(service, fifth=lambda: None):
    """The clients in each step, as they come, of a service; before step 5 `fifth` is called."""
    steps, step = [], service._slots._step

    def write(count):
        if len(steps) == 5:
            fifth()
        steps.append([arrival.client for arrival in service._slots.running[:count]])
        return step(count)

    service._slots._step = write
    return steps


def test_a_newcomer_has_a_slot_at_once_and_short_steps():
    """One has 12 long texts, and another short ones: some of the first one's pause meanwhile, and are moved."""
    decoder = SpeculativeDecoder(tiny_llama(0), tiny_llama(1), "ersd")
    prompts = [[1 + number % 6, number % 7] for number in range(12)]
    expected = [alone(decoder, prompt, LONG, number) for number, prompt in enumerate(prompts)]
    short = {**LONG, "max_new_tokens": 6}
    expected_short = alone(decoder, [3, 4], short, 50)
    with decoder.serve(slots=4, max_tokens=128, queue=32) as service:
        brief = []
        steps = watched(
            service, lambda: brief.extend(service.submit([3, 4], **short, seed=50, client="B") for _ in range(3))
        )
        with held(service) as entered:
            sent = [service.submit(prompts[0], **LONG, seed=0, client="A")]
            assert entered.wait(PATIENCE)
            sent += [service.submit(prompts[number], **LONG, seed=number, client="A") for number in range(1, 12)]
        assert [each.result(PATIENCE).tokens for each in sent] == expected
        assert [each.result(PATIENCE).tokens for each in brief] == [expected_short] * 3
    assert steps[1:6] == [["A"] * 3] * 5
    beside = [number for number, each in enumerate(steps) if "B" in each]
    assert beside == [*range(6, 6 + sum(each.result().steps for each in brief))], "at once, and without a break"
    assert all(sorted(steps[number]) == [*"A" * BESIDE, "B"] for number in beside)
    assert max(map(len, steps)) == 3


def test_a_program_alone_is_served_first_come_first_served_in_all_slots():
    with serve(slots=3, max_tokens=64) as service:
        steps, joined, join = watched(service), [], service._slots.join

        def write(group, place):
            joined.append(group[place].request.max_new_tokens)
            join(group, place)

        service._slots.join = write
        with held(service) as entered:
            sent = [service.submit([1], 4 + number, eos_token_id=None) for number in range(7)]
            assert entered.wait(PATIENCE)
        for each in sent:
            each.result(PATIENCE)
    assert max(map(len, steps)) == 3
    assert joined == [*range(4, 11)]


def test_on_a_gpu_where_a_step_takes_as_long_for_one_as_for_all_nobody_pauses():
    running = [SimpleNamespace(client=client) for client in "AAAAAB"]
    slots = SimpleNamespace(running=running, _on_host=False, limits=SimpleNamespace(slots=8))
    assert ServiceSlots._arrange(slots) == 6
    assert ServiceSlots.may_join(slots, "A", ["B"])
    slots.limits.slots = 7
    joins = [ServiceSlots.may_join(slots, client, ["A", "B", "C"]) for client in ("A", "B", "C", None)]
    assert joins == [False, False, True, True]


def test_the_last_free_slot_is_for_a_client_that_has_none():
    with serve(slots=4, max_tokens=256) as service:
        third = []
        steps = watched(service, lambda: third.append(service.submit([1, 2], 4, eos_token_id=None, client="C")))
        with held(service) as entered:
            service.submit([1, 2], 200, eos_token_id=None, client="A")
            assert entered.wait(PATIENCE)
            for client in "AABB":
                service.submit([1, 2], 200, eos_token_id=None, client=client)
        eventually(lambda: len(steps) > 6)
        assert len(third[0].result(PATIENCE).tokens) == 4
        service.close(graceful=False)
    assert [sorted(each) for each in steps[1:7]] == [[*"AAB"]] * 5 + [[*"AABC"]]
    assert all(len(each) <= 3 or "C" in each for each in steps)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["step", "prompt"])
def test_a_fault_of_the_gpu_ends_the_service_and_an_error_does_not(where, monkeypatch):
    """A GPU that has had a fault says so whenever it is asked for anything; it is played here."""
    service = serve(slots=3, max_tokens=64)
    monkeypatch.setattr(service._slots, "_on_host", False)
    has_fault = threading.Event()

    kept = service._slots.leave

    def synchronize():
        if has_fault.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*given):
        raise RuntimeError("it is lost")

    def leave(member, **rows):
        synchronize()
        kept(member, **rows)

    monkeypatch.setattr(service._slots, "leave", leave)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    of, name = (service._slots, "_step") if where == "step" else (service._slots._entrance._one, "beginning")
    with monkeypatch.context() as broken:
        broken.setattr(of, name, fail)
        with pytest.raises(RuntimeError, match="it is lost"):
            service.submit([1, 2], 4).result(PATIENCE)
    assert len(service.submit([1, 2], 4, eos_token_id=None).result(PATIENCE).tokens) == 4  # that was none of the GPU's
    with held(service) as entered:
        sent = [service.submit([1, 2], 40, eos_token_id=None)]
        assert entered.wait(PATIENCE)
        sent += [service.submit([1, 2], 40, eos_token_id=None) for _ in range(4)]
        has_fault.set()
        if where == "prompt":
            monkeypatch.setattr(of, name, fail)
    if where == "step":
        monkeypatch.setattr(of, name, fail)
    for each in sent:
        with pytest.raises(RuntimeError, match="it is lost"):
            each.result(PATIENCE)
    service._thread.join(PATIENCE)
    assert not service.is_open
    with pytest.raises(Closed, match="it is lost"):
        service.submit([1, 2], 4)
