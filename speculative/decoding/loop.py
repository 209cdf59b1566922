"""The host's side of `generate`: run one step after another until every sequence has ended.

Sequences that go on take the slots of those that have ended, and the next steps are smaller. What else happens after a
step is done by watchers: streams, stopping criteria, traces, another tree.
"""

import logging
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from heavypath.speculative.decoding.engine import Engine, SlotNumbers, Watcher
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Workspace

logger = logging.getLogger(__name__)


def decode(
    request: Request,
    plan: StepPlan,
    runner: StepRunner,
    workspace: Workspace,
    *,
    stats: Statistics,
    watchers: Sequence[Watcher] = (),
) -> Tensor:
    """The new tokens of each sequence, LongTensor[B, most new tokens of a sequence], with padding after them.

    workspace: holds the prompts already
    watchers: of which one may choose the plan of later steps, among those whose trees `plan` names

    Raises ValueError for logits that are no distribution. With ranks all of them raise RankMismatchError after the step
    in which they differ, and what one of them is to raise, see `Agreement.hold`.
    """
    peers, state, batch = plan.peers, workspace.state, len(request.prompt)
    looks = [watcher.looks_at(state) for watcher in watchers]
    engine = Engine[int](
        runner, workspace, [tensor for tensor in looks if tensor is not None],
        waits=bool(workspace.changes) or any(watcher.waits for watcher in watchers),
    )  # fmt: skip
    ended: dict[int, SlotNumbers] = {}
    members = [*workspace.order]  # the sequences in the slots
    longest, most_left = request.prompt.shape[1] - 1, request.max_new_tokens
    seen = 0  # steps whose outcome the host knows
    while True:
        for watcher in watchers:
            watcher.before(state)
        peers.tell()
        outcome = engine.step(
            plan, members[:], slots=len(members), levels=most_left - 1, longest=longest, lap=stats.lap,
            ends=most_left == 1,
        )  # fmt: skip
        if outcome is None:
            continue
        seen += 1
        rows = {slot: row for slot, row in enumerate(outcome.rows) if row.member not in ended}
        for row in rows.values():
            if row.left < 0:
                raise peers.error(row.left, seen) or row.error(f" of sequence {row.member}")
        for watcher in watchers:
            ends = watcher.ends([*rows.values()], state)
            for slot, row in rows.items():
                if row.member in ends:
                    rows[slot] = row._replace(produced=ends[row.member], left=0)
                    state.produced[slot], state.left[slot] = ends[row.member], 0
        copies = iter(outcome.looked)
        looked = [None if tensor is None else next(copies) for tensor in looks]
        for watcher, copy in zip(watchers, looked, strict=True):
            with peers.holding():
                watcher.see(outcome.stepped, state, [*rows.values()], copy)
        ended |= {row.member: row for row in rows.values() if row.left == 0}
        if len(ended) == batch:
            break
        longest, most_left = max(row.lengths for row in outcome.rows), max(row.left for row in rows.values())
        running = batch - len(ended)
        slots = running if engine.on_host else 1 << (running - 1).bit_length()
        close_up(workspace, members, ended, slots, longest + 2 * (plan.depth + 1))  # a step may be under way
        before, shortest = plan, min(row.lengths for row in rows.values() if row.left > 0)
        for watcher, copy in zip(watchers, looked, strict=True):
            plan = watcher.replanned(plan, seen, len(members), copy)
        plan = plan.after(shortest)
        if plan.tree != before.tree:
            stats.replans.append((seen, f"{len(plan.tree)} nodes, {plan.tree.depth} levels"))
            workspace.turn(request, before, plan, len(members))
        stats.lap("host")

    peers.end()
    tokens_of, steps_of, nodes_of = torch.tensor(
        [(ended[member].produced, ended[member].steps, ended[member].nodes) for member in range(batch)], device="cpu"
    ).unbind(1)
    stats.end(state.counts, tokens_of.clone(), steps_of.clone(), int(nodes_of.sum()))
    new = state.output[:batch, : int(tokens_of.max())]
    column = torch.arange(new.shape[1], device="cpu")
    return new.where((column < tokens_of[:, None]).to(new.device), request.pad)


def close_up(workspace: Workspace, members: list[int], ended: Container[int], slots: int, rows: int) -> None:
    """Move the sequences that go on, of at most `rows` rows, into the first slots; `members` says who is in these."""
    if slots < len(members):
        logger.debug("the batch closes up from %d slots to %d", len(members), slots)
    free = [slot for slot, member in enumerate(members[:slots]) if member in ended]
    for slot in range(slots, len(members)):
        if members[slot] not in ended:
            destination = free.pop(0)
            workspace.swap(slot, destination, rows)  # what has ended keeps its cache rows, for a later text
            members[destination] = members[slot]
    del members[slots:]
