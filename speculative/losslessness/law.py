"""The exact joint distribution of the next tokens of a causal language model, by enumeration.

Over a vocabulary of V tokens there are V ** T outputs of T tokens, and

    law(x_1, ..., x_T) = prod_t P(x_t | prompt, x_1, ..., x_{t-1}),

where P are the model's logits after temperature, top-k, top-p and min-p (`heavypath.kernels.filtering`). Over a toy
vocabulary they are few: a model of random weights over 7 tokens has 343 outputs of three. A decoder does not depend on
the size of the vocabulary, so its mistakes show there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative.losslessness.chi_square import described

MOST_TEXTS = 2**20
CONTEXTS_PER_FORWARD = 1024


@torch.inference_mode()
def joint_law(
    model: Any,
    prompt: Tensor,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Tensor:
    """The probability of each output of `length` tokens after a prompt, float64 [V, V, ..., V] on the CPU.

    The element at [x_1, ..., x_T] is the probability of the output x_1, ..., x_T.

    model:        a causal language model of transformers in evaluation mode, or any function of `input_ids` [B, T] and
                  `use_cache` that returns an object with `.logits` [B, T, V]
    prompt:       LongTensor[P]
    eos_token_id: tokens that end an output. After one of them the output is filled up with that token, with the first
                  one if there are several; a sampler must pad outputs in this way. None: no token ends an output

    Raises ValueError for a prompt of another shape, a length below 1, filters out of range, and tokens outside the
    vocabulary. Also for a model in training mode, and more than 2 ** 20 outputs.
    """
    filters = Filters(temperature, top_k, top_p, min_p).check()
    if not isinstance(prompt, Tensor) or prompt.dtype != torch.long or prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"prompt must be a LongTensor [P] with at least one token, got {described(prompt)}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if getattr(model, "training", False):
        raise ValueError("model is in training mode, where dropout changes its distribution: call model.eval() first")

    contexts = prompt[None]
    law = torch.ones(1, dtype=torch.float64, device="cpu")
    ended = torch.zeros(1, dtype=torch.bool, device="cpu")
    ends = torch.tensor(
        [eos_token_id] if isinstance(eos_token_id, int) else [*(eos_token_id or ())], dtype=torch.long, device="cpu"
    )
    vocab_size = 0
    for _ in range(length):
        logits = torch.cat(
            [
                model(input_ids=rows, use_cache=False).logits[:, -1].float().cpu()
                for rows in contexts.split(CONTEXTS_PER_FORWARD)
            ]
        )
        if not vocab_size:
            vocab_size = logits.shape[-1]
            check_size(vocab_size, length)
            if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < vocab_size:
                raise ValueError(f"eos_token_id must be in 0 .. {vocab_size - 1}, got {eos_token_id}")
        if temperature:
            step = filtered_logprobs(logits, filters).exp()  # [V ** t, V]
        else:
            step = one_hot(logits.argmax(-1), vocab_size).double()
        if len(ends):
            step = one_hot(ends[0], vocab_size).double().where(ended[:, None], step)
        law = (law[:, None] * step).flatten()
        new = torch.arange(vocab_size, device="cpu").repeat(len(contexts))
        ended = ended.repeat_interleave(vocab_size) | torch.isin(new, ends)
        contexts = torch.cat([contexts.repeat_interleave(vocab_size, 0), new[:, None].to(prompt.device)], 1)
    return law.view([vocab_size] * length)


def check_size(vocab_size: int, length: int) -> None:
    """Raise ValueError if there are more than 2 ** 20 outputs of `length` tokens, too many to list."""
    if vocab_size**length > MOST_TEXTS:
        raise ValueError(
            f"{vocab_size} ** {length} = {vocab_size**length} outputs are too many to list, at most {MOST_TEXTS} are: "
            f"ask for fewer tokens, or take a toy model with a smaller vocabulary"
        )
