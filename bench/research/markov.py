"""Acceptance that depends on which child the parent was: ERSD's Markov acceptance, for researchers.

A node is child i of its parent, and its child j is accepted with probability A[1 + i, j]; below the root, which is no
child, with A[0, j]. So the node that child indices c_1, c_2, ..., c_n lead to is accepted with probability

    v(c_1 ... c_n) = A[0, c_1] A[1 + c_1, c_2] ... A[1 + c_{n-1}, c_n],      expected tokens = sum of v over all nodes

(the first order of the Markov form in Kobus and Gündüz 2025, "Speculative Sampling via Exponential Races"). It is a
function of the path, which `expected_tokens`, `greedy_tree` and `select_tree` take.

*The greedy tree is the best one*, though subtrees of one shape differ in worth by the rank of their root. A node is
never worth more than its parent, since rates are at most 1, nor, where the rows of A fall, more than its elder
sibling. So the N nodes of largest v, parents and elder siblings first where v is equal, are a tree; and no N nodes are
worth more. The queue of `greedy_tree` takes just these, since the parent and the elder sibling of the best node that
is left have been taken. Where a row rises this is no longer so: a younger sibling that is worth more cannot be had
without its elders. Counted rows rise by chance among children that are seldom accepted, so those of `markov_table` are
made to fall.

Profiles count acceptance by depth instead. The history of this file has which model predicts and plans better: on the shipped
pair one vector for all nodes does as well as any.
"""

import torch
from torch import Tensor

from heavypath.speculative.trees.planning import PathAcceptance, Rates

PRIOR = 50  # nodes' worth of the mean over all rows in each row: children of seldom accepted ranks are seldom seen


def markov_acceptance(table: Tensor) -> PathAcceptance:
    """A as the function of a path that the planners take.

    table: [1 + K, K], row 0 for the root's children and row 1 + i for those of a child i. Where greedy trees are wanted
    each row falls.

    Raises ValueError for another shape, and for rows that are not in [0, 1] or sum to more than 1.
    """
    if table.ndim != 2 or table.shape[0] != table.shape[1] + 1:
        raise ValueError(
            f"expected a table [1 + K, K], a row for the root and one for each of K children, got {[*table.shape]}"
        )
    rows = Rates.of(table).matrix.tolist()
    return lambda path: rows[1 + path[-1] if path else 0]


def markov_table(ranks: Tensor, children: int, prior: float = PRIOR) -> Tensor:
    """Count A along texts: fp64 [1 + children, children], with rows that fall.

    ranks: integers [S, T], for each token of S texts which child was accepted as this token; -1 for none, so that the
    next token is offered below a root, as the first one is; -2 where none was offered, which is not counted: one of
    `calibration.Counts.ranks`. prior: how many nodes' worth of the mean over all rows is added
    to each row.

    Raises ValueError for ranks of another shape or beyond the children, and for a prior below 0.
    """
    if ranks.ndim != 2 or ranks.numel() == 0:
        raise ValueError(f"expected ranks [S, T] with at least one token, got shape {[*ranks.shape]}")
    if children <= int(ranks.max()):
        raise ValueError(f"ranks are below the number of children, {children}, got {int(ranks.max())}")
    if prior < 0:
        raise ValueError(f"prior must be at least 0, got {prior}")
    ranks, offered = ranks.long(), ranks >= -1
    before = torch.cat([torch.full_like(ranks[:, :1], -1), ranks[:, :-1]], 1).clamp(min=-1)
    outcomes = (1 + before) * (children + 1) + 1 + ranks  # by parent, then none or the accepted child
    counted = torch.bincount(outcomes[offered], minlength=(children + 1) ** 2).view(children + 1, -1).double()
    accepted, reached = counted[:, 1:], counted.sum(1, keepdim=True)
    overall = accepted.sum(0) / reached.sum().clamp(min=1)
    return falling((accepted + prior * overall) / (reached + prior).clamp(min=1e-12))


def falling(rates: Tensor) -> Tensor:
    """The likeliest rates that fall: the isotonic regression of each row, [R, K].

    With M[s, t] the mean of rates s to t, rate j is the least over s <= j of the greatest M[s, t] over t >= j
    (Robertson, Wright and Dykstra 1988, "Order Restricted Statistical Inference", section 1.4).
    """
    sums = torch.nn.functional.pad(rates.cumsum(1), (1, 0))
    index = torch.arange(rates.shape[1])
    length = index - index[:, None] + 1  # of rates s to t
    means = (sums[:, None, 1:] - sums[:, :-1, None]) / length.clamp(min=1)  # [R, s, t]
    means = means.where(length >= 1, -torch.inf)
    greatest = means.flip(2).cummax(2).values.flip(2)  # over t >= j, [R, s, j]
    return greatest.where(length >= 1, torch.inf).amin(1)  # over s <= j
