"""Medusa heads for training: all of them read the target's last hidden states, and no head reads another's output.

Head k (counted from 0) predicts token i + k + 2 from h, the target's hidden state at token i after its final norm:

    x       h
    x       x + SiLU(W_kj x + b_kj)        for each of the layers j
    logits  U_k x

The target does not learn, and the loss of head k has the weight decay^k. Source: Cai et al. 2024, "Medusa", arXiv
2401.10774, section 2.2.1 (Medusa-1). Its loss is the cross-entropy of the data's token. Here it is one of
`training.losses`; their KL(P || Q) is the cross-entropy for a token that is sampled from P, minus the entropy of P.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.training.student import Student, frozen_in
from heavypath.speculative.training.teacher import Taught


class SeparateHead(nn.Module):
    """One of K Medusa heads. Its parameters are views of the stacked weights, so that training changes those.

    The optimizer needs matrices: Muon makes each one's update orthogonal.

    number: the head's index
    """

    def __init__(self, heads: MedusaHeads, number: int):
        super().__init__()
        pairs = zip(heads.weight[:, number], heads.bias[:, number], strict=True)
        self.layers = nn.ModuleList(_linear(weight, bias) for weight, bias in pairs)
        self.lm_head = None if heads.lm_heads is None else _linear(heads.lm_heads[number], None)

    def forward(self, hidden: Tensor) -> Tensor:
        """The head's output before its lm_head, [R, N, H], for the target's hidden states [R, N, H]."""
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class SeparateHeads(nn.Module):
    """Medusa heads as a list of modules that share the memory of their stacked weights."""

    def __init__(self, heads: MedusaHeads):
        super().__init__()
        self.config = heads.config
        self.heads = nn.ModuleList(SeparateHead(heads, number) for number in range(heads.config.heads))


def student_of_medusa(heads: MedusaHeads, target: PreTrainedModel, dtype: torch.dtype | None = None) -> Student:
    """The student of Medusa heads. If they have no lm_heads, the target's is used, and is not trained.

    dtype: of matrix products, see `Student`
    """
    separate = SeparateHeads(heads)
    shared = frozen_in(dtype, target.get_output_embeddings())

    def outputs(rows: Taught, depths: int) -> list[Tensor]:
        chosen = separate.heads[:depths]
        hidden = rows.hidden[:, : rows.tokens.shape[1] - len(chosen)].to(heads.weight.dtype)
        return [head(hidden) for head in chosen]

    def logits(hidden: Tensor, depth: int) -> Tensor:
        own: Any = separate.heads[depth]
        lm_head = shared if own.lm_head is None else own.lm_head
        return lm_head(hidden.to(lm_head.weight.dtype))

    return Student(separate, outputs, logits, first=1, dtype=dtype)


def check_medusa(heads: MedusaHeads, width: int) -> None:
    """Raise ValueError for Medusa heads that cannot be trained for a target with hidden states of this width."""
    config = heads.config
    if config.layers < 1:
        raise ValueError("Medusa heads without layers are not trained here; make some by new_medusa(target)")
    if config.hidden_size != width:
        raise ValueError(
            f"the Medusa heads are for a target of width {config.hidden_size}, got a target of width {width}; make "
            "some by new_medusa(target)"
        )


def one_at_random(weights: Sequence[float], seed: int) -> Iterator[list[float]]:
    """For each step, endlessly, the weights of K heads of which one alone learns: K times its weight, and 0 for others.

    The mean over steps is `weights`. Source: Stern et al. 2018, "Blockwise Parallel Decoding for Deep Autoregressive
    Models", arXiv 1811.03115, section 6, which draws one of the heads' losses for each minibatch to save memory.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = len(weights)
    while True:
        chosen = int(torch.randint(heads, (), generator=generator, device="cpu"))
        yield [heads * weight if head == chosen else 0.0 for head, weight in enumerate(weights)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer whose parameters share the memory of these tensors, [O, H] and [O]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear
