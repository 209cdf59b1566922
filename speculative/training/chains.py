"""A head's outputs at all depths of training rows: training-time test (EAGLE-3, Li et al. 2025, section 3.2).

Entry i of a row pairs the target's hidden states at token i with token i + 1. Step k of the test (k = 0, 1, ...) uses
the outputs of step k - 1 instead of the target's features, token i + k + 1, and the rotary position i + k. So its
output predicts a node at depth k + 1. As in decoding it attends to the entries j <= i of step 0, which have the
target's features, and to the nodes above it, which are entry i of steps 1 to k.
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

    rows:  R rows of L tokens, with the target's hidden states
    embed: a function from tokens LongTensor[R, N] to their embeddings [R, N, H]
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
    """Attention of entry i in a step: to the entries j <= i of step 0, and to entry i of all later steps so far.

    A function for one pass over rows. The head's layers call it in turn, step after step, so that it collects each
    layer's keys and values.

    layers: number of the head's layers
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.calls = 0
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention's output [B, Hq, N, D]. query: [B, Hq, N, D]; key, value: [B, Hkv, N, D], of this step."""
        groups = query.shape[1] // key.shape[1]
        layer = self.calls % self.layers
        self.calls += 1
        self.keys[layer].append(for_all_heads(key.to(query.dtype), groups))
        self.values[layer].append(for_all_heads(value.to(query.dtype), groups))
        attention = joined_attention if query.is_cpu else masked_attention
        return attention(query, self.keys[layer], self.values[layer])


def masked_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a step's N entries to the steps up to this one, as one masked product. Returns [B, H, N, D].

    query: [B, H, N, D], of the last step
    keys, values: [B, H, N, D] for each step; entry i sees the entries j <= i of step 0, and entry i of later steps
    """
    entries = query.shape[2]
    own = torch.eye(entries, dtype=torch.bool, device=query.device)
    mask = torch.cat([own.new_ones(entries, entries).tril(), own.repeat(1, len(keys) - 1)], 1)
    return F.scaled_dot_product_attention(query, torch.cat(keys, 2), torch.cat(values, 2), mask)


def joined_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a step's N entries to the steps up to this one, for a CPU: equal to `masked_attention`, but faster.

    query: [B, H, N, D], of the last step. Returns [B, H, N, D]
    keys, values: [B, H, N, D] for each step. keys[0] is causal; of keys[k > 0] entry i sees only its own entry i
    """
    return _JoinedAttention.apply(query, *chain(keys, values))  # pyright: ignore[reportReturnType]


def for_all_heads(states: Tensor, groups: int) -> Tensor:
    """Keys or values [B, Hkv, N, D] repeated for all query heads, [B, Hkv * groups, N, D].

    On a GPU, PyTorch's attention has no fused kernel with both a mask and grouped heads; without a fused kernel it
    stores all scores.
    """
    return states[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


class _JoinedAttention(Function):
    """Causal attention to step 0, combined with one elementwise product for each later step.

    In the backward pass the fused kernel gets the combined output and normaliser. From them it computes step 0's part
    of the gradient, as in ring attention (Liu et al. 2023).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, *states: Tensor) -> Tensor:
        keys = states[: len(states) // 2]
        values = states[len(states) // 2 :]
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys[0], values[0], 0.0, True)
        if len(keys) > 1:
            scores = [(query * key).sum(-1) * query.shape[-1] ** -0.5 for key in keys[1:]]
            first = total
            total = torch.stack([total, *scores], -1).logsumexp(-1)
            out = out * (first - total).exp()[..., None]
            for score, value in zip(scores, values[1:], strict=True):
                out = out + (score - total).exp()[..., None] * value
        ctx.save_for_backward(query, out, total, *states)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, out, total, *states = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        keys = states[: len(states) // 2]
        values = states[len(states) // 2 :]
        scale = query.shape[-1] ** -0.5
        grad = grad.to(query.dtype)
        out = out.to(query.dtype)
        grad_query, *first = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys[0], values[0], out, total, 0.0, True
        )
        grad_keys = [first[0]]
        grad_values = [first[1]]
        shared = (grad * out).sum(-1)
        for key, value in zip(keys[1:], values[1:], strict=True):
            weight = ((query * key).sum(-1) * scale - total).exp()
            grad_score = (weight * ((grad * value).sum(-1) - shared) * scale)[..., None]
            grad_query = grad_query + grad_score * key
            grad_keys.append(grad_score * query)
            grad_values.append(weight[..., None] * grad)
        return grad_query, *grad_keys, *grad_values
