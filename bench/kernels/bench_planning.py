"""How long static trees take to plan, against the same recurrence as loops in Python.

    OMP_NUM_THREADS=1 python -m pytest bench/kernels/bench_planning.py --benchmark-only

programme            sequoia_tree without a bound on the depth
programme, bounded   with max_depth 18, which matters here: the acceptance is such that the best tree is deeper
programme, 2-D       with a row of acceptance for each depth
queue                greedy_tree with the same bound
selection            select_tree among all sizes from 1 to this one, with the same bound
loops                the bounded recurrence without NumPy, for at most 256 nodes

32 children, of which the k-th is accepted with probability 0.85 * 0.14^(k - 1). This falls with k, so that the queue
applies and must yield as many tokens as the programme, which is checked, as are the loops.
"""

import math
import time

import numpy as np
import pytest

from heavypath.speculative.trees.planning import expected_tokens, greedy_tree, select_tree, sequoia_tree

ACCEPTANCE, DEPTH, MOST_OF_LOOPS = 0.85 * 0.14 ** np.arange(32), 18, 256


def loops(size: int) -> float:
    """What the best tree yields, by F and G as trees/planning.py defines them."""
    below = [-math.inf, 1.0] + [-math.inf] * (size - 1)  # F_0
    for _ in range(DEPTH):
        younger = [0.0] + [-math.inf] * (size - 1)  # G of no children
        for rate in ACCEPTANCE.tolist()[::-1]:
            scaled = [rate * worth if worth > 0 else worth for worth in below]
            younger = [0.0] + [
                max(scaled[child] + younger[nodes - child] for child in range(1, nodes + 1)) for nodes in range(1, size)
            ]
        below = [-math.inf, *(1 + worth for worth in younger)]
    return below[size]


def selection(size: int):
    return select_tree(ACCEPTANCE, {nodes: 1 + nodes / 400 for nodes in range(1, size + 1)}, 0.02, DEPTH).tree


PLANNERS = {
    "programme": lambda size: sequoia_tree(ACCEPTANCE, size),
    "programme, bounded": lambda size: sequoia_tree(ACCEPTANCE, size, DEPTH),
    "programme, 2-D": lambda size: sequoia_tree(np.tile(ACCEPTANCE, (DEPTH, 1)), size),
    "queue": lambda size: greedy_tree(ACCEPTANCE, size, DEPTH),
    "selection": selection,
    "loops": loops,
}


@pytest.mark.parametrize("size", [64, 128, 256, 512, 768])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.benchmark(timer=time.process_time)
def test_planning(planner, size, benchmark, request):
    if request.config.getoption("--miniature"):
        size //= 16
    if planner == "loops" and size > MOST_OF_LOOPS:
        pytest.skip("loops take too long")
    benchmark.group = f"planning: {size} nodes"
    found = benchmark(PLANNERS[planner], size)
    if planner not in ("programme", "selection"):  # which have no bound, or another size
        tokens = found if planner == "loops" else expected_tokens(found, ACCEPTANCE)
        assert tokens == pytest.approx(expected_tokens(sequoia_tree(ACCEPTANCE, size, DEPTH), ACCEPTANCE), abs=1e-9)
