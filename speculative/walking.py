"""Count which of the draft's children are accepted, along sequences that the target generates.

At every token the draft offers `children` tokens, and rejection or the method's own verification decides:

    child j is accepted, and the tree has it  ->  the sequence continues with it, one level deeper
    otherwise                                 ->  the sequence continues with the token, which is a new root

The index of the accepted child, if any, is the token's *rank*. In another tree the same ranks occur, as far as it has
these children: the children drawn first, and the decisions about them, do not depend on those drawn later. So what any
tree accepts can be computed from the ranks afterwards, see `trees.ranks`. The tree used here only decides at which
depth a token counts, and how many of the last tokens a head sees as drafted. Without a tree all children exist down to
`depth` levels; after these the target draws a bonus token. With independent sequences (SpecInfer, SpecTr), those that
began with the accepted token continue together, with one child each.

Held siblings and traversal accept more than rejection does, depending on siblings and nodes below. That is not a
property of one token, so rejection is counted for them.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative.decoding.drafted import Reach, check_distributions, root_feed
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences, root_rows
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import REJECTION, VERIFIERS
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.profile import MeasuredAcceptance
from heavypath.speculative.trees.planning import greedy_tree
from heavypath.speculative.trees.ranks import NONE, UNKNOWN, children_of
from heavypath.speculative.trees.tails import CHILDREN, of_any_pair
from heavypath.speculative.trees.tree import TokenTree

NODES = 64  # size of the tree that is walked along
DEPTH = 8  # levels that are counted for independent sequences
PARTS = 4  # the sequences are divided into this many parts, each of which is counted for all ways in turn
GROWN = 16  # a profile keeps moments per depth for this many children
LEAST_TOKENS = 8  # length that each sequence reaches even if time is over
ACCEPTANCE_SHARE = 0.5  # share of the time limit for acceptance
DRAWING_SHARE = 0.2  # share of that for drawing temperatures, for drafts that have them
Report = Callable[[str], object]


class Way(NamedTuple):
    """A combination of draw and verification whose acceptance is measured.

    draw: how children are drawn; verification: how they are verified; by the names that `Method.at` returns
    sequence_count: number of independent sequences; None for trees that may branch at every node
    temperatures: for each depth the number by which the draft's logits are divided; empty for 1 at all depths
    """

    draw: str
    verification: str
    sequence_count: int | None
    temperatures: tuple[float, ...] = ()

    @property
    def counted(self) -> "Way":
        """The way whose acceptance is counted for this one: with rejection instead of held siblings or traversal."""
        by_rejection = self.draw in REJECTION and self.verification in VERIFIERS
        return self._replace(verification=self.draw) if by_rejection else self

    def drawn_at(self, temperatures: tuple[float, ...]) -> "Way":
        """This way with temperatures; unchanged for draw "top_k", which does not depend on them."""
        return self if self.draw == "top_k" else self._replace(temperatures=temperatures)

    def __str__(self) -> str:
        sequences = "" if self.sequence_count is None else f", {self.sequence_count} sequences"
        return f"drawn {self.draw}, verified by {self.verification}{sequences}".replace("_", " ")


class Extent(NamedTuple):
    """On how much text acceptance is counted, and for which children.

    tokens, sequences: length and number of the sequences that the target generates
    depth: levels that are counted
    children: how many children are offered at each token
    seconds: after this time the sequences are cut off, but not before they have `LEAST_TOKENS`
    tree: an accepted child leads one level deeper only if this tree has it; None for all children. It has fewer levels
        than `depth`, and is ignored for independent sequences
    """

    tokens: int
    sequences: int
    depth: int = DEPTH
    children: int = CHILDREN
    seconds: float = math.inf
    tree: TokenTree | None = None

    @classmethod
    def of_trees(cls, tokens: int, sequences: int, levels: int | None, seconds: float = math.inf) -> "Extent":
        """The extent for planning trees. levels: most levels that the draft can draft, None for any number."""
        tree = greedy_tree(of_any_pair(), NODES, levels)
        return cls(tokens, sequences, max(tree.depth + 1, DEPTH), CHILDREN, seconds, tree)


class Counts(NamedTuple):
    """Counts of acceptance along sequences, on the CPU.

    accepted: LongTensor[depth, children], how often child j of a node at depth d was accepted; of siblings with equal
        tokens, the first. For independent sequences, children below the first level count as child 0
    reached: LongTensor[depth], at how many nodes at depth d children were offered
    moments: fp64 [depth, children, 5], sums over the nodes at which child k was tried: of 1, q, q^2, y and q y. q is
        the draft's probability of the child among the tokens not yet drawn; y is 1 if the child was accepted, else 0
    ranks: for each set of sequences, int16 [S, T]: the index of the child that became each token, NONE if no child was
        accepted, UNKNOWN if none was offered
    """

    accepted: Tensor
    reached: Tensor
    moments: Tensor
    ranks: tuple[Tensor, ...]

    def plus(self, other: "Counts") -> "Counts":
        """The sum of these counts and others: the counts on the sequences of both."""
        return Counts(
            self.accepted + other.accepted,
            self.reached + other.reached,
            self.moments + other.moments,
            self.ranks + other.ranks,
        )


@torch.inference_mode()
def measure_ways(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], wanted: Sequence[tuple[Way, Filters]], extent: Extent,
    seed: int, seconds: float, report: Report,
) -> tuple[MeasuredAcceptance, ...]:  # fmt: skip
    """Measure the acceptance of each way with its filters. Ways take turns, each on a part of the sequences.

    prompts: LongTensors [T], taken in turn
    wanted: the ways, each with the filters of target and draft
    extent: on how much text acceptance is counted
    seconds: time limit. After it no further part begins, and the sequences of the first part are cut off if the part
        would take longer
    report: called with lines of text about the progress

    Raises ValueError if even sequences of `LEAST_TOKENS` tokens would take more than twice the time.
    """
    begin = time.perf_counter()
    every = wanted
    wanted = list(dict.fromkeys((way.counted, filters) for way, filters in wanted))
    counted: dict[tuple[Way, Filters], Counts] = {}
    parts = list(parts_of(extent.sequences))
    for number, (first, count) in enumerate(parts):
        chosen = [prompts[(first + place) % len(prompts)] for place in range(count)]
        read = ReadPrompts(target, draft, chosen, extent._replace(sequences=count))
        for index, (way, filters) in enumerate(wanted):
            done = number * len(wanted) + index
            spent = time.perf_counter() - begin
            left = min(spent / done * (len(wanted) * len(parts) - done), seconds - spent) if done else seconds
            report(
                f"acceptance, pass {number + 1} of {len(parts)}, {index + 1} of {len(wanted)}: temperature "
                f"{filters.temperature:g}, {way}, about {max(0.0, left):.0f} s left for acceptance"
            )
            part = extent._replace(
                sequences=count, seconds=(seconds - spent) / (len(wanted) - index) if number == 0 else math.inf
            )
            before_walk = time.perf_counter()
            counts = _counted(read, [(way, filters)], part, seed + number)[0]
            if not done:
                needed = before_walk - begin + len(wanted) * (time.perf_counter() - before_walk)
                _check_time(counts, needed, seconds)
            before = counted.get((way, filters))
            counted[way, filters] = counts if before is None else before.plus(counts)
        if time.perf_counter() - begin > seconds * (number + 1) / (number + 2):  # another pass would end after it
            break
    return tuple(as_measured(way, filters, counted[way.counted, filters]) for way, filters in every)


def _check_time(counts: Counts, needed: float, seconds: float) -> None:
    """Raise ValueError if `needed` seconds are more than twice `seconds`, though sequences are as short as allowed.

    counts: of the first walk, which show how long its sequences are
    """
    if counts.ranks[0].shape[1] <= LEAST_TOKENS and needed > 2 * seconds:
        raise ValueError(
            f"to count acceptance would take about {needed:.0f} s, more than its half of the limit, {seconds:.0f} s: "
            f"give a limit of {math.ceil(needed / ACCEPTANCE_SHARE)} s (limit=, --limit) or fewer temperatures. If the "
            "models are small, the machine is busy: calibrate while it is idle, with fewer threads than it has free "
            "cores (OMP_NUM_THREADS=1 where one core is free)"
        )


def parts_of(sequences: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into parts: for each part, the index of its first sequence and the number of its sequences."""
    size = -(-sequences // PARTS)
    for first in range(0, sequences, size):
        yield first, min(size, sequences - first)


def as_measured(way: Way, filters: Filters, counts: Counts) -> MeasuredAcceptance:
    """The counts in the form that a profile stores."""
    return MeasuredAcceptance(
        draw=way.draw,
        verification=way.verification,
        sequence_count=way.sequence_count,
        filters=filters,
        accepted=counts.accepted.tolist(),
        reached=counts.reached.tolist(),
        moments=counts.moments.sum(0).tolist(),
        moments_by_depth=counts.moments[:DEPTH, :GROWN].tolist() if way.draw == "without_replacement" else [],
        temperatures=[*way.temperatures],
        texts=[" ".join(map(str, text)) for part in counts.ranks for text in part.tolist()],
    )


class ReadPrompts:
    """Prompts that both models have read, except their last tokens. Each walk along them begins with a copy.

    tokens: LongTensor[S, T], padded on the right; lengths: LongTensor[S]
    """

    def __init__(self, target: Forward, draft: Draft, prompts: Sequence[Tensor], extent: Extent):
        """prompts: LongTensors [T], reused until there are `extent.sequences` of them"""
        self.target = target
        self.draft = draft
        chosen = [prompts[place % len(prompts)] for place in range(extent.sequences)]
        self.lengths = torch.tensor([len(prompt) for prompt in chosen], device=target.device)
        self.tokens = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        self._rows = self.tokens.shape[1] + extent.tokens + 1
        self._caches = target.new_cache(len(chosen), self._rows), draft.new_cache(len(chosen), self._rows)
        target_cache, draft_cache = self._caches
        target_cache.begin(self.lengths - 1)
        target.prefill(self.tokens, target_cache, taps=draft.taps(draft_cache))
        draft_cache.begin(self.lengths - 1)
        for part, cache in draft.parts(draft_cache):
            part.prefill(self.tokens, cache)

    def copies(self, count: int) -> tuple[Any, Any]:
        """New caches of target and draft for `count` walks: sequence s of walk w is number w S + s."""
        sequences, longest = self.tokens.shape
        every = count * sequences
        new = self.target.new_cache(every, self._rows), self.draft.new_cache(every, self._rows)
        for own, read in zip(new, self._caches, strict=True):
            own.begin((self.lengths - 1).repeat(count))
            for number in range(every):
                own.receive(number, read, number % sequences, longest)
        return new


def walk(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], way: Way, filters: Filters, extent: Extent, seed: int
) -> Counts:
    """Count what is offered and accepted along sequences that the target generates.

    prompts: LongTensors [T], reused until there are extent.sequences of them

    For independent sequences, `way.sequence_count` replaces extent.children.
    """
    return walk_together(target, draft, prompts, [(way, filters)], extent, seed)[0]


@torch.inference_mode()
def walk_together(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], wanted: Sequence[tuple[Way, Filters]], extent: Extent,
    seed: int, report: Report = lambda line: None,
) -> list[Counts]:  # fmt: skip
    """Count acceptance for several ways, each with its own filters and sequences, all in the same forward passes.

    prompts: LongTensors [T], reused until there are extent.sequences of them for each way
    report: called with lines of text about the progress

    Returns the counts of each way, as `walk` does.
    """
    return _counted(ReadPrompts(target, draft, prompts, extent), wanted, extent, seed, report)


def _counted(
    read: ReadPrompts, wanted: Sequence[tuple[Way, Filters]], extent: Extent, seed: int,
    report: Report = lambda line: None,
) -> list[Counts]:  # fmt: skip
    """The counts of several ways along the same prompts, in the same forward passes."""
    made = [partial(_Walked, way, filters, extent, read.target.vocab_size, seed) for way, filters in wanted]
    return [each.counts() for each in along(read, made, extent, seed, report)]


def along(
    read: ReadPrompts, wanted: Sequence[Callable[[Sequences], Any]], extent: Extent, seed: int, report: Report
) -> list[Any]:
    """Generate several sets of sequences in the same forward passes. Returns an observer for each set.

    wanted: for each set, a function that makes the observer, given the `Sequences` of the set. `observer.at`,
        LongTensor[S], is the depth of the next token. `observer.go_on` is called for each token with the logits of the
        draft [S, V] and of the target [S, 1, V], and appends the next token
    """
    tokens = extent.tokens
    sequences = extent.sequences
    depth = extent.depth
    target = read.target
    draft = read.draft
    every = sequences * len(wanted)
    target_cache, draft_cache = read.copies(len(wanted))
    taps = draft.taps(draft_cache)
    state = Sequences.room_for(every, new_tokens=tokens, stops=1, vocab_size=0, count_slots=0, device=target.device)
    state.begin(
        read.tokens.repeat(len(wanted), 1),
        read.lengths.repeat(len(wanted)),
        new_tokens=tokens,
        stops=read.lengths.new_zeros(0),
        sequence_ids=torch.arange(sequences, device=target.device).repeat(len(wanted)),
        seed=seed,
    )
    parts = state.numbers.split(sequences, 1)
    walked = [each(replace(state, numbers=numbers)) for each, numbers in zip(wanted, parts, strict=True)]
    begin = time.perf_counter()
    one = torch.ones(1, dtype=torch.long, device=target.device)
    root = torch.zeros_like(state.root)[:, None]
    for number in range(tokens):
        spent = time.perf_counter() - begin
        if number >= LEAST_TOKENS and spent >= extent.seconds:
            break
        if number:
            left = min(spent / number * (tokens - number), max(0.0, extent.seconds - spent))
            report(f"acceptance, token {number + 1} of up to {tokens}, about {left:.0f} s left for acceptance")
        here = state.lengths[:, None]
        longest = int(state.lengths.max())
        at = torch.cat([each.at for each in walked])
        feed = replace(root_feed(state, Reach(longest, depth + 1), 2, depth), drafted=at.where(at < depth, 0))
        after = draft(feed, draft_cache)[:, -1]
        mask = TreeMask(prefix_length=state.lengths, visible_rows=longest + 1, subtree_end=one)
        logits = target(state.root[:, None], here, here, target_cache, mask, taps=taps)
        for each, own_after, own_logits in zip(walked, after.split(sequences), logits.split(sequences), strict=True):
            each.go_on(own_after, own_logits)
        state.produced.add_(1)
        target_cache.advance(root, state.produced)
        draft_cache.advance(root, state.produced)
    return walked


class _Walked:
    """Observes the sequences of one way: offers children, verifies them, and counts which are accepted."""

    def __init__(self, way: Way, filters: Filters, extent: Extent, vocab_size: int, seed: int, state: Sequences):
        self._way = way
        self._rules = Rules(way.draw, way.verification, filters, filters)
        self._depth = extent.depth
        self._state = state
        self._seed = seed
        self._children = min(way.sequence_count or extent.children, vocab_size)
        device = state.root.device
        self._table = None if extent.tree is None or way.sequence_count else children_of(extent.tree, device)
        self._node = torch.zeros_like(state.lengths)  # the current node of the tree that is walked along
        self._star = torch.tensor([-1] + [0] * self._children, device=device)
        self.at = torch.zeros_like(state.lengths)  # depth of the current node: how many tokens in a row were accepted
        self._accepted = torch.zeros(extent.depth, self._children, dtype=torch.long, device=device)
        self._reached = torch.zeros(extent.depth, dtype=torch.long, device=device)
        self._moments = torch.zeros(extent.depth, self._children, 5, dtype=torch.float64, device=device)
        drawn_at = [*way.temperatures[: extent.depth]] or [1.0]
        drawn_at += drawn_at[-1:] * (extent.depth + 1 - len(drawn_at))
        self._sharper = 1 / torch.tensor(drawn_at, device=device)
        self._place = torch.arange(self._children, device=device)
        self._alive = torch.full_like(state.lengths, self._children)  # how many children are offered
        self._ranks: list[Tensor] = []
        host = device.type == "cpu"
        rows = (len(state.root), self._children + 1, vocab_size)
        self._rows = tuple(torch.zeros(rows, device=device) if host else None for _ in range(2))

    def go_on(self, after: Tensor, logits: Tensor) -> None:
        """Offer children at the last token of each sequence, verify them, count, and append the next token.

        after: the draft's logits [S, V]; logits: the target's [S, 1, V]
        """
        state = self._state
        way = self._way
        depth = self._depth
        children = self._children
        at = self.at
        rules = self._rules
        noise = root_rows(state.noise, state.lengths)
        independent = way.sequence_count is not None
        after = after * self._sharper[at][:, None] if way.temperatures else after
        drawn = gumbel_topk(
            after, children, **rules.drawing_filters._asdict(), seed=self._seed, rows=noise,
            replacement=rules.replacement,
        )  # fmt: skip
        check_distributions("draft", drawn.keys[:, None], state, 0)
        here_offered = (self._place < self._alive[:, None]) & (at < depth)[:, None]
        offered = torch.cat([state.root[:, None], drawn.tokens.where(here_offered, -1)], 1)
        verified = rules.verify(
            Nodes(offered, self._star, None), self._of_star(logits, self._rows[0]),
            self._of_star(after[:, None], self._rows[1]), max_depth=1,
            noise=Noise(self._seed, noise[:, None].expand(-1, children + 1)),
        )  # fmt: skip
        child = verified.path[:, 1]
        hit = verified.length > 0
        token = offered.gather(1, child.clamp(min=0)[:, None])
        counted = (child - 1).where(at == 0, 0) if independent else child - 1
        self._reached += torch.bincount(at[at < depth], minlength=depth)
        places = torch.bincount((at * children + counted)[hit], minlength=self._accepted.numel())
        self._accepted += places.view_as(self._accepted)
        self._ranks.append((child - 1).where(hit, NONE).where(at < depth, UNKNOWN).to(torch.int16))
        seen = _moments(drawn.logprobs.double().exp(), (child - 1).where(hit, children))
        self._moments.index_add_(0, at[at < depth], seen[at < depth])
        if independent:
            self._alive = (offered[:, 1:] == token).sum(1).where(hit, children)
        goes_on = hit
        if self._table is not None:
            rank = (child - 1).clamp(min=0)
            known = hit & (rank < self._table.shape[1])
            self._node = self._table[self._node, rank.clamp(max=self._table.shape[1] - 1)].where(known, 0)
            goes_on = self._node > 0
        self.at = (at + 1).where(goes_on, 0)
        state.previous.copy_(state.root)
        state.root.copy_(token[:, 0].where(hit, verified.next_token))
        state.lengths.add_(1)

    def _of_star(self, root: Tensor, rows: Tensor | None) -> Tensor:
        """Logits [S, 1 + K, V] of a root with K children, from the root's [S, 1, V].

        The children's only give bonus tokens, which a walk ignores. So on the host, whose verification copies logits
        that do not lie one after the other, they stay the zeros that are in `rows`.
        """
        if rows is None:
            return root.expand(-1, self._children + 1, -1)
        rows[:, :1] = root
        return rows

    def counts(self) -> Counts:
        ranks = torch.stack(self._ranks, 1).cpu()
        return Counts(self._accepted.cpu(), self._reached.cpu(), self._moments.cpu(), (ranks,))


def _moments(probs: Tensor, choice: Tensor) -> Tensor:
    """The terms of `Counts.moments` of one step, fp64 [S, K, 5].

    probs: fp64 [S, K], the draft's probabilities of the children
    choice: LongTensor[S], the accepted child; K if there is none
    """
    left = (1 - pad(probs[:, :-1], (1, 0)).cumsum(1)).clamp(min=1e-12)
    share = (probs / left).clamp(max=1)
    index = torch.arange(probs.shape[1], device=probs.device)
    tried = ((index <= choice[:, None]) & (probs > 0)).double()
    hit = (index == choice[:, None]).double()
    return tried[..., None] * torch.stack([1 + 0 * share, share, share**2, hit, share * hit], -1)
