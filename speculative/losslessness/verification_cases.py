"""Kinds of target and draft distributions over a small vocabulary, by which a verification is checked.

A kind is a function (torch.Generator, number of rows, vocabulary size V) -> P and Q, float64 [rows, V].
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

Kind = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]


def _random(generator: torch.Generator, rows: int, vocab_size: int, *, scale: float = 1.0) -> Tensor:
    """Rows of probabilities [rows, V]: the softmax of normal logits with this standard deviation."""
    logits = torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64, device="cpu")
    return (logits * scale).softmax(-1)


def _keep(rows: Tensor, tokens: Tensor) -> Tensor:
    """The distributions [rows, V] restricted to k tokens each, and normalised again. tokens: LongTensor[rows, k]."""
    kept = rows * torch.zeros_like(rows).scatter(-1, tokens, 1.0)
    return kept / kept.sum(-1, keepdim=True)


def _likeliest(rows: Tensor, count: int) -> Tensor:
    return rows.topk(count, -1).indices


def _independent(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    return _random(generator, rows, vocab_size), _random(generator, rows, vocab_size)


def _near_equal(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    target = _random(generator, rows, vocab_size)
    draft = target * torch.exp(0.1 * torch.randn(target.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return target, draft / draft.sum(-1, keepdim=True)


def _equal(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    target = _random(generator, rows, vocab_size)
    return target, target.clone()


def _disjoint(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """P on one half of the tokens, Q on the other."""
    target, draft = _independent(generator, rows, vocab_size)
    order = _likeliest(_random(generator, rows, vocab_size), vocab_size)
    return _keep(target, order[:, : vocab_size // 2]), _keep(draft, order[:, vocab_size // 2 :])


def _filtered(target_tokens: int, draft_tokens: int) -> Kind:
    """A kind that keeps this number of the likeliest tokens, as after top-k; negative: that many fewer than V; 0: all.

    So the other distribution has mass where this one has none.
    """

    def kept(rows: Tensor, count: int) -> Tensor:
        most = count if count > 0 else max(1, rows.shape[1] + count)
        return _keep(rows, _likeliest(rows, most)) if count else rows

    def kind(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        target, draft = _independent(generator, rows, vocab_size)
        return kept(target, target_tokens), kept(draft, draft_tokens)

    return kind


def _ties(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """P is uniform. Q has one token twice as often as the others, which are tied."""
    target = torch.full((rows, vocab_size), 1 / vocab_size, dtype=torch.float64, device="cpu")
    often = _likeliest(_random(generator, rows, vocab_size), 1)
    draft = torch.ones_like(target).scatter(-1, often, 2.0)
    return target, draft / draft.sum(-1, keepdim=True)


def _cold(generator: torch.Generator, rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Both at a temperature of 1/3: nearly one-hot, with small probabilities left."""
    return _random(generator, rows, vocab_size, scale=3.0), _random(generator, rows, vocab_size, scale=3.0)


VERIFICATION_CASES: Mapping[str, Kind] = MappingProxyType(
    {
        "independent": _independent,
        "near equal": _near_equal,
        "equal": _equal,
        "disjoint supports": _disjoint,
        "filtered target": _filtered(-2, 0),
        "filtered draft": _filtered(0, -2),
        "both filtered": _filtered(-1, -1),
        "ties": _ties,
        "one-hot target": _filtered(1, 0),
        "one-hot draft": _filtered(0, 1),
        "cold": _cold,
    }
)
