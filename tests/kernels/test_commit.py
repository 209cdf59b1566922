"""commit against its definition, written out for one sequence at a time; NumPy, kernel and compiled code."""

import pytest
import torch
from commit_cases import DEVICE, Problem
from kernel_cases import NATIVE

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE] if DEVICE == "cpu" else ["triton"])


@IMPLS
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_commit_is_what_it_says(seed, per_sequence, impl):
    Problem(seed, per_sequence=per_sequence).check(impl)


@IMPLS
def test_shapes_at_the_edge(impl):
    Problem(1, nodes=1).check(impl)  # a root alone
    Problem(2, stops=()).check(impl)
    Problem(3, batch=1, spare=0).check(impl)
    several_blocks = {"batch": 2, "nodes": 300, "new_tokens": 40, "vocab_size": 1000}
    Problem(4, **several_blocks, stops=range(9)).check(impl)
    unseen = Problem(5)
    unseen.seen = unseen.seen[:, :0]
    for found, right in zip(unseen.committed(impl)[:2], Problem(5).expected()[:2], strict=True):
        assert torch.equal(found, right)


@IMPLS
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_numbers_of_a_tree_may_lie_apart_in_memory(per_sequence, impl):
    problem = Problem(6, per_sequence=per_sequence)
    tokens, *shape = (torch.stack([field, field + 1], -1)[..., 0] for field in (problem.tokens, *problem.shape))
    problem.tokens, problem.shape = tokens, shape
    problem.stops = torch.tensor([[3, 0], [5, 0]])[:, 0]
    problem.check(impl)


@pytest.mark.parametrize("impl", ["triton", NATIVE])
@pytest.mark.parametrize("name", ["output", "seen"])
def test_a_state_with_gaps_in_its_rows_is_refused(name, impl):
    problem = Problem(7)
    setattr(problem, name, getattr(problem, name).mT.contiguous().mT)
    with pytest.raises(ValueError, match=rf"changes state.{name} with a last stride of 1, got strides \[1, "):
        problem.check(impl)


@pytest.mark.parametrize("batch", [4, pytest.param(217, marks=pytest.mark.slow)])
def test_a_commit_is_right_in_any_schedule(batch, adversary):
    Problem(adversary.seed, batch=batch, per_sequence=True).check("triton")
    adversary.met("_commit_kernel")
