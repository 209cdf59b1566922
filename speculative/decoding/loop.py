"""The host's side of decoding: run one step after another until every sequence has ended.

On a GPU the host learns what a step did while the next one is under way. So one more step may run after the end; what
it did is discarded. Sequences that go on take the slots of those that have ended, and the next steps are smaller.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heavypath.kernels.commit import StateField
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.snapshots import Snapshots
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.models.host import host_can_read
from heavypath.speculative.ranks.peers import Peers

logger = logging.getLogger(__name__)

OnStep = Callable[[Stepped, Sequences, Sequences], None]  # of what a step did, the state before it and after it


class Streamer(Protocol):
    """What transformers' streamers have: `put` is given the prompt, then new tokens; `end` comes after the last."""

    def put(self, value: Tensor) -> None: ...  # noqa: D102
    def end(self) -> None: ...  # noqa: D102


def checked_streamers(given: Streamer | Sequence[Streamer] | None, batch: int) -> list[Streamer]:
    """A streamer for each sequence, or none."""
    streamers = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    if given is not None and len(streamers) != batch:
        many = f"{len(streamers)} streamers" if isinstance(given, Sequence) else "one streamer"
        raise ValueError(f"streamer must be one for each sequence, got {many} for a batch of {batch}")
    return streamers


def begin_alike(
    plan: StepPlan, request: Request, streamers: list[Streamer], trace: str | Path | None
) -> tuple[list[Streamer], str | Path | None]:
    """Begin a text, which all ranks must begin alike: give streamers their prompts. This rank's streamers and trace.

    Raises RankMismatchError for ranks that were asked for something else.
    """
    plan.peers.begin_text(request.to_compare() | {"tree": (plan.tree, plan.others)}, plan.target)
    streamers, trace = plan.peers.of_first(streamers, trace)
    with plan.peers.holding():
        for each, prompt, length in zip(streamers, request.prompt, request.lengths, strict=False):
            each.put(prompt[None, :length].cpu())
    return streamers, trace


class Replan(Protocol):
    """Chooses what the next steps draft, by how many sequences run and by what steps before them have counted.

    every:        steps between two choices
    reads_counts: whether it is given the counts
    tree_of:      the tree of so many running sequences; None where a batch may take any of the plan's
    """

    every: int
    reads_counts: bool

    @property
    def tree_of(self) -> Callable[[int], Shape] | None: ...  # noqa: D102

    def __call__(self, counts: Tensor | None, running: int) -> StepPlan:
        """The plan of the next steps.

        counts: LongTensor[2, any] on the host, as `commit` has them; running: sequences that a step is to compute
        """
        ...


class _Ended(NamedTuple):
    """What became of a sequence: its new tokens, the steps it took, and the nodes that were scored in them."""

    tokens: int
    steps: int
    nodes: int


def decode(
    request: Request,
    plan: StepPlan,
    runner: StepRunner,
    workspace: Workspace,
    *,
    stats: Statistics,
    streamers: Sequence[Streamer] = (),
    observers: Sequence[OnStep] = (),
    replan: Replan | None = None,
) -> Tensor:
    """The new tokens of each sequence, LongTensor[B, most new tokens of a sequence], with padding behind them.

    workspace: holds the prompts already
    streamers: none, or one for each sequence, which have had the prompts
    observers: called after each step; the host then waits for every step
    replan: chooses the plan of later steps, among those whose trees `plan` names; None for the same plan throughout

    Raises ValueError for logits that are no distribution. With ranks, only rank 0 has streamers; all of them raise
    RankMismatchError after the step in which they differ, and what one of them is to raise, see `Agreement.hold`.
    """
    peers = plan.peers
    state, batch = workspace.state, len(request.prompt)
    on_host = host_can_read(state.numbers.device)
    watched = request.stopping is not None or request.processors is not None or len(observers) > 0
    looked_at = [state.numbers]
    looked_at += [state.counts] if replan is not None and replan.reads_counts else []
    looked_at += [state.output[:batch]] if streamers else []
    snapshots = Snapshots[int](looked_at, late=not on_host and not watched)
    ended: dict[int, _Ended] = {}
    members = [*range(batch)]  # the sequences in the slots
    asked = [0] * batch  # tokens for which the stopping criteria have been asked
    streamed = [0] * batch
    longest, most_left = request.prompt.shape[1] - 1, request.max_new_tokens
    seen = 0  # steps whose outcome the host knows
    while True:
        before = replace(state, numbers=state.numbers.clone()) if observers else state
        peers.tell()
        stepped = runner.run(plan, workspace, slots=len(members), levels=most_left - 1, longest=longest, lap=stats.lap)
        snapshot = snapshots.take(len(members))
        if snapshot is None:
            continue
        (numbers, *further), slots = snapshot
        table = numbers[:, :slots].tolist()
        _check(table, ended, peers, seen + 1)
        going_on = [member for member in table[StateField.MEMBER] if member not in ended]
        ends = _ends(request, state, table, going_on, asked, peers)
        longest, most_left = max(table[StateField.LENGTHS]), 0
        for slot, member in enumerate(table[StateField.MEMBER]):
            if member in ended:
                continue
            produced, left = table[StateField.PRODUCED][slot], table[StateField.LEFT][slot]
            asked[member] = produced
            if member in ends:
                produced, left = ends[member], 0
                state.produced[slot], state.left[slot] = produced, left
            if left == 0:
                ended[member] = _Ended(produced, table[StateField.STEPS][slot], table[StateField.NODES][slot])
            most_left = max(most_left, left)
            if streamers:
                with peers.holding():
                    streamers[member].put(further[-1][member, streamed[member] : produced].clone())
                    streamed[member] = produced
                    if left == 0:
                        streamers[member].end()
        for observe in observers:
            with peers.holding():
                observe(stepped, before.first(slots), state)
            stats.lap("trace")
        if len(ended) == batch:
            break
        seen += 1
        running = batch - len(ended)
        close_up(workspace, members, ended, running if on_host else 1 << (running - 1).bit_length())
        if replan is not None and seen % replan.every == 0:
            before_choice, plan = plan, replan(further[0] if replan.reads_counts else None, len(members))
            if plan.tree != before_choice.tree:
                stats.replans.append((seen, f"{len(plan.tree)} nodes, {plan.tree.depth} levels"))
                workspace.turn(request, before_choice, plan, len(members))
        stats.lap("host")

    peers.end()
    counts = torch.tensor([ended[member] for member in range(batch)])  # [B, 3]
    tokens_of, steps_of, nodes_of = counts.unbind(1)
    stats.end(state.counts, tokens_of.clone(), steps_of.clone(), int(nodes_of.sum()))
    new = state.output[:batch, : int(tokens_of.max())]
    column = torch.arange(new.shape[1])
    return new.where((column < tokens_of[:, None]).to(new.device), request.pad)


def _check(table: list[list[int]], ended: dict[int, _Ended], peers: Peers, step: int) -> None:
    """Raise what a step has left in the state of a sequence that went on. table: of each `StateField` and slot."""
    for slot, member in enumerate(table[StateField.MEMBER]):
        left = table[StateField.LEFT][slot]
        if left >= 0 or member in ended:
            continue
        problem = peers.error(left, step)
        raise problem or ValueError(
            "the target's logits hold NaN or +inf, or nothing but -inf, within a step after position "
            f"{table[StateField.LENGTHS][slot]} of sequence {member}"
        )


def _ends(
    request: Request,
    state: Sequences,
    table: list[list[int]],
    going_on: list[int],
    asked: list[int],
    peers: Peers,
) -> dict[int, int]:
    """With how many of its new tokens each sequence ends that its stopping criteria, which rank 0 asks, end now."""
    stopping = request.stopping
    if stopping is None:
        return {}
    produced = dict(zip(table[StateField.MEMBER], table[StateField.PRODUCED], strict=True))

    def ask() -> dict[int, int]:
        kept = {each: stopping.kept(each, state.output[each, : produced[each]], asked[each]) for each in going_on}
        return {member: count for member, count in kept.items() if count is not None}

    return peers.decided(ask)


def close_up(workspace: Workspace, members: list[int], ended: dict[int, _Ended], slots: int) -> None:
    """Move the sequences that go on into the first `slots` slots; `members` then says who is in these."""
    if slots < len(members):
        logger.debug("the batch closes up from %d slots to %d", len(members), slots)
    free = [slot for slot, member in enumerate(members[:slots]) if member in ended]
    for slot in range(slots, len(members)):
        if members[slot] not in ended:
            destination = free.pop(0)
            workspace.swap(slot, destination)  # what has ended keeps its cache rows, for a later text
            members[destination] = members[slot]
    del members[slots:]
