"""Typical acceptance against a search through all paths, written down a second time; and its kernels."""

import math
from itertools import product

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value
from typical_cases import Problem, random_problem
from verification_cases import TREES, mutant

from heavypath.kernels.filtering import Filters
from heavypath.kernels.typical import acceptance, kernel
from heavypath.kernels.typical.acceptance import Typical, accept_typical
from heavypath.speculative import TokenTree


def test_a_case_by_hand():
    """P = (1/2, 1/4, 1/4) has H = 1.5 log 2, so exp(-H) = 0.354: with delta 0.6 the threshold is 0.212, not epsilon."""
    p = torch.tensor([0.5, 0.25, 0.25]).log().expand(1, 5, 3)
    tokens, parents = torch.tensor([[0, 1, 0, 2, 1]]), torch.tensor([-1, 0, 0, 1, 2])  # 1 - 3 and 2 - 4
    for epsilon, delta, expected in (
        (0.3, 0.6, [0, 2, 4]),  # both paths are long enough, and the second is twice as likely
        (0.3, 0.8, [0, 2, -1]),  # min(0.3, 0.283): a quarter is too little
        (0.24, 0.8, [0, 2, 4]),  # min(0.24, 0.283)
        (0.6, 1.0, [0, 2, -1]),  # min(0.6, 0.354)
    ):
        out = accept_typical(tokens, parents, p, epsilon=epsilon, delta=delta)
        assert out.path.tolist() == [expected]
        assert int(out.length) == sum(node > 0 for node in expected)


def test_the_longest_path_is_kept_though_a_shorter_one_is_likelier():
    p = torch.tensor([0.8, 0.1, 0.1]).log().expand(1, 4, 3)
    out = accept_typical(torch.tensor([[0, 0, 1, 2]]), torch.tensor([-1, 0, 0, 2]), p, epsilon=0.05)
    assert out.path.tolist() == [[0, 2, 3]]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_of_equal_siblings_the_first_is_taken_unless_the_path_goes_on_below_another(impl):
    p = torch.tensor([0.1, 0.9]).log().expand(2, 4, 2)
    tokens = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    out = accept_typical(tokens, torch.tensor([-1, 0, 0, 2]), p, epsilon=0.5, delta=1.0, impl=impl)
    assert out.path.tolist() == [[0, 1, -1], [0, 2, 3]]


@pytest.mark.parametrize("vocab_size", [2, 3])
def test_every_tree_of_tokens_has_the_path_of_a_search_through_all_paths(vocab_size):
    """All assignments of tokens, or of absence, to the nodes of two trees, as one batch."""
    for parents in ([-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]):
        tree = TokenTree(parents)
        drafted = torch.tensor([*product(range(-1, vocab_size), repeat=len(tree) - 1)])
        problem = Problem(tree, vocab_size, batch=len(drafted), limits=Typical(0.4, 0.9), seed=vocab_size)
        problem.tokens[:, 1:] = drafted
        problem.check("torch")


@pytest.mark.parametrize("seed", range(60))
def test_any_tree_has_the_path_of_a_search_through_all_paths(seed):
    random_problem(seed).check("torch")


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_next_token_is_a_draw_from_p_at_the_end_of_the_path(impl):
    count = 20_000 if impl == "torch" else 5
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    logits, tokens = 0.7 * p.log().expand(count, 3, 3), torch.tensor([[0, 1, 2]]).expand(count, -1)
    parents = torch.tensor([-1, 0, 0])  # the child with 0.6 is accepted, and node 1 the end
    out = accept_typical(tokens, parents, logits, epsilon=0.5, delta=1.0, temperature=0.7, seed=3, impl=impl)
    assert (out.path == torch.tensor([0, 1])).all()
    if impl == "torch":
        assert chi_square_p_value(out.next_token.bincount(minlength=3), p[1].double()) > SIGNIFICANCE
    other = accept_typical(tokens, parents, logits, epsilon=0.5, delta=1.0, temperature=0.7, seed=4, impl=impl)
    assert not torch.equal(out.next_token, other.next_token)


def test_a_token_that_is_drafted_is_accepted_where_its_chance_is_large_enough_and_so_the_law_is_another_one():
    """Of P = (0.6, 0.3, 0.1), whatever is drawn: the draft's token 1 is always in the text, not three times in ten."""
    p = torch.tensor([0.6, 0.3, 0.1]).log().expand(500, 2, 3)
    out = accept_typical(torch.tensor([[0, 1]]).expand(500, -1), torch.tensor([-1, 0]), p)
    assert (out.length == 1).all()


FILTERS = {
    "none": Filters(), "top-k": Filters(0.7, 3), "top-p, min-p": Filters(1.3, None, 0.8, 0.05), "cold": Filters(1e-30),
}  # fmt: skip


@pytest.mark.parametrize(
    "filters", [pytest.param("top-p, min-p", marks=pytest.mark.slow), *(name for name in FILTERS if "p, " not in name)]
)
def test_the_kernels_accept_what_the_reference_accepts(filters):
    trees = TREES.values() if filters == "none" else (TREES["chain"],)
    for seed, tree in enumerate(trees):
        vocab_size, dtype = (3, 5, 11)[seed % 3], (torch.bfloat16, torch.float32, torch.float16)[seed // 2]
        shape = {"vocab_size": vocab_size, "dtype": dtype, "absent": 0.2 * (seed % 2), "seed": seed}
        problem = Problem(tree, batch=1 if tree is TREES["chain"] else 2, filters=FILTERS[filters], **shape)
        assert problem.agrees(), (seed, tree)
        problem.check("triton")


@pytest.mark.slow
def test_the_kernels_accept_what_the_reference_accepts_in_random_trees():
    assert not [seed for seed in range(200) if not random_problem(seed).agrees()]


def test_a_vocabulary_of_several_chunks_is_shared_by_programs():
    problem = Problem(TokenTree.k_ary(2, 1), vocab_size=20_001, batch=1, dtype=torch.bfloat16, seed=2)
    problem.target *= 3
    problem.tokens[0, 1:] = torch.stack([problem.target[0, 0].argmin(), problem.target[0, 0].argmax()])
    assert problem.agrees()
    assert problem.accepted("triton").path.tolist() == [[0, 2]]


def test_defaults_views_shallow_walks_and_seeds_in_memory_agree():
    problem = Problem(TREES["3-ary"], vocab_size=7, seed=4)
    for changes in ({"max_depth": 0}, {"max_depth": 1}, {"rows": None}, {"epsilon": 0.0}, {"delta": 0.0}):
        assert problem.agrees(**changes)
    wide = torch.zeros(2, len(TREES["3-ary"]), 16)
    wide[..., :7] = problem.target
    problem.target, problem.parents = wide[..., :7], problem.parents.expand(2, -1)
    assert problem.agrees()
    for impl in ("torch", "triton"):
        for seed in (1, 2**32 + 1) if impl == "torch" else (2**32 + 1,):
            one, other = (problem.accepted(impl, seed=each) for each in (seed, torch.tensor(seed)))
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution_are_refused_on_a_cpu_and_flagged_by_the_kernels(bad):
    problem = Problem(TREES["chain"], limits=Typical(0.0, 0.0), seed=1)
    problem.target[1, 1:] = bad
    with pytest.raises(ValueError, match=r"target_logits must have a finite maximum .* but \[1, 1\] has"):
        problem.accepted("torch")
    out = problem.accepted("triton")
    assert (int(out.length[0]), int(out.length[1])) == (3, 1)
    assert int(out.next_token[0]) >= 0
    assert int(out.next_token[1]) == -1
    problem.tokens[1, 1] = -1  # rows that nobody reaches are not read
    assert problem.agrees()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": -0.1}, r"epsilon must be in \[0, 1\], got -0.1"),
        ({"delta": 1.5}, r"delta must be in \[0, 1\], got 1.5"),
        ({"delta": math.nan}, r"delta must be in \[0, 1\], got nan"),
        ({"temperature": 0.0}, "needs temperature > 0; greedy text is verify_tree"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"rows": torch.zeros(2, 3).long()}, r"rows must be a LongTensor \[2, 4\]"),
        ({"max_depth": -1}, "max_depth must be at least 0, got -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Problem(TREES["chain"]).accepted("torch", **changes)


def test_tensors_that_do_not_fit_are_refused():
    problem = Problem(TREES["chain"])
    for tensors, message in (
        ((problem.tokens[0], problem.parents, problem.target), r"tokens must be a LongTensor \[B, N\]"),
        ((problem.tokens, problem.parents[1:], problem.target), r"parents must be a LongTensor \[4\] or \[2, 4\]"),
        ((problem.tokens, problem.parents, problem.target[:, 1:]), r"target_logits must be floating point \[2, 4, V\]"),
        ((problem.tokens + 9, problem.parents, problem.target), r"tokens must be in \[-1, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            accept_typical(*tensors)
    with pytest.raises(ValueError, match="accept_typical has impl 'auto', 'triton' or 'torch', got 'cuda'"):
        accept_typical(problem.tokens, problem.parents, problem.target, impl="cuda")
    with pytest.raises(ValueError, match=r"takes fp32, fp16 or bf16, got torch\.float64"):
        accept_typical(problem.tokens, problem.parents, problem.target.double(), impl="triton")


MUTATIONS = {
    "entropy without the normaliser": ("entropy = log_total - tl.sum", "entropy = -tl.sum"),
    "entropy's sum is not moved": ("scale * (moment + total * shift)", "scale * moment"),
    "the larger of both": ("tl.minimum(log_epsilon", "tl.maximum(log_epsilon"),
    "delta is dropped": ("log_delta - entropy", "log_delta"),
    "a path of refused nodes": (
        "tl.gather(likely, above, 0) + weight", "tl.maximum(tl.gather(likely, above, 0), -99.0) + weight"
    ),
    "the first of the longest paths": (
        "tl.where(likely == best, index, NONE)", "tl.where(likely > float('-inf'), index, NONE)"
    ),
    "the token behind the root": ("last_ptr + batch, batch * N + last)", "last_ptr + batch, batch * N)"),
    "filters are dropped": ("            if FILTERED:\n                x = filtered(x, here, cut, end_of_ties)\n", ""),
}  # fmt: skip


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_of_the_kernels_is_found(name, tmp_path, monkeypatch):
    original, replacement = MUTATIONS[name]
    copy = mutant(tmp_path, kernel, original, replacement, "mutant")
    monkeypatch.setattr(acceptance, "launch_typical", copy.launch_typical)
    filters = Filters(1.0, min_p=0.3) if "filters" in name else Filters()
    shape = {"vocab_size": 24, "filters": filters, "limits": Typical(0.5, 0.9)}
    problems = (Problem(TokenTree([-1, 0, 0, 1, 2]), **shape, seed=seed) for seed in range(4))
    assert not all(problem.agrees() for problem in problems)
