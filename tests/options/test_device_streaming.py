"""Targets whose layers are copied to a GPU while it decodes, on a real one: they write the text of the target there.

Where a GPU is only played (tests/support/stand_in_gpu.py) the same tests run in miniature. Order has tests of its own
that need no GPU (test_device_order.py).
"""

import gc

import pytest
import torch
from gpu_cases import MINIATURE, assert_alike, prompts, pytestmark, size  # noqa: F401, the mark
from head_cases import head_of
from in_time import in_time
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM

from heavypath.speculative import EarlyExit, PromptLookup, SpeculativeDecoder, load_demo_pair, load_streamed
from heavypath.speculative.models.layer_weights import stream_of

NEW, TREE = size((48, 24), (3, 3))
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def pair():
    """A target of six layers or more, and a draft, on the GPU."""
    if MINIATURE:
        models = [tiny_llama(seed, layers=layers, hidden_size=32, vocab_size=50) for seed, layers in ((1, 6), (2, 1))]
        return [model.cuda() for model in models]
    return load_demo_pair(device="cuda")[:2]


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    pair[0].save_pretrained(path)
    return path


def bytes_of_layers(model, count):
    """What all but the layers takes, and so many of them; a little more, since tensors are aligned."""
    layers = list(model.model.layers)
    each = sum(one.nbytes for one in layers[0].parameters())
    return sum(one.nbytes for one in model.parameters()) + (count - len(layers)) * each + 10_000


def streamed(pair, folder, count=3, **options):
    """The target with room for `count` layers on the GPU, two of which others pass through."""
    return load_streamed(folder, bytes_of_layers(pair[0], count), device="cuda", **options)


@pytest.fixture(scope="module")
def shared(pair, folder):
    return streamed(pair, folder)


@pytest.fixture(scope="module")
def ids():
    return prompts(2, 9)


def text_of(target, draft, ids, method="ersd", temperature=0.6, **options):
    shape = {} if method == "autoregressive" else {"tree_size": TREE}
    decoder = SpeculativeDecoder(target, None if method == "autoregressive" else draft, method, **shape, **options)
    mask = torch.ones_like(ids)
    mask[0, :3] = len(ids) == 1  # of two prompts the first is padded
    out = decoder.generate(ids, NEW, attention_mask=mask, temperature=temperature, seed=3, eos_token_id=None)
    assert not decoder.runner.cuda_graphs or len(decoder.runner.idle.launcher.graphs) > 0
    return out


@pytest.mark.parametrize(
    ("method", "temperature"), [("autoregressive", 0), ("sequoia", 0), ("sequoia", 0.6), ("ersd", 0.6), ("dyspec", 0.6)]
)
def test_a_streamed_target_writes_the_text_of_the_one_on_the_gpu(pair, shared, ids, method, temperature):
    """By ersd those of a batch."""
    ids = ids if method == "ersd" else ids[:1]
    texts = [text_of(target, pair[1], ids, method, temperature) for target in (pair[0], shared)]
    assert_alike(*texts)
    assert texts[1].stats.streaming.untimed > 0, "steps were graphs"


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
def test_a_graph_of_a_step_is_the_step(pair, shared, ids, method):
    assert_alike(*(text_of(shared, pair[1], ids, method, cuda_graphs=graphs) for graphs in (True, False)))


def test_a_target_on_disk_is_decoded_step_by_step(pair, folder, ids):
    model = streamed(pair, folder, host_memory=bytes_of_layers(pair[0], 3))
    stream = stream_of(model)
    assert stream.host.passing
    assert not stream.is_fixed
    before = stream.counts()
    texts = [text_of(target, pair[1], ids[:1]) for target in (pair[0], model)]
    assert_alike(*texts)
    assert stream.counts().since(before).bytes_read > 0
    with pytest.raises(ValueError, match="stay in memory, got one that is read from disk in each step"):
        SpeculativeDecoder(model, PromptLookup(), cuda_graphs=True)


def test_a_model_that_transformers_spread_over_gpu_host_and_disk_is_streamed(pair, folder, ids, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cuda:0")
    where = ["cuda:0", "cpu", "disk", "cpu", "cpu", "disk"]
    count = len(pair[0].model.layers)
    places |= {f"model.layers.{number}": where[number % len(where)] for number in range(count)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=places, offload_folder=tmp_path)
    assert_alike(*(text_of(target, pair[1], ids[:1]) for target in (pair[0], model.eval())))
    stream = stream_of(model)
    assert stream.layers == sum(place != "cuda:0" for name, place in places.items() if "layers" in name)
    assert {one.device for one in model.parameters()} == {torch.device("cuda", 0)}
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_transformers_generate_goes_through_the_same_stream(pair, shared, ids):
    before = stream_of(shared).counts()
    expected = pair[0].generate(ids, **GREEDY)
    assert torch.equal(shared.generate(ids, **GREEDY), expected)
    assert stream_of(shared).counts().since(before).bytes_read > 0
    decoder = SpeculativeDecoder(shared, pair[1], tree_size=TREE)
    assert torch.equal(shared.generate(ids, custom_generate=decoder, **GREEDY), expected)


@pytest.mark.skipif(MINIATURE, reason="the interpreter gets products of 16 bits wrong")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_streamed_as_they_are(pair, ids, dtype, tmp_path):
    model, draft = (AutoModelForCausalLM.from_pretrained(one.name_or_path, dtype=dtype).cuda() for one in pair)
    model.save_pretrained(tmp_path)
    passing = load_streamed(tmp_path, bytes_of_layers(model, 3), device="cuda")
    assert passing.dtype == dtype
    assert torch.equal(*(each.generate(ids, **GREEDY) for each in (model, passing)))
    assert_alike(*(text_of(passing, draft, ids, cuda_graphs=graphs) for graphs in (True, False)))


def test_a_head_drafts_from_hidden_states_of_a_streamed_target(pair, shared, ids):
    last = pair[0].config.num_hidden_layers
    head = head_of(pair[0], taps=(0, last // 2, last), head_dim=16).cuda()
    assert_alike(*(text_of(target, head, ids[:1], "sequoia") for target in (pair[0], shared)))


def test_an_early_exit_drafts_by_layers_that_stay(pair, folder, ids):
    model = streamed(pair, folder, 4, resident=[0, 1])
    assert_alike(*(text_of(target, EarlyExit(2), ids[:1]) for target in (pair[0], model)))


@pytest.mark.skipif(MINIATURE, reason="threads take minutes where a GPU is played")
def test_decoders_on_streams_of_their_own_and_transformers_take_turns(pair, shared, ids):
    expected, plain = text_of(pair[0], pair[1], ids).sequences, pair[0].generate(ids, **GREEDY)

    def decode():
        with torch.cuda.stream(torch.cuda.Stream()):
            return [text_of(shared, pair[1], ids).sequences.cpu() for _ in range(3)]

    def generate():
        with torch.cuda.stream(torch.cuda.Stream()):
            return [shared.generate(ids, **GREEDY).cpu() for _ in range(3)]

    found = in_time(decode, decode, generate, seconds=120)
    for texts, right in zip(found, (expected, expected, plain), strict=True):
        assert isinstance(texts, list), texts
        assert all(torch.equal(text, right.cpu()) for text in texts)


@pytest.mark.skipif(MINIATURE, reason="nothing runs at the same time where a GPU is played")
def test_many_texts_in_a_row_are_right(pair, shared, ids):
    """What may run at the same time runs otherwise each time."""
    decoders = [SpeculativeDecoder(each, pair[1], "ersd", tree_size=TREE) for each in (pair[0], shared)]
    for seed in range(40):
        options = {"temperature": 0.8, "seed": seed, "eos_token_id": None}
        assert torch.equal(*(decoder.generate(ids, NEW, **options).sequences for decoder in decoders))


def test_statistics_have_the_bytes_of_each_pass(pair, shared, ids):
    stream = stream_of(shared)
    one_pass = sum(sum(one.nbytes for one in stream.tensors(layer).values()) for layer in range(stream.layers))
    eager = text_of(shared, pair[1], ids[:1], cuda_graphs=False).stats
    assert eager.streaming.untimed == 0
    assert eager.streaming.bytes_read >= (eager.steps + 1) * one_pass
    assert eager.streaming.bandwidth > 0
    assert 0 <= eager.waiting_share <= 1
    replayed = text_of(shared, pair[1], ids[:1]).stats
    assert replayed.streaming.bytes_read - replayed.streaming.untimed >= one_pass  # the prompt, and a step before
    assert replayed.waiting_share != replayed.waiting_share, "not known"
    assert "not known with CUDA graphs" in str(replayed)


def test_closing_gives_the_gpus_memory_and_pinned_memory_back(pair, folder, ids):
    text_of(pair[0], pair[1], ids)  # a process that has decoded keeps cuBLAS's workspaces and the kernels' counters
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = streamed(pair, folder)
    stream = stream_of(model)
    decoder = SpeculativeDecoder(model, pair[1], tree_size=TREE)
    decoder.generate(ids, NEW, eos_token_id=None)
    assert stream.host.nbytes > 0
    assert MINIATURE or all(
        one.is_pinned() for layer in range(stream.layers) for one in stream.host.tensors(layer).values()
    )  # pinned to torch, too
    taken, slots = torch.cuda.memory_allocated(), stream.nbytes
    stream.close()
    assert stream.host.nbytes == 0
    assert MINIATURE or torch.cuda.memory_allocated() <= taken - slots
    with pytest.raises(RuntimeError, match="is closed; load the model anew"):
        decoder.generate(ids, NEW)
    with pytest.raises(RuntimeError, match="is closed; load the model anew"):
        model(ids)
    del model, stream, decoder
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_model_with_room_on_the_gpu_is_an_ordinary_one(pair, folder, ids):
    model = streamed(pair, folder, 100)
    assert stream_of(model) is None
    assert_alike(*(text_of(target, pair[1], ids[:1]) for target in (pair[0], model)))
