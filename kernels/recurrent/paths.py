"""The paths of a tree for recurrent layers: ancestor masks, decays, and windows of short convolutions.

A mask bool [B, Q, M] has for each of the last Q of M nodes which nodes it sees: itself and its ancestors. Parents come
before their children, and the last columns are the Q nodes themselves. With the G of `totals`, the contribution of an
ancestor j reaches node i with factor exp(G_i - G_j). For other pairs G_i - G_j may be large and positive, and exp
infinite. So the mask must be applied before exp, never after.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # nodes of a kernel's tile


class KeptNodes(NamedTuple):
    """What one layer keeps of a tree's M nodes, to update the state by those that are accepted.

    keys:   [B, M, Hk, Dk], in the model's dtype, not normalised
    values: [B, M, H, Dv], u, which each node adds to the state for its key. fp32: bf16 would cause errors of 2e-3
    totals: fp64 [B, M, H], the log-decay G from the root to each node; [B, M, H, Dk] if each key column has a gate
    """

    keys: Tensor
    values: Tensor
    totals: Tensor

    def joined(self, others: "KeptNodes | None") -> "KeptNodes":
        """Return `others`, the nodes of earlier passes, followed by these nodes."""
        if others is None:
            return self
        return KeptNodes(*(torch.cat(pair, 1) for pair in zip(others, self, strict=True)))


def fades(new: Tensor, every: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(G_i - G_j), [B, H, Q, M]; 0 where i does not see j. new: fp64 [B, Q, H]; every: fp64 [B, M, H]."""
    gap = new.transpose(1, 2)[..., :, None] - every.transpose(1, 2)[..., None, :]
    return gap.masked_fill(~mask[:, None], -torch.inf).to(dtype).exp()


def unit(rows: Tensor) -> Tensor:
    """Return rows [..., D] divided by sqrt(|row|^2 + 1e-6), in fp64 if the rows are, else in fp32."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, eq=False)
class Paths:
    """The paths of the nodes of one pass, with tensors that all layers share.

    mask: bool [B, Q, M], see the top of this file
    """

    mask: Tensor
    _windows: dict[int, Tensor] = field(default_factory=dict)
    _outside: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def new(self) -> int:
        """Q, the number of nodes of the pass."""
        return self.mask.shape[1]

    @property
    def before(self) -> int:
        """M - Q, the number of nodes of earlier passes."""
        return self.mask.shape[2] - self.mask.shape[1]

    @property
    def outside(self) -> tuple[Tensor, Tensor]:
        """For each block of `BLOCK` nodes the nodes outside it that some node of it sees; for trees in one pass.

        int32 [B, blocks, N], rising, undefined after the last one; int32 [B, blocks], the number of these nodes
        """
        if not self._outside:
            batch = len(self.mask)
            nodes = self.new
            device = self.mask.device
            blocks = -(-nodes // BLOCK)
            number = torch.arange(nodes, device=device)
            seen = pad(self.mask, (0, 0, 0, blocks * BLOCK - nodes)).view(batch, blocks, BLOCK, nodes).any(2)
            seen &= number < BLOCK * torch.arange(blocks, device=device)[:, None]
            above = number.where(seen, nodes).sort(-1).values.clamp(max=nodes - 1)
            self._outside.append((above.int(), seen.sum(-1, dtype=torch.int32)))
        return self._outside[0]

    def windows(self, taps: int) -> Tensor:
        """Return the window of each node for a convolution, LongTensor[B, Q, taps], oldest first.

        It holds columns of [taps - 1 of the state | M nodes]: the node and its nearest ancestors, and before the root
        the newest inputs of the state.
        """
        if taps not in self._windows:
            nodes = self.mask.shape[2]
            device = self.mask.device
            number = pad(torch.arange(nodes, device=device).where(self.mask, -1), (0, max(0, taps - nodes)), value=-1)
            nearest = number.topk(taps, -1).values  # itself, its parent, .., or -1
            above_root = torch.arange(taps, device=device) - self.mask.sum(-1, keepdim=True)
            column = (nearest + taps - 1).where(nearest >= 0, taps - 2 - above_root)
            self._windows[taps] = column.flip(-1)
        return self._windows[taps]
