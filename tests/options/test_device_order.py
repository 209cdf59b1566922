"""Streaming to a GPU, by the order of what is launched: no layer computes before it is there, none is overwritten.

Without a GPU: tests/support/cuda_order.py has streams that write down what they are given, and finds what may run at
the same time. Each wait is proved to be needed by what is found without it.
"""

import random
import weakref
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from cuda_order import HOST, RaceError, check, observe, played, slot_of, unneeded
from in_time import in_time
from safetensors.torch import save_file
from tiny_models import tiny_llama

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.streaming import gpu
from heavypath.speculative.streaming.accelerate_hooks import Offloaded, device_of, offloaded
from heavypath.speculative.streaming.device import DeviceStream
from heavypath.speculative.streaming.gpu import PlacedModel, stream_to_gpu
from heavypath.speculative.streaming.host_layers import Pinned
from heavypath.speculative.streaming.offloaded import layers_in, stream_layers
from heavypath.speculative.streaming.source import places_in

CPU = torch.device("cpu")


@pytest.fixture
def order(monkeypatch):
    with played(monkeypatch) as order:
        yield order


class InterruptionError(Exception):
    pass


def content(layer):
    return torch.full((100 + layer,), float(layer))


def in_memory(order, layers, slots=2):
    stream = DeviceStream([{"w": content(layer)} for layer in range(layers)], CPU, slots=slots)
    observe(order, stream)
    return stream


def in_files(order, folder, layers, stay=()):
    for layer in range(layers):
        save_file({f"{layer}.w": content(layer)}, folder / f"{layer}.safetensors")
    places = [{"w": places_in(folder / f"{layer}.safetensors")[f"{layer}.w"]} for layer in range(layers)]
    stream = DeviceStream(places, CPU, stay=stay)
    observe(order, stream)
    return stream


def compute(stream, layers):
    """A forward pass over layers, which finds their own numbers."""
    for layer in layers:
        with stream.layer(layer):
            assert torch.equal(stream.tensors(layer)["w"], content(layer))


def step(order, stream, layers=None, ahead=True):
    """What a step of decoding does: it drafts, and then passes over the layers."""
    with stream.one_pass(ahead=ahead):
        order.launch()  # a draft
        with stream.one_pass():
            compute(stream, range(stream.layers) if layers is None else layers)


def captured(order, work):
    """The graph of what a function launches."""
    with order.capture(order.new_stream()) as graph:
        work()
    return graph


def replay(order, graph, *streams):
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(stream.replay())
        order.replay(graph)


def without_the_hosts_waits(order):
    return [entry for entry in order.entries if (entry.stream, entry.kind) != (HOST, "wait")]


def assert_right(order):
    """Nothing is wrong, and without any of the waits something would be."""
    assert not unneeded(order.entries)


# Passes that are launched one by one


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_passes_one_behind_another_are_in_order_and_each_wait_is_needed(order, layers, slots):
    stream = in_memory(order, layers, slots)
    for ahead in (False, True, True, False):
        step(order, stream, ahead=ahead)
    assert_right(order)
    copies = [entry for entry in order.entries if entry.kind == "launch" and entry.writes and entry.reads]
    assert len(copies) == 4 * layers, "each layer is copied once a pass"


def test_copies_run_beside_the_layers_before_them(order):
    """Nothing that computes waits for a copy that is not its own, and the draft waits for none."""
    stream = in_memory(order, 6)
    step(order, stream)
    works = [(number, entry) for number, entry in enumerate(order.entries) if entry.kind == "launch"]
    copy_of = {entry.reads[0][1]: number for number, entry in works if entry.reads and entry.writes}
    compute_of = {entry.reads[0][1]: number for number, entry in works if entry.reads and not entry.writes}
    draft = next(number for number, entry in works if number > copy_of[0] and not entry.reads)
    waits = [number for number in check(order.entries) if order.entries[number].stream == order.entries[draft].stream]
    assert draft < min(waits)
    for layer in range(2, 6):
        assert compute_of[layer - 2] < copy_of[layer] < compute_of[layer - 1]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_passes_do_and_however_they_end_the_next_one_is_in_order(order, seed):
    """Layers in any order, that nobody releases; copies that fail; calls that Ctrl-C ends; other streams; graphs."""
    draw, stream = random.Random(seed), in_memory(order, 5, slots=2 + seed % 2)
    copy, chance = stream.copy, 0.0

    def fail(into, tensors):
        copy(into, tensors)
        if draw.random() < chance:
            raise InterruptionError

    def call():
        for layer in draw.choices(range(5), k=draw.randint(1, 7)):
            stream.take(layer)
            order.launch([(slot_of(stream, layer), layer)])
            if draw.random() < 4 * chance:
                raise InterruptionError  # between taking and releasing
            if draw.random() < 0.8:
                stream.release(layer)

    graph = captured(order, lambda: step(order, stream))
    stream.copy, chance = fail, 0.1
    for _ in range(12):
        what = draw.choice(["pass", "call", "replay"])
        with suppress(InterruptionError), order.on(order.new_stream()) if draw.random() < 0.3 else nullcontext():
            if what == "replay":
                replay(order, graph, stream)
            elif what == "pass":
                with stream.one_pass(ahead=draw.random() < 0.5):
                    call()
            else:
                stream.enter()
                call()
                stream.leave()
    chance = 0.0
    step(order, stream)
    assert in_time(lambda: step(order, stream)) == [None], "another thread need not wait"
    stream.close()
    check(order.entries)


# Graphs


def test_a_pass_forks_and_joins_within_a_graph(order):
    stream = in_memory(order, 5)
    step(order, stream)  # the step before, as it comes
    graph = captured(order, lambda: step(order, stream))
    for replays in (3, 1):
        for _ in range(replays):
            replay(order, graph, stream)
        step(order, stream)
    assert_right(order)
    assert stream.counts().untimed == 4 * sum(-(-4 * (100 + layer) // 256) * 256 for layer in range(5))


def test_a_streamed_draft_forks_and_joins_beside_its_target(order):
    stream, draft = (in_memory(order, layers) for layers in (5, 3))

    def both():
        with stream.one_pass(ahead=True):
            for _ in range(2):
                with draft.one_pass():
                    compute(draft, range(3))
            compute(stream, range(5))

    both()
    graph = captured(order, both)
    for _ in range(2):
        replay(order, graph, stream, draft)
    assert_right(order)


def test_a_capture_that_fails_is_joined_and_the_next_one_is_right(order):
    stream = in_memory(order, 5)
    for last in range(6):
        with suppress(InterruptionError), order.capture(order.new_stream()) as graph, stream.one_pass(ahead=True):
            compute(stream, range(last))
            if last < 5:
                raise InterruptionError
    replay(order, graph, stream)
    check(order.entries)


def test_threads_on_streams_of_their_own_take_turns_on_the_gpu(order):
    stream = in_memory(order, 5)
    graph = captured(order, lambda: step(order, stream))

    def decode():
        with order.on(order.new_stream()):
            for _ in range(3):
                step(order, stream)
                replay(order, graph, stream)
                stream.enter()
                compute(stream, range(5))
                stream.leave()

    assert in_time(decode, decode, decode) == [None] * 3
    check(order.entries)


# Layers in files


@pytest.mark.parametrize("stay", [(), (1,), (0, 2, 5)])
def test_places_in_the_hosts_memory_are_filled_behind_the_copies_from_there(order, tmp_path, stay):
    stream = in_files(order, tmp_path, 6, stay)
    assert not stream.is_fixed
    for ahead in (True, False, True):
        step(order, stream, ahead=ahead)
    with suppress(InterruptionError), stream.one_pass():
        compute(stream, range(3))
        raise InterruptionError
    step(order, stream)
    stream.close()
    check(order.entries)
    with pytest.raises(RaceError, match="host writes layer any into"):
        check(without_the_hosts_waits(order))


def test_layers_in_files_that_all_stay_are_as_those_in_memory(order, tmp_path):
    stream = in_files(order, tmp_path, 5, range(5))
    assert stream.is_fixed
    replay(order, captured(order, lambda: step(order, stream)), stream)
    check(order.entries)


# The end


def test_closing_waits_for_what_was_launched_and_frees_pinned_memory(order):
    stream = in_memory(order, 4)
    parameter = torch.nn.Parameter(stream.tensors(2)["w"], requires_grad=False)
    stream.parameter(parameter)
    graph = captured(order, lambda: step(order, stream))
    replay(order, graph, stream)
    assert len(order.pinned) == 4
    for _ in range(2):
        stream.close()
        assert not order.pinned
    assert parameter.numel() == 0
    assert_right(order)
    for use in (stream.replay, stream.one_pass):
        with pytest.raises(RuntimeError, match="is closed; load the model anew"), use():
            pass


def test_a_stream_that_is_forgotten_is_waited_for_before_its_memory_goes(order):
    stream = in_memory(order, 4)
    step(order, stream)
    stream.copy = stream.release = None  # which hold it
    del stream
    assert not order.pinned
    check(order.entries)
    with pytest.raises(RaceError, match="pinned"):
        check(without_the_hosts_waits(order))


def test_a_layer_outside_of_a_pass_and_weights_that_are_no_numbers_are_errors(order):
    stream = in_memory(order, 3)
    with pytest.raises(RuntimeError, match=r"outside of a pass; call the model, or enter one_pass\(\)"):
        stream.take(1)
    stream.release(1)
    broken = DeviceStream([{"w": torch.tensor([1.0, torch.nan])}], CPU)
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN or infinite weights in w of layer 0"), broken.layer(0):
            pass


# Models


def on_played_gpu(model, order):
    """The layers of a model on the CPU as streamed to a GPU which is that, too; all of its writing goes to `order`."""
    cpu_offload(model, execution_device=CPU)
    name, layers = layers_in(model)
    body, tensors = model.get_submodule(name.rpartition(".")[0]), [*offloaded(model)]
    numbers = {tensor.key: int(tensor.key.split(".")[2]) for tensor in tensors if ".layers." in tensor.key}
    parts = PlacedModel(model, body, layers, tensors, {number: {} for number in range(len(layers))}, numbers, CPU)
    stream = stream_to_gpu(parts, None, (0,), 0)
    observe(order, stream)
    return stream


@pytest.fixture
def pair(order):
    """A tiny target, the same one as if it were streamed, and the stream."""
    target, streamed = (tiny_llama(1, layers=4) for _ in range(2))
    return target, streamed, on_played_gpu(streamed, order)


IDS = torch.arange(10)[None] % 7


def test_a_model_decodes_and_generates_in_order_and_writes_its_own_text(order, pair):
    assert pair[2].layers == 3, "the first one is resident"
    for draft in (EarlyExit(1), tiny_llama(2, layers=1)):
        decoders = [SpeculativeDecoder(model, draft, "sequoia", tree_size=6) for model in pair[:2]]
        texts = [decoder.generate(IDS, 8, temperature=0.6, seed=2, eos_token_id=None) for decoder in decoders]
        assert torch.equal(texts[0].sequences, texts[1].sequences)
        assert texts[1].stats.streaming.bytes_read > 0
    assert torch.equal(*(model.generate(IDS, max_new_tokens=4, do_sample=False) for model in pair[:2]))
    assert not [entry for entry in unneeded(order.entries) if entry.stream != HOST]


def test_what_lay_in_the_hosts_memory_is_moved_not_copied(order):
    model = tiny_llama(1, layers=4)
    held = [weakref.ref(one.untyped_storage()) for one in model.model.layers[2].parameters()]
    stream = on_played_gpu(model, order)
    assert [reference() for reference in held] == [None] * len(held)
    assert stream.host.nbytes >= sum(one.nbytes for one in stream.tensors(1).values()) * 3


# What is refused


@pytest.mark.parametrize(
    ("owner", "name", "free", "message"),
    [
        (torch.cuda, "mem_get_info", lambda device=None: (10_000, 1 << 30),
         r"0\.000G of cpu's memory are free, and 1 layers that stay there and 2 that pass take 0\.000G; give a "),
        (gpu, "free_memory", lambda: 100, r"0\.000G of the host's memory are free, .* take 0\.000G; give host_memory="),
        (torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *given: 2, cudaHostUnregister=None),
         r"0\.000G of the host's memory cannot be pinned for the GPU, .*CUDA error 2\); give a smaller host_memory"),
    ],
)  # fmt: skip
def test_too_little_memory_is_refused_with_the_figures(order, monkeypatch, owner, name, free, message):
    monkeypatch.setattr(owner, name, free)
    with pytest.raises((ValueError, RuntimeError), match=message):
        on_played_gpu(tiny_llama(1, layers=4), order)


def test_no_later_work_meets_the_error_of_memory_that_cannot_be_pinned(order, monkeypatch):
    """CUDA keeps it as the last error, and PyTorch raises that once, at its next launch."""
    left = []

    def register(*given):
        left.append(2)
        return 2

    def launch(*sizes, device):
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(RuntimeError, match="cannot be pinned for the GPU"):
        Pinned(CPU).memory(10)
    assert not left


def test_weights_of_a_class_of_their_own_are_refused(tmp_path):
    class Params4bit(torch.nn.Parameter):
        pass

    model = tiny_llama(1)
    disk_offload(model, tmp_path)
    layer = model.model.layers[0].mlp.up_proj
    layer._parameters["weight"] = Params4bit(layer.weight.data, requires_grad=False)
    with pytest.raises(ValueError, match="is a Params4bit, which is no plain tensor and cannot be streamed"):
        stream_layers(model)


def test_several_gpus_are_refused_and_so_is_a_cpu_beside_itself():
    def place(device):
        return Offloaded(torch.nn.Linear(1, 1), "weight", "weight", {"weight": content(0)}, torch.device(device))

    with pytest.raises(ValueError, match="offloaded for cuda:0, cuda:1; streams are for a CPU or for one CUDA GPU"):
        device_of([place("cuda:0"), place("cuda:1")])
    with pytest.raises(ValueError, match="weight is offloaded from a CPU to its own memory; streams for a CPU need"):
        device_of([place("cpu")])
    assert device_of([place("cuda:1")]) == torch.device("cuda", 1)


# The checker itself


def write(order, stream, layer=1):
    with order.on(stream):
        order.launch(writes=[("slot", layer)])


def test_the_checker_knows_what_a_capture_forbids(order):
    first, other = order.new_stream(), order.new_stream()
    before = first.record_event()
    for error, work in {
        "905": lambda: first.wait_event(before),
        "900": before.synchronize,
        "904": lambda: other.wait_stream(first) or write(order, other),
        "no part of the capture": lambda: write(order, other),
    }.items():
        del order.entries[1:]
        with order.capture(first):
            work()
        with pytest.raises(RaceError, match=error):
            check(order.entries)
    del order.entries[1:]
    with order.capture(first):
        inside = first.record_event()
    first.wait_event(inside)
    with pytest.raises(RaceError, match="907"):
        check(order.entries)
