"""The cache of a model with recurrent layers: rows for its attention layers, and a state for each recurrent layer.

Row r of a sequence serves any sequence that shares its first r + 1 tokens. A state serves only sequences that share all
of its tokens. So a cache keeps two states for each sequence: one after the tokens so far, and one after the prompt, for
a later sequence that continues from there (`take`). A draft's state lags by one token, see `nodes.DraftNodes`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor

from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.recurrent.mixers import Layer, StatesCache
from heavypath.speculative.models.recurrent.nodes import DraftNodes, Key, LayerNodes, States, TextTokens, TreeNodes

FOREVER = torch.iinfo(torch.long).max


class StateLayout(NamedTuple):
    """The shapes of everything that a model keeps of a sequence: cache rows and recurrent states.

    rows:      {layer: its index among the layers with keys and values}; kv_heads, head_dim: of these layers
    recurrent: {(layer, number of the state in it): (heads, key columns, value columns)}
    convolved: {(layer, number of the state in it): (taps - 1, channels)}, the last inputs of a convolution
    limits:    {(layer, number of the state in it): least and most of a prompt's time steps}, for layers that clamp them
    """

    rows: dict[int, int]
    kv_heads: int
    head_dim: int
    recurrent: dict[Key, tuple[int, int, int]]
    convolved: dict[Key, tuple[int, int]]
    limits: dict[Key, tuple[float, float]]

    def states(self, batch: int, like: Tensor) -> States:
        """States of zeros for `batch` sequences: convolutions' with the dtype of `like`, recurrent ones in fp32."""
        return States(
            {key: like.new_zeros(batch, *shape, dtype=torch.float32) for key, shape in self.recurrent.items()},
            {key: like.new_zeros(batch, *shape) for key, shape in self.convolved.items()},
            torch.zeros(batch, dtype=torch.long, device=like.device),
        )


class HybridCache(StatesCache, KeyValueCache):
    """The cache rows and recurrent states of a batch.

    states:   the states after the tokens so far; prompts: copies of the states after the prompts
    ends:     LongTensor[B], the number of each sequence's tokens that the states include after prefill
    origin:   LongTensor[B], this number at the end of the prompts' prefill, before the first new token
    lag:      how many tokens before the root the states end: 0, for a draft 1
    """

    def __init__(self, layout: StateLayout, batch: int, rows: int, like: Tensor, lag: int = 0):
        heads = layout.kv_heads
        columns = layout.head_dim
        super().__init__(batch, max(1, len(layout.rows)), heads, rows, columns, like)
        self._row_of = layout.rows
        self._limits = layout.limits
        self._lag = lag
        self.states = layout.states(batch, like)
        self.prompts = layout.states(batch, like)
        self.ends = torch.full((batch,), FOREVER, device=like.device)
        self.origin = torch.zeros_like(self.ends)
        self._nodes: TreeNodes | TextTokens | None = None
        self._reads = False

    @property
    def nbytes(self) -> int:
        """Bytes of rows and states."""
        return super().nbytes + self.states.nbytes + self.prompts.nbytes

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.states = self.states.first(slots)
        view.prompts = self.prompts.first(slots)
        view.ends = self.ends[:slots]
        view.origin = self.origin[:slots]
        view._nodes = None
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences: rows, positions, and both kinds of recurrent states."""
        return [*super().remembered(), self.ends, self.origin, *self.states.tensors(), *self.prompts.tensors()]

    def begin(self, lengths: Tensor) -> None:
        """Set all states to zero. lengths: LongTensor[B], the number of tokens that prefill reads, before each root."""
        super().begin(lengths)
        for field in (*self.states.tensors(), *self.prompts.tensors()):
            field.zero_()
        self.origin.copy_(lengths - self._lag)
        self.reads_to(lengths)

    def reads_to(self, lengths: Tensor) -> None:
        """Have prefill move the states over the first `lengths` - lag tokens of each sequence, LongTensor[B]."""
        self.ends.copy_((lengths - self._lag).clamp(min=0))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for prefill: in it a pass moves the states over its tokens, without waiting for acceptance."""
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def give(self, mask: TreeMask, positions: Tensor, cache_rows: Tensor) -> Tensor:
        """Begin a pass over N tokens of each sequence; returns the cache rows to write, LongTensor[B, N].

        mask, positions, cache_rows: as in `Forward.__call__`

        Tokens that the states already include are computed without their context. So their existing rows are kept, and
        these tokens write to a row that is never read.
        """
        if self._reads:
            self._nodes = TextTokens(self.states, positions, self.ends)
            return cache_rows.where(positions >= self.states.position[:, None], self.keys.shape[2] - 1)
        if mask.level == 0:
            states = self.states
            begins = self.states.position == self.origin.clamp(min=0)
            self._nodes = DraftNodes(states, begins, mask.prefix_length) if self._lag else TreeNodes(states, begins)
        assert isinstance(self._nodes, TreeNodes)
        self._nodes.give(mask, cache_rows)
        return cache_rows

    def end_of_pass(self) -> None:
        """Called after all layers of a pass. In prefill it advances the positions, and copies states to `prompts`.

        A sequence's state is copied when it has reached the end of its prompt.
        """
        if isinstance(self._nodes, TextTokens):
            self._nodes.end()
            ended = self.states.position == self.ends
            for kept, now in zip(self.prompts.tensors(), self.states.tensors(), strict=True):
                kept.copy_(now.where(ended.view(-1, *[1] * (now.dim() - 1)), kept))

    def advance(self, path: Tensor, produced: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the states over the accepted nodes of a step. Arguments as in `RowCache.advance`."""
        if isinstance(self._nodes, TreeNodes):
            slots = path if node_rows is None else node_rows.gather(1, path.clamp(min=0))
            self._nodes.accept(slots, (self.origin + produced - self.states.position).clamp(min=0))
        self._nodes = None

    def take(self, sequence: int, source: RowCache, of: int, rows: int) -> int:
        """Copy a sequence from another cache, up to one of the two positions for which that cache has a state.

        rows: the most rows to copy. Returns the number of rows copied; 0 if both positions lie after them.
        """
        assert isinstance(source, HybridCache | _TakenTexts)
        most = min(rows, int(self.ends[sequence]))  # a draft's state must not include the token before the root
        for states in (source.states, source.prompts):
            length = int(states.position[of])
            if 0 < length <= most:
                for kept in (self.states, self.prompts):
                    for own, other in zip(kept.tensors(), states.tensors(), strict=True):
                        own[sequence] = other[of]
                return super().take(sequence, source, of, length)
        return 0

    def trimmed_bytes(self, slots: slice, rows: int) -> int:
        """The size in bytes of the result of `trimmed`."""
        return super().trimmed_bytes(slots, rows) + self.states.of(slots).nbytes + self.prompts.of(slots).nbytes

    def trimmed(self, slots: slice, rows: int) -> RowCache:
        """A copy of the first `rows` rows, and of the states, of the sequences in these slots."""
        return _TakenTexts(super().trimmed(slots, rows), self.states.of(slots), self.prompts.of(slots))

    # Methods that transformers' mixers call.

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values [B, Hkv, rows, D] of an attention layer, by its index in the model."""
        return super().read(self._row_of[layer])

    def write(self, layer: int, key: Tensor, value: Tensor, cache_rows: Tensor) -> None:
        """Store a layer's key and value [B, N, Hkv, D] at cache rows LongTensor[B, N]."""
        super().write(self._row_of[layer], key, value, cache_rows)

    def state(self, layer: int, which: int) -> Layer:
        """What a mixer gets in place of state number `which` of a layer: a `Layer` that runs this pass's tokens."""
        assert self._nodes is not None
        key = layer, which
        return LayerNodes(self._nodes, self.states, key, self._limits.get(key))


class _TakenTexts(RowCache):
    """Rows and states copied out of a `HybridCache`, from which `HybridCache.take` copies for later prompts."""

    def __init__(self, rows: RowCache, states: States, prompts: States):
        super().__init__(rows.keys, rows.values)
        self.states = states.copied()
        self.prompts = prompts.copied()

    @property
    def nbytes(self) -> int:
        """Bytes of rows and states."""
        return super().nbytes + self.states.nbytes + self.prompts.nbytes
