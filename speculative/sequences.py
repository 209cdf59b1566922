"""The state of a batch between steps, and how a verified tree is committed to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heavypath.kernels.verification import Verified
from heavypath.speculative.stopping import Stopping


@dataclass
class Sequences:
    """B sequences, each at its own length. All tensors LongTensor[B] unless said otherwise.

    root:     the last committed token, not in any cache yet
    previous: the token before it
    lengths:  tokens before the root: rows of the target's cache in use
    produced: new tokens so far
    active:   bool [B], still generating
    output:   LongTensor[B, max_new_tokens], the new tokens, padding behind them
    stops:    LongTensor[any], end-of-sequence tokens
    """

    root: Tensor
    previous: Tensor
    lengths: Tensor
    produced: Tensor
    active: Tensor
    output: Tensor
    stops: Tensor

    @classmethod
    def begin(cls, prompt: Tensor, prompt_lengths: Tensor, max_new_tokens: int, stops: Tensor, pad: int) -> "Sequences":
        """From right-padded prompts LongTensor[B, T]; the last token of each is its root."""
        root = prompt.gather(1, prompt_lengths[:, None] - 1)[:, 0]
        return cls(
            root=root,
            previous=root,  # never read: the first step drafts nothing
            lengths=prompt_lengths - 1,
            produced=torch.zeros_like(root),
            active=torch.ones_like(root, dtype=torch.bool),
            output=torch.full((len(root), max_new_tokens), pad, device=root.device),
            stops=stops,
        )

    @property
    def room(self) -> Tensor:
        """How deep below the root a node can still be emitted: one place is the recovered or bonus token's."""
        return (self.output.shape[1] - self.produced - 1).clamp(min=0)

    def commit(self, tokens: Tensor, verified: Verified, stopping: Stopping | None = None) -> Tensor:
        """Append the accepted tokens of each active sequence and the one after them, as far as it goes on.

        tokens: LongTensor[B, N] of the tree's nodes; stopping: what may end a sequence besides its tokens. Returns the
        tokens appended, all sequences', in order.
        """
        length, path = verified.length[:, None], verified.path
        emitted = tokens.gather(1, path.clamp(min=0)).roll(-1, 1)  # the accepted tokens, then
        emitted = emitted.scatter(1, length, verified.next_token[:, None])  # the one after them
        place = torch.arange(path.shape[1], device=path.device)
        fresh = (place <= length) & (place <= self.room[:, None]) & self.active[:, None]
        stops = torch.isin(emitted, self.stops) & fresh
        fresh &= stops.cumsum(1) - stops.long() == 0  # nothing after the first end-of-sequence token
        if stopping is not None:
            ends = stopping(self.output, self.produced, emitted, fresh)
            fresh &= ends.cumsum(1) - ends.long() == 0
            stops |= ends
        sequence, column = fresh.nonzero(as_tuple=True)
        self.output[sequence, self.produced[sequence] + column] = emitted[fresh]

        before = torch.cat([self.root[:, None], emitted], 1).gather(1, length)[:, 0]
        self.previous = before.where(self.active, self.previous)
        self.root = verified.next_token.where(self.active, self.root)
        self.lengths = self.lengths + self.active * (verified.length + 1)
        self.produced = self.produced + fresh.sum(1)
        self.active = self.active & ~stops.any(1) & (self.produced < self.output.shape[1])
        return emitted[fresh]
