"""Layers for `kernels.kernelize`: they have no state, and take the place of `forward` of a model's own.

RMSNorm          LlamaRMSNorm and those with its fields; "RMSNorm" in transformers
RotaryPosEmb     apply_rotary_pos_emb; "rotary_pos_emb" in transformers
SiluProductMLP   an MLP of silu(gate) * up, with the fields of LlamaMLP
TreeAttention    `tree_attention` as a module
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..tree_attention import tree_attention
from .gated import silu_product
from .rms_norm import Norm, add_rms_norm
from .rotary import Projected, Turns, rotate_and_store


class RMSNorm(nn.Module):
    can_torch_compile = True
    has_backward = False
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return add_rms_norm(rows, None, Norm(self.weight, self.variance_epsilon))[1].view(hidden_states.shape)


class RotaryPosEmb(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """q, k: [B, H, N, D]; or [B, N, H, D], and then unsqueeze_dim is 2."""
        by_heads = unsqueeze_dim == 1
        query, key = (q.transpose(1, 2), k.transpose(1, 2)) if by_heads else (q, k)
        batch, count, heads, size = key.shape
        half = size // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        turns = Turns(*(each.expand(batch, count, size)[:, :, None].contiguous() for each in (cos, signed)))
        keys = key.new_empty(batch, heads, count, size)  # a cache of these tokens alone
        rows = torch.arange(count, device=key.device).expand(batch, count).contiguous()
        turned = rotate_and_store(Projected(query, key, key), turns, keys, torch.empty_like(keys), rows)
        return (turned.transpose(1, 2), keys) if by_heads else (turned, keys.transpose(1, 2))


class SiluProductMLP(nn.Module):
    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(silu_product(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))


class TreeAttention(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, prefix_length: int | Tensor, subtree_end: Tensor
    ) -> Tensor:
        return tree_attention(query, key, value, prefix_length=prefix_length, subtree_end=subtree_end)
