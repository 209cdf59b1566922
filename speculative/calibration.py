"""Measure what planning a tree needs: what steps cost on this machine, and how often which child is accepted.

Costs are those of real decoding, which `visits` times. Acceptance is counted first, so that only sizes are timed that
could be planned.

Acceptance [depth, child] is counted on a walk along text that the target itself writes. At every token the draft offers
`children` tokens, and the verifier decides as it would at a node of a tree:

    accepted child j  ->  the text goes on with it, one level deeper; the next token is offered below it
    none accepted     ->  the text goes on with the recovered token, which is a new root

The nodes of a tree meet the same, as long as the tree has the children that are accepted. So nothing is assumed about
how acceptance depends on depth (Sequoia measures one vector for all depths). After `depth` accepted tokens the target
draws a bonus token, as it does below the deepest leaves of a tree. Of independent sequences (SpecInfer, SpecTr) those
that began with the accepted token go on together, with one child each.
"""

import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.drafted import Reach, check_distributions, root_feed
from heavypath.speculative.decoding.noise_rows import root_rows
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.drafts.kinds import AnyDraft, as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.methods import METHODS, Kind, measured_row, row_of
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.forward_of import check_alone, forward_of
from heavypath.speculative.output.options import NOTHING
from heavypath.speculative.profile import (
    MeasuredAcceptance,
    Profile,
    streaming_of,
)
from heavypath.speculative.visits import StreamedVisits, Visits, costs_by_batch, default_batch_sizes

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTH = 8
CHILDREN = 8
SEQUENCE_COUNTS = (2, 3, 4, 6, 8)  # of SpecInfer and SpecTr: how many are drawn decides how often one is accepted
PARTS = 4  # of the texts walked along: acceptance is counted in so many passes over all ways
LEAST_TOKENS = 8  # of each text, where the time is over
ACCEPTANCE_SHARE = 0.5  # of the time limit
LIMIT = 90.0  # seconds
STREAMED_SIZES = (1, 8, 32, 64, 96, 128, 192, 256, 384, 512, 768)
STREAMED_PASSES = 80  # of a target whose weights are read in each: the time limit, if none is given
STREAMED_PROMPT = 16  # tokens of each text that is continued there: all ways have caches at the same time
Report = Callable[[str], object]

logger = logging.getLogger(__name__)


def calibrate(
    target: PreTrainedModel,
    draft: AnyDraft,
    *,
    prompts: Sequence[Tensor] = (),
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    sizes: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    tokens: int = 48,
    sequences: int = 48,
    seed: int = 0,
    on_progress: Report | None = None,
    limit: float | None = None,
    verifier: str | None = None,
) -> Profile:
    """Measure costs and acceptance of a pair of models, for `SpeculativeDecoder(..., profile=)`.

    prompts: LongTensors [T] to be continued, as many as `sequences` of them. Without any, the target samples some of
        its own, from its first token on.
    temperatures, top_k, top_p, min_p: how the target will be sampled; temperature 0 takes no filters.
    sizes: nodes of the trees that are timed, root included. Default: up to 256, and up to 768 of a streamed target.
    batch_sizes: numbers of sequences that are decoded together, for each of which trees are timed; a single sequence is
        always among them. Default: 1, 2, 4, 8 and 16; on a GPU also 32 and 64, as far as there is memory. A streamed
        target is timed with 1 alone.
    tokens, sequences: length of each text that is walked along, and number of these texts. Of a streamed target it is
        the number for all ways together, at least two for each.
    on_progress: called with a line of text that says what is going on and about how long it will take.
    limit: seconds that it may take. Half of them are for acceptance. The rest, with those that acceptance left, are for
        costs: half of that for one sequence, the rest for larger batches alike. A few rounds are timed in any case.
        Figures for which the time was short have a larger error in the profile. Default: 90, or the time of 80 passes
        of a streamed target if that is more.
    verifier: what verifies the methods that take one, as `SpeculativeDecoder` has it by name, and its default.

    A streamed target reads its weights in every pass, which may take seconds. So all ways are counted in the same
    passes, and steps are timed in two rounds, after prompts of one token.

    Raises ValueError for models that do not fit each other, for `Lookahead` and `Merge`, which need whole steps, and
    for settings out of range. Also for a limit in which acceptance cannot be counted, and where the machine is so busy
    that the costs are noise.
    """
    begin = time.perf_counter()
    for temperature in temperatures:
        Filters(temperature, top_k, top_p, min_p).check()
    if tokens < 2 or sequences < 1 or (sizes is not None and (not sizes or min(sizes) < 1)):
        raise ValueError(f"expected tokens >= 2, sequences >= 1, sizes >= 1, got {tokens}, {sequences} and {sizes}")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be a number of seconds above 0, got {limit}")
    if batch_sizes is not None and (not batch_sizes or min(batch_sizes) < 1):
        raise ValueError(f"batch_sizes must be numbers of sequences of at least 1, got {[*batch_sizes]}")
    row_of("sequoia", verifier)  # refuses a word that is none
    report = on_progress or (lambda line: None)
    forward = forward_of(target, "target")
    check_alone("calibrate", forward)  # which ends when timings agree
    source = as_draft(draft, forward, target)
    if why_not := source.why_not_measured:
        raise ValueError(
            f"acceptance is counted token by token, but {why_not}; "
            "give the decoder a tree or a tree_size in the place of a profile"
        )
    streamed = forward.stream is not None
    if streamed:
        limit = _limit_of_streamed(forward, limit, report)
    limit = LIMIT if limit is None else limit
    models = [forward, *source.models]
    limits = [model.rope_limit or model.max_positions for model in models]
    room = min(limits) - tokens - 2 * DEPTH
    if room < 1:
        raise ValueError(f"the models have {min(limits)} positions; tokens must leave some for a prompt, got {tokens}")
    if not prompts:
        report("sampling prompts from the target")
        length = STREAMED_PROMPT // 2 if streamed else 32
        prompts = own_prompts(target, min(sequences, 16), min(length, room), seed)
    prompts = [prompt[-min(room, STREAMED_PROMPT if streamed else room) :] for prompt in prompts]

    samplings = [Filters(each, top_k, top_p, min_p) if each > 0 else Filters(0.0) for each in temperatures]
    kind = target.device.type
    wanted = [(way, each) for each in samplings for way in ways_to_draft(each.temperature, kind, verifier)]
    share = ACCEPTANCE_SHARE * limit
    if streamed:
        extent = Extent(tokens=tokens, sequences=max(2, sequences // len(wanted)), seconds=share)
        counts = walk_together(forward, source, prompts, wanted, extent, seed, report)
        measured = tuple(_as_measured(way, each, found) for (way, each), found in zip(wanted, counts, strict=True))
    else:
        extent = Extent(tokens=tokens, sequences=sequences)
        measured = measure_ways(forward, source, prompts, wanted, extent, seed, share, report)
    levels = min(DEPTH, source.levels or DEPTH)
    sizes = (STREAMED_SIZES if streamed else SIZES) if sizes is None else sizes
    sizes = [size for size in sizes if size <= sum(CHILDREN**depth for depth in range(levels + 1))]
    costs = costs_by_batch(
        (StreamedVisits if streamed else Visits)(target, draft, prompts, levels, verifier),
        default_batch_sizes("streamed" if streamed else kind) if batch_sizes is None else batch_sizes,
        sizes,
        measured,
        limit=limit - (time.perf_counter() - begin),
        report=report,
    )
    logger.debug("calibrated in %.1f s: %s", time.perf_counter() - begin, costs)
    return Profile(
        target=describe(target),
        draft=describe(draft),
        target_parameters=parameter_count(target),
        draft_parameters=draft_parameter_count(draft, target),
        environment=cost_environment(target),
        costs=costs,
        acceptance=measured,
        verifier=verifier,
    )


@torch.inference_mode()
def _limit_of_streamed(target: Forward, limit: float | None, report: Report) -> float:
    """The time limit for a streamed target, by what a pass takes; ValueError for one that is less than it needs."""
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    report("the first pass, in which weights are looked at, too")
    target.prefill(token, target.new_cache(1, 2))
    begin = time.perf_counter()
    target.prefill(token, target.new_cache(1, 2))
    seconds = time.perf_counter() - begin
    least = seconds * LEAST_TOKENS / ACCEPTANCE_SHARE
    if limit is not None and limit < least:
        raise ValueError(
            f"a pass of this target, which reads its weights, takes {seconds:.2g} s, so that acceptance cannot be "
            f"counted in {limit:g} s; give a limit of at least {math.ceil(least)} s (limit=, --limit), or none"
        )
    chosen = max(LIMIT, STREAMED_PASSES * seconds) if limit is None else limit
    report(f"a pass takes {seconds:.2g} s, and calibrating up to {chosen:.0f} s")
    logger.debug("a pass of the streamed target takes %.2f s, the limit is %.0f s", seconds, chosen)
    return chosen


class Way(NamedTuple):
    """A way to draft and verify, whose acceptance is measured.

    sequence_count: the number of independent sequences; None for trees that may branch everywhere
    """

    kind: Kind
    sequence_count: int | None

    def __str__(self) -> str:
        sequences = "" if self.sequence_count is None else f", {self.sequence_count} sequences"
        return f"drawn {self.kind.draw}, verified by {self.kind.verification}{sequences}".replace("_", " ")


def ways_to_draft(temperature: float, device_type: str, verifier: str | None = None) -> list[Way]:
    """The ways of all methods at a temperature that keep the target's law, with a verifier where they take it."""
    drafting = (name for name, row in METHODS.items() if name != "autoregressive" and row.is_lossless)
    kinds = dict.fromkeys(measured_row(name, verifier, device_type).kind(temperature) for name in drafting)
    return [
        Way(kind, count) for kind in kinds for count in (SEQUENCE_COUNTS if kind.independent_sequences else (None,))
    ]


def cost_environment(target: PreTrainedModel) -> dict[str, str | int]:
    """Facts that costs depend on besides the models: device, threads, precision, libraries, bytes of a pass."""
    device = target.device
    return streaming_of(target) | {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def own_prompts(target: PreTrainedModel, count: int, length: int, seed: int) -> list[Tensor]:
    """`count` texts LongTensor[1 + length] that the target samples after its first token (bos, else eos, else 0)."""
    config = target.config
    known = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in known if isinstance(token, int)), 0)
    start = torch.full((count, 1), first, device=target.device)
    plain = SpeculativeDecoder(target, None, "autoregressive")
    return list(plain.generate(start, length, temperature=1.0, seed=seed, **NOTHING).sequences)


class Extent(NamedTuple):
    """The extent of counting: `sequences` texts of `tokens` tokens, `children` at each node, down to `depth` levels.

    seconds: after these texts are cut off, but not before they have `LEAST_TOKENS`
    """

    tokens: int
    sequences: int
    depth: int = DEPTH
    children: int = CHILDREN
    seconds: float = math.inf


class Counts(NamedTuple):
    """Counts of acceptance, on the CPU.

    accepted: LongTensor[depth, children], how often child j of a node at depth d was the accepted one, the first of
              siblings with equal tokens. Of independent sequences those below the first level count as one child
    reached:  LongTensor[depth], how many nodes there were at depth d
    moments:  fp64 [children, 5], over the nodes that tried child k: their number, and the sums of q, q^2, y and q y.
              q is the draft's share of the child among the tokens left, and y is 1 if it was accepted, else 0
    ranks:    int16 [S, T] of each walk: the child accepted at each token, -1 for none, -2 where none was offered
    """

    accepted: Tensor
    reached: Tensor
    moments: Tensor
    ranks: tuple[Tensor, ...]

    def plus(self, other: "Counts") -> "Counts":
        """The counts on the texts of both."""
        return Counts(
            self.accepted + other.accepted,
            self.reached + other.reached,
            self.moments + other.moments,
            self.ranks + other.ranks,
        )


def measure_ways(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], wanted: Sequence[tuple[Way, Filters]], extent: Extent,
    seed: int, seconds: float, report: Report,
) -> tuple[MeasuredAcceptance, ...]:  # fmt: skip
    """The acceptance of every way under its sampling, counted in passes over all of them.

    seconds: for all of it. After them no further pass begins, and the texts of the first are cut off where it would
        take longer. Raises ValueError where even texts of `LEAST_TOKENS` tokens would
    """
    begin = time.perf_counter()
    counted: dict[tuple[Way, Filters], Counts] = {}
    parts = list(_parts(extent.sequences))
    for number, (first, count) in enumerate(parts):
        for index, (way, filters) in enumerate(wanted):
            done, spent = number * len(wanted) + index, time.perf_counter() - begin
            left = min(spent / done * (len(wanted) * len(parts) - done), seconds - spent) if done else seconds
            report(
                f"acceptance, pass {number + 1} of {len(parts)}, {index + 1} of {len(wanted)}: temperature "
                f"{filters.temperature:g}, {way}, about {max(0.0, left):.0f} s left"
            )
            part = extent._replace(
                sequences=count, seconds=(seconds - spent) / (len(wanted) - index) if number == 0 else math.inf
            )
            chosen = [prompts[(first + place) % len(prompts)] for place in range(count)]
            counts = walk(target, draft, chosen, way, filters, part, seed + number)
            if not done:
                _check_time(counts, len(wanted) * (time.perf_counter() - begin), seconds)
            before = counted.get((way, filters))
            counted[way, filters] = counts if before is None else before.plus(counts)
        if time.perf_counter() - begin > seconds * (number + 1) / (number + 2):  # another pass would end after it
            break
    return tuple(_as_measured(way, filters, counts) for (way, filters), counts in counted.items())


def _check_time(counts: Counts, needed: float, seconds: float) -> None:
    """Raise ValueError where `needed` seconds with texts as short as they may be are far more than there are.

    counts: of the first walk
    """
    if counts.ranks[0].shape[1] <= LEAST_TOKENS and needed > 2 * seconds:
        raise ValueError(
            f"to count acceptance would take about {needed:.0f} s, more than its half of the limit, {seconds:.0f} s: "
            f"give a limit of {math.ceil(needed / ACCEPTANCE_SHARE)} s (limit=, --limit) or fewer temperatures. If the "
            "models are small, the machine is busy: calibrate while it is idle, with fewer threads than it has free "
            "cores (OMP_NUM_THREADS=1 where one core is free)"
        )


def _parts(sequences: int) -> Iterator[tuple[int, int]]:
    """The first of the sequences of each pass, and how many there are."""
    size = -(-sequences // PARTS)
    for first in range(0, sequences, size):
        yield first, min(size, sequences - first)


def measure_way(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], way: Way, filters: Filters, extent: Extent, seed: int
) -> MeasuredAcceptance:
    """The acceptance of one way to draft and verify under one sampling, counted by `walk`."""
    return _as_measured(way, filters, walk(target, draft, prompts, way, filters, extent, seed))


def _as_measured(way: Way, filters: Filters, counts: Counts) -> MeasuredAcceptance:
    return MeasuredAcceptance(
        draw=way.kind.draw,
        verification=way.kind.verification,
        sequence_count=way.sequence_count,
        filters=filters,
        accepted=counts.accepted.tolist(),
        reached=counts.reached.tolist(),
        moments=counts.moments.tolist(),
    )


def walk(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], way: Way, filters: Filters, extent: Extent, seed: int
) -> Counts:
    """Count what is offered and accepted along texts that the target writes.

    prompts: LongTensors [T], taken in turn until there are extent.sequences of them. Of independent sequences as many
        begin as `way` says, whatever extent.children is.
    """
    return walk_together(target, draft, prompts, [(way, filters)], extent, seed)[0]


@torch.inference_mode()
def walk_together(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], wanted: Sequence[tuple[Way, Filters]], extent: Extent,
    seed: int, report: Report = lambda line: None,
) -> list[Counts]:  # fmt: skip
    """`walk` of several ways, each on texts of its own under its sampling, and all of them in the same passes."""
    tokens, sequences, depth = extent.tokens, extent.sequences, extent.depth
    every = sequences * len(wanted)
    chosen = [prompts[i % len(prompts)] for i in range(sequences)] * len(wanted)
    lengths = torch.tensor([len(prompt) for prompt in chosen], device=target.device)
    padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    cache_rows = padded.shape[1] + tokens + 1
    target_cache, draft_cache = target.new_cache(every, cache_rows), draft.new_cache(every, cache_rows)
    taps = draft.taps(draft_cache)
    target_cache.begin(lengths - 1)
    target.prefill(padded, target_cache, taps=taps)
    draft_cache.begin(lengths - 1)
    for part, cache in draft.parts(draft_cache):
        part.prefill(padded, cache)
    state = Sequences.room_for(every, new_tokens=tokens, stops=1, vocab_size=0, count_slots=0, device=target.device)
    state.begin(
        padded,
        lengths,
        new_tokens=tokens,
        stops=lengths.new_zeros(0),
        sequence_ids=torch.arange(sequences, device=target.device).repeat(len(wanted)),
        seed=seed,
    )
    parts = state.numbers.split(sequences, 1)
    walked = [
        _Walked(way, filters, extent, replace(state, numbers=numbers), target.vocab_size, seed)
        for (way, filters), numbers in zip(wanted, parts, strict=True)
    ]
    begin, one = time.perf_counter(), torch.ones(1, dtype=torch.long, device=target.device)
    root = torch.zeros_like(state.root)[:, None]
    for number in range(tokens):
        spent = time.perf_counter() - begin
        if number >= LEAST_TOKENS and spent >= extent.seconds:
            break
        if number:
            left = min(spent / number * (tokens - number), max(0.0, extent.seconds - spent))
            report(f"acceptance, token {number + 1} of up to {tokens}, about {left:.0f} s left")
        here, longest = state.lengths[:, None], int(state.lengths.max())
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
    return [each.counts() for each in walked]


class _Walked:
    """The texts of one way, and what was counted on them."""

    def __init__(self, way: Way, filters: Filters, extent: Extent, state: Sequences, vocab_size: int, seed: int):
        self._way, self._filters, self._depth, self._state, self._seed = way, filters, extent.depth, state, seed
        self._children, device = min(way.sequence_count or extent.children, vocab_size), state.root.device
        self._star = torch.tensor([-1] + [0] * self._children, device=device)
        self.at = torch.zeros_like(state.lengths)  # the depth of the node: how many tokens in a row were accepted
        self._accepted = torch.zeros(extent.depth, self._children, dtype=torch.long, device=device)
        self._reached = torch.zeros(extent.depth, dtype=torch.long, device=device)
        self._moments = torch.zeros(self._children, 5, dtype=torch.float64, device=device)
        self._place = torch.arange(self._children, device=device)
        self._alive = torch.full_like(state.lengths, self._children)  # how many children are offered
        self._ranks: list[Tensor] = []

    def go_on(self, after: Tensor, logits: Tensor) -> None:
        """Offer, decide, count, and append a token. after: the draft's logits [S, V]; logits: the target's [S, 1, V]"""
        state, way, depth, children, at = self._state, self._way, self._depth, self._children, self.at
        drawing, noise = way.kind.drawing_filters(self._filters), root_rows(state.noise, state.lengths)
        drawn = gumbel_topk(
            after, children, **drawing._asdict(), seed=self._seed, rows=noise, replacement=way.kind.replacement
        )
        check_distributions("draft", drawn.keys[:, None], state, 0)
        here_offered = (self._place < self._alive[:, None]) & (at < depth)[:, None]
        offered = torch.cat([state.root[:, None], drawn.tokens.where(here_offered, -1)], 1)
        verified = verify_tree(
            offered, self._star, logits.expand(-1, children + 1, -1), after[:, None].expand(-1, children + 1, -1),
            **way.kind.rule._asdict(), max_depth=1, **self._filters._asdict(), draft_temperature=drawing.temperature,
            seed=self._seed, rows=noise[:, None].expand(-1, children + 1),
        )  # fmt: skip
        child = verified.path[:, 1]
        hit = verified.length > 0
        token = offered.gather(1, child.clamp(min=0)[:, None])
        counted = (child - 1).where(at == 0, 0) if way.kind.independent_sequences else child - 1
        self._reached += torch.bincount(at[at < depth], minlength=depth)
        places = torch.bincount((at * children + counted)[hit], minlength=self._accepted.numel())
        self._accepted += places.view_as(self._accepted)
        self._ranks.append((child - 1).where(hit, -1).where(at < depth, -2).to(torch.int16))
        self._moments += _moments(drawn.logprobs.double().exp(), (child - 1).where(hit, children), at < depth)
        if way.kind.independent_sequences:
            self._alive = (offered[:, 1:] == token).sum(1).where(hit, children)
        self.at = (at + 1).where(hit, 0)
        state.previous.copy_(state.root)
        state.root.copy_(token[:, 0].where(hit, verified.next_token))
        state.lengths.add_(1)

    def counts(self) -> Counts:
        """The counts of acceptance."""
        ranks = torch.stack(self._ranks, 1).cpu()
        return Counts(self._accepted.cpu(), self._reached.cpu(), self._moments.cpu(), (ranks,))


def _moments(probs: Tensor, choice: Tensor, counted: Tensor) -> Tensor:
    """`Counts.moments` of one step, fp64 [K, 5].

    probs: fp64 [S, K], the draft's probabilities of the children; choice: LongTensor[S], the accepted child, K if there
    is none; counted: bool [S], which sequences count.
    """
    left = (1 - pad(probs[:, :-1], (1, 0)).cumsum(1)).clamp(min=1e-12)
    share = (probs / left).clamp(max=1)
    index = torch.arange(probs.shape[1], device=probs.device)
    tried = ((index <= choice[:, None]) & counted[:, None] & (probs > 0)).double()
    hit = (index == choice[:, None]).double()
    return torch.stack([(tried * term).sum(0) for term in (1 + 0 * share, share, share**2, hit, share * hit)], 1)
