"""Helpers of tests/kernels/test_verification.py and its neighbours."""

from math import log

import numpy as np
import torch
from bisection import bisected
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.verifying.residual import residual_chain


def acceptance_and_weights(target: Tensor, draft_logits: Tensor, filters: Filters, drawn: Tensor, replacement: bool):
    """What residual_chain does with each row of drawn children: acceptance [n, k] of each, earlier ones rejected,
    found by bisecting its coin, and the weights [n, V] of the recovered token."""
    rows, k = drawn.shape
    log_draft = None
    if filters.temperature > 0:
        log_draft = (filtered_logprobs(draft_logits, filters) / log(2)).expand(rows, -1).numpy()
    arguments = target.log2().expand(rows, -1).numpy(), log_draft, drawn.numpy()
    acceptance = np.zeros((rows, k))
    for place in range(k):
        acceptance[:, place] = bisected(
            lambda coins, place=place: residual_chain(*arguments, coins, replacement)[0] == place, rows, k, place
        )
    choice, stopped = residual_chain(*arguments, np.ones((rows, k)), replacement)
    weights = torch.ones(rows, len(target)).double()  # of those that always accept, anything
    weights[torch.from_numpy(choice < 0)] = torch.from_numpy(stopped)
    return torch.from_numpy(acceptance), weights
