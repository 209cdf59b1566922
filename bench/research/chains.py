"""What a chain of drafted tokens yields along the target's own text, without a coin: by rejection and by blocks.

Let y_1, y_2, ... be what the target writes behind a root, r_i = P(y_i | ...) / Q(y_i | ...) the ratio of target's and
draft's probability, and R_i = r_1 ... r_i, R_0 = 1. Whatever is drafted, the text is the target's, and given that text
at least i drafted tokens were accepted with probability

    rejection   prod_{j <= i} min(1, 1 / r_j)     speculative sampling (Leviathan et al. 2023; Chen et al. 2023)
    block       1 / max_{k <= i} R_k              block verification (Sun et al. 2024, arXiv 2403.10444)

*Proof.* That i tokens are accepted and the text begins with y_1 ... y_i means that these were drafted, which has the
probability Q(y_1) ... Q(y_i), and then accepted; and the text begins so with probability P(y_1) ... P(y_i). So the
probability given the text is that of being accepted once drafted, over R_i. One by one they are accepted with
min(1, r_1) ... min(1, r_i), and min(1, r) / r = min(1, 1 / r). Block verification is traversal on a chain
(`verifying.traversal`): the walk ends at token i or behind it with the weight w_i = min(1, w_{i-1} r_i), w_0 = 1. By
induction w_i = R_i / max_{k <= i} R_k, for w_{i-1} r_i = R_i / max_{k < i} R_k is above 1 iff R_i is the greatest yet.

A step begins where the one before it ended, behind the accepted tokens and one more. Where a text is easy steps are
long, and few begin there: the mean over all tokens as roots would promise too much.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class LengthLaws(NamedTuple):
    """The probability that at least 1, 2, ..., n drafted tokens are accepted, given the text: fp64 [..., n] each."""

    rejection: Tensor
    block: Tensor


def length_laws(log_ratios: Tensor) -> LengthLaws:
    """Both laws behind some roots.

    log_ratios: [..., n], log r_1 ... log r_n of the target's text behind each root; +inf where the draft could not have
    drawn the token.

    Raises ValueError without a token, and for NaN or -inf, which no token that the target wrote has.
    """
    if log_ratios.ndim == 0 or log_ratios.shape[-1] == 0:
        raise ValueError(f"expected log_ratios [..., n] of n >= 1 tokens, got shape {[*log_ratios.shape]}")
    if bool((log_ratios.isnan() | (log_ratios == -torch.inf)).any()):
        raise ValueError("log_ratios are log P - log Q of tokens that the target wrote, got NaN or -inf")
    one_by_one = log_ratios.double()
    together = one_by_one.cumsum(-1)  # log R
    return LengthLaws(
        rejection=(-one_by_one.clamp(min=0).cumsum(-1)).exp(),
        block=(-together.cummax(-1).values.clamp(min=0)).exp(),
    )


def step_starts(law: Tensor) -> Tensor:
    """The probability that a step begins at each token, fp64 [S, T], where one begins at the first.

    law: [S, T, n], behind each token of S texts as a root, that at least 1 .. n tokens are accepted. With l_0 = 1 and
    l_{n+1} = 0 a step goes on i + 1 tokens with probability l_i - l_{i+1}.
    """
    ends = pad(law.double(), (1, 1))
    ends[..., 0] = 1
    ends = ends[..., :-1] - ends[..., 1:]  # exactly i accepted, [S, T, n + 1]
    texts, tokens, most = ends.shape
    begins = torch.zeros(texts, tokens + most, dtype=torch.float64)
    begins[:, 0] = 1
    for token in range(tokens):
        begins[:, token + 1 : token + 1 + most] += begins[:, token, None] * ends[:, token]
    return begins[:, :tokens]


def chain_tokens(log_ratios: Tensor, length: int) -> dict[str, Tensor]:
    """Expected tokens and steps of decoding with a chain along each text: fp64 [2, S] by the name of the law.

    log_ratios: [S, T], of the tokens of S texts. length: of the chain. Tokens over steps are tokens per forward. Steps
    that begin less than `length` tokens before a text's end are left out.

    Raises ValueError for texts without `length` tokens, and for log_ratios as `length_laws` does.
    """
    if log_ratios.ndim != 2 or not 1 <= length <= log_ratios.shape[1]:
        raise ValueError(f"expected log_ratios [S, T] and a length in 1 .. T, got {[*log_ratios.shape]} and {length}")
    found = {}
    for name, law in length_laws(log_ratios.unfold(1, length, 1))._asdict().items():
        begins = step_starts(law)
        found[name] = torch.stack([(begins * (1 + law.sum(-1))).sum(1), begins.sum(1)])
    return found
