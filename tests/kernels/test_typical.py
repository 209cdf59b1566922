"""Typical acceptance against a search through all paths, written down a second time; and its kernels."""

import math
from itertools import product

import pytest
import torch
from devices import placed
from statistical import SIGNIFICANCE, chi_square_p_value
from typical_cases import Problem, random_problem
from verification_cases import TREES

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.kernels.typical.acceptance import Typical, accept_typical
from heavypath.speculative import TokenTree


def test_every_tree_of_tokens_has_the_path_of_a_search_through_all_paths():
    """All assignments of two tokens, or of absence, to the nodes of two trees, as one batch; and random trees."""
    for parents in ([-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]):
        tree = TokenTree(parents)
        drafted = torch.tensor([*product(range(-1, 2), repeat=len(tree) - 1)])
        problem = Problem(tree, 2, batch=len(drafted), limits=Typical(0.4, 0.9), seed=2)
        problem.tokens[:, 1:] = drafted
        problem.check("torch")
    for seed in range(60):
        random_problem(seed).check("torch")


def test_the_next_token_is_a_draw_from_p_at_the_end_of_the_path():
    count = 20_000
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    logits, tokens = 0.7 * p.log().expand(count, 3, 3), torch.tensor([[0, 1, 2]]).expand(count, -1)
    parents = torch.tensor([-1, 0, 0])  # the child with 0.6 is accepted, and node 1 the end
    limits = {"epsilon": 0.5, "delta": 1.0, "temperature": 0.7}
    out, other = (accept_typical(tokens, parents, logits, **limits, seed=seed) for seed in (3, 4))
    assert (out.path == torch.tensor([0, 1])).all()
    assert chi_square_p_value(out.next_token.bincount(minlength=3), p[1].double()) > SIGNIFICANCE
    assert not torch.equal(out.next_token, other.next_token)


@pytest.mark.parametrize("filters", [Filters(), Filters(0.7, 3), Filters(1.3, min_p=0.05), Filters(1e-30)])
def test_the_kernels_accept_what_the_reference_accepts(filters):
    for seed, tree in enumerate(TREES.values() if filters == Filters() else (TREES["chain"],)):
        vocab_size, dtype = (3, 5, 11)[seed % 3], (torch.bfloat16, torch.float32, torch.float16)[seed // 2]
        shape = {"vocab_size": vocab_size, "dtype": dtype, "absent": 0.2 * (seed % 2), "seed": seed}
        Problem(tree, batch=1, filters=filters, **shape).check("triton")


def test_the_kernels_accept_by_the_thresholds_of_small_limits():
    """Where the entropy, the smaller of both limits, refused parents, and the likeliest of equal paths all count."""
    for seed in range(2):
        Problem(TokenTree([-1, 0, 0, 1, 2]), vocab_size=24, limits=Typical(0.5, 0.9), seed=seed).check("triton")


@pytest.mark.slow
def test_the_kernels_accept_what_the_reference_accepts_in_random_trees():
    assert not [seed for seed in range(200) if not random_problem(seed).agrees()]


def test_a_vocabulary_of_several_chunks_is_shared_by_programs():
    problem = Problem(TokenTree.k_ary(2, 1), vocab_size=20_001, batch=1, dtype=torch.bfloat16, seed=2)
    problem.target *= 3
    problem.tokens[0, 1:] = torch.stack([problem.target[0, 0].argmin(), problem.target[0, 0].argmax()])
    assert problem.agrees()
    assert problem.verified("triton").path.tolist() == [[0, 2]]


def test_defaults_views_shallow_walks_and_seeds_in_memory_agree():
    problem = Problem(TREES["3-ary"], vocab_size=7, seed=4)
    for changes in ({"max_depth": 0}, {"max_depth": 1}, {"rows": None}, {"epsilon": 0.0}, {"delta": 0.0}):
        assert problem.agrees(**changes)
    wide = torch.zeros(2, len(TREES["3-ary"]), 16)
    wide[..., :7] = problem.target
    problem.target, problem.parents = wide[..., :7], problem.parents.expand(2, -1)
    assert problem.agrees()
    unchecked = problem.limits(
        Nodes(problem.tokens, problem.parents, None), problem.target, None, max_depth=1,
        target_filters=problem.filters, draft_filters=problem.filters, noise=Noise(4, problem.options["rows"]),
    )  # fmt: skip
    assert all(map(torch.equal, unchecked, problem.verified("torch")))
    seed = 2**32 + 1
    assert problem.agrees(seed=torch.tensor(seed))
    assert all(
        map(torch.equal, problem.verified("torch", seed=seed), problem.verified("torch", seed=torch.tensor(seed)))
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution_are_refused_on_a_cpu_and_flagged_by_the_kernels(bad):
    problem = Problem(TREES["chain"], limits=Typical(0.0, 0.0), seed=1)
    problem.target[1, 1:] = bad
    with pytest.raises(ValueError, match=r"target_logits must have a finite maximum .* but \[1, 1\] has"):
        problem.verified("torch")
    out = problem.verified("triton")
    assert (int(out.length[0]), int(out.length[1])) == (3, 1)
    assert int(out.next_token[0]) >= 0
    assert int(out.next_token[1]) == -1
    problem.tokens[1, 1] = -1  # rows that nobody reaches are not read
    assert problem.agrees()


def test_an_empty_batch_gives_an_empty_answer():
    empty = torch.zeros(0, 2, dtype=torch.long)
    verified = accept_typical(empty, torch.tensor([-1, 0]), torch.zeros(0, 2, 3), max_depth=1)
    assert [field.shape for field in verified] == [(0, 2), (0,), (0,)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"epsilon": -0.1}, r"epsilon must be in \[0, 1\], got -0.1"),
    ({"delta": math.nan}, r"delta must be in \[0, 1\], got nan"),
    ({"temperature": 0.0}, "needs temperature > 0; greedy text is verify_tree"),
    ({"top_p": 0.0}, "top_p must be"),
    ({"rows": torch.zeros(2, 3).long()}, r"rows must be a LongTensor \[2, 4\]"),
    ({"max_depth": -1}, "max_depth must be at least 0, got -1"),
    ({"impl": "cuda"}, "accept_typical has impl 'auto', 'native', 'triton' or 'torch', got 'cuda'"),
    ({"tokens": torch.full((2, 4), 5)}, r"tokens must be in \[-1, 5\)"),
    ({"target_logits": torch.zeros(2, 3, 5)}, r"target_logits must be floating point \[2, 4, V\]"),
    ({"target_logits": torch.zeros(2, 4, 5).double(), "impl": "triton"}, r"fp32, fp16 or bf16 target_logits, got .*64"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
    problem = Problem(TREES["chain"])
    given = {"tokens": problem.tokens, "parents": problem.parents, "target_logits": problem.target} | changes
    with pytest.raises(ValueError, match=message):
        accept_typical(**placed(given))
