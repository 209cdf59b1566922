"""Sampling from rows of logits on a CPU: calls of the compiled kernels in sampling.cpp."""

from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.implementation import in_rows
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.recording import Arguments, fields, launch
from heavypath.kernels.noise import Noise


class FiltersStruct(Structure):
    """`Filters` of filters.h."""

    _fields_ = fields(".temperature top_k .top_p .min_p")

    @classmethod
    def of(cls, filters: Filters) -> "FiltersStruct":
        """Convert filters; those that are off get neutral numbers."""
        top_k = int(filters.top_k or 0)  # a tensor of 32 bits would not be compared with more bits
        top_p = 1.0 if filters.top_p is None else filters.top_p
        return cls(filters.temperature, min(top_k, 2**63 - 1), top_p, filters.min_p or 0.0)


class _Draw(Arguments):
    _fields_ = (
        *fields("*logits stride rows vocab k"),
        ("filters", FiltersStruct),
        *fields("*seed *noise_rows replacement uniform_fill *tokens *keys *logprobs threads"),
    )


class _SequenceScores(Arguments):
    _fields_ = fields("*logits batch nodes vocab sequence_step row_step *settings settings_step *scores threads")


class _Mix(Arguments):
    _fields_ = fields("*logits batch nodes vocab sequence_step row_step .log_weight adds *mixed threads")


def seed_tensor(seed: int | Tensor) -> Tensor:
    """Return a seed as a LongTensor []; an integer is taken modulo 2**64."""
    if isinstance(seed, Tensor):
        return seed
    signed = (int(seed) + 2**63) % 2**64 - 2**63
    return torch.tensor(signed, device="cpu")


def below_infinity(values: Tensor) -> bool:
    """Whether no number of a contiguous fp32 tensor is +infinity or NaN."""
    address = c_void_p(values.data_ptr())
    count = c_int64(values.numel())
    return bool(compiled().below_infinity(address, count))


def draw(
    logits: Tensor, k: int, filters: Filters, *, noise: Noise, replacement: bool, uniform_fill: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw k tokens per row of logits [R, V], as `kernels.sampling`: tokens LongTensor, keys, logprobs fp32 [R, k]."""
    logits = logits.detach().float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, k, dtype=torch.long, device="cpu")
    keys, logprobs = torch.empty(2, rows, k, dtype=torch.float32, device="cpu").unbind()
    call = _Draw(
        logits,
        logits.stride(0),
        rows,
        vocab,
        k,
        FiltersStruct.of(filters),
        seed_tensor(noise.seed),
        None if noise.rows is None else noise.rows.contiguous(),
        replacement,
        uniform_fill,
        tokens,
        keys,
        logprobs,
        thread_count(),
    )
    launch("draw", call)
    return tokens, keys, logprobs


def sequence_scores(logits: Tensor, settings: Tensor) -> Tensor:
    """Return scores fp32 [B, N, V] of logits [B, N, V] and settings fp64 [B, 4], as `kernels.sequence_scores`."""
    logits = in_rows(logits.detach().float())
    settings = in_rows(settings)
    scores = torch.empty(logits.shape, dtype=torch.float32, device="cpu")
    call = _SequenceScores(
        logits,
        *logits.shape,
        logits.stride(0),
        logits.stride(1),
        settings,
        settings.stride(0),
        scores,
        thread_count(),
    )
    launch("sequence_scores", call)
    return scores


def mix(mixed: Tensor | None, logits: Tensor, log_weight: float) -> Tensor:
    """Return log-probabilities fp32 [B, n, V] of a mixture with another part, as `kernels.mixing`."""
    logits = logits.detach().float()
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device="cpu") if mixed is None else mixed.contiguous()
    call = _Mix(
        logits,
        *logits.shape,
        logits.stride(0),
        logits.stride(1),
        log_weight,
        mixed is not None,
        out,
        thread_count(),
    )
    launch("mix", call)
    return out
