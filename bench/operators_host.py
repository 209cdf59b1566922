"""What it costs the host that a function is an operator; no GPU is needed.

    python bench/operators_host.py [--rounds 200]

Attention and verification of a small tree on the CPU are called in turns

    direct     the function itself
    public     as users call it, where nothing is compiled
    operator   by the operator alone, as a compiled graph does

Microseconds are those that a call takes more than the direct one: medians of the differences within a round, with their
quartiles. A recorded or captured step is replayed without any of them.
"""

import inspect
import time
from functools import partial
from statistics import quantiles

import torch
from common import argument_parser

from heavypath.kernels.attention.masks import Visible
from heavypath.kernels.operators import OPERATORS
from heavypath.kernels.tree_attention import tree_attention, visible_attention
from heavypath.kernels.verification import verify_tree

CALLS = 50  # in a row, in each round


def ways() -> dict[str, dict[str, partial]]:
    """The calls by function and by way."""
    query, (key, value) = torch.randn(1, 8, 16, 64), torch.randn(2, 1, 2, 80, 64)
    end = torch.full((16,), 16)
    visible = Visible(64, None, end, None, 16, None, None)
    attended = (query, key, value, visible, None, None, "torch")
    tokens, parents = torch.arange(16)[None], torch.arange(16) - 1
    logits = torch.randn(2, 1, 16, 256)
    verified = (tokens, parents, *logits)
    named = {"method": "without_replacement", "max_depth": 15}
    operators = {name: OPERATORS[name] for name in ("tree_attention", "verify_tree")}
    return {
        "tree_attention": {
            "direct": partial(lambda: visible_attention(*attended).transpose(1, 2)),
            "public": partial(tree_attention, query, key, value, prefix_length=64, subtree_end=end, impl="torch"),
            "operator": partial(
                operators["tree_attention"].overload, *operators["tree_attention"].leaves(attended, {})
            ),
        },
        "verify_tree": {
            "direct": partial(inspect.unwrap(verify_tree), *verified, **named),
            "public": partial(verify_tree, *verified, **named),
            "operator": partial(operators["verify_tree"].overload, *operators["verify_tree"].leaves(verified, named)),
        },
    }


def microseconds(call: partial) -> float:
    begin = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - begin) / CALLS * 1e6


@torch.no_grad()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, calls in ways().items():
        taken = {way: [] for way in calls}
        for number in range(rounds):
            for way in sorted(calls, key=lambda way: hash((way, number))):
                taken[way].append(microseconds(calls[way]))
        direct = taken.pop("direct")
        print(f"{name}: direct {quantiles(direct)[1]:.1f} us")
        for way, times in taken.items():
            low, middle, high = quantiles([one - base for one, base in zip(times, direct, strict=True)])
            print(f"  {way:<10}{middle:+.2f} us ({low:+.2f} .. {high:+.2f})")


if __name__ == "__main__":
    main()
