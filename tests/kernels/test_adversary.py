"""The adversary finds what it should in kernels with faults, and nothing in the kernels of the package.

A new kernel needs a function here that calls it and compares it with its reference, and a line in `CASES`.
"""

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import adversary as tool
import pytest
import test_layer_kernels
import test_levels
import test_retrieval
import test_slots
import test_tree_attention
import torch
import triton
import triton.language as tl
from adversary import Adversary, HazardError
from attention_cases import inputs, masks, oracle, random_tree
from commit_cases import Problem as Commit
from compaction_cases import assert_right, drawn
from law_cases import Problem as OfLaws
from ordering_cases import assert_same, parents_of, shuffled_ranks
from sampling_cases import same
from typical_cases import Problem as Typical
from typical_cases import random_problem as random_typical
from verification_cases import Problem as Verification
from verification_cases import random_problem

from heavypath.kernels import cache_compaction, commit, ordering, sampling_kernel, sharing, tickets
from heavypath.kernels import tree_attention as attention
from heavypath.kernels.attention import kernel as tree_attention_kernel
from heavypath.kernels.attention import launch as tree_attention_launch
from heavypath.kernels.filtering import Filters
from heavypath.kernels.ordering import heavy_path_order
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.sequence_scores import sequence_scores, settings_of
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import DRAFT_AWARE, VERIFICATION_METHODS
from heavypath.kernels.verifying import laws, traversal_kernel, walk
from heavypath.kernels.verifying.rule import WHOLE_TREE
from heavypath.speculative import TokenTree

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the adversary needs Triton's interpreter")
ROOT = Path(__file__).parents[2]
FEW, MANY = 4, 217  # random trees; with three seeds, MANY are 651 for each kernel


@pytest.fixture(autouse=True)
def no_kept_plans(monkeypatch):
    """Plans of attention know their kernel, and where its prefix is cut."""
    monkeypatch.setattr(attention, "_plan", attention._plan.__wrapped__)


def orders(adversary: Adversary, trees: int, nodes: int = 12) -> None:
    parents = torch.stack([parents_of("random", nodes) for _ in range(trees)])
    ranks = torch.stack([*map(shuffled_ranks, parents)])
    leaves = torch.ones_like(parents).scatter(1, parents.clamp(min=0), 0).bool()
    parents[trees // 2 :] = parents.where(~leaves | (torch.rand(parents.shape) < 0.7), -1)[trees // 2 :]  # some absent
    for half, given in ((slice(0, None, 2), None), (slice(1, None, 2), ranks)):
        arguments = parents[half], None if given is None else given[half]
        assert_same(*(heavy_path_order(*arguments, impl=impl) for impl in ("triton", "torch")))


def orders_large(adversary: Adversary, trees: int) -> None:
    """Trees of so many nodes that a program has two warps."""
    orders(adversary, 2, nodes=130)


def commits(adversary: Adversary, trees: int) -> None:
    Commit(adversary.seed, batch=trees, per_sequence=True).check("triton")


def attends(adversary: Adversary, trees: int) -> None:
    drawn_trees = [random_tree(9, trees * adversary.seed + tree) for tree in range(trees)]
    lengths = torch.randint(0, 300, (trees,))
    lengths[:2] = torch.tensor([280, 0])  # two parts, and one
    query, key, value = inputs(trees, 2, 1, 9, 310, 16, seed=adversary.seed)
    exact = oracle(query, key, value, lengths, torch.stack([tree.mask() for tree in drawn_trees]))
    for visible in masks(drawn_trees)[::3] if trees == FEW else masks(drawn_trees)[:1]:
        out = tree_attention(query, key, value, prefix_length=lengths, **visible, impl="triton")
        torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)


def attends_in_parts(adversary: Adversary, trees: int = FEW) -> None:
    """Up to six programs share each of two tiles, and the last of them merges their parts, in two times 16 rows."""
    drawn_trees = [random_tree(20, adversary.seed + tree) for tree in range(3)]
    lengths, visible = torch.tensor([150, 0, 70]), masks(drawn_trees)[0]
    tensors = inputs(3, 2, 1, 20, 170, 64, seed=adversary.seed)
    exact = oracle(*tensors, lengths, torch.stack([tree.mask() for tree in drawn_trees]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention_launch, "MIN_SPLIT", 32)
        out, again = (tree_attention(*tensors, prefix_length=lengths, **visible, impl="triton") for _ in range(2))
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)
    assert torch.equal(out, again), "it depends on which program is the last one"


def verifies(adversary: Adversary, trees: int) -> None:
    for seed in range(trees * adversary.seed, trees * (adversary.seed + 1)):
        assert random_problem(VERIFICATION_METHODS[seed % len(VERIFICATION_METHODS)], seed).agrees()


def traverses(adversary: Adversary, trees: int) -> None:
    """Levels that give each other weights, of distinct children and of independent ones."""
    for seed in range(2 * adversary.seed, 2 * adversary.seed + 2):
        tree = TokenTree.independent(2, 2) if seed % 2 else TokenTree([-1, 0, 0, 1, 1, 3])
        method = WHOLE_TREE[adversary.seed % 2]
        assert Verification(tree, method, vocab_size=6, batch=1, seed=seed).agrees()


def verifies_in_chunks(adversary: Adversary, trees: int = 1) -> None:
    """Several programs share a row, and the last of them decides."""
    for method in DRAFT_AWARE:
        tree, seed = TokenTree.k_ary(2, 1), adversary.seed
        assert Verification(
            tree, method, vocab_size=9_000, batch=1, dtype=torch.bfloat16, noise=2.0, seed=seed
        ).agrees()


def verifies_by_laws(adversary: Adversary, trees: int) -> None:
    for seed in range(trees * adversary.seed, trees * (adversary.seed + 1)):
        assert OfLaws(seed, filters=(Filters(), Filters())).agrees()


def verifies_by_laws_in_tiles(adversary: Adversary, trees: int = 1) -> None:
    """Of trees in which many children are rejected; what they take away is stored and loaded by other threads."""
    assert OfLaws({1: 48, 2: 8, 3: 29}[adversary.seed], vocab_size=2_100, filters=(Filters(), Filters())).agrees()


def accepts_typical(adversary: Adversary, trees: int) -> None:
    for seed in range(trees * adversary.seed, trees * (adversary.seed + 1)):
        assert random_typical(seed, filtered=0.0).agrees()


def accepts_typical_in_chunks(adversary: Adversary, trees: int = 1) -> None:
    tree, seed = TokenTree.k_ary(2, 1), adversary.seed
    assert Typical(tree, vocab_size=9_000, batch=1, dtype=torch.bfloat16, seed=seed).agrees()


def draws(adversary: Adversary, rows: int) -> None:
    for count, vocab_size, options in (
        (2, 17_000, {}), (1, 9_000, {"replacement": True}), (1, 9_000, {"top_k": 50}),  # in three chunks, or two
    ):  # fmt: skip
        logits = 3 * torch.randn(count, vocab_size).bfloat16()
        options = {"seed": adversary.seed, "rows": torch.arange(count)} | options
        assert same(gumbel_topk(logits, 3, impl="triton", **options), gumbel_topk(logits, 3, impl="torch", **options))


def scores(adversary: Adversary, rows: int) -> None:
    """Of sequences each with its own filters, temperature 0 among them; of two chunks, with ties."""
    filters = [Filters(0.0), Filters(0.6, top_k=9), Filters(1.0, top_p=0.9), Filters(2.0)]
    settings = torch.tensor([settings_of(each) for each in filters], dtype=torch.float64)
    logits = (3 * torch.randn(4, 1, 5_000)).round()
    assert torch.equal(*(sequence_scores(logits, settings, impl=impl) for impl in ("triton", "torch")))


def compacts(adversary: Adversary, sequences: int) -> None:
    storage = [torch.randn(sequences, 20, 2, 70) for _ in range(2)]  # [B, S, H, D]
    adversary.knows(*storage)  # the kernel finds them by their addresses in a table
    path, length, prefix = drawn(sequences, 9, 6, 11)
    path[0, 1:4], length[0] = torch.tensor([2, 3, 5]), 3  # row 2 is written and read
    assert_right(storage, (path, length, prefix), "triton", lambda cache: cache.transpose(1, 2))


def places(adversary: Adversary, trees: int) -> None:
    for case in range(2):  # of one warp's nodes, and of more
        test_levels.test_kernels_place_and_feed_as_their_references(2 * adversary.seed + case)


def grows(adversary: Adversary, trees: int) -> None:
    for way in (1, 4, 6):  # by confidence, by likeliest tokens, by beam
        test_slots.test_kernels_grow_and_assemble_the_references_trees(8 * adversary.seed + way)


def retrieves(adversary: Adversary, trees: int) -> None:
    test_retrieval.test_both_implementations_give_the_same_numbers(adversary.seed, 60)
    test_retrieval.test_of_many_occurrences_some_are_taken_evenly("triton")


def grows_wide(adversary: Adversary, trees: int) -> None:
    """Levels so wide that a program has two warps."""
    test_slots.grown_by_both(8 * adversary.seed + 1, batch=1, width=66, depth=1, vocab=70)


def layers(adversary: Adversary, trees: int) -> None:
    for columns in (40, 512):
        test_layer_kernels.test_a_norm_behind_a_sum_is_that_of_transformers(3, columns, torch.bfloat16)
    test_layer_kernels.test_gate_and_up_of_one_product_are_multiplied_as_by_transformers(2, 1030, torch.bfloat16)
    for normed in (False, True):
        test_layer_kernels.test_rotary_and_cache_rows_are_those_of_transformers(2, 3, 6, 2, 24, normed, torch.bfloat16)


def packs(adversary: Adversary, trees: int) -> None:
    for window in (None, 3):
        test_tree_attention.test_the_kernel_packs_ancestors_as_pytorch_does(300, window)


CASES = {
    layers: ["_rms_norm_kernel", "_gated_kernel", "_rotary_kernel"],
    packs: ["_pack_kernel"],
    orders: ["_heavy_path_kernel"],
    orders_large: ["_heavy_path_kernel"],
    commits: ["_commit_kernel"],
    attends: ["tree_attention_kernel"],
    attends_in_parts: ["tree_attention_kernel"],
    verifies: ["_decide_kernel", "_walk_kernel"],
    verifies_in_chunks: ["_decide_kernel", "_walk_kernel"],
    verifies_by_laws: ["_laws_kernel", "_walk_kernel"],
    verifies_by_laws_in_tiles: ["_laws_kernel", "_walk_kernel"],
    traverses: ["_normalize_kernel", "_chains_kernel", "_choose_kernel", "_walk_kernel"],
    accepts_typical: ["_weigh_kernel", "_longest_kernel"],
    accepts_typical_in_chunks: ["_weigh_kernel", "_longest_kernel"],
    draws: ["_gumbel_topk_kernel", "_cuts_kernel"],
    scores: ["_scores_kernel", "_cuts_kernel"],
    compacts: ["_compact_kernel"],
    places: ["_first_kernel", "_place_kernel", "_alike_kernel"],
    grows: ["_sums_kernel", "_grow_kernel", "_keep_kernel", "_heavy_path_kernel", "_number_kernel"],
    grows_wide: ["_sums_kernel", "_grow_kernel"],
    retrieves: ["_append_kernel", "_followers_kernel"],
}
OF_TREES = [orders, commits, attends, verifies, verifies_by_laws, accepts_typical, compacts]


def test_every_kernel_meets_the_adversary():
    kernels = set()
    for path in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "speculative").rglob("*.py")]:
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        kernels |= {node.name for node in functions if node.name.endswith("_kernel") and "jit" in ast.unparse(node)}
    assert kernels == {name for names in CASES.values() for name in names}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_right_in_any_order_of_their_programs(case, adversary):
    torch.manual_seed(adversary.seed)
    case(adversary, FEW)
    assert {*CASES[case]} <= {*adversary.launched}


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_TREES)
def test_kernels_are_right_on_650_random_trees_in_any_order_of_their_programs(case, adversary):
    torch.manual_seed(adversary.seed)
    case(adversary, MANY)


BARRIER = "tl.debug_barrier()\n"
TICKET = (tickets, "is_last")
ATTENTION = (tree_attention_kernel, "tree_attention_kernel")
ORDERING = (ordering, "_heavy_path_kernel", orders_large)
LAWS = (laws, "_laws_kernel", verifies_by_laws_in_tiles)
UNORDERED, NO_BARRIER, OUTSIDE = "another program .* in no order", "another thread .* with no barrier", "outside"
FAULTS = {
    "a ticket orders nothing (draws)": (*TICKET, draws, 'sem="acq_rel"', 'sem="relaxed"', UNORDERED),
    "a ticket orders nothing (verification)": (
        *TICKET, verifies_in_chunks, 'sem="acq_rel"', 'sem="relaxed"', UNORDERED
    ),
    "a ticket orders nothing (typical acceptance)": (
        *TICKET, accepts_typical_in_chunks, 'sem="acq_rel"', 'sem="relaxed"', UNORDERED
    ),
    "a ticket orders nothing (attention)": (*TICKET, attends_in_parts, 'sem="acq_rel"', 'sem="relaxed"', UNORDERED),
    "a ticket does not release": (*TICKET, draws, 'sem="acq_rel"', 'sem="acquire"', UNORDERED),
    "a ticket does not acquire": (*TICKET, draws, 'sem="acq_rel"', 'sem="release"', UNORDERED),
    "a ticket is drawn before all threads have stored": (*TICKET, draws, BARRIER, "pass\n", UNORDERED),
    "parts are read without the ticket": (
        sampling_kernel, "_gumbel_topk_kernel", draws, "if is_last(tickets_ptr + draw, CHUNKS):", "if chunk == 0:",
        UNORDERED,
    ),
    "all programs store one part": (
        walk, "_walk_kernel", verifies_in_chunks, "best_ptr + batch * CHUNKS + chunk", "best_ptr + batch * CHUNKS",
        UNORDERED,
    ),
    "what was taken away is loaded without a barrier": (
        *LAWS, "tl.debug_barrier()  # behind it", "pass  # behind it", NO_BARRIER
    ),
    "what was taken away is stored anew without a barrier": (
        *LAWS, "tl.debug_barrier()  # before it", "pass  # before it", NO_BARRIER
    ),
    "all nodes share what was taken away": (
        *LAWS, "taken_ptr += place * V", "taken_ptr += 0 * place", UNORDERED
    ),
    "a chain begins before its weight is there": (
        sharing, "call_leader", traverses, "    open_pass(counters_ptr, row, 1)\n",
        '    tl.atomic_xchg(counters_ptr + 1 + row, 1, sem="relaxed")\n', UNORDERED,
    ),
    "a chain is marked as begun while threads look at the mark": (
        traversal_kernel, "_lead", traverses, "tl.debug_barrier()  # all threads have seen", "pass  #", NO_BARRIER
    ),
    "a draft's numbers are stored anew while threads load them": (
        traversal_kernel, "_lead", traverses, "tl.debug_barrier()  # all threads have loaded", "pass  #", NO_BARRIER
    ),
    "a store one past the end": (
        sampling_kernel, "_open_groups", draws, "tl.store(keys_ptr + out, key, mask=place < K)",
        "tl.store(keys_ptr + out, key, mask=place <= K)", f"{OUTSIDE}|{UNORDERED}",
    ),
    "a read one past the end": (
        *ATTENTION, attends, "keys < nodes, other=0", "keys <= nodes, other=0", OUTSIDE
    ),
    "a part that no other program may store": (
        *ATTENTION, attends, "peak, mask=asks)", "peak)", f"{OUTSIDE}|{UNORDERED}"
    ),
    "the first program merges all parts": (
        *ATTENTION, attends_in_parts, "if is_last(tickets + tl.program_id(2) * tl.num_programs(0) + tile, parts):",
        "if part == 0:", UNORDERED,
    ),
    "two tiles draw from one counter": (
        *ATTENTION, attends_in_parts, "tl.num_programs(0) + tile, parts)", "tl.num_programs(0), parts)", UNORDERED
    ),
    "the last but one merges all parts": (
        *ATTENTION, attends_in_parts, "+ tile, parts)", "+ tile, parts - 1)", UNORDERED
    ),
    "a value is fetched before it is stored": (
        ordering, "_scattered", orders_large, f"mask=place < N)\n    {BARRIER}", "mask=place < N)\n", NO_BARRIER
    ),
    "sizes are read before they are sums": (
        *ORDERING, f"{BARRIER}    size = tl.load(end_ptr", "size = tl.load(end_ptr", NO_BARRIER
    ),
    "sizes are added to before all have read them": (
        *ORDERING, f"{BARRIER}        tl.atomic_add(", "tl.atomic_add(", NO_BARRIER
    ),
    "scratch memory is overwritten before all have read it": (
        *ORDERING, f"{BARRIER}    tl.store(permutation_ptr", "tl.store(permutation_ptr", NO_BARRIER
    ),
    "a row is overwritten before it is read": (
        cache_compaction, "_compact_kernel", compacts, "tl.debug_barrier()  #", "pass  #", NO_BARRIER
    ),
    "a commit in two warps": (commit, "_launch", commits, "num_warps=1", "num_warps=2", NO_BARRIER),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_our_kernels_is_found(fault, tmp_path, monkeypatch):
    module, name, case, original, replacement, finding = FAULTS[fault]
    source = inspect.getsource(module)
    assert original in source, f"{original!r} is not in the source: update the fault"
    path = tmp_path / "faulty.py"  # Triton reads the source of its functions from a file
    path.write_text(source.replace(original, replacement))
    spec = importlib.util.spec_from_file_location("faulty", path)
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    right = getattr(module, name)
    for other in [*sys.modules.values()]:
        if other.__name__.startswith("heavypath.kernels") and getattr(other, name, None) is right:
            monkeypatch.setattr(other, name, getattr(faulty, name))
    with pytest.raises(HazardError, match=finding), Adversary(1) as adversary:
        case(adversary, FEW)


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


@pytest.mark.parametrize(("release", "acquire", "barrier", "finding"), [
    ("release", "acquire", True, None),
    ("acq_rel", "acq_rel", True, None),
    ("release", "acquire", False, UNORDERED),
    ("relaxed", "acquire", True, UNORDERED),
    ("acquire", "acquire", True, UNORDERED),
    ("release", "relaxed", True, UNORDERED),
    ("release", "release", True, UNORDERED),
    ("release", "volatile", True, UNORDERED),
    ("release", "plain", True, UNORDERED),
])  # fmt: skip
def test_a_flag_hands_over_what_a_release_and_an_acquire_put_in_order(release, acquire, barrier, finding):
    found = []
    with Adversary(1):
        for _ in range(8):  # in some schedules nobody sees the flag
            x, flag, out = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1024)
            try:
                hand_over[(4,)](x, flag, out.int(), release, acquire, barrier)
            except HazardError as error:
                found.append(str(error))
    assert bool(found) == bool(finding)
    assert all(re.search(finding or "", text) for text in found)


@triton.jit
def share(x_ptr, parts_ptr, next_ptr, done_ptr, out_ptr, CHUNKS: tl.constexpr, RELEASE: tl.constexpr,
          BARRIER: tl.constexpr, ACQUIRE: tl.constexpr, WAITS_FOR: tl.constexpr):  # fmt: skip
    """Programs take chunks of a row as they come; the first one waits for all chunks, and adds their squares up."""
    place = tl.arange(0, 128)
    chunk = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while chunk < CHUNKS:
        x = tl.load(x_ptr + chunk * 128 + place)
        tl.store(parts_ptr + chunk * 128 + place, x * x)
        if BARRIER:
            tl.debug_barrier()
        if WAITS_FOR == "chunks":
            tl.atomic_add(done_ptr, 1, sem=RELEASE)
        chunk = tl.atomic_add(next_ptr, 1, sem="relaxed")
    if WAITS_FOR == "programs":
        tl.atomic_add(done_ptr, 1, sem=RELEASE)
    if tl.program_id(0) == 0:
        done = tl.atomic_add(done_ptr, 0, sem=ACQUIRE)
        while done < (CHUNKS if WAITS_FOR == "chunks" else tl.num_programs(0)):
            done = tl.atomic_add(done_ptr, 0, sem=ACQUIRE)
        total = 0.0
        for part in range(CHUNKS):
            total += tl.sum(tl.load(parts_ptr + part * 128 + place))
        tl.store(out_ptr, total)


@pytest.mark.parametrize(("release", "barrier", "acquire", "waits_for", "finding"), [
    ("release", True, "acquire", "chunks", None),
    ("acq_rel", True, "acq_rel", "chunks", None),
    ("relaxed", True, "acquire", "chunks", UNORDERED),
    ("release", False, "acquire", "chunks", UNORDERED),
    ("release", True, "relaxed", "chunks", UNORDERED),
    ("release", True, "acquire", "programs", "no program gets on"),
])  # fmt: skip
def test_waiting_for_others_works_if_these_have_started(release, barrier, acquire, waits_for, finding, monkeypatch):
    monkeypatch.setattr(tool, "PATIENCE", 2000)
    x, found = torch.arange(768.0) % 7, []
    for seed in range(8):
        parts, out, counters = torch.empty(768), torch.empty(1), torch.zeros(2, dtype=torch.int32)
        try:
            with Adversary(seed):
                share[(4,)](x, parts, counters[:1], counters[1:], out, 6, release, barrier, acquire, waits_for)
            assert out == x.square().sum()
        except HazardError as error:
            found.append(str(error))
    assert bool(found) == bool(finding)
    assert all(re.search(finding or "", text) for text in found)


@triton.jit
def fill(x_ptr, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, place.to(tl.float32), mask=place < count)


def test_a_view_is_all_that_a_launch_may_touch():
    storage = torch.zeros(4, 16)
    with Adversary(1):
        fill[(1,)](storage[1:2], 16, 64)
        assert torch.equal(storage[1], torch.arange(16.0))
        with pytest.raises(HazardError, match=r"(?s)test_adversary.py:\d+ fill.*writes outside .* 128 bytes .* x_ptr"):
            fill[(1,)](storage[1:2], 17, 64)
        with pytest.raises(HazardError, match=OUTSIDE):
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
    x = torch.arange(count)
    with Adversary(1):
        if finding is None:
            exchange[(1,)](x, count, how, num_warps=warps)
        else:
            with pytest.raises(HazardError, match=finding):
                exchange[(1,)](x, count, how, num_warps=warps)


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
