"""The encoder of LiLiCorr: attention between the K candidates of all D depths, with a bias for their depths."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def bias_by_depth(relative: Tensor, same: Tensor, depths: int, count: int) -> Tensor:
    """What is added to the scores of attention between candidates, [heads, D * K, D * K].

    relative: [heads, 2 R + 1], for each distance of depths from -R to R; same: [heads], for candidates of one depth
    depths, count: D and K
    """
    slots = torch.arange(depths, device=relative.device).repeat_interleave(count)
    apart = slots[:, None] - slots
    return relative[:, apart + relative.shape[1] // 2] + (apart == 0) * same[:, None, None]


class EncoderLayer(nn.Module):
    """A layer of the encoder: attention, then an MLP, each after a norm. Weights are named as in its checkpoints."""

    def __init__(self, width: int, heads: int, inner: int, eps: float):
        super().__init__()
        self.attn_norm = LlamaRMSNorm(width, eps)
        self.mlp_norm = LlamaRMSNorm(width, eps)
        self.attn = _Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        """The candidates' new states [B, D * K, W]; bias: [heads, D * K, D * K], see `bias_by_depth`."""
        states = states + self.attn(self.attn_norm(states), bias)
        return states + self.mlp(self.mlp_norm(states))


class _Attention(nn.Module):
    """Attention with a bias on its scores. Weights are named as in `torch.nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        parts = linear(states, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out_proj(scaled_dot_product_attention(query, key, value, bias[None]).transpose(1, 2).flatten(2))
