"""The adversary finds what it should in kernels with faults, and nothing in those that verify trees.

The other kernels meet it in their own tests. A new kernel needs such a test, which ends with `adversary.met(its name)`.
"""

import ast
import re
from contextlib import nullcontext
from pathlib import Path

import adversary as tool
import pytest
import torch
import triton
import triton.language as tl
from adversary import Adversary, HazardError
from verification_cases import Problem, random_problem

from heavypath.kernels.nodes import DRAFT_AWARE, WHOLE_TREE
from heavypath.kernels.verification import VERIFICATION_METHODS
from heavypath.speculative import TokenTree

of_the_tool = pytest.mark.usefixtures("interpreter")
ROOT = Path(__file__).parents[2]
TREES = pytest.mark.parametrize("trees", [4, pytest.param(217, marks=pytest.mark.slow)])  # random ones
NO_BARRIER = "another thread .* with no barrier"


def test_every_kernel_meets_the_adversary():
    """In a test of this folder, which says so by the kernel's name."""
    kernels, met = set(), set()
    for path in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "speculative").rglob("*.py")]:
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        kernels |= {node.name for node in functions if node.name.endswith("_kernel") and "jit" in ast.unparse(node)}
    for path in Path(__file__).parent.glob("test_*.py"):
        for names in re.findall(r"^ +adversary\.met\((.*)\)$", path.read_text(), re.MULTILINE):
            met |= {*re.findall(r'"(\w+)"', names)}
    assert kernels == met


@pytest.mark.parametrize("trees", [[3, 4], [5, 90, 100], pytest.param(range(217), marks=pytest.mark.slow)])
def test_trees_are_verified_in_any_schedule(trees, adversary):
    for tree in trees:
        seed = 217 * (adversary.seed - 1) + tree
        assert random_problem(VERIFICATION_METHODS[seed % len(VERIFICATION_METHODS)], seed).agrees()
    adversary.met("_walk_kernel")


@pytest.mark.budget(1.7)
@pytest.mark.parametrize("method", DRAFT_AWARE)
def test_a_row_that_programs_share_is_verified_in_any_schedule(method, adversary):
    options = {"vocab_size": 9_000, "batch": 1, "dtype": torch.bfloat16, "seed": adversary.seed}
    assert Problem(TokenTree.k_ary(2, 1), method, noise=2.0, **options).agrees()
    adversary.met("_walk_kernel")
    if method not in WHOLE_TREE:
        adversary.met("_decide_kernel")


def test_levels_give_each_other_weights_in_any_schedule(adversary):
    for seed in range(2 * adversary.seed, 2 * adversary.seed + 2):
        tree = TokenTree.independent(2, 2) if seed % 2 else TokenTree([-1, 0, 0, 1, 1, 3])
        assert Problem(tree, WHOLE_TREE[adversary.seed % 2], vocab_size=6, batch=1, seed=seed).agrees()
    adversary.met("_normalize_kernel", "_chains_kernel", "_choose_kernel", "_walk_kernel")


@triton.jit
def hand_over(x_ptr, flag_ptr, out_ptr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, BARRIER: tl.constexpr):
    """Program 0 stores 256 numbers and raises a flag; another that sees the flag reads them."""
    place = tl.arange(0, 256)
    if tl.program_id(0) == 0:
        tl.store(x_ptr + place, place)
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem=RELEASE)
    else:
        if ACQUIRE == "volatile":
            raised = tl.load(flag_ptr, volatile=True)
        elif ACQUIRE == "plain":
            raised = tl.load(flag_ptr)
        else:
            raised = tl.atomic_add(flag_ptr, 0, sem=ACQUIRE)
        if raised == 1:
            tl.store(out_ptr + tl.program_id(0) * 256 + place, tl.load(x_ptr + 255 - place))


@of_the_tool
@pytest.mark.parametrize(("release", "acquire", "barrier", "right"), [
    ("release", "acquire", True, True), ("acq_rel", "acq_rel", True, True), ("release", "acquire", False, False),
    ("relaxed", "acquire", True, False), ("acquire", "acquire", True, False), ("release", "relaxed", True, False),
    ("release", "release", True, False), ("release", "volatile", True, False), ("release", "plain", True, False),
])  # fmt: skip
def test_a_flag_hands_over_what_a_release_and_an_acquire_put_in_order(release, acquire, barrier, right):
    found = []
    with Adversary(1):
        for _ in range(8):  # in some schedules nobody sees the flag
            x, flag, out = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1024)
            try:
                hand_over[(4,)](x, flag, out.int(), release, acquire, barrier)
            except HazardError as error:
                found.append(str(error))
    assert bool(found) != right
    assert all(re.search("another program .* in no order", text) for text in found)


@triton.jit
def wait(done_ptr, COUNT: tl.constexpr):
    """The first program waits until so many have started, itself among them."""
    tl.atomic_add(done_ptr, 1, sem="release")
    if tl.program_id(0) == 0:
        done = tl.atomic_add(done_ptr, 0, sem="acquire")
        while done < COUNT:
            done = tl.atomic_add(done_ptr, 0, sem="acquire")


@of_the_tool
def test_waiting_works_for_programs_that_have_started(monkeypatch):
    """As few as one runs at a time."""
    monkeypatch.setattr(tool, "PATIENCE", 2000)
    found = []
    for seed in range(8):
        try:
            with Adversary(seed):
                wait[(4,)](torch.zeros(1, dtype=torch.int32), 1)
                wait[(4,)](torch.zeros(1, dtype=torch.int32), 4)
        except HazardError as error:
            found.append(str(error))
    assert 0 < len(found) < 8
    assert all("no program gets on" in text for text in found)


@triton.jit
def fill(x_ptr, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, place.to(tl.float32), mask=place < count)


@of_the_tool
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_view_is_all_that_a_launch_may_touch(everywhere):
    storage = torch.zeros(4, 16)
    with Adversary(1, everywhere):
        fill[(1,)](storage[1:2], 16, 64)
        assert torch.equal(storage[1], torch.arange(16.0))
        with pytest.raises(HazardError, match=r"(?s)test_adversary.py:\d+ fill.*writes outside .* 128 bytes .* x_ptr"):
            fill[(1,)](storage[1:2], 17, 64)
        with pytest.raises(HazardError, match="outside"):
            fill[(1,)](storage[:, :8], 16, 64)
    assert not storage[2:].any()  # what is outside is not written


@triton.jit
def exchange(x_ptr, COUNT: tl.constexpr, HOW: tl.constexpr):
    """Every number is fetched, and stored elsewhere or added to."""
    place = tl.arange(0, COUNT)
    x = tl.load(x_ptr + place)
    if HOW == "barrier":
        tl.debug_barrier()
        tl.store(x_ptr + COUNT - 1 - place, x)
    elif HOW == "reversed":
        tl.store(x_ptr + COUNT - 1 - place, x)
    elif HOW == "in place":
        tl.store(x_ptr + place, x + 1)
    elif HOW == "one thread":
        tl.store(x_ptr, tl.load(x_ptr) + 1)
    elif HOW == "in twos":
        tl.store(x_ptr + place // 2, x)


@of_the_tool
@pytest.mark.parametrize(("count", "how", "warps", "finding"), [
    (256, "barrier", 4, None),
    (256, "reversed", 4, NO_BARRIER),
    (32, "reversed", 1, None),
    (256, "in place", 4, None),  # each thread changes what it has read
    (64, "in place", 4, NO_BARRIER),  # two threads read each number, and only one of them changes it
    (256, "one thread", 4, NO_BARRIER),  # all threads read the number
    (32, "one thread", 1, None),
    (32, "in twos", 1, "different values to one address"),
])  # fmt: skip
def test_threads_of_a_program_need_barriers_where_they_meet(count, how, warps, finding):
    with Adversary(1), nullcontext() if finding is None else pytest.raises(HazardError, match=finding):
        exchange[(1,)](torch.arange(count), count, how, num_warps=warps)


@of_the_tool
def test_a_seed_is_a_schedule():
    def order_of_arrival(seed: int) -> list[int]:
        out, count = torch.empty(12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with Adversary(seed):
            arrive[(12,)](count, out)
        return out.tolist()

    assert order_of_arrival(1) == order_of_arrival(1)
    assert len({tuple(order_of_arrival(seed)) for seed in range(5)}) == 5


@triton.jit
def arrive(count_ptr, out_ptr):
    tl.store(out_ptr + tl.atomic_add(count_ptr, 1), tl.program_id(0))
