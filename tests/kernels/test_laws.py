"""The kernel of children of different laws against the reference; test_verification.py has that beside the oracle."""

import pytest
import torch
from law_cases import Problem
from verification_cases import DEVICE, PLAIN

from heavypath.kernels.filtering import Filters
from heavypath.kernels.verification import verify_tree


def unfiltered(seed: int, vocab_size: int = 5, batch: int = 2) -> Problem:
    return Problem(seed, vocab_size=vocab_size, batch=batch, filters=(PLAIN, PLAIN))


def test_the_kernel_accepts_what_the_reference_accepts():
    for seed in range(5):
        assert unfiltered(seed, batch=1).agrees(), seed
    assert Problem(7, vocab_size=5, batch=1, filters=(Filters(0.8, min_p=0.1), Filters(1.3, min_p=0.2))).agrees()


@pytest.mark.slow
def test_the_kernel_accepts_what_the_reference_accepts_in_random_trees():
    assert not [seed for seed in range(100) if not Problem(seed).agrees()]


def test_several_tiles_views_and_shallow_walks_agree():
    assert unfiltered(3, vocab_size=5_001).agrees()
    problem = unfiltered(5, vocab_size=7)
    for depth in (0, 1):
        assert problem.agrees(max_depth=depth)
    assert problem.agrees(rows=torch.arange(problem.tokens.numel()).view_as(problem.tokens) + (5 << 33), ranks=None)
    wide = torch.zeros(*problem.draft.shape[:2], 16, dtype=problem.draft.dtype)
    wide[..., :7] = problem.draft
    problem.draft = wide[..., :7]
    assert problem.agrees(seed=torch.tensor(-(2**40) - 3), laws=problem.laws.t().contiguous().t())


def test_rows_without_a_distribution_are_flagged_by_the_kernel_and_refused_by_the_reference():
    tokens, parents, rows = torch.tensor([[0, 1, 2]] * 2), torch.tensor([-1, 0, 0]), torch.tensor([0, 3, 4])
    target, draft = torch.tensor([0.0, -3.0, 0.0]).expand(2, 3, 3), torch.zeros(2, 5, 3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        draft[1, 4] = bad  # asked for where the first child, token 1, is rejected
        options = {"method": "with_replacement", "laws": rows, "seed": 1}
        given = [tensor.to(DEVICE) for tensor in (tokens, parents, target, draft, rows)]
        verified = verify_tree(*given[:4], **options | {"laws": given[4]}, impl="triton")
        assert int(verified.next_token[0]) >= 0
        assert verified.next_token[1] == -1
        with pytest.raises(ValueError, match=r"draft_logits .* \[1, 4\] has"):
            verify_tree(tokens, parents, target, draft, **options, impl="torch")
