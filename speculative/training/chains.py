"""A head's outputs at every depth of every text: training-time test (EAGLE-3, Li et al. 2025, section 3.2).

Entry i of a row pairs the target's hidden states at token i with token i + 1. Step k of the test, from 0, feeds the
outputs of step k - 1 in the place of the features. Its tokens are k further to the left, with rotary positions i + k.
So step k of entry i is the node at depth k + 1 below it. It sees the same as in decoding: the entries j <= i with the
target's own features, and the nodes above it, entry i of steps 1 to k.
"""

from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.teacher import Taught


def chain_outputs(head: EagleHead, rows: Taught, embed: Callable[[Tensor], Tensor], depths: int) -> list[Tensor]:
    """The head's outputs [R, L - depths, H] at each of `depths` steps: entry i of step k predicts token i + k + 2.

    embed: the embedding, [R, N, H] of tokens LongTensor[R, N]
    """
    entries = rows.tokens.shape[1] - depths
    weights = head.fc.weight
    hidden = head.features(rows.taps[:, :entries].to(weights.dtype).unbind(2))
    embedded = embed(rows.tokens[:, 1:].long()).to(weights.dtype)
    cos, sin = head.rotary_emb(hidden, torch.arange(entries + depths, device=weights.device)[None])
    attend = ChainAttention(head.config.layers)
    outputs = []
    for step in range(depths):
        span = slice(step, step + entries)
        hidden = head(hidden, embedded[:, span], (cos[:, span], sin[:, span]), attend)
        outputs.append(hidden)
        hidden = head.fed_back(hidden)
    return outputs


class ChainAttention:
    """Attention of a step: to the first step's entries up to one's own, and to one's own entry of the later steps.

    It is called by each layer of a head in turn, step after step.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.calls = layers, 0
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of query [B, Hq, N, D], and this step's key and value [B, Hkv, N, D]; as query."""
        groups, layer = query.shape[1] // key.shape[1], self.calls % self.layers
        self.calls += 1
        self.keys[layer].append(for_all_heads(key.to(query.dtype), groups))
        self.values[layer].append(for_all_heads(value.to(query.dtype), groups))
        attention = joined_attention if query.is_cpu else masked_attention
        return attention(query, self.keys[layer], self.values[layer])


def masked_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of query [B, H, N, D] to each step's keys and values [B, H, N, D]: one product under a mask."""
    entries = query.shape[2]
    own = torch.eye(entries, dtype=torch.bool, device=query.device)
    mask = torch.cat([own.new_ones(entries, entries).tril(), own.repeat(1, len(keys) - 1)], 1)
    return F.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)


def joined_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """The same on a CPU, in less time: one causal product, joined with an elementwise one for each later step."""
    return _JoinedAttention.apply(query, *chain(keys, values))  # pyright: ignore[reportReturnType]


def for_all_heads(states: Tensor, groups: int) -> Tensor:
    """Keys or values [B, Hkv, N, D] for each query head, [B, Hkv * groups, N, D].

    On a GPU no kernel of sdpa has both a mask and groups, and without one it keeps all scores.
    """
    return states[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


class _JoinedAttention(Function):
    """Causal attention over the first keys, joined with one elementwise product for each of the others.

    Backward, the fused kernel gets the joint output and normaliser: of these it makes the first keys' share of the
    joint gradient, as in ring attention (Liu et al. 2023).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, *states: Tensor) -> Tensor:
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys[0], values[0], 0.0, True)
        if len(keys) > 1:
            scores = [(query * key).sum(-1) * query.shape[-1] ** -0.5 for key in keys[1:]]
            first, total = total, torch.stack([total, *scores], -1).logsumexp(-1)
            out = out * (first - total).exp()[..., None]
            for score, value in zip(scores, values[1:], strict=True):
                out = out + (score - total).exp()[..., None] * value
        ctx.save_for_backward(query, out, total, *states)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, out, total, *states = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        scale = query.shape[-1] ** -0.5
        grad_query, *first = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys[0], values[0], out, total, 0.0, True
        )
        grad_keys, grad_values = [first[0]], [first[1]]
        shared = (grad * out).sum(-1)
        for key, value in zip(keys[1:], values[1:], strict=True):
            weight = ((query * key).sum(-1) * scale - total).exp()
            grad_score = (weight * ((grad * value).sum(-1) - shared) * scale)[..., None]
            grad_query = grad_query + grad_score * key
            grad_keys.append(grad_score * query)
            grad_values.append(weight[..., None] * grad)
        return grad_query, *grad_keys, *grad_values
