"""What a call of attention costs on the host, with attn_implementation="heavypath" and "sdpa"; no GPU is needed.

    python bench/dropin_host.py [--rounds 300] [--json FILE]

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
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from common import Row, Run, argument_parser, environment, in_turns, kept, show, times_as_fast
from machine_code import all_on_gpu, compile_for
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heavypath.kernels import tickets
from heavypath.kernels.attention import launch as attention_launch
from heavypath.kernels.attention.variant import Launch
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


def main() -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compile_for(90, lambda kernel: None)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = torch._C._is_tracing  # another question that C answers with no
    tickets.buffers[0, 0] = torch.zeros(4096, dtype=torch.int32)  # of GPU 0, for its stream 0
    attention_launch.tickets = lambda count, _: tickets.tickets(count, GPU)  # a tensor's device says that it is a CPU
    rounds = 2 if arguments.miniature else arguments.rounds
    show(kept(measured(rounds), environment("cpu") | {"rounds": rounds}, arguments.json))


if __name__ == "__main__":
    main()
