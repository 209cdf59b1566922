"""verify_tree's kernels against its PyTorch reference: the same noise, so the same nodes and tokens."""

import pytest
import torch
import triton.language as tl
from kernel_cases import captured
from verification_cases import DEVICE, PLAIN, TREES, Problem, random_problem

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import DRAFT_AWARE, WHOLE_TREE
from heavypath.kernels.verification import VERIFICATION_METHODS, verify_tree
from heavypath.kernels.verifying import decision, distributions, traversal_kernel
from heavypath.speculative.trees.tree import TokenTree

SLOW = pytest.mark.slow
SMALL = TokenTree([-1, 0, 0])
BOTH_FILTERED = Filters(0.8, 3), Filters(1.3, min_p=0.2)


def some(*default):
    """All methods, of which these run by default: the others walk the same code."""
    methods = [method if method in default else pytest.param(method, marks=SLOW) for method in VERIFICATION_METHODS]
    return pytest.mark.parametrize("method", methods)


@pytest.mark.budget(3.5)
@pytest.mark.parametrize("method", VERIFICATION_METHODS)
@pytest.mark.parametrize(
    "tree", ["sequences", "ranks", *(pytest.param(n, marks=SLOW) for n in ("root", "3-ary", "4, 2"))]
)
def test_the_kernels_accept_what_the_reference_accepts(tree, method):
    for seed in (1, 2):  # of an odd seed, either draw is independent; of an even one, drafts may be filled
        dtype = (torch.float32, torch.bfloat16, torch.float16)[(seed + len(TREES[tree])) % 3]
        problem = Problem(TREES[tree], method, vocab_size=5, batch=1, dtype=dtype, absent=0.2 * (seed % 2), seed=seed)
        assert problem.agrees(), seed


@some("without_replacement", "held_traversal", "race")
def test_filters_of_both_sides_act_as_in_the_reference(method):
    """Every filter costs a GPU a few passes, and the interpreter seconds."""
    assert Problem(TokenTree.chain(1), method, *BOTH_FILTERED, vocab_size=7, batch=1, seed=2).agrees()


@pytest.mark.budget(2)
@pytest.mark.parametrize("method", ["without_replacement", "with_replacement", "held", "traversal", "held_traversal"])
def test_point_masses_and_drafts_that_are_used_up_agree(method):
    for seed, drafted in ((1, Filters(0.0)), (2, Filters(1.0, 2))):
        if drafted.temperature == 0 or method != "with_replacement":
            assert Problem(TREES["3-ary"], method, PLAIN, drafted, batch=1, vocab_size=4, noise=3.0, seed=seed).agrees()


@pytest.mark.parametrize("drafted", [PLAIN, Filters(0.0)], ids=["drawn", "point masses"])
@pytest.mark.parametrize("method", ["without_replacement", "held", "traversal", "held_traversal"])
def test_a_token_of_several_distinct_siblings_counts_once(method, drafted):
    """No draft draws such siblings without replacement, but a caller may give them."""
    problem = Problem(TokenTree([-1, 0, 0, 0, 0]), method, PLAIN, drafted, vocab_size=4, batch=16)
    problem.tokens[:, 1:] = torch.tensor([2, 1, 1, 1])
    assert problem.agrees()


@SLOW
@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_the_kernels_accept_what_the_reference_accepts_in_random_trees(method):
    differ = [seed for seed in range(110) if not random_problem(method, seed).agrees()]
    assert not differ


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_a_vocabulary_of_several_chunks_is_shared_by_programs(method):
    assert Problem(SMALL, method, vocab_size=9_001, batch=1, dtype=torch.bfloat16, noise=2.0, seed=2).agrees()


def test_sequences_that_share_no_ranks_agree():
    """And programs share each of an even number of nodes."""
    tree = TokenTree([-1, 0, 0, 0, 1, 2])
    problem = Problem(tree, "without_replacement", vocab_size=8_400, noise=0.5, seed=4)
    assert problem.agrees(ranks=torch.tensor([[0, 0, 1, 2, 0, 0], [0, 2, 0, 1, 0, 0]]))


def test_logits_whose_numbers_lie_apart_agree():
    problem = Problem(SMALL, "without_replacement", batch=3)
    problem.target = problem.target.mT.contiguous().mT
    assert problem.agrees()


@pytest.mark.parametrize("method", WHOLE_TREE)
def test_a_whole_tree_that_is_deeper_than_the_walk_may_go_agrees(method):
    """What lies deeper has no weight."""
    for seed in range(3):
        problem = Problem(TokenTree([-1, 0, 0, 1, 1, 3]), method, batch=1, seed=seed)
        assert problem.agrees(max_depth=1)


@some("kseq", "held_traversal", "race")
def test_defaults_views_seeds_in_memory_and_shallow_walks_agree(method):
    problem = Problem(TREES["ranks"], method, vocab_size=7, batch=1, seed=4, noise=0.3)
    for impl in ("torch", "triton"):
        in_memory = problem.verified(impl, seed=torch.tensor(2**32 + 1), max_depth=1)
        assert all(map(torch.equal, in_memory, problem.verified("torch", seed=2**32 + 1, max_depth=1)))
    wide = torch.zeros(1, len(TREES["ranks"]), 16)
    wide[..., :7] = problem.target
    problem.target, problem.parents = wide[..., :7], problem.parents.expand(1, -1)
    assert problem.agrees(seed=torch.tensor(-(2**40) - 3), max_depth=0)
    in_order = Problem(TREES["3-ary"], method, vocab_size=7, batch=2, seed=0, noise=0.3)
    assert in_order.agrees(rows=None, ranks=None)


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_rows_without_a_distribution_are_flagged_by_the_kernels(method):
    problem = Problem(TokenTree.chain(1), method, batch=4, seed=1)
    problem.target[1:] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None, None]
    verified = problem.verified("triton")
    assert int(verified.next_token[0]) >= 0
    assert verified.next_token[1:].tolist() == [-1] * 3
    assert verified.length[1:].tolist() == [0] * 3


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("method", DRAFT_AWARE)
def test_a_row_whose_only_nan_is_a_childs_is_flagged_by_the_kernels(method, side):
    problem = Problem(TokenTree.chain(1), method, batch=1, seed=2)
    getattr(problem, side)[0, 0, problem.tokens[0, 1]] = torch.nan
    verified = problem.verified("triton")
    assert (verified.length.tolist(), verified.next_token.tolist()) == ([0], [-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_a_captured_graph_verifies_what_its_tensors_hold_when_it_is_replayed(method):
    problems = [Problem(TREES["4, 2"], method, vocab_size=32_000, batch=4, seed=2 * seed) for seed in range(3)]
    expected = [problem.verified("triton", max_depth=2) for problem in problems]
    fields = ("tokens", "target", "draft", "rows")
    held = {name: getattr(problems[0], name).to(DEVICE) for name in fields}
    ranks, parents = problems[0].options["ranks"].to(DEVICE), problems[0].parents.to(DEVICE)
    seed = torch.tensor(problems[0].options["seed"], device=DEVICE)
    options = problems[0].options | {"ranks": ranks, "rows": held["rows"], "max_depth": 2, "seed": seed}
    graph, out = captured(lambda: verify_tree(held["tokens"], parents, held["target"], held["draft"], **options))
    for problem, right in zip(problems, expected, strict=True):
        for name in fields:
            held[name].copy_(getattr(problem, name))
        seed.fill_(problem.options["seed"])
        graph.replay()
        assert all(torch.equal(field.cpu(), wanted) for field, wanted in zip(out, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tree"), [
    ("without_replacement", "4, 2"), ("with_replacement", "sequences"), ("kseq", "sequences"), ("kseq", "4, 2"),
    ("held", "4, 2"), ("traversal", "4, 2"), ("held_traversal", "sequences"),
])  # fmt: skip
def test_passes_that_programs_share_are_right_in_any_schedule(method, tree, adversary, monkeypatch):
    """Short pieces, so that a few tokens are several; with uniform_fill (even seeds) the chain restarts."""
    for module in (decision, distributions, traversal_kernel):
        monkeypatch.setattr(module, "PIECE", tl.constexpr(2))
    for seed in (1, 2):
        filters = Filters(1.0, 2) if method not in ("with_replacement", "kseq") and seed == 2 else PLAIN
        problem = Problem(TREES[tree], method, PLAIN, filters, vocab_size=8, batch=1, noise=3.0, seed=seed)
        assert problem.agrees()
    kernel = "_normalize_kernel" if method in WHOLE_TREE else "_decide_kernel"
    assert adversary.launched[kernel] == 2


def test_a_chain_that_has_begun_is_led_once(adversary, monkeypatch):
    for module in (decision, distributions, traversal_kernel):
        monkeypatch.setattr(module, "PIECE", tl.constexpr(2))
    for _ in range(3):
        assert Problem(TokenTree([-1, 0, 1, 1]), "traversal", vocab_size=8, batch=1, noise=3.0, seed=2).agrees()
    adversary.met("_chains_kernel")
