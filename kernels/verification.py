"""Verify a drafted token tree so that what is emitted follows the target's distribution exactly.

Some rules weigh children against the distribution that they were drawn from. For these `residual`, `held` and `k_seq`
say for one node which child is accepted, and by which distribution a recovered token is drawn:

    without_replacement   recursive rejection (Sequoia, RSD, DySpec; with one child, standard speculative sampling)
    with_replacement      the same for independent children (SpecInfer)
    kseq                  K-SEQ for independent children (SpecTr)
    held                  held siblings: a later child is tried before an accepted earlier one is returned (`held`)

`traversal` looks at the whole tree instead: the nodes below a node are tried before it.

    traversal             traversal verification (Weng et al. 2025); on a chain block verification (Sun et al. 2024)
    held_traversal        the same with held siblings, where all children of a node are drawn before any below them

The other methods choose the token first, and accept the child that happens to carry it:

    race                  argmax log P + G, with the Gumbels that drew the children (exponential races, ERSD)
    target_sample         a fresh sample of P (naive and top-k drafting)
    greedy                argmax P

Then a walk goes down from the root, and draws a recovered or bonus token where it ends. Siblings with equal tokens,
which independent draws may give, have equal contexts. So once their token is accepted, the children of all of them are
candidates.

This file has the reference; `verifying.launches` has the launches on a GPU, and `native.verification` the C++.
"""

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters, check_kernel_takes, filtered_scores
from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.nodes import (
    DRAFT_AWARE,
    EITHER_DRAW,
    VERIFICATION_RULES,
    WHOLE_TREE,
    Nodes,
    PlainTree,
    Verified,
    VerifyInputs,
    as_verified,
    check_devices,
    check_draft_logits,
    check_trees,
    check_values,
    depth_of,
    nothing_verified,
    per_sequence,
    plain_trees,
    sibling_order,
)
from heavypath.kernels.noise import Noise, Stream, check_seed, coins, gumbels
from heavypath.kernels.step_kernels import kernels_by
from heavypath.kernels.verifying.distributions import best_tokens, log_weights, used_row, verified_by_draws
from heavypath.kernels.verifying.k_seq import k_seq
from heavypath.kernels.verifying.residual import Offers
from heavypath.kernels.verifying.traversal import in_post_order

VERIFICATION_METHODS = tuple(VERIFICATION_RULES)


@operator
def verify_tree(
    tokens: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    *,
    method: str,
    replacement: bool = False,
    ranks: Tensor | None = None,
    max_depth: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int | None = None,
    draft_top_p: float | None = None,
    draft_min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Verified:
    """Walk down each sequence's drafted tree along the children that are accepted, and choose the token after the last.

    tokens:        LongTensor[B, N]; the root's is already committed, -1 marks an absent node
    parents:       LongTensor[N] or [B, N], parents[0] = -1, parents[i] < i
    target_logits: [B, N, V]; [b, i] is the target's distribution after node i
    draft_logits:  [B, N, V], the distribution that node i's children were drawn from; leaves' rows may hold anything.
                   Needed by the methods of DRAFT_AWARE where N > 1, else it may be None
    method:        "without_replacement" | "with_replacement" | "kseq" | "held" | "traversal" | "held_traversal" |
                   "race" | "target_sample" | "greedy". "held_traversal" is lossless only where all children of a node
                   were drawn before any node below them, which cannot be checked here
    replacement:   for "held", "traversal" and "held_traversal": whether children are independent draws; else they were
                   drawn without replacement. The names of other methods say how, so these refuse it
    ranks:         LongTensor shaped as parents: a node's index among its siblings in draw order (default: index order)
    max_depth:     edges of the deepest path considered (default: the tree's depth)
    temperature, top_k, top_p, min_p: the target's filters; draft_*: those the children were drawn with (default: the
                   target's). temperature 0 is for "greedy" only; draft_temperature 0 says the children are the
                   draft's top-k, each a point mass, which "kseq" does not take. Of point masses "held" decides as
                   "without_replacement" does: there is nothing to gain
    seed, rows:    the names of the noise after each node. rows is a LongTensor[B, N] >= 0 (default arange(B * N)). seed
                   is an integer or a LongTensor [] on the logits' device, which kernels read when they run. Coins,
                   recovered and bonus tokens use streams of their own, so children may have been drawn with the same
                   (seed, rows); a race needs that. Each step must have fresh rows or a fresh seed.
    impl:          see `implementation`; "triton" is two launches, or four for traversal, and one more for each side
                   that has filters, without host synchronisation where max_depth is given. It takes fp32, fp16 or bf16
                   logits. All accept the same nodes, except where a coin is within fp32 rounding of its threshold.

    Raises ValueError for bad shapes, dtypes or options, and on CPU for values out of range and NaN logits.
    """
    target_filters = Filters(temperature, top_k, top_p, min_p).check()
    draft_filters = target_filters.override(draft_temperature, draft_top_k, draft_top_p, draft_min_p).check("draft_")
    if method not in VERIFICATION_METHODS:
        raise ValueError(f"method must be one of {', '.join(VERIFICATION_METHODS)}, got {method!r}")
    if replacement and method not in EITHER_DRAW:
        raise ValueError(
            f"replacement is for method {' or '.join(map(repr, EITHER_DRAW))}: {method!r} says by its name "
            f"how children are drawn; leave it out, got replacement={replacement}"
        )
    if temperature == 0 and method != "greedy":
        raise ValueError(f"temperature 0 needs method 'greedy', got {method!r}")
    if draft_filters.temperature == 0 and not VERIFICATION_RULES[method].point_masses:
        raise ValueError(f"method {method!r} needs draft_temperature > 0: its children are independent draws; got 0")
    impl = choose_impl("verify_tree", impl, tokens, native=True)

    parents = check_trees(tokens, parents, target_logits, rows)
    batch, nodes = tokens.shape
    if method in DRAFT_AWARE and nodes > 1:
        if draft_logits is None:
            raise ValueError(f"method {method!r} needs draft_logits, got None")
        check_draft_logits(draft_logits, target_logits)
    draft_logits = draft_logits if method in DRAFT_AWARE and nodes > 1 else None
    ranks = None if ranks is None else per_sequence("ranks", ranks, batch, nodes)
    check_devices(tokens, draft_logits=draft_logits, ranks=ranks)
    check_seed(seed, tokens.device)
    if impl == "triton":
        check_kernel_takes(target_logits=target_logits, draft_logits=draft_logits)
    if tokens.device.type == "cpu":
        check_values(tokens, parents, ranks, rows, target_logits.shape[-1])
    depth = depth_of(parents, max_depth)
    if batch == 0:
        return nothing_verified(tokens, depth)
    inputs = VerifyInputs(
        nodes=Nodes(tokens, parents, ranks),
        target_logits=target_logits,
        draft_logits=draft_logits,
        method=method,
        replacement=replacement,
        max_depth=depth,
        target_filters=target_filters,
        draft_filters=draft_filters,
        noise=Noise(seed, rows),
    )
    return kernels_by(impl).verify(inputs)


@np.errstate(all="ignore")
def reference(inputs: VerifyInputs) -> Verified:
    """Verify one tree after the other, by the formulas."""
    inputs = inputs._replace(nodes=inputs.nodes.per_sequence())
    tokens, parents, ranks = inputs.nodes
    noise = inputs.noise
    rows = torch.arange(tokens.numel(), device="cpu").view_as(tokens) if noise.rows is None else noise.rows.cpu()
    ranks = sibling_order(parents) if ranks is None else ranks
    tossed = coins(int(noise.seed), rows.gather(1, parents.cpu().clamp(min=0)).numpy(), ranks.cpu().numpy())
    walk = _traverse if inputs.method in WHOLE_TREE else _walk_down
    ends: list[tuple[list[int], Any]] = [
        walk(_Sequence(inputs, number, tree, tossed[number].tolist(), rows[number].numpy()))
        for number, tree in enumerate(plain_trees(inputs.nodes))
    ]
    if inputs.method in DRAFT_AWARE:
        return verified_by_draws(inputs, ends)
    return as_verified([path for path, _ in ends], np.array([token for _, token in ends]), inputs)


class _Sequence:
    """One sequence of what is verified: its tree, the coins of its nodes, and what is read of its rows."""

    def __init__(self, inputs: VerifyInputs, number: int, tree: PlainTree, tossed: list[float], rows: np.ndarray):
        self.inputs = inputs
        self.number = number
        self.tree = tree
        self.coins = tossed
        self.rows = rows

    def log_target(self, node: int) -> np.ndarray:
        """log2 of the target's distribution after a node, up to a constant."""
        return log_weights(used_row(self.inputs.target_logits, "target", self.number, node), self.inputs.target_filters)

    def log_draft(self, row: int) -> np.ndarray | None:
        """The same of a row of the draft's; None for point masses."""
        filters = self.inputs.draft_filters
        draft = self.inputs.draft_logits
        if draft is None or filters.temperature == 0:
            return None
        return log_weights(used_row(draft, "draft", self.number, row), filters)

    def end(self, node: int, left: np.ndarray | None) -> tuple[list[int], np.ndarray]:
        """The path to the last accepted node, and the weights of the tokens after it: what is left there, or P."""
        weights = np.exp2(self.log_target(node)) if left is None or not left.any() else left
        return self.tree.path(node), weights

    def chosen(self, node: int) -> int:
        """The token that the target chooses after a node, where it does so before it looks at the children."""
        row = used_row(self.inputs.target_logits, "target", self.number, node)
        method = self.inputs.method
        keys = row - row.max()  # NaN in a row with NaN or +inf in it
        if method != "greedy":
            stream = Stream.DRAFT if method == "race" else Stream.TARGET
            keys = filtered_scores(row, row.max(keepdims=True), self.inputs.target_filters)
            keys = keys + gumbels(int(self.inputs.noise.seed), stream, self.rows[node, None], len(row))[0]
        return int(best_tokens(keys[None])[0])


def _traverse(sequence: _Sequence) -> tuple[list[int], np.ndarray]:
    """The path by traversal, and the weights of the tokens after it."""
    inputs = sequence.inputs
    tree = sequence.tree
    visits = in_post_order(
        tree,
        sequence.log_target,
        sequence.log_draft,
        inputs.max_depth,
        held=inputs.method == "held_traversal",
        independent=inputs.independent,
    )
    node, _, left = next(visit for visit in visits if visit.node == 0 or sequence.coins[visit.node] < visit.ending)
    return sequence.end(node, left)


def _walk_down(sequence: _Sequence) -> tuple[list[int], Any]:
    """The path, decided node by node from the root down, and the weights of the tokens after it, or the token."""
    inputs = sequence.inputs
    tree = sequence.tree
    node = 0  # the last accepted one
    depth = 0
    reached = [0]  # this node, and its siblings of equal token
    while True:
        children = tree.below(reached) if depth < inputs.max_depth else []
        if inputs.method in DRAFT_AWARE:
            child, left = _accepted(sequence, node, children)
            if child is None:
                return sequence.end(node, left)
        else:
            token = sequence.chosen(node)
            child = next(iter(tree.alike(children, token)), None)
            if child is None:
                return tree.path(node), token
        node = child
        depth += 1
        reached = tree.alike(children, tree.tokens[child])


def _accepted(sequence: _Sequence, node: int, children: list[int]) -> tuple[int | None, np.ndarray | None]:
    """The child that is accepted, or None and what the recovered token is drawn by."""
    inputs = sequence.inputs
    tokens = sequence.tree.tokens
    tossed = sequence.coins
    if not children:
        return None, None
    log_target = sequence.log_target(node)
    log_draft = sequence.log_draft(sequence.tree.parents[children[0]])  # of equal siblings' children, the first one's
    if inputs.method == "kseq":
        assert log_draft is not None
        thresholds, left = k_seq(log_target, log_draft, [tokens[child] for child in children])
        tried = zip(children, thresholds, strict=True)
        return next((child for child, most in tried if most is not None and tossed[child] < most), None), left
    offers = Offers(log_target, log_draft, 1.0, inputs.independent)
    if inputs.method == "held" and log_draft is not None:  # of point masses it is the same as rejection
        held = offers.hold(children, tokens)
        ends = zip(accumulate(weight for _, weight in held), held, strict=True)
        return next((child for end, (child, _) in ends if tossed[children[0]] < end), None), offers.left
    for child in children:
        chance = offers.offer(tokens[child])
        if chance is not None:
            if tossed[child] < chance:
                return child, None
            offers.pass_over(tokens[child])
    return None, offers.left
