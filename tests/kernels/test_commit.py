"""commit against its definition, written out for one sequence at a time; NumPy and kernel."""

import importlib.util
import inspect
from contextlib import nullcontext

import pytest
import torch
from commit_cases import DEVICE, Problem

import heavypath.kernels.commit as module
from heavypath.kernels.commit import StateField

IMPLS = ["torch", "triton"] if DEVICE == "cpu" else ["triton"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_commit_is_what_it_says(seed, per_sequence, impl):
    Problem(seed, per_sequence=per_sequence).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_at_the_edge(impl):
    Problem(1, nodes=1).check(impl)  # a root alone
    Problem(2, stops=()).check(impl)
    Problem(3, batch=1, spare=0).check(impl)
    Problem(4, batch=2, nodes=700, new_tokens=40, vocab_size=1000).check(impl)  # nodes in several blocks
    unseen = Problem(5)
    unseen.seen = unseen.seen[:, :0]
    for found, right in zip(unseen.committed(impl)[:2], Problem(5).expected()[:2], strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("impl", IMPLS)
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


@pytest.mark.parametrize(("original", "replacement"), [
    ("", ""),
    ("tl.minimum(length + 1, left)", "length + 1"),
    ("mask=place < count)", "mask=place < most)"),
    ("stop > 0) & (place <= length)", "stop > 0) & (place < length)"),
    ("tl.load(path_ptr + above, mask=there, other=-2) == parent", "parent >= 0"),
    ("accepted & (tl.load(path_ptr + above + 1, mask=accepted) == child)", "accepted"),
    ("there & (tl.load(tokens_ptr + child, mask=there, other=-1) >= 0)", "there"),
    ("until <= most", "until < most"),
    ("if active:", "if length >= 0:"),
    ("tl.load(path_ptr + length)", "length"),
])  # fmt: skip
@pytest.mark.usefixtures("interpreter")
def test_a_mutation_of_the_kernel_is_found(original, replacement, tmp_path):
    source = inspect.getsource(module)
    harmless = original == replacement
    assert harmless or original in source
    path = tmp_path / "mutated_commit.py"
    path.write_text(source.replace(original, replacement))
    spec = importlib.util.spec_from_file_location("mutated_commit", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    with nullcontext() if harmless else pytest.raises(AssertionError):
        for seed in range(12):
            Problem(seed, per_sequence=seed % 2 == 1).check("triton", copy.commit)
