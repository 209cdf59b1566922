"""The state of a batch between steps, on its device, and the noise rows of its nodes. `kernels.commit` updates it.

A step changes these tensors in place and never synchronises with the host, so that a CUDA graph can replay it. Each
running sequence has a slot; when a sequence has ended, another may take its slot.

Each node has a row of random numbers, a `noise_row` for drawing and verifying:

    row  =  | sequence id, 27 bits | position of the root, 24 bits | node, 12 bits |

A row is used for one node of one step and never again: the next step has another root. So results do not depend on the
batch, and a sequence has the same noise in every batch in which it has the same id. Nodes are numbered as in the whole
tree, so a tree that is cut near the end of a sequence keeps its noise.

An exponential race takes the row of the node's position in the sequence instead, with node number 0. So a position has
the same noise on every path of the tree, and in plain decoding: the output depends neither on the tree nor on the
draft.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heavypath.kernels.commit import StateField
from heavypath.speculative.trees.tree import NODE_BITS

POSITION_BITS = 24
SEQUENCE_BITS = 27
ROWS_PER_ROOT = 1 << NODE_BITS  # the most nodes of a tree, or slots of a growing one
MAX_SEQUENCES = 1 << SEQUENCE_BITS  # sequence ids are below this


@dataclass
class Sequences:
    """B sequences of different lengths in b slots.

    numbers: LongTensor[9, b], a row for each `StateField` of kernels.commit; root, previous, .. noise are its rows
    output: LongTensor[B, M], the new tokens; undefined after them
    stops:  LongTensor[any], end-of-sequence tokens, -1 for none
    seen:   bool [b, V], the tokens of each sequence so far, if there is a repetition penalty; else [b, 0]
    seed:   LongTensor[], of all noise
    counts: LongTensor[2, any], how often each child was offered below an accepted node, and accepted; see `commit`
    settings: fp64 [b, 2, 4], sampling settings of target and draft, as in `kernels.sequence_scores`; used only if
            `serving.own_settings.OwnSettings` is among the changes of logits
    """

    numbers: Tensor
    output: Tensor
    stops: Tensor
    seen: Tensor
    seed: Tensor
    counts: Tensor
    settings: Tensor
    root: Tensor = field(init=False)
    previous: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    produced: Tensor = field(init=False)
    left: Tensor = field(init=False)
    steps: Tensor = field(init=False)
    nodes: Tensor = field(init=False)
    member: Tensor = field(init=False)
    noise: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for field_, row in zip(StateField, self.numbers.unbind(), strict=True):
            setattr(self, field_.name.lower(), row)

    @classmethod
    def room_for(
        cls, batch: int, *, new_tokens: int, stops: int, vocab_size: int, count_slots: int, device: torch.device
    ) -> "Sequences":
        """Allocate memory for `batch` sequences, all of them marked as ended.

        new_tokens: the most of a sequence; stops: number of end-of-sequence tokens
        vocab_size: 0 without a repetition penalty; count_slots: the columns of `counts`
        """
        return cls(
            numbers=torch.zeros(len(StateField), batch, dtype=torch.long, device=device),
            output=torch.zeros(batch, new_tokens, dtype=torch.long, device=device),
            stops=torch.full((stops,), -1, device=device),
            seen=torch.zeros(batch, vocab_size, dtype=torch.bool, device=device),
            seed=torch.zeros((), dtype=torch.long, device=device),
            counts=torch.zeros(2, count_slots, dtype=torch.long, device=device),
            settings=torch.ones(batch, 2, 4, dtype=torch.float64, device=device),
        )

    def begin(
        self,
        prompt: Tensor,
        prompt_lengths: Tensor,
        *,
        new_tokens: int,
        stops: Tensor,
        sequence_ids: Tensor,
        seed: int,
        members: Tensor | None = None,
    ) -> None:
        """Put right-padded prompts LongTensor[B, T] into the first slots. The last token of each is its root.

        new_tokens: the most new tokens of each; stops: LongTensor[any]; sequence_ids, prompt_lengths: LongTensor[B]
        members: LongTensor[B], the row of `output` of each sequence (default: 0, 1, ...)
        """
        batch, width = prompt.shape
        last = prompt_lengths[:, None] - 1  # [B, 1], the column of each root
        before_last = (last - 1).clamp(min=0)
        root = prompt.gather(1, last)[:, 0]
        previous = prompt.gather(1, before_last)[:, 0]
        zero = torch.zeros_like(root)
        if members is None:
            members = torch.arange(batch, device=prompt.device)
        given = {
            StateField.ROOT: root,
            StateField.PREVIOUS: previous,
            StateField.LENGTHS: prompt_lengths - 1,
            StateField.LEFT: zero + new_tokens,
            StateField.MEMBER: members,
            StateField.NOISE: sequence_rows(sequence_ids),
        }
        numbers = [given.get(name, zero) for name in StateField]
        self.numbers.zero_()
        self.numbers[:, :batch] = torch.stack(numbers)
        count = len(stops)
        self.stops.fill_(stops[-1] if count else -1)
        self.stops[:count] = stops
        self.seed.fill_(_signed(seed))
        self.counts.zero_()
        if self.seen.shape[1]:
            column = torch.arange(width, device=prompt.device)
            is_token = column <= last
            seen = prompt.where(is_token, root[:, None])  # the root instead of padding
            self.seen.zero_()
            self.seen[:batch].scatter_(1, seen, True)

    def first(self, slots: int) -> "Sequences":
        """Return a view of the sequences in the first `slots` slots; all of `output` belongs to it."""
        return replace(
            self,
            numbers=self.numbers[:, :slots],
            seen=self.seen[:slots],
            settings=self.settings[:slots],
        )

    def swap(self, one: int, other: int) -> None:
        """Exchange the sequences in two slots."""
        for rows in self._of_slots():
            kept = rows[one].clone()
            rows[one] = rows[other]
            rows[other] = kept

    def receive(self, slot: int, source: "Sequences", of: int) -> None:
        """Copy slot `of` of `source`, which may be this object, to `slot`; rows of `output` are not copied."""
        for own, other in zip(self._of_slots(), source._of_slots(), strict=True):
            own[slot] = other[of]

    def _of_slots(self) -> list[Tensor]:
        """The tensors with one entry per slot, [b, ...]."""
        return [self.numbers.T, self.seen, self.settings]


def _signed(seed: int) -> int:
    """A seed modulo 2**64 as a signed 64-bit number."""
    half = 1 << 63
    return (seed + half) % (1 << 64) - half


def sequence_rows(sequence_ids: Tensor) -> Tensor:
    """Return the first noise row of each sequence, LongTensor[B], from its id, LongTensor[B]."""
    return sequence_ids << (POSITION_BITS + NODE_BITS)


def root_rows(sequence_rows: Tensor, positions: Tensor) -> Tensor:
    """Return the noise rows of roots at these positions, LongTensor[B]; sequence_rows: from `sequence_rows`."""
    rows = _below(sequence_rows, positions[:, None], ROWS_PER_ROOT)  # [B, 1]
    return rows[:, 0]


def node_rows(root_rows: Tensor, nodes: Tensor) -> Tensor:
    """Return the noise rows LongTensor[B, n] of nodes, or of slots of growing trees.

    root_rows: LongTensor[B], of the roots; nodes: LongTensor[n] or [B, n], the nodes' numbers
    """
    return _below(root_rows, nodes, 1)


def race_rows(root_rows: Tensor, depths: Tensor) -> Tensor:
    """Return the noise rows LongTensor[B, N] of nodes for exponential races, which depend on their positions alone.

    root_rows: LongTensor[B], of the roots; depths: LongTensor[N], of the nodes
    """
    return _below(root_rows, depths, ROWS_PER_ROOT)


def _below(root_rows: Tensor, places: Tensor, step: int) -> Tensor:
    return torch.add(root_rows[:, None], places, alpha=step)
