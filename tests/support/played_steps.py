"""Helpers of tests/core/test_step.py and its neighbours."""

import importlib
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from played_graphs import Event, PlayedGraph, Pools, Stream, capturing, current_stream, on_stream
from tiny_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels import step_kernels
from heavypath.speculative import METHODS
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import StepPlan, new_step
from heavypath.speculative.decoding.typical import Typical
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.llama import LlamaForward

KERNELS = (
    "sampling", "trees.levels", "verification",
    "verifying.top_down", "attention.prepared", "attention.masks", "tree_attention", "cache_compaction", "commit",
    "layers.rms_norm", "layers.rotary", "layers.gated", "layers.entries", "layers.spread",
    "layers.side_by_side", "layers.units", "layers.few_logits",
    "retrieval.ranges", "retrieval.followers", "retrieval.latest", "mixing",
)  # fmt: skip
RECURRENT = ("by_kernel", "acceptance", "convolution", "totals")  # whose kernels take no columns of tiny models
PROMPTS = torch.tensor([[0, 3, 1, 4, 1], [6, 6, 2, 6, 5], [0, 0, 0, 0, 2]])
PADDING = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
launched = GridExecutor.__call__


class Tape(PlayedGraph):
    """A graph of a machine where all tensors are the CPU's: numbers alone are as good as the host's."""

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.numbers = set()  # memory of the host's numbers
        super().capture_begin(pool, capture_error_mode)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(GridExecutor, "__call__", noted)

    def capture_end(self):
        self.patch.undo()
        super().capture_end()

    def is_there(self, tensor):
        return tensor.untyped_storage()._cdata not in self.numbers

    def check_copy(self, into, source):
        if into is None and source.dim() == 0:
            self.numbers.add(source.untyped_storage()._cdata)
        elif into is None:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")

    run = staticmethod(launched)


def noted(executor, *args, **kwargs):
    """A kernel's launch while a graph is captured, by this thread or another one."""
    graph = capturing()
    (launched if graph is None else graph.launch)(executor, *args, **kwargs)


CUDA = {
    "CUDAGraph": Tape,
    "Event": Event,
    "Stream": Stream,
    "stream": on_stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(number=0),
    "is_current_stream_capturing": lambda: capturing() is not None,
    "device": nullcontext,
    "current_blas_handle": lambda: PlayedGraph.pools.handles.add(threading.get_ident()),
    "graph_pool_handle": lambda: PlayedGraph.pools.handle(),
    "empty_cache": lambda: PlayedGraph.pools.empty_cache(),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch, interpreter):
    """Kernels for everything, steps on tape, and a host that sees each step only after the next one."""

    def apply():
        for name in KERNELS:
            module = importlib.import_module(f"heavypath.kernels.{name}")
            monkeypatch.setattr(module, "choose_impl", lambda function, impl, tensor, native=False: "triton")
        for device in ("cpu", "meta"):
            kernels = step_kernels.StepKernels("triton")
            kernels.sequence_scores = step_kernels.StepKernels("torch").sequence_scores
            monkeypatch.setitem(step_kernels._CHOSEN, device, kernels)
        monkeypatch.setattr("heavypath.speculative.models.joined.choose_impl", lambda *_: "triton")
        for place in ("sequence_scores", *(f"recurrent.{name}" for name in RECURRENT)):
            monkeypatch.setattr(f"heavypath.kernels.{place}.choose_impl", lambda *_, native=False: "torch")
        monkeypatch.setattr("heavypath.speculative.models.linear.library", lambda: None)  # no compiled pass
        for name, module in [*sys.modules.items()]:
            if name.startswith("heavypath.") and hasattr(module, "host_can_read"):
                monkeypatch.setattr(module, "host_can_read", lambda device: False)
        for name, part in CUDA.items():
            monkeypatch.setattr(torch.cuda, name, part)
        monkeypatch.setattr("heavypath.kernels.cache_compaction._check_rows", lambda *rows: None)  # of CPU tensors
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: PlayedGraph.pools.end(*given))
        for known in ("_streams", "_pools"):
            monkeypatch.setattr(f"heavypath.speculative.decoding.graphs.{known}", {})
        PlayedGraph.pools, PlayedGraph.replays = Pools(), 0

    return apply


class Strict(TorchDispatchMode):
    """Refuses whatever has to do with another device; what asks for values is refused by the meta device itself."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        seen = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        assert all(leaf.is_meta for leaf in seen), f"{function} takes or gives tensors of the host"
        return out


@pytest.fixture
def without_values(as_on_a_gpu, monkeypatch):
    """The meta device, on which tensors have shapes alone, in the part of a GPU; kernels do nothing on it."""
    as_on_a_gpu()
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)
    for name in ("sampling_kernel", "nucleus", "filter_cuts", "verifying.decision", "verifying.walk"):
        module = importlib.import_module(f"heavypath.kernels.{name}")
        monkeypatch.setattr(module, "tickets", lambda count, device: torch.empty(count, device=device))


def llama_without_values(layers: int) -> LlamaForward:
    """The forward pass of a tiny model on the meta device."""
    forward = LlamaForward(tiny_llama(1, layers=layers, hidden_size=32, vocab_size=50, max_position_embeddings=512))
    forward.model.to("meta")
    forward._look_up()
    forward._rotary = torch.empty(200, 2, 16, device="meta")
    return forward


def step_on_meta(method, filters, target, draft, size=9, batch=3, vocab_size=0, processing=None):
    """The depth of a method's step, and the step, which ran once, as before a capture: that fills tables.

    vocab_size: where the text is counted for `processing`
    """
    (draw, verification), shape = METHODS[method].at(filters.temperature), METHODS[method].tree_of(size)
    limits = Typical() if verification == "typical" else None
    changes = () if processing is None else (processing,)
    rules = Rules(draw, verification, filters, filters, METHODS[method].fill, changes=changes, verifier=limits)
    draft = NO_DRAFT if draft is None else draft
    step = new_step(StepPlan(target, draft, shape, draft.rules(rules)), shape.depth)
    caches = target.new_cache(batch, 300), draft.new_cache(batch, 300)
    slots = max(1, shape.depth * shape.branching)
    room = {"new_tokens": 20, "stops": 2, "vocab_size": vocab_size, "count_slots": slots, "device": target.device}
    run = partial(step, Sequences.room_for(batch, **room), *caches, 160, lambda phase: None)
    run()
    return step.drafter.depth, run


class Launches(TorchDispatchMode):
    """Notes what a GPU would have to do, which views and fresh memory are not."""

    def __init__(self):
        super().__init__()
        self.names, self.counts = [], True

    def note(self, name):
        if self.counts:
            self.names.append(name)

    def without(self, function):
        def uncounted(*args, **kwargs):
            self.counts = False
            out = function(*args, **kwargs)
            self.counts = True
            return out

        return uncounted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        views = any(argument.alias_info and not argument.alias_info.is_write for argument in function._schema.arguments)
        if not views and not function.__name__.startswith(("empty", "new_empty")):
            self.note(function.__name__)
        return out
