"""Attention under an additive mask: what a CPU computes for a tree, and what defines `tree_attention`.

out[i] = sum_s softmax_s(scale * query[i] . key[s] + bias[i, s]) value[s]
bias[i, s] = 0 where node i sees cache row s, else -inf
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FEW_QUERIES = 8  # up to this many, queries of a group share one matrix product on a CPU


def attention_bias(ancestors: Tensor, lengths: int | Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [B or 1, 1, Q, rows] of a tree behind its prefix: 0 for rows that a node sees, else -inf.

    ancestors: bool [Q, N] or [B, Q, N], which of the N nodes each of the Q querying nodes sees
    lengths:   number of prefix rows, in all sequences or LongTensor[B]; the tree's own rows lie behind them
    rows:      number of cache rows that the mask covers
    """
    queries, nodes = ancestors.shape[-2:]
    if isinstance(lengths, int):
        bias = torch.zeros(*ancestors.shape[:-1], rows, dtype=dtype, device=ancestors.device)
        bias[..., lengths : lengths + nodes].masked_fill_(~ancestors, -torch.inf)
        if lengths + nodes < rows:
            bias[..., lengths + nodes :] = -torch.inf
        return bias.view(-1, 1, queries, rows)
    tree = torch.zeros(ancestors.shape, dtype=dtype, device=ancestors.device).masked_fill_(~ancestors, -torch.inf)
    tree = tree.view(-1, 1, queries, nodes)
    batch = max(len(tree), len(lengths))
    bias = torch.zeros(batch, 1, queries, rows, dtype=dtype, device=ancestors.device)
    bias.masked_fill_((torch.arange(rows, device=lengths.device) >= lengths[:, None, None, None] + nodes), -torch.inf)
    columns = lengths[:, None, None, None] + torch.arange(nodes, device=lengths.device)
    return bias.scatter_(3, columns.expand(batch, 1, queries, nodes), tree.expand(batch, -1, -1, -1))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Grouped-query attention; without a bias every query sees every key. Returns [B, Hq, Q, D].

    query: [B, Hq, Q, D]; key, value: [B, Hkv, S, D], Hq a multiple of Hkv
    bias:  [B or 1, 1, Q, S], added to the scaled scores
    scale: of the scores, default D ** -0.5

    On a CPU, for few fp32 queries, one matrix product serves all query heads of a key head, and four operations take
    the place of a dozen: a decoder's forward pass takes a tenth less time.
    """
    batch, heads, queries, head_dim = query.shape
    if query.device.type != "cpu" or query.dtype != torch.float32 or queries > _FEW_QUERIES:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    factor = head_dim**-0.5 if scale is None else scale
    keys, values = key.flatten(0, 1), value.flatten(0, 1)  # [B * Hkv, S, D]
    scores = torch.bmm(query.reshape(len(keys), -1, head_dim), keys.transpose(1, 2)).view(batch, heads, queries, -1)
    scores = scores * factor if bias is None else torch.add(bias, scores, alpha=factor)
    weights = scores.softmax(-1).view(len(keys), -1, keys.shape[1])
    return torch.bmm(weights, values).view(batch, heads, queries, -1)
