"""commit against its definition, written out for one sequence at a time; NumPy, kernel and compiled code."""

import pytest
import torch
from commit_cases import DEVICE, Problem
from kernel_cases import NATIVE

from heavypath.kernels.commit import StateField

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
def test_no_distribution_ends_a_sequence_with_minus_one(impl):
    problem = Problem(6)
    problem.after[:] = -1
    problem.whole[StateField.LEFT] = torch.tensor([10, 10, 0, 10, 10, 10, 10])
    problem.whole[StateField.PRODUCED] = 0
    problem.stops = torch.tensor([-1])  # none
    whole, _, seen, _ = problem.committed(impl)
    accepted = [set(problem.tokens[slot, problem.path[slot, 1 : 1 + length]].tolist())
                for slot, length in enumerate(problem.length.tolist())]  # fmt: skip
    assert [set(row.nonzero()[:, 0].tolist()) for row in seen] == [*accepted[:2], set(), *accepted[3:]]
    assert whole[StateField.LEFT, :5].tolist() == [-1, -1, 0, -1, -1]
    assert whole[StateField.ROOT, :5].tolist() == [0] * 5


@pytest.mark.parametrize("batch", [4, pytest.param(217, marks=pytest.mark.slow)])
def test_a_commit_is_right_in_any_schedule(batch, adversary):
    Problem(adversary.seed, batch=batch, per_sequence=True).check("triton")
    adversary.met("_commit_kernel")
