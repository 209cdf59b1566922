"""The host's side of decoding: run one step after another until every sequence has ended.

On a GPU the host sees what a step did while the next one is under way, so the last one may be for nothing; nothing of
it is in the text. Sequences that have ended leave their slots: the last ones move up, and the next steps are smaller.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from heavypath.kernels.commit import StateField
from heavypath.speculative.custom_generate import Streamer
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.snapshots import Snapshots, host_sees
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Step, Stepped
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.output.trace import Recorder


def decode(
    request: Request,
    workspace: Workspace,
    step_for: Callable[[int], Step],
    run: Callable[[Step, int, int], Stepped],
    stats: Statistics,
    streamer: Streamer | None,
    recorder: Recorder | None,
) -> Tensor:
    """The new tokens of each sequence, LongTensor[B, the most of one], padding behind them.

    workspace: with the prompts in it. step_for: the step where at most so many levels can still be emitted; run: does
    it for the first slots, where the longest prefix has at most so many rows. Raises ValueError for logits that are no
    distribution.
    """
    state, batch = workspace.state, len(request.prompt)
    seen_freely = host_sees(state.numbers.device)
    watched = request.stopping is not None or recorder is not None
    text = () if streamer is None else (state.output[:1],)
    snapshots = Snapshots(state.numbers, *text, late=not seen_freely and not watched)
    ended: dict[int, tuple[int, int, int]] = {}  # tokens, steps and nodes of each
    members = [*range(batch)]  # of the slots
    asked = [0] * batch  # tokens for which the stopping criteria have been asked
    streamed = 0
    longest, most = request.prompt.shape[1] - 1, request.max_new_tokens
    while True:
        before = None if recorder is None else replace(state, numbers=state.numbers.clone())
        stepped = run(step_for(most - 1), len(members), longest)
        seen = snapshots.take(len(members))
        if seen is None:
            continue
        (numbers, *output), slots = seen
        table = numbers[:, :slots].tolist()
        longest, most = max(table[StateField.LENGTHS]), 0
        for slot, member in enumerate(table[StateField.MEMBER]):
            if member in ended:
                continue
            length, produced, left = (
                table[field][slot] for field in (StateField.LENGTHS, StateField.PRODUCED, StateField.LEFT)
            )
            if left < 0:
                raise ValueError(
                    f"the target's logits hold NaN or +inf, or nothing but -inf, within a step after position {length} "
                    f"of sequence {member}"
                )
            if request.stopping is not None:
                kept = request.stopping.kept(member, state.output[member, :produced], asked[member])
                asked[member] = produced
                if kept is not None:
                    produced, left = kept, 0
                    state.produced[slot], state.left[slot] = produced, left
            if left == 0:
                ended[member] = produced, table[StateField.STEPS][slot], table[StateField.NODES][slot]
            else:
                most = max(most, left)
            if streamer is not None:
                streamer.put(output[0][0, streamed:produced].clone())
                streamed = produced
        if recorder is not None and before is not None:
            recorder.step(stepped, before.first(slots), state)
            stats.lap("trace")
        if len(ended) == batch:
            break
        running = batch - len(ended)
        _close_up(workspace, members, ended, running if seen_freely else 1 << (running - 1).bit_length())
        stats.lap("host")

    tokens_of, steps_of, nodes = (torch.tensor([ended[member][i] for member in range(batch)]) for i in range(3))
    stats.end(state.counts, tokens_of, steps_of, int(nodes.sum()))
    new = state.output[:batch, : int(tokens_of.max())]
    column = torch.arange(new.shape[1])
    return new.where((column < tokens_of[:, None]).to(new.device), request.pad)


def _close_up(workspace: Workspace, members: list[int], ended: dict[int, tuple[int, int, int]], slots: int) -> None:
    """Move the sequences that go on into the first `slots` slots; members, of the slots, become as many."""
    free = [slot for slot, member in enumerate(members[:slots]) if member in ended]
    for slot in range(slots, len(members)):
        if members[slot] not in ended:
            destination = free.pop(0)
            workspace.move(slot, destination)
            members[destination] = members[slot]
    del members[slots:]
