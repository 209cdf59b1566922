"""Medusa heads as a PyTorch module: the layout of checkpoints, and the reference for decoding.

When the target has read x_i, its own lm_head predicts x_{i+1}, and head k (counted from 0) predicts the token k + 1
positions after that. Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
Decoding Heads", arXiv 2401.10774, sec. 2.1.1.

    x       the target's hidden state of x_i, after its final norm
    x       x + SiLU(W_kj x + b_kj)        for each of the layers j
    logits  U_k x                          of x_{i+2+k}

No head sees what the others have proposed: the children of all nodes at one depth have the same distribution. Older
checkpoints have no U_k; the target's lm_head is used instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from heavypath.speculative.drafts.draft import Draftable


@dataclass(frozen=True)
class MedusaConfig:
    """Shapes of Medusa heads.

    heads: number of heads, which is the number of tokens that they can draft
    layers: number of layers of each head, before its lm_head
    hidden_size, vocab_size: the target's
    owns_lm_heads: whether each head has its own lm_head, or uses the target's
    acceptance: as in `TappedConfig`
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    owns_lm_heads: bool
    acceptance: tuple[float, float] | None = None

    @property
    def model_type(self) -> str:
        """Name of this kind of draft in traces."""
        return "medusa"


class MedusaHeads(nn.Module, Draftable):
    """K Medusa heads with stacked weights, so that each layer of all heads is one product.

    weight: [layers, K, H, H]
    bias: [layers, K, H]
    lm_heads: [K, V, H]; None if the target's is used
    """

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        heads = config.heads
        width = config.hidden_size
        self.weight = nn.Parameter(torch.zeros(config.layers, heads, width, width))
        self.bias = nn.Parameter(torch.zeros(config.layers, heads, width))
        self.lm_heads = nn.Parameter(torch.zeros(heads, config.vocab_size, width)) if config.owns_lm_heads else None

    def by_name(self) -> dict[str, Tensor]:
        """Views of the stacked weights, by the names that a checkpoint has for them (`checkpoint.py`)."""
        layers = self.config.layers
        found = dict[str, Tensor]()
        for head in range(self.config.heads):
            for layer in range(layers):
                found[f"{head}.{layer}.linear.weight"] = self.weight[layer, head]
                found[f"{head}.{layer}.linear.bias"] = self.bias[layer, head]
            if self.lm_heads is not None:
                found[f"{head}.{layers}.weight"] = self.lm_heads[head]
        return found

    def forward(self, features: Tensor, lm_head: Callable[[Tensor], Tensor], heads: int | None = None) -> Tensor:
        """The logits [R, K, V] of the first `heads` heads (default: all), from the target's hidden states [R, H].

        lm_head: the target's, for heads without their own
        """
        count = self.config.heads if heads is None else heads
        hidden = features.expand(count, *features.shape)
        for weight, bias in zip(self.weight[:, :count], self.bias[:, :count], strict=True):
            hidden = hidden + silu(torch.baddbmm(bias[:, None], hidden, weight.mT))
        if self.lm_heads is None:
            logits = lm_head(hidden.flatten(0, 1)).view(count, len(features), -1)
        else:
            logits = hidden @ self.lm_heads[:count].mT
        return logits.transpose(0, 1)
