"""What it costs the host that a function is an operator; no GPU is needed.

    python bench/operators_host.py [--rounds 40]

Timed are calls of functions that do nothing, or return what was computed before, with the arguments of attention and of
verification

    public     as users call them where nothing is compiled: the look at whether something is
    operator   by an operator alone, as a compiled graph does: the dispatch of PyTorch, and arguments put together

Microseconds of the thread's own CPU time are the least of all rounds, less those of the same call without either. A
recorded or captured step is replayed without any of them.
"""

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import argument_parser

from heavypath.kernels.attention.masks import Visible
from heavypath.kernels.implementation import operator
from heavypath.kernels.operators.definition import Operator
from heavypath.kernels.tree_attention import visible_attention
from heavypath.kernels.verification import verify_tree

CALLS = 300  # in a row, in each round


def returning(function: Callable[..., Any], made: object) -> Callable[..., Any]:
    """A function with the arguments of another, that returns something made before."""

    def stand_in(*_: object, **named: object) -> object:
        return made

    stand_in.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
    stand_in.__annotations__ = function.__annotations__
    return stand_in


def microseconds(call: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time() - begin) / CALLS * 1e6)
    return best


@torch.no_grad()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    query, (key, value) = torch.randn(1, 8, 16, 64), torch.randn(2, 1, 2, 80, 64)
    visible = Visible(64, None, torch.full((16,), 16), None, 16, None, None)
    attended = (query, key, value, visible, None, None, "torch")
    verified = (torch.arange(16)[None], torch.arange(16) - 1, *torch.randn(2, 1, 16, 256))
    options = {"method": "without_replacement", "max_depth": 15}
    nothing = microseconds(lambda: None, rounds)
    for function, args, named in ((visible_attention, attended, {}), (inspect.unwrap(verify_tree), verified, options)):
        stand_in = returning(function, function(*args, **named))
        direct = microseconds(partial(stand_in, *args, **named), rounds)
        public = microseconds(partial(operator(stand_in), *args, **named), rounds) - direct
        known = Operator(stand_in, is_fresh=True, name=f"timed_{function.__name__}")
        alone = microseconds(partial(known.overload, *known.leaves(args, named)), rounds) - nothing
        print(f"{function.__name__:<20}public {public:+.2f} us    operator {alone:+.2f} us")


if __name__ == "__main__":
    main()
