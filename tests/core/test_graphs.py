"""What is around CUDA graphs: devices, streams, threads, failures, lifetimes, warming up. `test_step` plays CUDA."""

import gc
import itertools
import logging
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from families import tiny
from in_time import in_time
from own_drafts import Bigrams
from played_graphs import STREAMS, Event, Stream
from played_steps import PROMPTS, Tape
from tiny_models import small_llama, tiny_llama

from heavypath.kernels import cache_compaction
from heavypath.speculative import EarlyExit, Lookahead, PromptLookup, Retrieval, SpeculativeDecoder
from heavypath.speculative.decoding.graphs import MOST, Graphs
from heavypath.speculative.decoding.run import Snapshots
from heavypath.speculative.decoding.workspace import Workspace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="real graphs have tests of their own")
ONE = PROMPTS[:1]
CPU = torch.device("cpu")
SAMPLED = {"max_new_tokens": 2, "temperature": 0.8}


def gpt2():
    """A target whose pass is torch's operations alone, which are quicker than kernels in Triton's interpreter."""
    return tiny("gpt2", vocab_size=7, n_layer=1, n_positions=64)


def test_the_models_gpu_is_the_current_one_while_decoding(as_on_a_gpu, monkeypatch):
    current, seen = [None], {}

    @contextmanager
    def device(given):
        current.append(given)
        yield
        current.pop()

    as_on_a_gpu()
    monkeypatch.setattr(torch.cuda, "device", device)
    watched = (Tape, "capture_begin"), (Tape, "replay"), (Snapshots, "take"), (torch.cuda, "graph_pool_handle")

    def watch(kept, name):
        def noted(*args, **kwargs):
            seen.setdefault(name, set()).add(current[-1])
            return kept(*args, **kwargs)

        return noted

    for owner, name in watched:
        monkeypatch.setattr(owner, name, watch(getattr(owner, name), name))
    SpeculativeDecoder(gpt2(), None, "autoregressive").generate(ONE, **SAMPLED)
    assert seen == {name: {CPU} for _, name in watched}
    assert current == [None]


def test_one_capture_is_underway_in_a_process(as_on_a_gpu):
    as_on_a_gpu()
    together = threading.Barrier(4)

    def capture():
        graph = Graphs(CPU).of("a step")
        together.wait()
        graph.capture(lambda: time.sleep(0.05))  # `Tape.capture_begin` asserts that it is the only one

    assert in_time(*[capture] * 4) == [None] * 4


class AsksTheHost(Bigrams):
    """A draft that CUDA cannot capture."""

    def __call__(self, feed, cache):
        if Tape.underway is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        return super().__call__(feed, cache)


def test_what_cannot_be_captured_runs_eagerly_with_one_warning(as_on_a_gpu, monkeypatch, caplog):
    target, logits = gpt2(), torch.randn(7, 7)
    expected = SpeculativeDecoder(target, Bigrams(logits), tree_size=2).generate(ONE, **SAMPLED)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(target, AsksTheHost(logits), tree_size=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(decoder.generate(ONE, **SAMPLED).sequences, expected.sequences)
    (record,) = [each for each in caplog.records if "CUDA graph" in each.message]
    assert "GPT2LMHeadModel and AsksTheHost" in record.message
    assert record.message.endswith("operation not permitted when stream is capturing")
    assert torch.cuda.current_stream() == Stream(number=0)
    assert len(decoder.runner.idle.launcher.graphs) == 0


class Noted(Stream):
    """A stream that notes what waits for what."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def record_event(self):
        self.notes.append(f"{self.name} records")
        return Event()

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits")


def test_a_workspace_changes_streams_behind_its_last_step(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    notes = []
    one, other = Noted("one", notes), Noted("other", notes)
    decoder = SpeculativeDecoder(gpt2(), None, "autoregressive")
    for stream, expected in (
        (one, ["one records", "one waits"]),
        (other, ["other waits", "other records", "one waits"]),
    ):
        notes.clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        decoder.generate(ONE, **SAMPLED)
        assert notes == expected


DRAFTS = {
    "model": (lambda: small_llama(1), lambda: small_llama(2)),
    "another kind of model": (gpt2, gpt2),
    "early exit": (lambda: tiny_llama(1, layers=2, hidden_size=32), lambda: EarlyExit(1)),
    "prompt lookup": (gpt2, PromptLookup),
    "lookahead": (gpt2, lambda: Lookahead(2, 3)),
    "retrieval": (gpt2, lambda: Retrieval([[1, 2, 3, 1, 2]])),
}


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [(kind, False) for kind in DRAFTS]
    + [("prompt lookup", True)]
    + [pytest.param(kind, True, marks=pytest.mark.slow) for kind in DRAFTS if kind != "prompt lookup"],
)
def test_a_decoder_goes_with_its_last_reference(kind, graphs, as_on_a_gpu):
    """Its memory would else be kept until Python looks for cycles, which knows nothing of a GPU's memory."""
    if graphs:
        as_on_a_gpu()
    target, draft = DRAFTS[kind]
    target, draft = target(), draft()
    gc.collect()
    gc.disable()
    try:
        decoder = SpeculativeDecoder(target, draft, "sequoia", tree_size=2)
        out = decoder.generate(ONE, 3, temperature=0.8, eos_token_id=None)
        parts = [decoder, decoder.runner, decoder._target, decoder._draft, out.cache]
        parts += [decoder.runner.idle, decoder.runner.idle.target_cache.keys] if graphs else []
        alive = {type(part).__name__: weakref.ref(part) for part in parts}
        del decoder, parts, out
        assert [name for name, part in alive.items() if part() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(("batch", "new"), [(1, 3), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_after_warming_up_nothing_is_captured_or_allocated(batch, new, as_on_a_gpu, monkeypatch):
    draft = Bigrams(torch.randn(7, 7)) if batch == 1 else small_llama(2)
    pair, options = (gpt2() if batch == 1 else small_llama(1), draft), {"temperature": 0.8, "eos_token_id": 2}
    expected = SpeculativeDecoder(*pair, tree_size=2).generate(PROMPTS[:batch], new, **options)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(*pair, tree_size=2)
    assert decoder.warm_up(batch_size=batch, prompt_tokens=6, max_new_tokens=new, temperature=0.8) > 0
    workspace = decoder.runner.idle
    assert len(workspace.launcher.graphs) == batch  # of 1 sequence; of 3, 2 and 1
    monkeypatch.setattr(Tape, "capture_begin", lambda *args, **kwargs: pytest.fail("captured"))
    assert torch.equal(decoder.generate(PROMPTS[:batch], new, **options).sequences, expected.sequences)
    assert decoder.runner.idle is workspace


@pytest.mark.parametrize(("new", "batch"), [(1, 1), (4, 3)])
def test_no_step_is_launched_behind_the_one_that_must_be_the_last(new, batch, as_on_a_gpu, monkeypatch):
    """Though the host is a step behind: of plain decoding it knows which step writes the last token."""
    as_on_a_gpu()
    decoder = SpeculativeDecoder(gpt2(), None, "autoregressive")
    run, runs = decoder.runner.run, []

    def counted(plan, workspace, **where):
        runs.append(where["slots"])
        return run(plan, workspace, **where)

    monkeypatch.setattr(decoder.runner, "run", counted)
    out = decoder.generate(PROMPTS[:batch], new, temperature=0.8, eos_token_id=None)
    assert runs == [batch] * new
    assert out.stats.steps_of.tolist() == [new] * batch


@pytest.mark.slow
def test_launches_that_take_the_host_long_do_not_say_that_a_draft_does_not_pay(as_on_a_gpu, caplog, monkeypatch):
    """Without graphs, on a GPU: nobody waits for it between phases, and the first ones compile kernels."""
    monkeypatch.setattr("heavypath.speculative.decoding.statistics.ENOUGH_STEPS", 2)
    as_on_a_gpu()
    clock = itertools.count()
    for graphs in (True, False):
        decoder = SpeculativeDecoder(gpt2(), Bigrams(torch.randn(7, 7)), tree_size=3, cuda_graphs=graphs)
        decoder.clock = lambda: float(next(clock))
        assert decoder.generate(ONE, 6, temperature=0.8, eos_token_id=None).stats.steps > 1
    assert "does not pay" not in caplog.text


@pytest.mark.parametrize("warms_up", [True, False])
def test_a_step_that_is_tried_out_gets_as_far_as_the_rows_of_the_caches(warms_up, as_on_a_gpu, monkeypatch):
    """So that what it launches before is compiled side by side, at the first step of a workspace at the latest."""
    as_on_a_gpu()
    cache_compaction._table.cache_clear()  # which may know the same addresses
    launch, names = Tape.launch, {}

    def watch(graph, executor, *args, **kwargs):
        names.setdefault(graph, []).append(executor.fn.__name__)
        launch(graph, executor, *args, **kwargs)

    monkeypatch.setattr(Tape, "launch", watch)
    decoder = SpeculativeDecoder(small_llama(1), PromptLookup(), tree_size=2)
    if warms_up:
        decoder.warm_up(prompt_tokens=2, max_new_tokens=2, temperature=0.8)
    decoder.generate(ONE[:, :2], 8, temperature=0.8, eos_token_id=None)
    tried_out, captured = names.values()
    assert tried_out == captured[: len(tried_out)]
    assert captured[len(tried_out)] == "_compact_kernel"


@pytest.mark.parametrize(("tokens", "pieces"), [(1, [0]), (2, [1, 1]), (6, [1, 2, 4, 5]), (9, [1, 2, 4, 8, 8])])
def test_warming_up_reads_prompts_of_each_power_of_two(tokens, pieces, as_on_a_gpu, monkeypatch):
    """Attention to pieces of other lengths is compiled for these: a text must not wait for that."""
    as_on_a_gpu()
    begin, begun = Workspace.begin, []

    def noted(workspace, request, plan):
        begun.append(request.prompt.shape[1] - 1)
        assert request.lengths.tolist() == [request.prompt.shape[1]]
        return begin(workspace, request, plan)

    monkeypatch.setattr(Workspace, "begin", noted)
    SpeculativeDecoder(small_llama(1), None, "autoregressive").warm_up(prompt_tokens=tokens, max_new_tokens=1)
    assert begun == [*pieces, tokens - 1]


def test_on_a_cpu_warming_up_leaves_the_text_as_it_is():
    decoder = SpeculativeDecoder(small_llama(1), small_llama(2))
    before = decoder.generate(ONE, **SAMPLED).sequences
    assert decoder.warm_up(batch_size=2, prompt_tokens=4, temperature=0.8, max_new_tokens=8) > 0
    assert torch.equal(decoder.generate(ONE, **SAMPLED).sequences, before)
    with pytest.raises(ValueError, match="positions"):
        decoder.warm_up(prompt_tokens=60, max_new_tokens=8)


@pytest.mark.parametrize("first", [lambda: 1 / 0, lambda: torch.ones(1).item()], ids=["in Python", "by CUDA"])
def test_a_capture_that_fails_leaves_the_others_and_torchs_allocator_and_generator(first, as_on_a_gpu):
    """Whether it is the first one of its workspace or another graph is there."""
    as_on_a_gpu()
    graphs = Graphs(CPU)
    for number in range(2):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            graphs.of(number).capture(first)
        assert (graphs.of(number).fails, graphs.of(number).is_captured, Tape.underway) == (True, False, None)
        torch.cuda.empty_cache()
        Tape.pools.draw()
        graphs.of(number).capture(lambda: torch.ones(1))
        assert (graphs.of(number).fails, graphs.of(number).is_captured) == (False, True)
    graphs.of(2).capture(lambda: torch.ones(2, 2) @ torch.ones(2, 2))  # the first product of this thread
    graphs.try_out(lambda: torch.ones(1))
    assert len(graphs) == 3
    for number in range(2):
        graphs.of(number).replay()
        assert graphs.of(number).result == 1


@pytest.mark.parametrize("last", [lambda: torch.ones(1), lambda: torch.ones(1).item()], ids=["captured", "fails"])
def test_no_garbage_is_collected_during_a_capture(last, as_on_a_gpu):
    """A decoder that goes copies its models' weights; within a capture the copies would be captured, not made."""
    as_on_a_gpu()
    enabled = []

    def function():
        enabled.append(gc.isenabled())
        return last()

    Graphs(CPU).try_out(function)
    assert enabled == [False]
    assert gc.isenabled()


def test_graphs_of_a_workspace_share_a_pool_for_as_long_as_there_are_some(as_on_a_gpu):
    as_on_a_gpu()
    graphs = Graphs(CPU)
    for number in range(MOST + 3):  # the first three are dropped
        graphs.of(number).capture(lambda: torch.ones(1))
    assert len({graphs.of(number)._graph.pool for number in range(3, MOST + 3)}) == 1
    assert Tape.pools.made == 1


def test_graphs_stay_when_those_of_another_workspace_go(as_on_a_gpu):
    """torch knows what cuBLAS works in by the stream, and lets it go with any graph that was captured there."""
    as_on_a_gpu()
    first, others = Graphs(CPU), [Graphs(CPU) for _ in range(2)]
    for graphs in (first, *others, *others):
        for step in range(2):
            graphs.of(step).capture(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    others[0].try_out(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    del first, graphs
    gc.collect()
    for graphs in others:
        for step in range(2):
            graphs.of(step).replay()
            assert graphs.of(step).result.tolist() == [[2, 2], [2, 2]]


def test_nobody_is_given_the_stream_that_is_captured_on_however_many_workspaces_there_are(as_on_a_gpu):
    """torch gives out 32 streams in turn."""
    as_on_a_gpu()
    mine = torch.cuda.Stream()
    for _ in range(STREAMS + 1):
        graph = Graphs(CPU).of("a step")
        graph.capture(lambda: torch.ones(1))
        assert graph._graph.stream != mine
