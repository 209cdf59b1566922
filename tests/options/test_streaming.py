"""Targets whose layers are read from disk write the text of the same target in memory, with all that may go wrong."""

import gc
import json
import os
import random
import shutil
import signal
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
from gpu_hardware import H100
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    MixtralConfig,
    OPTConfig,
)

from heavypath.kernels.filtering import Filters
from heavypath.speculative import EarlyExit, PromptLookup, SpeculativeDecoder, load_demo_head, load_demo_pair
from heavypath.speculative.cli import app
from heavypath.speculative.cli.app import main
from heavypath.speculative.costs.host import host_costs, pass_seconds
from heavypath.speculative.costs.roofline import Work
from heavypath.speculative.costs.streamed import streamed_bytes, streamed_costs
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.loading import load_pair
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.ranks.agreement import agreement_of
from heavypath.speculative.streaming.file import BLOCK, WeightFile
from heavypath.speculative.streaming.layer_weights import stream_of
from heavypath.speculative.streaming.layout import aligned_memory
from heavypath.speculative.streaming.load import load_streamed
from heavypath.speculative.streaming.memory import bytes_of, resident_layers
from heavypath.speculative.streaming.offloaded import stream_layers
from heavypath.speculative.streaming.slots import StreamCounts
from heavypath.speculative.streaming.source import layers_of, places_in, places_of_folder
from heavypath.speculative.streaming.stream import LayerStream
from heavypath.speculative.tree_choice import default_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
TREE, NEW, PATIENCE = 12, 24, 3  # nodes; tokens; seconds after which something hangs


@pytest.fixture(autouse=True)
def patience():
    """A test that waits for ever fails."""

    def fail(*given):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 4 * PATIENCE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def folder(demo_pair, tmp_path_factory):
    """The shipped target in float32, in several files, so that some layers lie in two of them."""
    path = tmp_path_factory.mktemp("target")
    demo_pair[0].save_pretrained(path, max_shard_size="10MB")
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


@pytest.fixture(scope="module")
def ids(demo_pair):
    return demo_pair[2]("def read_lines(path):", return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def expected(demo_pair, ids):
    """The text of the target in memory."""
    return text_of(demo_pair[0], demo_pair[1], ids)


def some_time(*case):
    """A case like others, for `make test-all`."""
    return pytest.param(*case, marks=pytest.mark.slow)


def text_of(target, draft, ids, method="ersd", temperature=0.6):
    decoder = SpeculativeDecoder(target, draft, method, tree_size=TREE)
    return decoder.generate(ids, NEW, temperature=temperature, seed=3, eos_token_id=None).sequences


def in_time(*functions):
    """What functions return, each in a thread of its own, or the exceptions that they raise. A hang fails the test."""
    results = [None] * len(functions)

    def run(number):
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it hangs"
    return results


def on_read(stream, before):
    """Have `before(number, into)` run before each read, numbered from 0."""
    numbers = iter(range(10**9))

    def read(file, into, begin):
        before(next(numbers), into)
        WeightFile.read(file, into, begin)

    stream.slots.read = read


def spoil(number, into):
    """Whatever is used before it has been read is not a number."""
    into[:] = b"\xff" * len(into)
    time.sleep(random.random() * 1e-3)


# The same text


@pytest.mark.parametrize(("method", "temperature"), [("autoregressive", 0), ("sequoia", 0.6), ("dyspec", 0.6),
                                                     some_time("sequoia", 0), some_time("specinfer", 0.6)])  # fmt: skip
def test_a_streamed_target_writes_the_text_of_the_one_in_memory(demo_pair, shared, ids, method, temperature):
    target, draft, _ = demo_pair
    draft = None if method == "autoregressive" else draft
    options = {} if draft is None else {"tree_size": TREE}
    texts = [
        SpeculativeDecoder(each, draft, method, **options)
        .generate(ids, NEW, temperature=temperature, seed=5, eos_token_id=None)
        .sequences
        for each in (target, shared)
    ]
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("draft", ["head", "early exit", some_time("lookup")])
def test_every_draft_drafts_for_a_streamed_target(demo_pair, shared, ids, draft):
    make = {"head": load_demo_head, "lookup": lambda target: PromptLookup(), "early exit": lambda target: EarlyExit(2)}
    texts = [text_of(target, make[draft](target), ids) for target in (demo_pair[0], shared)]
    assert torch.equal(*texts)


def test_a_batch_of_padded_prompts_has_the_texts_of_the_target_in_memory(demo_pair, shared):
    target, draft, tokenizer = demo_pair
    given = tokenizer(["import os\n", "class Stack:\n    def push(self, item):"], return_tensors="pt", padding=True)
    sampling = {"max_new_tokens": NEW, "temperature": 0.6, "seed": 2, "eos_token_id": None}
    decoders = [SpeculativeDecoder(each, draft, "ersd", tree_size=TREE) for each in (target, shared)]
    assert torch.equal(*(decoder.generate(**given, **sampling).sequences for decoder in decoders))


def test_a_service_decodes_by_a_streamed_target_whatever_is_read_late(demo_pair, folder, ids):
    model = load_streamed(folder, "20M", resident=[0, 1])
    decoders = [SpeculativeDecoder(each, demo_pair[1], "ersd", tree_size=TREE) for each in (demo_pair[0], model)]
    on_read(stream_of(model), spoil)
    texts = []
    for decoder in decoders:
        with decoder.serve(slots=2, max_tokens=64, prefill_tokens=4) as service:
            sent = [service.submit(ids[0, : 3 + number], 8, 0.6, seed=number) for number in range(4)]
            texts.append([completion.result(2 * PATIENCE).tokens for completion in sent])
    assert texts[0] == texts[1]


def test_a_service_goes_on_after_a_read_that_failed(demo_pair, folder, ids):
    model = load_streamed(folder, "20M")
    fails = []

    def fail(number, into):
        if fails:
            raise fails.pop()

    on_read(stream_of(model), fail)
    with SpeculativeDecoder(model, demo_pair[1], "ersd", tree_size=TREE).serve(slots=2, max_tokens=64) as service:
        expected = service.submit(ids[0], 8, 0.6, seed=1).result(PATIENCE).tokens
        fails += [OSError(5, "Input/output error")] * 3
        with suppress(OSError):  # unless it was retried in time
            service.submit(ids[0], 8, 0.6, seed=2).result(PATIENCE)
        fails.clear()
        assert service.submit(ids[0], 8, 0.6, seed=1).result(PATIENCE).tokens == expected


def test_a_batch_shares_the_nodes_that_are_free(demo_pair, shared):
    trees = SpeculativeDecoder(shared, demo_pair[1]).trees_by_batch(Filters(0.0), 8)
    assert [len(trees.of(running)) for running in (1, 4, 8)] == [128, 32, 16]


def test_a_step_costs_reading_until_its_products_take_longer(shared, demo_pair):
    """By hand: the six layers that pass are read at 2 GB/s; what a pass multiplies takes what it takes in memory."""
    target, draft = LlamaForward(shared, "target"), LlamaForward(demo_pair[1], "draft")
    passing = sum(one.nbytes for layer in shared.model.layers[2:] for one in layer.parameters())
    assert streamed_bytes(target.stream) == pytest.approx(passing, rel=0.01)
    reading, sizes = streamed_bytes(target.stream) / 2e9, (1, 64, 512)
    costs, resident = streamed_costs(target, [draft], sizes=sizes), host_costs(target, [draft], 1, sizes)
    drafted = {size: pass_seconds(Work.of(draft), torch.float32, size, 1) for size in sizes}
    assert costs.step[1] == reading > resident.step[1]
    assert costs.step[64] == pytest.approx(reading + drafted[64] - drafted[1])
    assert costs.step[512] == pytest.approx(resident.step[512] + drafted[512] - drafted[1])
    assert costs.level == resident.level


def test_behind_pcie_hundreds_of_nodes_are_free(shared, demo_pair, monkeypatch):
    """As an H100 would have it: 27 MB take a millisecond through PCIe, and the products of 512 nodes a quarter."""
    target, draft = LlamaForward(shared, "target"), LlamaForward(demo_pair[1], "draft")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(LlamaForward, "device", torch.device("cuda", 0))
    costs = streamed_costs(target, [draft])
    assert costs.step[1] == pytest.approx(streamed_bytes(target.stream) / (0.85 * 31.5e9))
    assert costs.step[max(costs.step)] < 1.2 * costs.step[1]
    assert len(default_tree("sequoia", costs)) >= 128


def test_what_stays_in_memory_makes_the_default_tree_smaller(demo_pair, folder):
    sizes = []
    for memory in ("12M", "20M", "30M"):
        target = load_streamed(folder, memory)
        sizes.append(len(SpeculativeDecoder(target, demo_pair[1]).tree))
        stream_of(target).close()
    assert sizes == [192, 128, 64]


def test_a_target_is_split_or_streamed(shared):
    with pytest.raises(ValueError, match="either split over processes or streamed, got 2 and memory '20M'"):
        load_pair("anywhere", memory="20M", ranks=2)
    two = Mock(count=2)  # ranks
    models = [Mock(ranks=None, stream=stream_of(shared)), Mock(ranks=two, stream=None)]
    models[0].name = "target"
    with pytest.raises(ValueError, match="target is streamed, and another model split over 2 processes"):
        agreement_of(models, torch.device("cpu"))


def test_a_streamed_llama_runs_by_its_own_modules_and_transformers_generate_through_the_same_stream(
    demo_pair, shared, ids
):
    decoder = SpeculativeDecoder(shared, demo_pair[1])
    assert isinstance(decoder._target, LlamaForward)
    assert decoder._target.stream is stream_of(shared)
    before = stream_of(shared).counts()
    texts = [each.generate(ids, max_new_tokens=NEW, do_sample=False) for each in (demo_pair[0], shared)]
    assert torch.equal(*texts)
    assert stream_of(shared).counts().since(before).bytes_read > 20 * 6 * 3e6
    assert torch.equal(shared.generate(ids, custom_generate=decoder, max_new_tokens=NEW, do_sample=False), texts[0])


def test_a_model_that_transformers_offloaded_is_streamed_by_the_decoder(demo_pair, folder, ids, expected, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{number}": "cpu" if number in (2, 5) else "disk" for number in range(8)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=places, offload_folder=tmp_path)
    assert torch.equal(text_of(model.eval(), demo_pair[1], ids), expected)
    stream = stream_of(model)
    assert (stream.layers, stream.resident) == (6, frozenset())
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2}
ARCHITECTURES = {
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=5, n_head=2, n_positions=128),
    "opt": OPTConfig(**TINY, ffn_dim=64, max_position_embeddings=128, word_embed_proj_dim=32),
    "gemma3": Gemma3TextConfig(**TINY, intermediate_size=64, num_key_value_heads=1, head_dim=16, sliding_window=16),
    "mixtral": MixtralConfig(**TINY, intermediate_size=48, num_key_value_heads=1, num_local_experts=3),
}


@pytest.mark.parametrize("name", ["gpt2", "gemma3", some_time("opt"), some_time("mixtral")])
def test_other_architectures_are_streamed_by_transformers_own_forward_pass(name, tmp_path):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    resident = sum(one.nbytes for one in model.parameters()) // 2 + 60_000
    streamed = load_streamed(tmp_path / "model", resident, offload_folder=tmp_path / "converted")
    streamed.generation_config.eos_token_id = None
    stream = stream_of(streamed)
    assert len(stream.resident) < stream.layers == 5
    ids = torch.arange(10)[None]
    texts = [text_of(each, PromptLookup(), ids, temperature=1.0) for each in (model, streamed)]
    assert isinstance(SpeculativeDecoder(streamed, PromptLookup())._target, TransformersForward)
    assert torch.equal(*texts)


def test_sixteen_bits_are_streamed_as_they_are(demo_pair, ids, tmp_path):
    AutoModelForCausalLM.from_pretrained(demo_pair[0].name_or_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    streamed = load_streamed(tmp_path, "10M")
    assert streamed.dtype == torch.bfloat16
    assert torch.equal(*(each.generate(ids, max_new_tokens=NEW, do_sample=False) for each in (model, streamed)))
    out = SpeculativeDecoder(streamed, PromptLookup()).generate(ids, 8)
    assert out.sequences.shape[1] == ids.shape[1] + 8


class QuantisedLinear(nn.Module):
    """A linear layer of whole numbers of eight bits and a scale for each output."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def test_quantised_linear_layers_that_accelerate_offloads_are_streamed(ids, tmp_path):
    def quantised():
        model = load_demo_pair()[0]
        for layer in model.model.layers:
            layer.mlp.down_proj = QuantisedLinear(layer.mlp.down_proj)
        return model

    model, streamed = quantised(), quantised()
    disk_offload(streamed, tmp_path)
    texts = [text_of(each, PromptLookup(), ids) for each in (model, streamed)]
    assert torch.equal(*texts)
    assert stream_of(streamed).tensors(3)["model.layers.3.mlp.down_proj.weight"].dtype == torch.int8


# Memory, and the end


def test_layers_stay_as_far_as_the_memory_goes_and_are_spread():
    assert resident_layers([10] * 12, 120, (), 0) == [*range(12)]
    for memory in range(20, 120, 7):
        chosen = resident_layers([10] * 12, memory, (), 0)
        assert len(chosen) == memory // 10 - 2
    assert resident_layers([10] * 12, 50, (), 0) == [2, 6, 10]
    assert resident_layers([10] * 12, 40, (3, 4), 0) == [3, 4]
    with pytest.raises(ValueError, match=r"memory of 0\.000G is too little.*2 resident layers.*give at least 1M"):
        resident_layers([10] * 12, 39, (3, 4), 0)


@pytest.mark.parametrize(("given", "number"), [("8G", 8e9), ("1.5GB", 1.5e9), ("2GiB", 2**31), (77, 77), ("5 mb", 5e6)])
def test_sizes_of_memory_have_units(given, number):
    assert bytes_of(given) == number


@pytest.mark.parametrize("given", ["", "8 apples", "8Gi", "-1", "0"])
def test_what_is_no_size_of_memory_is_refused(given):
    with pytest.raises(ValueError, match="expected a size of memory such as 8G"):
        bytes_of(given)


@pytest.mark.parametrize("memory", ["16M", "24M", "30M", "100M"])
def test_weights_take_the_memory_that_they_are_given(folder, demo_pair, memory):
    model = load_streamed(folder, memory)
    stream = stream_of(model)
    brought = {id(one) for layer in model.model.layers for one in layer.parameters()}
    beside = sum(one.nbytes for one in model.parameters() if id(one) not in brought)
    whole = sum(one.nbytes for one in demo_pair[0].parameters())
    layer = (whole - beside) / 8
    assert min(bytes_of(memory), whole) - 1.05 * layer < stream.nbytes + beside <= bytes_of(memory)


def open_files(folder):
    """How often files of a folder are open in this process."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and str(folder) in os.readlink(link) for link in links)


def test_closing_frees_files_threads_and_memory(copied, demo_pair, ids):
    model = load_streamed(copied, "20M")
    text_of(model, demo_pair[1], ids)
    stream = stream_of(model)
    assert open_files(copied)
    stream.close()
    assert not open_files(copied)
    assert not any(thread.is_alive() for thread in stream._threads)
    with pytest.raises(RuntimeError, match="closed; load the model anew"):
        text_of(model, demo_pair[1], ids)
    stream.close()  # once more does nothing
    memory = [weakref.ref(slot.bytes.obj) for slot in {id(slot): slot for slot in stream.slots._slot_of}.values()]
    assert len(memory) > 2
    del model, stream
    gc.collect()
    assert not any(pages() for pages in memory)


def test_a_model_that_nobody_needs_takes_its_stream_along(copied, demo_pair, ids):
    model = load_streamed(copied, "20M")
    text_of(model, demo_pair[1], ids)
    threads = stream_of(model)._threads
    assert all(thread.is_alive() for thread in threads)
    del model
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert not open_files(copied)


def test_the_default_tree_has_a_hundred_nodes_and_a_prompt_goes_through_in_one_pass(demo_pair, shared, ids):
    decoder = SpeculativeDecoder(shared, demo_pair[1])
    assert len(decoder.tree) == 128
    assert decoder.tree_from == "by costs estimated for 0.0273 GB that each pass reads"
    taken = []
    stream_of(shared).on_take = taken.append
    out = decoder.generate(ids.repeat(1, 200)[:, :1000], 1)
    stream_of(shared).on_take = None
    assert taken == [*range(8)] * 2, "one pass for the prompt, one for its last token"
    assert "GB/s" in str(out.stats)


def test_statistics_say_what_was_read_and_what_was_waited_for(demo_pair, folder, ids):
    model = load_streamed(folder, "20M")
    stream = stream_of(model)
    decoder = SpeculativeDecoder(model, demo_pair[1], tree_size=2)
    decoder.generate(ids, 8)
    on_read(stream, lambda number, into: time.sleep(0.05))
    stats = decoder.generate(ids, 16).stats
    reads = 2 * (stats.steps + 1) * (8 - len(stream.resident))
    assert abs(stats.streaming.bytes_read / 3.6e6 - reads / 2) < reads / 4
    assert 0.3 < stats.waiting_share <= 1
    assert stats.streaming.waiting < stats.total_seconds
    assert SpeculativeDecoder(demo_pair[0], demo_pair[1]).generate(ids, 4).stats.streaming is None


# Faults


def test_reads_that_are_late_and_in_disorder_are_never_used_half(demo_pair, folder, ids, expected):
    model = load_streamed(folder, "20M")
    on_read(stream_of(model), spoil)
    for _ in range(3):
        assert torch.equal(text_of(model, demo_pair[1], ids), expected)


@pytest.mark.parametrize("number", [0, 30, *map(some_time, (1, 7, 61))])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), some_time(MemoryError("no room"))])
def test_a_read_that_fails_is_an_error_with_the_layer_and_the_next_text_is_right(
    demo_pair, folder, ids, expected, number, error
):
    model = load_streamed(folder, "20M")
    decoder = SpeculativeDecoder(model, demo_pair[1], "ersd", tree_size=TREE)

    def fail(count, into):
        spoil(count, into)
        if count >= number:
            raise error

    on_read(stream_of(model), fail)
    (raised,) = in_time(lambda: decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None))
    assert isinstance(raised, OSError)
    assert f"layer {raised.args[0].split()[1]} of the model cannot be read: " in str(raised)
    assert str(error) in str(raised)
    on_read(stream_of(model), spoil)
    (out,) = in_time(lambda: decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None))
    assert torch.equal(out.sequences, expected)


def test_a_read_ahead_that_fails_while_nothing_is_decoded_is_tried_again(demo_pair, folder, ids, expected):
    model = load_streamed(folder, "20M")
    stream = stream_of(model)
    assert torch.equal(text_of(model, demo_pair[1], ids), expected)

    failed = threading.Event()

    def fail(count, into):
        failed.set()
        raise OSError("the disk is away")

    on_read(stream, fail)
    first = min({*range(8)} - stream.resident)
    with stream.layer(first):  # it is there already
        pass
    assert failed.wait(PATIENCE), "behind it reading goes on"
    (error,) = in_time(lambda: text_of(model, demo_pair[1], ids))
    assert "the disk is away" in str(error)
    with pytest.raises(OSError, match="the disk is away"):
        model(ids)
    on_read(stream, spoil)
    assert torch.equal(text_of(model, demo_pair[1], ids), expected)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def write_in_place(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")


def write_in_place_unseen(path):
    """With its size and its time of modification as before."""
    facts = path.stat()
    write_in_place(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


SPOILT = [(truncate, "truncated"), (write_in_place, "has changed"), (write_in_place_unseen, "has changed")]


@pytest.mark.parametrize(("spoilt", "message"), SPOILT)
def test_a_file_that_changes_under_a_stream_is_an_error(demo_pair, copied, ids, spoilt, message):
    model = load_streamed(copied, "20M")
    text_of(model, demo_pair[1], ids)
    for path in copied.glob("*.safetensors"):
        spoilt(path)
    (error,) = in_time(lambda: text_of(model, demo_pair[1], ids))
    assert isinstance(error, OSError)
    assert message in str(error)


def test_a_file_that_is_deleted_under_a_stream_can_be_read_on(demo_pair, copied, ids, expected):
    model = load_streamed(copied, "20M")
    shutil.rmtree(copied)
    assert torch.equal(text_of(model, demo_pair[1], ids), expected)


def test_a_file_may_get_and_lose_names_but_not_other_bytes(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(BLOCK))
    file = WeightFile(str(path))
    for change in (lambda: os.link(path, tmp_path / "other"), path.unlink, (tmp_path / "other").unlink):
        time.sleep(0.02)  # more than the clock of files takes to go on
        change()
        file.check()
        file.check()
    path.write_bytes(bytes(BLOCK))
    file = WeightFile(str(path))
    os.link(path, tmp_path / "third")
    file.check()
    time.sleep(0.02)
    write_in_place_unseen(path)
    with pytest.raises(OSError, match=r"weights' has changed since it was opened; load the model anew"):
        file.check()


def read_whole(path):
    """A file's bytes, as a stream reads them."""
    file = WeightFile(str(path))
    memory, there = aligned_memory(-(-file.size // BLOCK) * BLOCK)
    file.read(there, 0)
    file.close()
    return memory[: file.size].numpy().tobytes()


@pytest.mark.parametrize("size", [BLOCK * 3, BLOCK * 3 + 77, 100])
def test_a_read_that_brings_less_goes_on_at_a_block(tmp_path, monkeypatch, size):
    path, real = tmp_path / "weights", os.preadv
    path.write_bytes(random.Random(1).randbytes(size))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: min(BLOCK + 904, real(file, [into[0][: 2 * BLOCK]], at)))
    assert read_whole(path) == path.read_bytes()


def test_the_disk_reads_each_byte_once(tmp_path):
    """Reads that ask the page cache first have the system read ahead what they then read themselves."""
    path, size = tmp_path / "weights", 32 << 20
    path.write_bytes(bytes(size))
    with path.open() as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_from_disk()
    read_whole(path)
    assert bytes_from_disk() - before <= 1.1 * size


def bytes_from_disk():
    """Bytes that this process had the disk read."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["read_bytes"])


def missing(folder):
    next(folder.glob("model-*.safetensors")).unlink()


def cut_off(folder):
    truncate(sorted(folder.glob("model-*.safetensors"))[1])


def no_header(folder):
    sorted(folder.glob("model-*.safetensors"))[1].write_bytes(b"\x05" + bytes(7) + b"{not}" + bytes(100))


def lost_tensor(folder):
    index = folder / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    first = min(facts["weight_map"].values())
    facts["weight_map"] = dict.fromkeys(facts["weight_map"], first)
    index.write_text(json.dumps(facts))


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model-00001-of-00002.safetensors"]}')


def foreign_index(folder):
    index = folder / "model.safetensors.index.json"
    shutil.copy(next(folder.glob("model-*.safetensors")), folder.parent / "model-0.safetensors")
    facts = json.loads(index.read_text())
    facts["weight_map"] = dict.fromkeys(facts["weight_map"], "../model-0.safetensors")
    index.write_text(json.dumps(facts))


@pytest.mark.parametrize("spoilt", [missing, cut_off, no_header, lost_tensor, no_index, foreign_index])
def test_files_that_are_missing_or_broken_are_found_before_anything_is_decoded(copied, spoilt):
    spoilt(copied)
    for load in (
        lambda: load_streamed(copied, "20M"),
        lambda: LayerStream(layers_of(places_of_folder(copied), "model.")),
    ):
        (error,) = in_time(load)
        assert isinstance(error, ValueError | FileNotFoundError)
        assert f"{copied}/model" in str(error)


def test_a_header_that_contradicts_itself_is_refused(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=r"a\.safetensors' is no safetensors file, or is truncated: .*offset"):
        places_in(tmp_path / "a.safetensors")


def test_weights_that_are_no_numbers_are_an_error_when_they_are_first_read(demo_pair, copied, ids):
    path = next(path for path in copied.glob("*.safetensors") if "model.layers.4.mlp.up_proj.weight" in load_file(path))
    weights = load_file(path)
    weights["model.layers.4.mlp.up_proj.weight"][5, 5] = torch.nan
    save_file(weights, path, {"format": "pt"})
    model = load_streamed(copied, "20M")
    (error,) = in_time(lambda: text_of(model, demo_pair[1], ids))
    assert isinstance(error, ValueError)
    assert "NaN or infinite weights in model.layers.4.mlp.up_proj.weight of layer 4" in str(error)


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("layer", [3, some_time(0), some_time(7)])
def test_a_pass_that_an_exception_ends_leaves_the_next_one_right(demo_pair, folder, ids, expected, layer):
    model = load_streamed(folder, "20M")
    decoder = SpeculativeDecoder(model, demo_pair[1], "ersd", tree_size=TREE)

    def raise_error(*given):
        raise InterruptionError

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(raise_error)
    with pytest.raises(InterruptionError):
        model(ids)
    hook.remove()
    (out,) = in_time(lambda: decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None))
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("seed", [0, *map(some_time, (1, 2))])
def test_ctrl_c_at_any_time_leaves_the_next_text_right(demo_pair, folder, ids, expected, seed):
    model = load_streamed(folder, "20M")
    decoder = SpeculativeDecoder(model, demo_pair[1], "ersd", tree_size=TREE)
    begin = time.perf_counter()
    decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None)
    seconds, times, interrupted = time.perf_counter() - begin, random.Random(seed), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(4):
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, seconds * times.random()))
            try:
                decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    (out,) = in_time(lambda: decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None))
    assert torch.equal(out.sequences, expected)


def test_a_pass_that_is_interrupted_before_its_release_leaves_nothing_held(demo_pair, folder, ids, expected):
    """Ctrl-C may come when a layer has just been taken; then another thread decodes."""
    model = load_streamed(folder, "20M")
    decoder, slots = SpeculativeDecoder(model, demo_pair[1], "ersd", tree_size=TREE), stream_of(model).slots
    take, taken = slots.take, []

    def interrupted(layer):
        take(layer)
        taken.append(layer)
        if len(taken) == 4:
            raise KeyboardInterrupt

    slots.take = interrupted
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None)
    slots.take = take
    (out,) = in_time(lambda: decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None))
    assert torch.equal(out.sequences, expected)


def test_layers_that_an_interrupted_pass_never_released_do_not_stop_their_thread(shared):
    stream = stream_of(shared)
    for layer in [*range(stream.layers), *reversed(range(stream.layers)), 3, 7, 3]:
        stream.take(layer)
    stream.release(3)


def test_two_decoders_of_one_model_may_take_turns(demo_pair, shared, ids, expected):
    decoders = [SpeculativeDecoder(shared, draft, "ersd", tree_size=TREE) for draft in (demo_pair[1], EarlyExit(2))]
    for decoder in decoders * 2:
        out = decoder.generate(ids, NEW, temperature=0.6, seed=3, eos_token_id=None)
        assert torch.equal(out.sequences, expected)


def test_threads_may_decode_by_one_stream_and_transformers_beside_them(demo_pair, folder, ids, expected):
    target, draft, _ = demo_pair
    model = load_streamed(folder, "20M")
    on_read(stream_of(model), spoil)
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    texts = in_time(
        lambda: text_of(model, draft, ids),
        lambda: text_of(model, draft, ids),
        lambda: model.generate(ids, max_new_tokens=8, do_sample=False),
        lambda: model.generate(ids, max_new_tokens=8, do_sample=False),
    )
    for text, right in zip(texts, [expected, expected, plain, plain], strict=True):
        assert not isinstance(text, BaseException), text
        assert torch.equal(text, right)


def test_a_stream_that_is_closed_while_somebody_decodes_raises_an_error_there(demo_pair, folder, ids):
    model = load_streamed(folder, "20M")
    stream = stream_of(model)
    on_read(stream, lambda number, into: time.sleep(0.02))

    def close():
        time.sleep(0.1)
        stream.close()

    error, _ = in_time(lambda: text_of(model, demo_pair[1], ids), close)
    assert isinstance(error, RuntimeError)
    assert "closed" in str(error)


@pytest.mark.parametrize("seed", [1, *map(some_time, range(2, 12))])
def test_threads_that_take_layers_at_random_always_find_the_layers_own_bytes(tmp_path, seed):
    """Every layer's numbers are its own; reads fail now and then, and threads take any layer, and die holding one."""
    count, chance = 9, random.Random(seed)
    for half in range(2):
        save_file({f"l.{n}.{half}": torch.full((30_000 + n,), 10 * n + half) for n in range(count)},
                  tmp_path / f"{half}.safetensors")  # fmt: skip
    places = places_in(tmp_path / "0.safetensors") | places_in(tmp_path / "1.safetensors")
    with LayerStream(layers_of(places, "l."), resident=[4]) as stream:

        def disturb(number, into):
            spoil(number, into)
            if chance.random() < 0.02:
                raise OSError("now and then")

        on_read(stream, disturb)

        def use(number):
            own, layer, right = random.Random(10 * seed + number), 0, 0
            for _ in range(150):
                layer = (layer + 1) % count if own.random() < 0.8 else own.randrange(count)
                try:
                    with stream.layer(layer):
                        for half in "01":
                            assert (stream.tensors(layer)[half] == 10 * layer + int(half)).all()
                        right += 1
                        if own.random() < 0.05:
                            raise InterruptionError
                except (OSError, InterruptionError):
                    pass
            with suppress(OSError):
                stream.take(layer)  # and never released
            return right

        done = in_time(*(partial(use, number) for number in range(3)))
        assert all(isinstance(right, int) and right > 100 for right in done), done


# What is refused


def test_an_early_exit_needs_its_layers_in_memory(folder):
    model = load_streamed(folder, "20M", resident=[0])
    with pytest.raises(ValueError, match=r"must stay in memory, got \[0, 1\] of which \[1\] are streamed; load the ta"):
        SpeculativeDecoder(model, EarlyExit(2))


def test_too_little_memory_is_refused_with_the_least_that_would_do(folder):
    with pytest.raises(ValueError, match=r"a memory of 0\.005G is too little: .*; give at least (\d+)M") as found:
        load_streamed(folder, "5M")
    least = str(found.value).rpartition("at least ")[2]
    stream_of(load_streamed(folder, least)).close()
    with pytest.raises(ValueError, match="is too little"):
        load_streamed(folder, bytes_of(least) - 2_000_000)


def test_weights_that_would_have_to_be_converted_are_refused(folder, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{number}": "disk" for number in range(8)}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, offload_folder=tmp_path
    )
    with pytest.raises(ValueError, match=r"saved as torch.float32 .* as torch.bfloat16.*load the model with dtype"):
        SpeculativeDecoder(model, PromptLookup())


def test_a_model_in_memory_has_nothing_to_stream(demo_pair):
    with pytest.raises(ValueError, match="no weight of the model is offloaded to disk; load it by load_streamed"):
        stream_layers(demo_pair[0], "20M")
    assert stream_of(demo_pair[0]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder):
    with pytest.raises(ValueError, match="device 'cuda' was given, and torch finds no CUDA GPU"):
        load_streamed(folder, "20M", device="cuda")
    with pytest.raises(ValueError, match="streamed to a CPU or a CUDA GPU, got device 'meta'"):
        load_streamed(folder, "20M", device="meta")
    with pytest.raises(ValueError, match="host_memory is for a model on a GPU, got '1G' for one on the CPU"):
        load_streamed(folder, "20M", host_memory="1G")


# The command line


@pytest.mark.parametrize("draft", ["early-exit:2+prompt-lookup", some_time("prompt-lookup")])
def test_the_command_line_decodes_within_the_memory_that_it_is_told(folder, demo_pair, capsys, draft):
    demo_pair[2].save_pretrained(folder)
    command = ["generate", "def read_lines(path):", "--target", str(folder), "--draft", draft, "--max-new-tokens", "8"]
    texts = []
    for options in ([], ["--memory", "20M"]):
        assert main([*command, *options, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        texts.append(answer["text"])
        assert ("bytes_read" in answer["stats"]) == bool(options)
    assert texts[0] == texts[1]


def test_json_says_null_where_the_time_of_copies_is_not_known():
    stats = Statistics(depth=1, branching=1)
    stats.streaming, stats.total_seconds = StreamCounts(10, 0.0, 0.0, untimed=10), 1.0
    assert json.loads(json.dumps(app._summary(stats), allow_nan=False))["waiting_share"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "much"], "expected a size of memory such as 8G, 500M or 8GiB, got 'much'"),
        (["--memory", "8G", "--dtype", "bfloat16"], "memory is for a target in a folder of its own"),
        (["--memory", "1M"], "a memory of 0.001G is too little"),
        (["--host-memory", "1G"], "host_memory goes with memory, that of the GPU; got '1G' alone"),
    ],
)
def test_the_command_line_says_what_is_wrong_with_a_memory(folder, demo_pair, capsys, options, message):
    demo_pair[2].save_pretrained(folder)
    assert main(["generate", "x", "--target", str(folder), "--draft", "prompt-lookup", *options]) == 1
    assert message in capsys.readouterr().err
