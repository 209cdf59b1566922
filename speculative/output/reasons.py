"""Explain for each node of a verified tree why it is on the accepted path, or why not.

`verify_tree` only returns the path that it accepted. This module repeats the verification of one sequence along that
path, in fp64 and with the references in `residual`, `traversal` and `k_seq` of `heavypath.kernels.verifying`. So it
finds the coin (uniform random number) of each node that was tried, and the threshold that the coin had to be below.
The accepted path is not computed again, because fp32 and fp64 may disagree about a coin that is within rounding of its
threshold.

Traversal visits all nodes before the accepted one in post-order, so that order is repeated here. Nodes above the
accepted one had no coin: a descendant was accepted before their turn.

Held siblings share one coin, and each has an interval of its range. The thresholds are the upper ends of these
intervals, in draw order. The accepted child is the one whose interval contains the coin.

Typical acceptance has no coins: the target's probability of a child's token must be above the child's threshold.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import DRAFT_AWARE, WHOLE_TREE, PlainTree
from heavypath.kernels.noise import coins
from heavypath.kernels.verifying.k_seq import k_seq
from heavypath.kernels.verifying.residual import Offers
from heavypath.kernels.verifying.traversal import in_post_order
from heavypath.speculative.decoding.rules import OWN, Rules
from heavypath.speculative.decoding.typical import Typical

# What can happen to a node:
#
#     root       it was committed before this step
#     accepted   it is on the accepted path
#     rejected   its coin was not below its threshold
#     skipped    it could not be accepted: the draft could not have drawn it, or its token was rejected before
#    `elder`     a sibling drawn earlier was accepted, so this one was not tried
#     beyond     held siblings: the coin lies in the interval of a sibling drawn earlier
#     equal      its token was accepted, but the path continues below a sibling with the same token
#     other      the target chose another token, which is the next one on the path, or the next token
#     refused    a user's verifier, or the draft's, did not accept it; such verifiers give no reason
#     unlikely   the target's probability of its token was not above its threshold
#     shorter    it was likely enough, but another path is longer, or as long and likelier
#     parent     the node above it was not accepted
#     absent     nothing was drafted here
FATES = (
    "root",
    "accepted",
    "rejected",
    "skipped",
    "elder",
    "equal",
    "other",
    "parent",
    "absent",
    "refused",
    "unlikely",
    "shorter",
    "beyond",
)

WITH_COINS = DRAFT_AWARE  # verifications that try a child against a coin


class VerifiedTree(NamedTuple):
    """One sequence's tree of N nodes, as it was given to `verify_tree`; on any device.

    tokens, parents, ranks: LongTensor[N], as in `Drafted`
    noise_rows:    LongTensor[N], the row of random numbers of each node
    target_logits: [N, V], after each node
    draft_logits:  [N, V], after each node; None if nothing was drafted; with more rows if the root's children were
                   drawn from several distributions
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    noise_rows: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None


class Reasons(NamedTuple):
    """What happened to each of N nodes, and where the token after the accepted nodes came from.

    fates:       one of FATES for each node
    coins:       the random number that each node was tried against; None for a node that was not tried
    thresholds:  the bound that the coin had to be below; None for a node that was not tried. Typical acceptance has
                 thresholds, for the target's probability, and no coins
    chosen:      for each node of the path, the node by which its token was accepted: itself, or an equal sibling
    draft, target: the probability of each node's token given its parent; None for the root and absent nodes
    kind:        how the next token was chosen: "recovered" if all drafted children were refused, "bonus" if the last
                 accepted node had no children, "plain" if nothing was drafted
    next_target: the target's probability of the next token
    """

    fates: list[str]
    coins: list[float | None]
    thresholds: list[float | None]
    chosen: list[int]
    draft: list[float | None]
    target: list[float | None]
    kind: str
    next_target: float


def explain(tree: VerifiedTree, rules: Rules, seed: int, path: Tensor, next_token: int) -> Reasons:
    """Explain the verification of one sequence's tree, by `verify_tree` or by a user's or the draft's verifier.

    rules: the verification and the filters of the step
    seed:  of the generation, from which the coins come
    path:  LongTensor[any], the nodes that the verifier accepted, from the root on; -1 for padding
    next_token: the token that the verifier chose after them

    Probabilities are computed with the filters; at temperature 0, from the logits without filters.
    """
    token = tree.tokens.tolist()
    parent = tree.parents.tolist()
    rank = tree.ranks.tolist()
    noise_row = tree.noise_rows.tolist()
    accepted = [node for node in path.tolist() if node >= 0]
    present = [node for node in range(1, len(token)) if token[node] >= 0]
    inner = sorted({parent[node] for node in present} | {accepted[-1]})
    log_target = _distributions(tree.target_logits, inner, rules.target_filters)
    drawn_from = sorted({parent[node] for node in present})
    draft_logits = tree.draft_logits if tree.draft_logits is None or len(tree.draft_logits) == len(token) else None
    log_draft = {} if draft_logits is None else _distributions(draft_logits, drawn_from, rules.draft_filters)

    fates = ["parent" if token[node] >= 0 else "absent" for node in range(len(token))]
    fates[0] = "root"
    coin: list[float | None] = [None] * len(token)
    threshold: list[float | None] = [None] * len(token)
    chosen = [0]
    reached = {0}  # the last accepted node and its siblings of equal token
    candidates = []  # the children of all these
    traversed = rules.verification in WHOLE_TREE and len(present) > 0
    if traversed:
        chosen, candidates = _traverse_again(
            tree, rules, seed, accepted, (log_target, log_draft), (fates, coin, threshold)
        )
    for node, following in [] if traversed else zip(accepted, [*accepted[1:], None], strict=True):
        candidates = sorted((child for child in present if parent[child] in reached), key=lambda one: (rank[one], one))
        if rules.verification in WITH_COINS and candidates:
            drawn = [token[child] for child in candidates]
            above = np.array([noise_row[parent[child]] for child in candidates])
            tossed = coins(seed, above, np.array([rank[child] for child in candidates]))
            q = log_draft[parent[candidates[0]]] if rules.draft_filters.temperature > 0 else None
            held = rules.verification == "held" and q is not None
            chain = _chain(log_target[node], q, rules.replacement)
            if rules.verification == "kseq":
                assert q is not None
                bounds, _ = k_seq(log_target[node] / np.log(2), q / np.log(2), drawn)
                bounds = [None if bound is None else min(1.0, float(bound)) for bound in bounds]
            elif held:
                bounds = _shares(chain, drawn)
                tossed[:] = tossed[0]
            else:
                bounds = _rejected(chain, drawn)
            last = len(drawn) - 1
            if following is not None:  # the first of equal siblings whose coin was below its threshold
                equals = [index for index, one in enumerate(drawn) if one == token[following]]
                low = (index for index in equals if tossed[index] < (bounds[index] or 0))
                last = next(low, candidates.index(following))
                chosen.append(candidates[last])
            for index, child in enumerate(candidates):
                if index <= last or held:
                    fates[child] = "skipped" if bounds[index] is None else "rejected" if index <= last else "beyond"
                    threshold[child], coin[child] = bounds[index], None if bounds[index] is None else tossed[index]
                else:
                    fates[child] = "elder"
        elif rules.verification == "typical":
            assert isinstance(rules.verifier, Typical)
            least = float(rules.verifier.least(torch.from_numpy(log_target[node])))
            for child in candidates:
                threshold[child] = least
                fates[child] = "shorter" if np.exp(log_target[node][token[child]]) > least else "unlikely"
            if following is not None:
                chosen.append(following)
        else:
            for child in candidates:
                fates[child] = "refused" if rules.verification == OWN else "other"
            if following is not None and rules.verification == OWN:
                chosen.append(following)
            elif following is not None:
                chosen.append(next(child for child in candidates if token[child] == token[following]))
        if following is not None:
            alone = rules.verification == "typical"  # the children of equal siblings are not candidates together
            reached = {child for child in candidates if token[child] == token[following] and not alone} or {following}
            for child in reached:
                if fates[child] in ("elder", "beyond", "other", "refused") or child == chosen[-1]:
                    fates[child] = "equal"
            fates[following] = "accepted"

    def probabilities(logs: dict[int, np.ndarray], row: list[int]) -> list[float | None]:
        there = set(present) if logs else set()
        return [float(np.exp(logs[row[node]][token[node]])) if node in there else None for node in range(len(token))]

    return Reasons(
        fates=fates,
        coins=coin,
        thresholds=threshold,
        chosen=chosen,
        draft=probabilities(log_draft, parent),
        target=probabilities(log_target, parent),
        kind="plain" if not present else "recovered" if candidates else "bonus",
        next_target=float(np.exp(log_target[accepted[-1]][next_token])),
    )


def shown(filters: Filters) -> Filters:
    """The filters to apply before probabilities are shown: the given ones, or none at temperature 0."""
    return filters if filters.temperature > 0 else Filters()


def _distributions(logits: Tensor, nodes: list[int], filters: Filters) -> dict[int, np.ndarray]:
    """For each of these nodes, the log-probabilities after it, fp64 [V], of logits [N, V] with the filters."""
    logs = filtered_logprobs(logits[nodes].float(), shown(filters))
    return dict(zip(nodes, logs.cpu().numpy(), strict=True))


def _chain(log_target: np.ndarray, log_draft: np.ndarray | None, independent: bool) -> Offers:
    """The state in which a node's children are tried one after the other, from natural log-probabilities fp64 [V].

    independent: whether the children were drawn with replacement
    """
    base_2 = np.log(2)
    return Offers(log_target / base_2, None if log_draft is None else log_draft / base_2, 1.0, independent)


def _rejected(chain: Offers, drawn: list[int]) -> list[float | None]:
    """The threshold of each child, if all children before it were rejected; None for a child that is skipped."""
    thresholds: list[float | None] = []
    for token in drawn:
        thresholds.append(chain.offer(token))
        if thresholds[-1] is not None:
            chain.pass_over(token)
    return thresholds


def _traverse_again(
    tree: VerifiedTree,
    rules: Rules,
    seed: int,
    accepted: list[int],
    logs_of: tuple[dict[int, np.ndarray], dict[int, np.ndarray]],
    found: tuple[list[str], list[float | None], list[float | None]],
) -> tuple[list[int], list[int]]:
    """Repeat traversal: write fates, coins and thresholds into `found`; return `chosen` and the last node's children.

    logs_of: the log-probabilities (target's, draft's) of nodes that have children, and of the last accepted node
    """
    fates, coin, threshold = found
    token = tree.tokens.tolist()
    parent = tree.parents.tolist()
    rank = tree.ranks.tolist()
    order = sorted(range(len(token)), key=lambda node: (rank[node], node))
    above = tree.noise_rows[tree.parents.clamp(min=0)]
    tossed = coins(seed, above.cpu().numpy(), tree.ranks.cpu().numpy()).tolist()
    paths: list[tuple[int, ...]] = [()]  # the tokens from the root to each node; they may be equal for several nodes
    for node in range(1, len(token)):
        paths.append((*paths[parent[node]], token[node] if token[node] >= 0 else ~node))
    first = {paths[node]: node for node in reversed(order) if token[node] >= 0}
    last = paths[accepted[-1]]
    on_path = {last[:length] for length in range(len(last) + 1)}

    def scores_of(side: int) -> Callable[[int], np.ndarray]:
        logs = {paths[node]: row / np.log(2) for node, row in logs_of[side].items()}
        return lambda node: logs[paths[node]] - logs[paths[node]].max()

    draft = scores_of(1) if rules.draft_filters.temperature > 0 else lambda _: None
    met: dict[tuple[int, ...], int] = {(): 0}
    with np.errstate(all="ignore"):
        for node, ending, _ in in_post_order(
            PlainTree(token, parent, order),
            scores_of(0),
            draft,
            len(token),
            held=rules.verification == "held_traversal",
            independent=rules.replacement,
        ):
            met[paths[node]] = node
            if node > 0:
                coin[node], threshold[node] = tossed[node], ending
                fates[node] = "rejected"
            if paths[node] == last:
                break
    for node in range(1, len(token)):
        path = paths[node]
        if path in on_path:
            fates[node] = "accepted" if node in accepted else "equal"
        elif path[:-1] in on_path and node not in met.values() and token[node] >= 0:
            rival = first[last[: len(path)]] if len(path) <= len(last) else None
            elder = rival is not None and (rank[rival], rival) < (rank[node], node)
            fates[node] = "elder" if elder else "skipped"
        elif path[:-1] in met and node not in met.values() and token[node] >= 0:
            fates[node] = "skipped"
    below = [node for node in order if token[node] >= 0 and node > 0 and paths[parent[node]] == last]
    return [first.get(paths[node], 0) for node in accepted], below


def _shares(chain: Offers, drawn: list[int]) -> list[float | None]:
    """The upper ends of held siblings' intervals in the range of their coin; None for a child that is skipped."""
    held = dict(chain.hold([*range(len(drawn))], drawn))
    ends = np.cumsum([held.get(index, 0.0) for index in range(len(drawn))]).tolist()
    return [end if index in held else None for index, end in enumerate(ends)]
