"""K-SEQ accepts as often as it may: the search for g ends at the least one, also where the draft is nearly the target.

That the text keeps the target's law, for any g, is in test_verification_oracle.py.
"""

import numpy as np
import pytest
import torch
from devices import DEVICE, run_on

from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying.k_seq import k_seq


def accepting(target, draft, children, g):
    """A(g) = 1 - (1 - C(g) / g)^K of SpecTr, C(g) = sum min(P, g Q), in fp64."""
    return 1 - (1 - np.minimum(target, g * draft).sum() / g) ** children


def most_accepting(target, draft, children):
    """A of the least g with C(g) >= A(g), by bisection."""
    low, high = 1.0, float(children)
    for _ in range(50):
        middle = (low + high) / 2
        enough = np.minimum(target, middle * draft).sum() >= accepting(target, draft, children, middle)
        low, high = (low, middle) if enough else (middle, high)
    return accepting(target, draft, children, high)


def test_the_search_ends_near_the_least_g():
    """To a thousandth of the acceptance, of targets flat and sharp, and drafts near and far, some of few tokens."""
    generator = np.random.default_rng(1)
    for _ in range(400):
        size, children = int(generator.choice([3, 7, 40, 500])), int(generator.choice([2, 3, 5, 8, 16]))
        log_target = generator.normal(size=size) * generator.choice([0.3, 1, 3, 6])
        log_draft = log_target + generator.normal(size=size) * generator.choice([0.001, 0.03, 0.3, 1, 3])
        if generator.random() < 0.3:
            log_draft[1:][generator.random(size - 1) < 0.3] = -60
        target, draft = (np.exp2(logs) / np.exp2(logs).sum() for logs in (log_target, log_draft))
        drawn = [0] * children  # a threshold is P / (g Q)
        thresholds, _ = k_seq(log_target.astype(np.float32), log_draft.astype(np.float32), drawn)
        g = target[0] / draft[0] / thresholds[0]
        assert 0 <= g - 1 + 1e-5 < children
        assert accepting(target, draft, children, g) > most_accepting(target, draft, children) - 1e-3


@pytest.mark.parametrize("impl", ["torch", "auto", "triton"])
@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_a_draft_that_is_nearly_the_target_is_accepted_always(noise, impl):
    """All children are rejected less than once in 100,000 nodes, by the formulas. With g = K, every third."""
    generator = torch.Generator().manual_seed(0)
    for children in (3, 8):
        logits = 2 * torch.randn(20, generator=generator)
        near = logits + noise * torch.randn(20, generator=generator)
        assert most_accepting(logits.softmax(0).numpy(), near.softmax(0).numpy(), children) > 1 - 1e-5
        tokens = near.softmax(0).multinomial(4 * (children + 1), replacement=True, generator=generator)
        parents = torch.tensor([-1] + [0] * children)
        rows = [row.expand(4, children + 1, 20).contiguous() for row in (logits, near)]
        verified = run_on(
            DEVICE if impl == "triton" else "cpu",
            verify_tree, tokens.view(4, -1), parents, *rows, method="kseq", max_depth=1, seed=3, impl=impl,
        )  # fmt: skip
        assert verified.length.tolist() == [1] * 4
