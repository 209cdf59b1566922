"""How long static trees take to plan, against the same recurrence as loops in Python.

    OMP_NUM_THREADS=1 python bench/planning.py [--sizes 64 128 256 512 768] [--depth 18] [--plain 256] [--rounds 5]
        [--json FILE]

programme            sequoia_tree without a bound on the depth
programme, bounded   with max_depth, which matters here: the acceptance is such that the best tree is deeper
programme, 2-D       with a row of acceptance for each depth
queue                greedy_tree with the same bound
selection            select_tree among all sizes from 1 to this one, with the same bound
loops                the bounded recurrence without NumPy, for at most --plain nodes

32 children, of which the k-th is accepted with probability 0.85 * 0.14^(k - 1). This falls with k, so that the queue
applies and must yield as many tokens as the programme, which is checked, as are the loops. Milliseconds are process
times, of all threads: median (least - most) of the rounds, in which the planners take turns.
"""

import math
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from common import argument_parser, environment, write_results
from rich import box
from rich.console import Console
from rich.table import Table

from heavypath.speculative.trees.planning import expected_tokens, greedy_tree, select_tree, sequoia_tree
from heavypath.speculative.trees.tree import TokenTree

ACCEPTANCE = 0.85 * 0.14 ** np.arange(32)


def loops(acceptance: list[float], size: int, depth: int) -> float:
    """What the best tree yields, by F and G as trees/planning.py defines them."""
    below = [-math.inf, 1.0] + [-math.inf] * (size - 1)  # F_0
    for _ in range(depth):
        younger = [0.0] + [-math.inf] * (size - 1)  # G of no children
        for rate in reversed(acceptance):
            scaled = [rate * worth if worth > 0 else worth for worth in below]
            younger = [0.0] + [
                max(scaled[child] + younger[nodes - child] for child in range(1, nodes + 1)) for nodes in range(1, size)
            ]
        below = [-math.inf, *(1 + worth for worth in younger)]
    return below[size]


def planners(size: int, depth: int, plain: int) -> dict[str, Callable[[], TokenTree | float]]:
    by_depth = np.tile(ACCEPTANCE, (depth, 1))
    costs = {nodes: 1 + nodes / 400 for nodes in range(1, size + 1)}
    runs: dict[str, Callable[[], TokenTree | float]] = {
        "programme": lambda: sequoia_tree(ACCEPTANCE, size),
        "programme, bounded": lambda: sequoia_tree(ACCEPTANCE, size, depth),
        "programme, 2-D": lambda: sequoia_tree(by_depth, size),
        "queue": lambda: greedy_tree(ACCEPTANCE, size, depth),
        "selection": lambda: select_tree(ACCEPTANCE, costs, 0.02, depth).tree,
    }
    if size <= plain:
        runs["loops"] = lambda: loops(ACCEPTANCE.tolist(), size, depth)
    return runs


def milliseconds(runs: dict[str, Callable[[], TokenTree | float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            begin = time.process_time()
            runs[name]()
            times[name].append((time.process_time() - begin) * 1e3)
    return times


def check(runs: dict[str, Callable[[], TokenTree | float]]) -> None:
    """Assert that all planners with the same bound yield the same number of tokens."""
    planned = {name: run() for name, run in runs.items() if name not in ("programme", "selection")}
    tokens = {
        name: plan if isinstance(plan, float) else expected_tokens(plan, ACCEPTANCE) for name, plan in planned.items()
    }
    assert max(tokens.values()) - min(tokens.values()) < 1e-9, tokens


def main() -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 768], help="nodes of the trees")
    parser.add_argument("--depth", type=int, default=18, help="the bound on the depth")
    parser.add_argument("--plain", type=int, default=256, help="most nodes for the loops")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    names = [*planners(2, 1, 2)]
    table, rows = Table("nodes", *names, box=box.SIMPLE), []
    for size in arguments.sizes:
        runs = planners(size, arguments.depth, arguments.plain)
        check(runs)
        times = milliseconds(runs, arguments.rounds)
        rows.append({"nodes": size, "milliseconds": {name: sorted(taken) for name, taken in times.items()}})
        cells = (
            f"{median(times[name]):.1f} ({min(times[name]):.1f} - {max(times[name]):.1f})" if name in times else ""
            for name in names
        )
        table.add_row(str(size), *cells)
    Console(highlight=False, width=150).print(table)
    facts = environment("cpu") | {"numpy": np.__version__, "depth": arguments.depth, "children": len(ACCEPTANCE)}
    write_results(arguments.json, facts, rows=rows)


if __name__ == "__main__":
    main()
