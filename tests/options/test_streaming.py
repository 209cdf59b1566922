"""Targets whose layers are read from disk: their memory, their costs, and all that may go wrong while they are read.

That their texts are those of the target in memory, by every method and draft, is tested with all other options
(tests/conformance).
"""

import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import disk_offload
from families import tiny
from gpu_hardware import H100
from in_time import PATIENCE, in_time
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM

from heavypath.kernels.filtering import Filters
from heavypath.speculative import EarlyExit, PromptLookup, SpeculativeDecoder
from heavypath.speculative.cli.generate import summary
from heavypath.speculative.costs.estimates import Work, host_costs, pass_seconds
from heavypath.speculative.costs.streamed import streamed_bytes, streamed_costs
from heavypath.speculative.loading import load_pair
from heavypath.speculative.models.layer_weights import StreamCounts, stream_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.ranks.agreement import agreement_of
from heavypath.speculative.streaming.file import BLOCK, WeightFile
from heavypath.speculative.streaming.layout import aligned_memory
from heavypath.speculative.streaming.load import load_streamed
from heavypath.speculative.streaming.memory import bytes_of, resident_layers
from heavypath.speculative.streaming.offloaded import stream_layers
from heavypath.speculative.streaming.source import places_in, places_of_folder
from heavypath.speculative.streaming.stream import LayerStream
from heavypath.speculative.tree_choice import default_tree

pytestmark = [pytest.mark.timeout(3 * PATIENCE), pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")]
NEW = 8  # tokens of a text
SOME = torch.tensor([[3, 1, 4, 1, 6, 3, 1]])
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def folder(demo_pair, tmp_path_factory):
    """The shipped target in float32, in several files, so that some layers lie in two of them."""
    path = tmp_path_factory.mktemp("target")
    demo_pair[0].save_pretrained(path, max_shard_size="10MB")
    demo_pair[2].save_pretrained(path)
    assert (path / "model.safetensors.index.json").is_file()
    return path


@pytest.fixture
def copied(folder, tmp_path):
    """The same files, to be spoilt."""
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.fixture(scope="module")
def shared(folder):
    """A streamed target for tests that leave it as it is: six of its eight layers pass through two places."""
    return load_streamed(folder, "20M", resident=[0, 1])


@pytest.fixture
def model(folder):
    """A streamed target of the test's own."""
    model = load_streamed(folder, "20M", resident=[0, 1])
    yield model
    stream_of(model).close()


@pytest.fixture(scope="module")
def ids(demo_pair):
    return demo_pair[2]("def read_lines(path):", return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def decoder_of(demo_pair):
    return lambda target, draft=demo_pair[1]: SpeculativeDecoder(target, draft, "ersd", tree_size=12)


@pytest.fixture(scope="module")
def text_of(decoder_of, ids):
    """The text of a decoder, or of a target with the shipped draft, or another one."""

    def text_of(given, *draft):
        decoder = given if isinstance(given, SpeculativeDecoder) else decoder_of(given, *draft)
        return decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None).sequences

    return text_of


@pytest.fixture(scope="module")
def expected(demo_pair, text_of):
    """The text of the target in memory."""
    return text_of(demo_pair[0])


def on_read(model, before):
    """Have `before(number, into)` run before each read of a model's weights, numbered from 0."""
    numbers = iter(range(10**9))

    def read(file, into, begin):
        before(next(numbers), into)
        WeightFile.read(file, into, begin)

    stream_of(model).slots.read = read


def spoil(number, into):
    """Whatever is used before it has been read is not a number."""
    into[:] = b"\xff" * len(into)
    time.sleep(random.random() * 1e-3)


# Models


def test_transformers_generate_goes_through_the_stream_that_the_decoder_reads_by(demo_pair, shared, ids):
    decoder = SpeculativeDecoder(shared, demo_pair[1])
    assert isinstance(decoder._target, LlamaForward)
    assert decoder._target.stream is stream_of(shared)
    before = stream_of(shared).counts()
    expected = demo_pair[0].generate(ids, **GREEDY)
    assert torch.equal(shared.generate(ids, **GREEDY), expected)
    assert stream_of(shared).counts().since(before).bytes_read > (NEW - 2) * 6 * 3e6
    assert torch.equal(shared.generate(ids, custom_generate=decoder, **GREEDY), expected)


def on_disk(layers, in_memory=()):
    """transformers' device map of a Llama whose layers are on disk, all but some."""
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return places | {f"model.layers.{one}": "cpu" if one in in_memory else "disk" for one in range(layers)}


def test_a_model_that_transformers_offloaded_is_streamed_by_the_decoder(folder, text_of, expected, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=on_disk(8, in_memory=(2, 5)), offload_folder=tmp_path
    )
    assert torch.equal(text_of(model.eval()), expected)
    stream = stream_of(model)
    assert (stream.layers, stream.resident) == (6, frozenset())
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_whole_numbers_of_eight_bits_that_accelerate_offloads_are_streamed(tmp_path):
    models = [tiny_llama(1, layers=4) for _ in range(2)]
    kept = torch.arange(-100, 100, dtype=torch.int8)
    for layer in models[1].model.layers:
        layer.mlp.kept = nn.Parameter(kept.clone(), requires_grad=False)
    disk_offload(models[1], tmp_path)
    decoders = [SpeculativeDecoder(model, PromptLookup(), tree_size=4) for model in models]
    texts = [decoder.generate(torch.arange(5)[None], NEW, temperature=1.0).sequences for decoder in decoders]
    assert torch.equal(*texts)
    assert torch.equal(stream_of(models[1]).tensors(3)["model.layers.3.mlp.kept"], kept)


# Costs, and the trees that follow from them


def test_a_step_costs_reading_until_its_products_take_longer(shared, demo_pair, monkeypatch):
    """By hand: the six layers that pass are read at 2 GB/s; what a pass multiplies takes what it takes in memory."""
    target, draft = LlamaForward(shared, "target"), LlamaForward(demo_pair[1], "draft")
    passing = sum(one.nbytes for layer in shared.model.layers[2:] for one in layer.parameters())
    assert streamed_bytes(target.stream) == pytest.approx(passing, rel=0.01)
    reading, sizes = streamed_bytes(target.stream) / 2e9, (1, 32, 512)
    costs, resident = streamed_costs(target, [draft], sizes=sizes), host_costs(target, [draft], 1, sizes)
    drafted = {size: pass_seconds(Work.of(draft), size, 1) for size in sizes}
    assert costs.step[1] == reading > resident.step[1]
    assert costs.step[32] == pytest.approx(reading + drafted[32] - drafted[1])
    assert costs.step[512] == pytest.approx(resident.step[512] + drafted[512] - drafted[1])
    assert costs.level == resident.level
    # As an H100 would have it: 27 MB take a millisecond through PCIe, and the products of 512 nodes a quarter.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(LlamaForward, "device", torch.device("cuda", 0))
    costs = streamed_costs(target, [draft])
    assert costs.step[1] == pytest.approx(streamed_bytes(target.stream) / (0.85 * 31.5e9))
    assert costs.step[max(costs.step)] < 1.2 * costs.step[1]
    assert len(default_tree("sequoia", costs)) >= 128


def test_the_default_tree_has_dozens_of_nodes_and_a_prompt_goes_through_in_one_pass(demo_pair, model, ids):
    decoder, taken = SpeculativeDecoder(model, demo_pair[1]), []
    assert len(decoder.tree) == 64
    assert decoder.trees.chosen_by == "by costs estimated for 0.0273 GB that each pass reads"
    trees = decoder.trees.by_batch(Filters(0.0), 8)
    assert [len(trees.of(running)) for running in (1, 4, 8)] == [64, 16, 8], "a batch shares the nodes that are free"
    stream_of(model).on_take = taken.append
    out = decoder.generate(ids.repeat(1, 200)[:, :600], 1)
    assert taken == [*range(8)] * 2, "one pass for the prompt, one for its last token"
    assert "GB/s" in str(out.stats)


def test_statistics_say_what_was_read_and_what_was_waited_for(demo_pair, model, ids):
    decoder = SpeculativeDecoder(model, demo_pair[1], tree_size=2)
    decoder.generate(ids, 1)
    on_read(model, lambda number, into: time.sleep(0.03))
    stats = decoder.generate(ids, 5).stats
    passing = (stats.steps + 1) * 6
    assert abs(stats.streaming.bytes_read / 3.6e6 - passing) < passing / 2
    assert 0 < stats.streaming.waiting < stats.total_seconds
    assert stats.waiting_share == pytest.approx(stats.streaming.waiting / stats.total_seconds)
    stats.streaming = StreamCounts(10, 0.0, 0.0, untimed=10)  # of steps that are CUDA graphs
    assert json.loads(json.dumps(summary(stats), allow_nan=False))["waiting_share"] is None
    assert SpeculativeDecoder(demo_pair[0], demo_pair[1]).generate(ids, 4).stats.streaming is None


# Memory, and the end


def test_layers_stay_as_far_as_the_memory_goes_and_are_spread():
    assert resident_layers([10] * 12, 120, (), 0) == [*range(12)]
    for memory in range(20, 120, 7):
        assert len(resident_layers([10] * 12, memory, (), 0)) == memory // 10 - 2
    assert resident_layers([10] * 12, 50, (), 0) == [2, 6, 10]
    assert resident_layers([10] * 12, 40, (3, 4), 0) == [3, 4]
    with pytest.raises(ValueError, match=r"is too little.*2 resident layers and 2 that pass"):
        resident_layers([10] * 12, 39, (3, 4), 0)


def test_sizes_of_memory_have_units():
    assert [*map(bytes_of, ("8G", "1.5GB", "2GiB", 77, "5 mb"))] == [8e9, 1.5e9, 2**31, 77, 5e6]
    for given in ("", "8 apples", "8Gi", "-1", "0"):
        with pytest.raises(ValueError, match="expected a size of memory such as 8G"):
            bytes_of(given)


@pytest.mark.parametrize(("memory", "nodes"), [("12M", 96), ("30M", 48), ("100M", None)])
def test_weights_take_the_memory_that_they_are_given_and_the_tree_what_is_free_then(folder, demo_pair, memory, nodes):
    model = load_streamed(folder, memory)
    stream = stream_of(model)
    brought = {id(one) for layer in model.model.layers for one in layer.parameters()}
    beside = sum(one.nbytes for one in model.parameters() if id(one) not in brought)
    whole = sum(one.nbytes for one in demo_pair[0].parameters())
    layer = (whole - beside) / 8
    assert min(bytes_of(memory), whole) - 1.05 * layer < stream.nbytes + beside <= bytes_of(memory)
    assert nodes is None or len(SpeculativeDecoder(model, demo_pair[1]).tree) == nodes
    stream.close()


def open_files(folder):
    """How often files of a folder are open in this process."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and str(folder) in os.readlink(link) for link in links)


def test_closing_frees_files_threads_and_memory(copied, ids):
    model = load_streamed(copied, "20M")
    stream = stream_of(model)
    model(ids)
    assert open_files(copied)
    stream.close()
    assert not open_files(copied)
    assert not any(thread.is_alive() for thread in stream._threads)
    with pytest.raises(RuntimeError, match="closed; load the model anew"):
        model(ids)
    stream.close()  # once more does nothing
    memory = [weakref.ref(slot.bytes.obj) for slot in {id(slot): slot for slot in stream.slots._slot_of}.values()]
    assert len(memory) > 2
    del model, stream
    gc.collect()
    assert not any(pages() for pages in memory)


def test_a_model_that_nobody_needs_takes_its_stream_along(copied, text_of):
    model = load_streamed(copied, "20M")
    text_of(model)
    threads = stream_of(model)._threads
    assert all(thread.is_alive() for thread in threads)
    del model
    gc.collect()
    in_time(*(thread.join for thread in threads))
    gc.collect()
    assert not open_files(copied)


# Reads that are late, or fail


@pytest.mark.parametrize(("number", "error"), [(0, OSError(5, "Input/output error")), (20, MemoryError("no room"))])
def test_a_read_that_fails_is_an_error_with_the_layer_and_the_next_text_is_right(
    model, decoder_of, text_of, expected, number, error
):
    decoder = decoder_of(model)

    def fail(count, into):
        spoil(count, into)
        if count >= number:
            raise error

    on_read(model, fail)
    with pytest.raises(OSError, match=rf"layer \d of the model cannot be read: {re.escape(str(error))}"):
        text_of(decoder)
    on_read(model, spoil)
    assert torch.equal(text_of(decoder), expected)


def test_a_read_ahead_that_fails_while_nothing_is_decoded_is_tried_again(model, ids, text_of, expected):
    assert torch.equal(text_of(model), expected)
    stream, failed = stream_of(model), threading.Event()
    slot, end = stream.slots._slot_of[2], time.monotonic() + PATIENCE
    while slot.layer != 2 or slot.left or slot.running:  # reading ahead of the next text is still under way
        assert time.monotonic() < end
        time.sleep(0.001)

    def fail(count, into):
        failed.set()
        raise OSError("the disk is away")

    on_read(model, fail)
    with stream.layer(2):  # it is there already
        pass
    assert failed.wait(PATIENCE), "after it reading goes on"
    for use in (text_of, lambda model: model(ids)):
        with pytest.raises(OSError, match="the disk is away"):
            use(model)
    on_read(model, spoil)
    assert torch.equal(text_of(model), expected)


# Files


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def write_in_place(path):
    """With its size and its time of modification as before."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_a_file_may_get_and_lose_names_but_not_other_bytes(tmp_path):
    path, other = tmp_path / "weights", tmp_path / "other"
    path.write_bytes(bytes(BLOCK))
    file = WeightFile(str(path))
    for change in (lambda: os.link(path, other), path.unlink, other.unlink):
        time.sleep(0.02)  # more than the clock of files takes to go on
        change()
        file.check()
        file.check()
    for spoilt, message in ((truncate, "has been truncated"), (write_in_place, "has changed")):
        path.write_bytes(bytes(BLOCK))
        file = WeightFile(str(path))
        os.link(path, tmp_path / spoilt.__name__)
        file.check()
        time.sleep(0.02)
        spoilt(path)
        with pytest.raises(OSError, match=rf"weights' {message}.*; load the model anew"):
            file.check()


def read_whole(path):
    """A file's bytes, as a stream reads them."""
    file = WeightFile(str(path))
    memory, there = aligned_memory(-(-file.size // BLOCK) * BLOCK)
    file.read(there, 0)
    file.close()
    return memory[: file.size].numpy().tobytes()


def test_a_read_that_brings_less_goes_on_at_a_block(tmp_path, monkeypatch):
    path, real = tmp_path / "weights", os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: min(BLOCK + 904, real(file, [into[0][: 2 * BLOCK]], at)))
    for size in (BLOCK * 3, BLOCK * 3 + 77, 100):
        path.write_bytes(random.Random(1).randbytes(size))
        assert read_whole(path) == path.read_bytes()


def test_the_disk_reads_each_byte_once(tmp_path):
    """Reads that ask the page cache first have the system read ahead what they then read themselves."""

    def bytes_from_disk():
        facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(facts["read_bytes"])

    path, size = tmp_path / "weights", 8 << 20
    path.write_bytes(bytes(size))
    with path.open() as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_from_disk()
    read_whole(path)
    assert bytes_from_disk() - before <= 1.1 * size


def test_files_that_are_missing_or_broken_are_found_before_anything_is_decoded(copied):
    """An index that names the wrong file, a file that is gone, and one that is cut off."""
    index, files, away = copied / "model.safetensors.index.json", sorted(copied.glob("model-*")), copied / "away"

    def refused():
        for load in (lambda: load_streamed(copied, "20M"), lambda: places_of_folder(copied)):
            with pytest.raises((ValueError, FileNotFoundError), match=f"{copied}/model"):
                load()

    right = index.read_text()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(json.loads(right)["weight_map"], files[0].name)}))
    refused()
    index.write_text(right)
    files[0].rename(away)
    refused()
    away.rename(files[0])
    truncate(files[1])
    refused()


def test_weights_that_are_no_numbers_are_an_error_when_they_are_first_read(copied, text_of):
    name = "model.layers.4.mlp.up_proj.weight"
    path = next(path for path in copied.glob("*.safetensors") if name in load_file(path))
    weights = load_file(path)
    weights[name][5, 5] = torch.nan
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"NaN or infinite weights in {name} of layer 4"):
        text_of(load_streamed(copied, "20M"))


# Interruptions, and threads


class InterruptionError(Exception): ...


@pytest.mark.parametrize("raised", [InterruptionError, KeyboardInterrupt])  # after the latter PyTorch calls no hook
def test_a_pass_that_an_exception_ends_leaves_nothing_held(
    raised, model, ids, decoder_of, text_of, expected, monkeypatch
):
    """Within a layer, or when one has just been taken, as by Ctrl-C; each time another thread goes on."""

    def raise_error(*given):
        raise raised

    decoder, slots, numbers = decoder_of(model), stream_of(model).slots, iter(range(1000))
    hook = model.model.layers[3].mlp.register_forward_pre_hook(raise_error)
    with pytest.raises(raised):
        model(ids)
    hook.remove()
    (text,) = in_time(partial(text_of, decoder))
    assert torch.equal(text, expected)
    take = slots.take
    with monkeypatch.context() as patch:
        patch.setattr(slots, "take", lambda layer: take(layer) or next(numbers) < 4 or raise_error())
        (error,) = in_time(partial(text_of, decoder))
    assert isinstance(error, raised)
    (text,) = in_time(partial(text_of, decoder))
    assert torch.equal(text, expected)


@pytest.mark.skipif(sys.gettrace() is not None, reason="Ctrl-C may leave the lock of what records coverage held")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_ctrl_c_at_any_time_leaves_the_next_text_right(model, decoder_of, text_of, expected, seed):
    decoder = decoder_of(model)
    begin = time.perf_counter()
    text_of(decoder)
    seconds, times, interrupted = time.perf_counter() - begin, random.Random(seed), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 3:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, seconds * times.random()))
            try:
                text_of(decoder)
                seconds /= 2  # the first took longer, on a busy machine
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    (text,) = in_time(partial(text_of, decoder))
    assert torch.equal(text, expected)


def test_threads_may_decode_by_one_stream_and_transformers_beside_them(demo_pair, model, ids, text_of, expected):
    on_read(model, spoil)
    plain = demo_pair[0].generate(ids, **GREEDY)
    generate = partial(model.generate, ids, **GREEDY)
    texts = in_time(partial(text_of, model), partial(text_of, model, EarlyExit(2)), generate)
    for text, right in zip(texts, [expected, expected, plain], strict=True):
        assert not isinstance(text, BaseException), text
        assert torch.equal(text, right)


def test_a_stream_that_is_closed_while_somebody_decodes_raises_an_error_there(model, text_of):
    on_read(model, lambda number, into: time.sleep(0.02))

    def close():
        time.sleep(0.1)
        stream_of(model).close()

    error, _ = in_time(partial(text_of, model), close)
    assert isinstance(error, RuntimeError)
    assert "closed" in str(error)


def test_a_thread_gets_the_slot_of_one_that_dies_with_a_layer_while_it_waits(tmp_path):
    save_file({f"l.{n}": torch.full((1000,), n) for n in range(9)}, tmp_path / "layers.safetensors")
    places = places_in(tmp_path / "layers.safetensors")
    with LayerStream([{"weight": places[f"l.{n}"]} for n in range(9)]) as stream:
        slots = stream.slots
        held = threading.Event()

        def dies():
            stream.take(0)
            held.set()
            while len(slots._asked) == 0:  # until the other one waits
                time.sleep(0.001)

        def waits():
            held.wait()
            stream.take(slots.count)  # of the same slot
            return int(stream.tensors(slots.count)["weight"][0])

        _, found = in_time(dies, waits)
        assert found == slots.count


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_threads_that_take_layers_at_random_always_find_the_layers_own_bytes(tmp_path, seed):
    """Every layer's numbers are its own; reads fail now and then, and threads take any layer, and die holding one."""
    count, chance = 9, random.Random(seed)
    for half in range(2):
        save_file({f"l.{n}.{half}": torch.full((30_000 + n,), 10 * n + half) for n in range(count)},
                  tmp_path / f"{half}.safetensors")  # fmt: skip
    places = places_in(tmp_path / "0.safetensors") | places_in(tmp_path / "1.safetensors")
    layers = [{str(half): places[f"l.{n}.{half}"] for half in range(2)} for n in range(count)]
    with LayerStream(layers, resident=[4]) as stream:

        def disturbed(file, into, begin):
            spoil(0, into)
            if chance.random() < 0.02:
                raise OSError("now and then")
            WeightFile.read(file, into, begin)

        stream.slots.read = disturbed

        def use(number):
            own, layer, right = random.Random(10 * seed + number), 0, 0
            for _ in range(150):
                layer = (layer + 1) % count if own.random() < 0.8 else own.randrange(count)
                with suppress(OSError, InterruptionError), stream.layer(layer):
                    for half in "01":
                        assert (stream.tensors(layer)[half] == 10 * layer + int(half)).all()
                    right += 1
                    if own.random() < 0.05:
                        raise InterruptionError
            with suppress(OSError):
                stream.take(layer)  # and never released
            return right

        done = in_time(*(partial(use, number) for number in range(3)))
        assert all(isinstance(right, int) and right > 100 for right in done), done


# What is refused


def test_a_target_is_split_or_streamed(shared):
    with pytest.raises(ValueError, match="either split over processes or streamed, got 2 and memory '20M'"):
        load_pair("anywhere", memory="20M", ranks=2)
    with pytest.raises(ValueError, match="memory is for a target in a folder of its own"):
        load_pair("anywhere", memory="20M", dtype=torch.bfloat16)
    models = [Mock(ranks=None, stream=stream_of(shared)), Mock(ranks=Mock(count=2), stream=None)]
    models[0].name = "target"
    with pytest.raises(ValueError, match="target is streamed, and another model split over 2 processes"):
        agreement_of(models, torch.device("cpu"))


def test_too_little_memory_is_refused_with_the_least_that_would_do(folder):
    with pytest.raises(ValueError, match=r"a memory of 0\.005G is too little: .*; give at least (\d+)M") as found:
        load_streamed(folder, "5M")
    least = str(found.value).rpartition("at least ")[2]
    stream_of(load_streamed(folder, least)).close()
    with pytest.raises(ValueError, match="is too little"):
        load_streamed(folder, bytes_of(least) - 2_000_000)


@pytest.mark.slow
def test_weights_that_transformers_keeps_in_float32_stay_in_memory(tmp_path):
    tiny("ernie4_5_moe", num_hidden_layers=4).bfloat16().save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    target = load_streamed(tmp_path, sum(one.nbytes for one in whole.parameters()) * 9 // 10, offload_folder=tmp_path)
    texts = [SpeculativeDecoder(each, PromptLookup()).generate(SOME, 8).sequences for each in (whole, target)]
    assert torch.equal(*texts)
    assert stream_of(target).counts().bytes_read > 0
    gates = [layer.mlp.gate.weight for layer in target.model.layers[1:]]
    assert {(one.dtype, one.device.type) for one in gates} == {(torch.float32, "cpu")}


def test_weights_that_would_have_to_be_converted_are_refused(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=on_disk(8), offload_folder=tmp_path
    )
    message = r"not saved in the type .* has them in, torch.bfloat16; .*: load the model with dtype"
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model, PromptLookup())


def test_a_model_in_memory_has_nothing_to_stream_and_an_early_exit_needs_it(demo_pair, shared):
    with pytest.raises(ValueError, match=r"memory, got \[0, 1, 2\] of which \[2\] are streamed; load the ta"):
        SpeculativeDecoder(shared, EarlyExit(3))
    with pytest.raises(ValueError, match="no weight of the model is offloaded to disk; load it by load_streamed"):
        stream_layers(demo_pair[0], "20M")
    assert stream_of(demo_pair[0]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("options", "message"), [
    ({"device": "cuda"}, "device 'cuda' was given, and torch finds no CUDA GPU"),
    ({"device": "meta"}, "streamed to a CPU or a CUDA GPU, got device 'meta'"),
    ({"host_memory": "1G"}, "host_memory is for a model on a GPU, got '1G' for one on the CPU"),
])  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        load_streamed(folder, "20M", **options)
