"""What a call of attention costs on the host, with attn_implementation="heavypath" and "sdpa"; no GPU is needed.

    python bench/dropin_host.py [--operators] [--rounds 300] [--json FILE]

A model that is not under a CUDA graph calls attention for each layer of each token, and where the model is small the
GPU waits for the host. Timed are

    heavypath  the function that transformers calls for a layer, with checks and allocations, on CPU tensors that say
               they are on a GPU and share counters as there, where launches do nothing
    sdpa       transformers' own function for the same kind of call, on tensors of a few numbers on the CPU, so that
               nearly all of it is dispatch. On a GPU sdpa chooses a backend, too, and makes more tensors

In each round both take turns, and a ratio is taken within the round: above 1, heavypath costs more. Microseconds of the
thread's own CPU time and ratios are medians, with the quartiles of the ratio. `launched` includes what a launch does in
Python; only the driver does nothing then. `anew` is that for shapes that were not seen before, as in the first layer of
each step behind a growing cache. The kernels are compiled for an H100 first, which takes some seconds unless Triton has
them on disk.

--operators times what it costs that a function is an operator. Calls do nothing, or return what was computed before,
with the arguments of attention and of verification

    public     as users call them where nothing is compiled: the look at whether something is
    operator   by an operator alone, as a compiled graph does: the dispatch of PyTorch, and arguments put together

Microseconds are the least of all rounds, less those of the same call without either. A recorded or captured step is
replayed without any of them.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from common import Row, Run, argument_parser, environment, in_turns, options_of, report, times_as_fast
from machine_code import all_on_gpu, compile_for
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heavypath.kernels import tickets
from heavypath.kernels.attention import launch as attention_launch
from heavypath.kernels.attention.masks import Visible
from heavypath.kernels.attention.variant import Launch
from heavypath.kernels.implementation import operator
from heavypath.kernels.operators.definition import Operator
from heavypath.kernels.tree_attention import visible_attention
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.models.attn_implementation import attention_forward

CALLS = 50  # in a row, in each round
HEADS, HEAD_DIM, ROWS = 8, 64, 512  # so small that the CPU's own allocator, which no GPU has, takes no time
GPU = torch.device("cuda", 0)


class Kind(NamedTuple):
    """A kind of call. mask: of heavypath and of sdpa; tree: what else heavypath is given."""

    batch: int
    queries: int
    mask: Tensor | None = None
    sdpa_mask: Tensor | None = None
    tree: dict[str, Tensor] = {}  # noqa: RUF012


def kinds() -> dict[str, Kind]:
    """The calls that are timed, by name."""
    sees = torch.tensor([[0] * 4, [ROWS - 1] * 4]).T[:, None, None]  # as `visible_rows` makes it
    return {
        "decode": Kind(1, 1),
        "decode 4, padded": Kind(4, 1, sees, torch.ones(4, 1, 1, 2).bool()),
        "prefill 64": Kind(1, 64),
        "tree of 32": Kind(1, 32, None, torch.ones(1, 1, 2, 2).bool(), {"tree_subtree_end": torch.full((32,), 32)}),
    }


def calls(kind: Kind, anew: int) -> list[Callable[[], object]]:
    """A call of sdpa, one of heavypath, and so many of heavypath with caches of other lengths."""
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, 1
    more = {"dropout": 0.0, "scaling": 0.1, "position_ids": None, "use_cache": True}
    few_queries, few_keys = torch.zeros(kind.batch, 1, min(kind.queries, 2), 16), torch.zeros(kind.batch, 1, 2, 16)
    query = torch.zeros(kind.batch, kind.queries, HEADS, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2)
    cache = torch.zeros(kind.batch, HEADS, ROWS + anew + 1, HEAD_DIM, dtype=torch.bfloat16)
    ours = [
        partial(attention_forward, module, query, rows, rows, kind.mask, **kind.tree, **more)
        for rows in (cache[:, :, : ROWS + longer] for longer in range(anew + 2))
    ]
    return [partial(sdpa_attention_forward, module, few_queries, few_keys, few_keys, kind.sdpa_mask, **more), *ours]


@contextmanager
def without_launches() -> Iterator[None]:
    launch = Launch.__call__
    Launch.__call__ = lambda *_: None
    try:
        yield
    finally:
        Launch.__call__ = launch


@torch.inference_mode()
def measured(rounds: int) -> Iterator[Row]:
    """Medians of the microseconds of a call, and of their ratio, for each kind."""
    for name, kind in kinds().items():
        sdpa, ours, *anew = calls(kind, rounds)
        unseen = iter(anew)

        def launched(ours: Run = ours, times: int = CALLS) -> None:
            with all_on_gpu():
                for _ in range(times):
                    ours()

        def heavypath(launched: Run = launched) -> None:
            with without_launches():
                launched()

        launched()
        ways = {
            "sdpa": lambda sdpa=sdpa: [sdpa() for _ in range(CALLS)],
            "heavypath": heavypath,
            "launched": launched,
            "anew": lambda unseen=unseen, launched=launched: launched(next(unseen), 1),
        }
        times = in_turns(ways, rounds, clock=time.thread_time)
        ratio = times_as_fast(times, "sdpa", "heavypath")
        taken = {way: 1e6 * median(each) / (1 if way == "anew" else CALLS) for way, each in times.items()}
        yield {"call": name, **taken, "ratio": ratio.median, "quartiles": ratio[1:]}


def on_a_gpu() -> None:
    """Have launches compile for an H100 and nothing run, from now on."""
    compile_for(90, lambda kernel: None)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = torch._C._is_tracing  # another question that C answers with no
    tickets.buffers[0, 0] = torch.zeros(4096, dtype=torch.int32)  # of GPU 0, for its stream 0
    attention_launch.tickets = lambda count, _: tickets.tickets(count, GPU)  # a tensor's device says that it is a CPU


def returning(function: Callable[..., Any], made: object) -> Callable[..., Any]:
    """A function with the arguments of another, that returns something made before."""

    def stand_in(*_: object, **named: object) -> object:
        return made

    stand_in.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
    stand_in.__annotations__ = function.__annotations__
    return stand_in


@torch.no_grad()
def of_operators(rounds: int) -> Iterator[Row]:
    """Microseconds that a function costs more as users call it, and as an operator."""
    query, (key, value) = torch.randn(1, 8, 16, 64), torch.randn(2, 1, 2, 80, 64)
    visible = Visible(64, None, torch.full((16,), 16), None, 16, None, None)
    attended = (query, key, value, visible, None, None, "torch")
    verified = (torch.arange(16)[None], torch.arange(16) - 1, *torch.randn(2, 1, 16, 256))
    options = {"method": "without_replacement", "max_depth": 15}
    for function, args, named in ((visible_attention, attended, {}), (inspect.unwrap(verify_tree), verified, options)):
        stand_in = returning(function, function(*args, **named))
        known = Operator(stand_in, is_fresh=True, name=f"timed_{function.__name__}")
        ways: dict[str, Run] = {
            "nothing": lambda: None,
            "direct": partial(stand_in, *args, **named),
            "public": partial(operator(stand_in), *args, **named),
            "operator": partial(known.overload, *known.leaves(args, named)),
        }
        calls = {way: lambda call=call: [call() for _ in range(CALLS)] for way, call in ways.items()}
        times = in_turns(calls, rounds, clock=time.thread_time)
        least = {way: 1e6 * min(each) / CALLS for way, each in times.items()}
        public, alone = least["public"] - least["direct"], least["operator"] - least["nothing"]
        yield {"function": function.__name__, "public": public, "operator": alone}


def main() -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--operators", action="store_true", help="what it costs that functions are operators")
    arguments = options_of(parser, rounds=2)
    torch.set_num_threads(1)
    if not arguments.operators:
        on_a_gpu()
    rows = of_operators(arguments.rounds) if arguments.operators else measured(arguments.rounds)
    report(rows, environment("cpu", arguments, "rounds"), arguments.json)


if __name__ == "__main__":
    main()
