"""Below which coin a rule accepts, found by bisection."""

from collections.abc import Callable

import numpy as np


def bisected(accepts: Callable[[np.ndarray], np.ndarray], rows: int, children: int, place: int) -> np.ndarray:
    """Of child `place` in each row, where the other children's coins are 1: fp64 [rows].

    accepts: from coins [rows, children] to bool [rows], true below some coin of this child
    """
    low, high = np.zeros(rows), np.ones(rows)
    for _ in range(52):
        coins = np.ones((rows, children))
        coins[:, place] = middle = (low + high) / 2
        accepted = accepts(coins)
        low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
    return low
