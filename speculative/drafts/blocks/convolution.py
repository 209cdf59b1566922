"""Convolutions over the rows of a block, before and after a sublayer (DFlash2).

Let y_r be the normed input of row r, f the attention or the MLP, c a column and g its group, and t < T a distance in
rows:

    K_r,s,t,c = base_s,t,c + (P y_r)_s,t,g        s = 0 before f, s = 1 after it
    conv_s(u)_r,c = sum_t K_r,s,t,c u_(r-t),c     rows before the block are 0
    h = h + conv_1(f(conv_0(y)))

The keys and values of the context are computed without convolutions.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heavypath.speculative.drafts.blocks.config import BlockConfig


class BlockConvolution(nn.Module):
    """The two convolutions of a sublayer. base_kernel: [2, T, H], kernel_projection: from H to 2 T H / group."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        size = config.conv_size
        width = config.hidden_size
        self.size = size
        self.group = config.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, size, width))
        self.kernel_projection = nn.Linear(width, 2 * size * width // config.conv_group, bias=False)

    def forward(self, normed: Tensor, rows: int) -> list[Callable[[Tensor], Tensor]]:
        """The functions conv_0 and conv_1, each [B * rows, H] -> [B * rows, H].

        normed: y, [B * rows, H], from which the weights are computed; rows: of a sequence's block
        """
        own = self.kernel_projection(normed).view(len(normed), 2, self.size, -1)
        kernels = self.base_kernel + own.repeat_interleave(self.group, -1)  # [B * rows, 2, T, H]

        def convolved(given: Tensor, kernel: Tensor) -> Tensor:
            padded = pad(given.view(-1, rows, given.shape[-1]), (0, 0, self.size - 1, 0))
            back = padded.unfold(1, self.size, 1).flip(-1)  # [B, rows, H, T]
            return (back.flatten(0, 1) * kernel.mT).sum(-1)

        return [lambda given, kernel=kernel: convolved(given, kernel) for kernel in kernels.unbind(1)]


def around(convolution: nn.Module | None, normed: Tensor, rows: int) -> list[Callable[[Tensor], Tensor]]:
    """The functions to apply before and after a sublayer, for its normed input; identities without a convolution."""
    return [_same, _same] if convolution is None else convolution(normed, rows)


def _same(given: Tensor) -> Tensor:
    return given
