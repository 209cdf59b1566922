"""Verify a drafted token tree so that what is emitted follows the target's distribution exactly.

Where children are weighed against the distribution that they were drawn from, `residual`, `held` and `k_seq` say for
one node which child is accepted, and by which distribution a recovered token is drawn:

    without_replacement   recursive rejection (Sequoia, RSD, DySpec; with one child, standard speculative sampling)
    with_replacement      the same for independent children (SpecInfer)
    kseq                  K-SEQ for independent children (SpecTr)
    held                  held siblings: a later child is tried before an accepted elder one is given out (`held`)

`traversal` looks at the whole tree instead: what is below a node is tried before the node itself.

    traversal             traversal verification (Weng et al. 2025); on a chain block verification (Sun et al. 2024)
    held_traversal        the same with held siblings, where all children of a node are drawn before any below them

The other methods choose the token first, and accept the child that happens to carry it:

    race                  argmax log P + G, with the Gumbels that drew the children (exponential races, ERSD)
    target_sample         a fresh sample of P (naive and top-k drafting)
    greedy                argmax P

Then a walk goes down from the root, and draws a recovered or bonus token where it ends. Siblings with equal tokens,
which independent draws may give, have equal contexts. So once their token is accepted, the children of all of them are
candidates.

Where siblings were drawn from different distributions (SpecInfer with several drafts), `laws` says what
"with_replacement" then is.

On a GPU a first launch decides for all nodes at once (`decision`, or `gumbel_topk` for one token per node), and a
second one walks (`walk`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.filtering import HIDDEN_BITS, Filters, filtered_scores
from heavypath.kernels.implementation import check_can_launch, choose_impl, opaque
from heavypath.kernels.native.verification import NATIVE_METHODS, verify
from heavypath.kernels.nodes import (
    Laws,
    Nodes,
    Verified,
    check_draft_logits,
    check_law_values,
    check_logits,
    check_values,
    paths_to,
    per_sequence,
    tree_depth,
)
from heavypath.kernels.noise import Noise, Stream, check_seed, coins, gumbels
from heavypath.kernels.ordering import sibling_order
from heavypath.kernels.sampling_kernel import launch_topk
from heavypath.kernels.verifying.decision import Decided, decide
from heavypath.kernels.verifying.distributions import best_token, log_probs, readable, used_rows
from heavypath.kernels.verifying.k_seq import k_seq
from heavypath.kernels.verifying.laws import LOGARITHMS, decide_by_laws, laws_chain
from heavypath.kernels.verifying.residual import residual_chain
from heavypath.kernels.verifying.rule import DRAFT_AWARE, VERIFICATION_METHODS, WHOLE_TREE, Rule
from heavypath.kernels.verifying.traversal import traverse
from heavypath.kernels.verifying.traversal_kernel import launch_traversal
from heavypath.kernels.verifying.walk import launch_walk

__all__ = ["DRAFT_AWARE", "VERIFICATION_METHODS", "Rule", "verify_tree", "verify_unchecked"]


@opaque
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
    laws: Tensor | None = None,
    impl: str = "auto",
) -> Verified:
    """Walk down each sequence's drafted tree along the children that are accepted, and choose the token after the last.

    tokens:        LongTensor[B, N]; the root's is already committed, -1 marks an absent node
    parents:       LongTensor[N] or [B, N], parents[0] = -1, parents[i] < i
    target_logits: [B, N, V]; [b, i] is the target's distribution after node i
    draft_logits:  [B, N, V], the distribution that node i's children were drawn from; leaves' rows are never read.
                   Needed by the methods of DRAFT_AWARE where N > 1, else it may be None
    method:        "without_replacement" | "with_replacement" | "kseq" | "held" | "traversal" | "held_traversal" |
                   "race" | "target_sample" | "greedy". "held_traversal" is lossless only where all children of a node
                   were drawn before any node below them, which cannot be checked here
    replacement:   for "held", "traversal" and "held_traversal": whether children are independent draws; else they were
                   drawn without replacement. The names of other methods say how, so these refuse it
    ranks:         LongTensor shaped as parents: a node's place among its siblings in draw order (default: index order)
    max_depth:     edges of the deepest path considered (default: the tree's depth)
    temperature, top_k, top_p, min_p: the target's filters; draft_*: those the children were drawn with (default: the
                   target's). temperature 0 is for "greedy" only; draft_temperature 0 says the children are the
                   draft's top-k, each a point mass, which "kseq" does not take. Of point masses "held" decides as
                   "without_replacement" does: there is nothing to gain
    seed, rows:    the names of the noise after each node; rows is a LongTensor[B, N] >= 0 (default arange(B * N)), and
                   seed an integer or a LongTensor [] on the logits' device, which kernels read when they run. Coins,
                   recovered and bonus tokens use streams of their own, so children may have been drawn with the same
                   (seed, rows); a race needs that. Each step must have fresh rows or a fresh seed.
    laws:          LongTensor[N] or [B, N], the row of draft_logits that each node was drawn from, where siblings were
                   drawn from different ones (default: the row of its parent); for "with_replacement" with
                   draft_temperature > 0. draft_logits may then have more rows than there are nodes, [B, M, V]; and
                   draws from different ones must be independent, each with a row of noise of its own. What it says of
                   the root means nothing
    impl:          "triton" is two launches, or four for traversal, without host synchronisation where
                   max_depth is given; it takes fp32, fp16 or bf16 logits, CUDA tensors, or any tensors under Triton's
                   interpreter. "native" is compiled code for CPU tensors, for the methods greedy, target_sample, race,
                   traversal and held_traversal. "torch" takes anything. "auto" is triton for CUDA tensors, else native
                   where the method has it and a compiler is there, else torch. All accept the same nodes, except where
                   a coin is within fp32 rounding of its threshold.

    Raises ValueError for bad shapes, dtypes or options, and on CPU for values out of range and NaN logits.
    """
    target_filters = Filters(temperature, top_k, top_p, min_p).check()
    draft_filters = target_filters.override(draft_temperature, draft_top_k, draft_top_p, draft_min_p).check("draft_")
    rule = Rule(method, replacement).check()
    if temperature == 0 and method != "greedy":
        raise ValueError(f"temperature 0 needs method 'greedy', got {method!r}")
    if method == "kseq" and draft_filters.temperature == 0:
        raise ValueError("method 'kseq' needs draft_temperature > 0: its children are independent draws; got 0")
    if laws is not None and (method != "with_replacement" or draft_filters.temperature == 0):
        raise ValueError(
            "laws are for method 'with_replacement' with draft_temperature > 0; "
            f"got method {method!r} with draft_temperature {draft_filters.temperature:g}; leave laws out"
        )
    impl = choose_impl("verify_tree", impl, tokens, native=method in NATIVE_METHODS)

    if tokens.dim() != 2 or tokens.dtype != torch.long or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be a LongTensor [B, N] with N >= 1, got {tokens.dtype} {[*tokens.shape]}")
    batch, nodes = tokens.shape
    parents = per_sequence("parents", parents, batch, nodes)
    check_logits("target_logits", target_logits, batch, nodes)
    if method in DRAFT_AWARE and nodes > 1:
        if draft_logits is None:
            raise ValueError(f"method {method!r} needs draft_logits, got None")
        check_draft_logits(draft_logits, target_logits, laws)
    draft_logits = draft_logits if method in DRAFT_AWARE and nodes > 1 else None
    if rows is not None and (rows.shape != tokens.shape or rows.dtype != torch.long):
        raise ValueError(f"rows must be a LongTensor {[batch, nodes]}, got {rows.dtype} {[*rows.shape]}")
    ranks = None if ranks is None else per_sequence("ranks", ranks, batch, nodes)
    laws = None if laws is None else per_sequence("laws", laws, batch, nodes)
    tensors = {
        "parents": parents,
        "target_logits": target_logits,
        "draft_logits": draft_logits,
        "ranks": ranks,
        "rows": rows,
        "laws": laws,
    }
    for name, value in tensors.items():
        if value is not None and value.device != tokens.device:
            raise ValueError(f"{name} must be on the device of tokens, {tokens.device}, got {value.device}")
    check_seed(seed, tokens.device)
    if impl == "triton":
        for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
            if logits is not None and logits.dtype not in HIDDEN_BITS:
                raise ValueError(
                    f"impl 'triton' takes fp32, fp16 or bf16 {name}, got {logits.dtype}; take impl 'torch'"
                )
        check_can_launch(tokens)
    if tokens.device.type == "cpu":
        check_values(tokens, parents, ranks, rows, target_logits.shape[-1])
        if laws is not None and draft_logits is not None:
            check_law_values(laws, draft_logits.shape[1])
    depth = tree_depth(parents) if max_depth is None else max_depth
    if depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}")
    if batch == 0:
        return Verified(tokens.new_zeros(0, depth + 1), tokens.new_zeros(0), tokens.new_zeros(0))
    run = _verifier(rule, impl)
    return run(
        Nodes(tokens, parents, ranks),
        target_logits,
        draft_logits if laws is None or draft_logits is None else Laws(draft_logits, laws),
        rule=rule,
        max_depth=depth,
        target_filters=target_filters,
        draft_filters=draft_filters,
        noise=Noise(seed, rows),
    )


def verify_unchecked(
    nodes: Nodes,
    target_logits: Tensor,
    draft_logits: Tensor | Laws | None,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """`verify_tree` without its checks, which cost a decoder on a CPU about 20% of its time.

    target_logits, draft_logits: [B, N, V]; draft_logits is None for a rule whose method is not in DRAFT_AWARE, and for
    trees of a root alone, and `Laws` where siblings were drawn from different distributions. noise.rows:
    LongTensor[B, N]. The rest as `verify_tree`; impl is "auto".
    """
    impl = choose_impl("verify_unchecked", "auto", nodes.tokens, native=rule.method in NATIVE_METHODS)
    run = _verifier(rule, impl)
    return run(
        nodes.per_sequence(),
        target_logits,
        draft_logits,
        rule=rule,
        max_depth=max_depth,
        target_filters=target_filters,
        draft_filters=draft_filters,
        noise=noise,
    )


def _verifier(rule: Rule, impl: str) -> Callable[..., Verified]:
    """The function that verifies by a rule, with the arguments of `verify_unchecked`."""
    if impl == "triton":
        return _launch
    if impl == "native":
        return verify
    return traverse if rule.method in WHOLE_TREE else _reference


@np.errstate(all="ignore")
def _reference(
    nodes: Nodes,
    target_logits: Tensor,
    draft_logits: Tensor | Laws | None,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """Walk down from the root, level by level, for all sequences at once.

    Parents and ranks of nodes are [B, N], logits [B, N, V]. It computes in NumPy, whose calls cost less than PyTorch's
    on short rows.
    """
    method, (tokens, parents, ranks) = rule.method, nodes
    batch, count = tokens.shape
    device, vocab_size = tokens.device, target_logits.shape[-1]
    checked = device.type == "cpu"
    ranks = sibling_order(parents) if ranks is None else ranks
    seed = int(noise.seed)
    token, parent, rank = (field.cpu().numpy() for field in (tokens, parents, ranks))
    row = np.arange(batch * count).reshape(batch, count) if noise.rows is None else noise.rows.cpu().numpy()
    index, every = np.arange(count), np.arange(batch)[:, None]
    law = None
    if isinstance(draft_logits, Laws):
        draft_logits, law = draft_logits.logits, draft_logits.rows.expand(batch, -1).cpu().numpy()
    target, draft = readable(target_logits), None if draft_logits is None else readable(draft_logits)
    above = np.maximum(parent, 0)
    present = (parent >= 0) & (token >= 0)
    order = rank * count + index  # by rank, then by index
    coin = np.zeros(token.shape) if draft is None else coins(seed, row[every, above], rank)
    last, length = np.zeros((2, batch), dtype=np.int64)  # the last accepted node, and how many were accepted
    next_token = last - 1

    # Of the A sequences that have accepted a node at every level so far:
    sequence, node = np.arange(batch), last  # the last accepted node: its distribution decides
    reached = index + every * 0 == 0  # that node, and its siblings of equal token
    state = [token, above, present, order, coin, row]
    for level in range(max_depth + 1):
        token, above, present, order, coin, row = state
        here = every[: len(node)]
        noise_rows = row[here[:, 0], node]
        candidate = reached[here, above] & present  # [A, N]
        if level == max_depth:
            candidate[:] = False

        if method in DRAFT_AWARE:
            offered = candidate.sum(1)
            width = int(offered.max())
            children = np.where(candidate, order, count * count).argsort(1)[:, :width]  # [A, K]
            drawn = np.where(index[:width] < offered[:, None], token[here, children], -1)
            target_row, largest = used_rows(target, "target", sequence, node, checked)
            log_target = log_probs(target_row, largest, target_filters)  # [A, V]
            choice, recovered = offered * 0 - 1, log_target
            inner = offered.nonzero()[0]
            if len(inner):
                assert draft is not None
                log_draft, tried, their_coins = None, drawn[inner], coin[here, children][inner]
                if draft_filters.temperature > 0 and law is None:
                    first = above[inner, children[inner, 0]]  # of equal siblings, one that has children
                    draft_row, largest = used_rows(draft, "draft", sequence[inner], first, checked)
                    log_draft = log_probs(draft_row, largest, draft_filters)
                if law is not None:
                    own = law[sequence[inner, None], children[inner]]  # [A', K]
                    own = np.where(tried >= 0, own, own[:, :1])
                    used = (used_rows(draft, "draft", sequence[inner], one, checked) for one in own.T)
                    log_laws = (log_probs(rows, largest, draft_filters) for rows, largest in used)
                    choice[inner], recovered = laws_chain(log_target[inner], log_laws, tried, their_coins)
                elif method == "kseq":
                    assert log_draft is not None
                    choice[inner], recovered = k_seq(log_target[inner], log_draft, tried, their_coins)
                else:
                    choice[inner], recovered = residual_chain(
                        log_target[inner], log_draft, tried, their_coins, rule.independent, held=method == "held"
                    )
            stop = (choice < 0).nonzero()[0]
            if len(stop):
                weights = recovered
                if len(inner) < len(node):
                    weights = np.exp2(log_target)
                    if len(inner):
                        weights[inner[choice[inner] < 0]] = recovered
                    weights = weights[stop]
                keys = np.log(weights.astype(np.float64))
                keys += gumbels(seed, Stream.TARGET, noise_rows[stop], vocab_size)
                next_token[sequence[stop]] = best_token(keys)
            taken = choice >= 0
            if not taken.any():
                break
            node = children[here[:, 0], choice]  # where taken
            reached = candidate & (token == token[here[:, 0], node][:, None])
        else:
            target_row, largest = used_rows(target, "target", sequence, node, checked)
            keys = target_row - largest  # NaN in a row with NaN or +inf in it
            if method != "greedy":
                stream = Stream.DRAFT if method == "race" else Stream.TARGET
                keys = filtered_scores(target_row, largest, target_filters)
                keys += gumbels(seed, stream, noise_rows, vocab_size)
            next_token[sequence] = winner = best_token(keys)
            reached = candidate & (token == winner[:, None])
            taken = reached.any(1)
            if not taken.any():
                break
            node = np.where(reached, order, count * count).argmin(1)

        if not taken.all():
            state = [field[taken] for field in state]
            sequence, node, reached = sequence[taken], node[taken], reached[taken]
        last[sequence] = node
        length[sequence] += 1

    path = paths_to(last, length, parent, max_depth)
    return Verified(*(torch.from_numpy(field).to(device) for field in (path, length, next_token)))


def _launch(
    nodes: Nodes,
    target_logits: Tensor,
    draft_logits: Tensor | Laws | None,
    *,
    rule: Rule,
    max_depth: int,
    target_filters: Filters,
    draft_filters: Filters,
    noise: Noise,
) -> Verified:
    """As `_reference`, in two launches, and one for the filters of each side that has any."""
    method, (tokens, parents, ranks) = rule.method, nodes
    parents = parents if parents.stride(1) == 1 else parents.contiguous()
    ranks = ranks if ranks is None or ranks.stride(1) == 1 else ranks.contiguous()
    nodes = Nodes(tokens.contiguous(), parents, ranks)
    noise = Noise(noise.seed, None if noise.rows is None else noise.rows.contiguous())
    target = target_logits if target_logits.stride(2) == 1 else target_logits.contiguous()
    rows = None
    if isinstance(draft_logits, Laws):
        draft_logits, rows = draft_logits.logits, draft_logits.rows.expand(tokens.shape)
    draft = draft_logits if draft_logits is None or draft_logits.stride(2) == 1 else draft_logits.contiguous()
    if method in WHOLE_TREE and draft is not None:
        return launch_traversal(
            nodes,
            target,
            draft,
            rule=rule,
            max_depth=max_depth,
            target_filters=target_filters,
            draft_filters=draft_filters,
            noise=noise,
        )
    if rows is not None:
        assert draft is not None
        decided, draft = decide_by_laws(
            nodes,
            target,
            Laws(draft, rows if rows.stride(1) == 1 else rows.contiguous()),
            target_filters=target_filters,
            draft_filters=draft_filters,
            noise=noise,
        )
        draft_filters = LOGARITHMS
    elif method in DRAFT_AWARE:
        decided = decide(
            nodes,
            target,
            draft,
            rule=rule,
            target_filters=target_filters,
            draft_filters=draft_filters,
            noise=noise,
        )
    else:
        winner, _, _ = launch_topk(
            target.reshape(-1, target.shape[-1]),
            1,
            Filters(temperature=0.0) if method == "greedy" else target_filters,
            noise=Noise(noise.seed, None if noise.rows is None else noise.rows.view(-1)),
            stream=Stream.DRAFT if method == "race" else Stream.TARGET,
        )
        decided = Decided(winner, left_out=None, facts=None, marks=None)
    return launch_walk(
        nodes,
        target,
        target if draft is None else draft,
        decided,
        max_depth=max_depth,
        target_filters=target_filters,
        draft_filters=draft_filters,
        noise=noise,
    )
