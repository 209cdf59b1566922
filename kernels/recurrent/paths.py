"""The paths of a tree, and the windows of short convolutions along them: for recurrent layers.

A mask bool [B, Q, M] says which of the M nodes given so far each of the last Q of them sees: itself and its ancestors.
Nodes are given in an order that rises along each path, so the last columns are the Q nodes themselves. With the G of
`totals` a node i keeps exp(G_i - G_j) of what its ancestor j leaves. Elsewhere G_i - G_j may be large and positive, and
exp of it infinite. So the mask comes before exp, never after.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # nodes that a kernel takes at once


class KeptNodes(NamedTuple):
    """M nodes in one layer, until some of them are accepted: all that is kept of them.

    keys:   [B, M, Hk, Dk], in the model's dtype, before they are normalised
    values: [B, M, H, Dv], what each node adds to the state for its key. fp32: in bf16 the state would be off by 2e-3
    totals: fp64 [B, M, H], the log-decay G from the root to each node; [B, M, H, Dk] if each key column has its own
    """

    keys: Tensor
    values: Tensor
    totals: Tensor

    def joined(self, others: "KeptNodes | None") -> "KeptNodes":
        """These nodes after others, which were given before them."""
        if others is None:
            return self
        return KeptNodes(*(torch.cat(pair, 1) for pair in zip(others, self, strict=True)))


def fades(new: Tensor, every: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(G_i - G_j) where node i sees node j, else 0: [B, H, Q, M]; new fp64 [B, Q, H], every fp64 [B, M, H]."""
    gap = new.transpose(1, 2)[..., :, None] - every.transpose(1, 2)[..., None, :]
    return gap.masked_fill(~mask[:, None], -torch.inf).to(dtype).exp()


def unit(rows: Tensor) -> Tensor:
    """Rows [..., D] in fp32, or in fp64 if they are, divided by their norms."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, eq=False)
class Paths:
    """The paths of a pass, with what all layers share of them.

    mask: bool [B, Q, M], see above
    """

    mask: Tensor
    _windows: dict[int, Tensor] = field(default_factory=dict)
    _outside: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def new(self) -> int:
        """Nodes of the pass."""
        return self.mask.shape[1]

    @property
    def before(self) -> int:
        """Nodes that were given before."""
        return self.mask.shape[2] - self.mask.shape[1]

    @property
    def outside(self) -> tuple[Tensor, Tensor]:
        """The nodes outside of each block of `BLOCK` new nodes that some node of the block sees, of one pass.

        int32 [B, blocks, N], rising, and after them anything; int32 [B, blocks], how many they are
        """
        if not self._outside:
            batch, nodes, device = len(self.mask), self.new, self.mask.device
            blocks, number = -(-nodes // BLOCK), torch.arange(nodes, device=device)
            seen = pad(self.mask, (0, 0, 0, blocks * BLOCK - nodes)).view(batch, blocks, BLOCK, nodes).any(2)
            seen &= number < BLOCK * torch.arange(blocks, device=device)[:, None]
            above = number.where(seen, nodes).sort(-1).values.clamp(max=nodes - 1)
            self._outside.append((above.int(), seen.sum(-1, dtype=torch.int32)))
        return self._outside[0]

    def windows(self, taps: int) -> Tensor:
        """LongTensor[B, Q, taps], the window of each node for a convolution, oldest first.

        It holds columns of [taps - 1 of the state | M nodes]: the node's nearest ancestors, and before the root the
        newest of the state.
        """
        if taps not in self._windows:
            nodes, device = self.mask.shape[2], self.mask.device
            number = pad(torch.arange(nodes, device=device).where(self.mask, -1), (0, max(0, taps - nodes)), value=-1)
            nearest = number.topk(taps, -1).values  # itself, its parent, .., or -1
            above_root = torch.arange(taps, device=device) - self.mask.sum(-1, keepdim=True)
            column = (nearest + taps - 1).where(nearest >= 0, taps - 2 - above_root)
            self._windows[taps] = column.flip(-1)
        return self._windows[taps]
