"""Draws from rows of logits by the compiled kernel, see sampling.cpp."""

from ctypes import Structure, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.recording import dense, launch
from heavypath.kernels.noise import Noise


class FiltersStruct(Structure):
    """`Filters` of rows.h."""

    _fields_ = [("temperature", c_double), ("top_k", c_int64), ("top_p", c_double), ("min_p", c_double)]

    @classmethod
    def of(cls, filters: Filters) -> "FiltersStruct":
        """The same filters, with numbers that filter nothing for those that are off."""
        top_p = 1.0 if filters.top_p is None else filters.top_p
        return cls(filters.temperature, filters.top_k or 0, top_p, filters.min_p or 0.0)


class _Draw(Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("stride", "rows", "vocab", "k")),
        ("filters", FiltersStruct),
        *((name, c_void_p) for name in ("seed", "noise_rows")),
        *((name, c_int64) for name in ("replacement", "uniform_fill")),
        *((name, c_void_p) for name in ("tokens", "keys", "logprobs")),
        ("threads", c_int64),
    ]


class _SequenceScores(Structure):
    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("batch", "nodes", "vocab", "sequence_step", "row_step")),
        ("settings", c_void_p),
        ("settings_step", c_int64),
        ("scores", c_void_p),
        ("threads", c_int64),
    ]


def seed_tensor(seed: int | Tensor) -> Tensor:
    """A seed as the LongTensor [] that kernels read; an integer is taken modulo 2**64."""
    return seed if isinstance(seed, Tensor) else torch.tensor(seed - (seed + (1 << 63) >> 64 << 64))


def below_infinity(values: Tensor) -> bool:
    """Whether all numbers of a contiguous fp32 tensor are below infinity, and none is NaN."""
    return bool(compiled().below_infinity(c_void_p(values.data_ptr()), c_int64(values.numel())))


def draw(
    logits: Tensor, k: int, filters: Filters, *, noise: Noise, replacement: bool, uniform_fill: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens LongTensor[R, k], keys and logprobs fp32 [R, k] of logits [R, V], as the reference of `sampling`."""
    logits = logits.detach().float()
    if logits.stride(1) != 1:
        logits = dense(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, k, dtype=torch.long)
    keys, logprobs = torch.empty(2, rows, k).unbind()
    noise_rows = None if noise.rows is None else dense(noise.rows)
    seed = seed_tensor(noise.seed)
    call = _Draw(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        rows=rows,
        vocab=vocab,
        k=k,
        filters=FiltersStruct.of(filters),
        seed=seed.data_ptr(),
        noise_rows=None if noise_rows is None else noise_rows.data_ptr(),
        replacement=replacement,
        uniform_fill=uniform_fill,
        tokens=tokens.data_ptr(),
        keys=keys.data_ptr(),
        logprobs=logprobs.data_ptr(),
        threads=thread_count(),
    )
    launch("draw", call, (logits, seed, noise_rows, tokens, keys, logprobs))
    return tokens, keys, logprobs


def sequence_scores(logits: Tensor, settings: Tensor) -> Tensor:
    """fp32 [B, N, V] of logits [B, N, V] and fp64 [B, 4], as the reference of `kernels.sequence_scores`."""
    logits = logits.detach().float()
    if logits.stride(2) != 1:
        logits = dense(logits)
    batch, nodes, vocab = logits.shape
    scores = torch.empty(batch, nodes, vocab)
    call = _SequenceScores(
        logits=logits.data_ptr(),
        batch=batch,
        nodes=nodes,
        vocab=vocab,
        sequence_step=logits.stride(0),
        row_step=logits.stride(1),
        settings=settings.data_ptr(),
        settings_step=settings.stride(0),
        scores=scores.data_ptr(),
        threads=thread_count(),
    )
    launch("sequence_scores", call, (logits, settings, scores))
    return scores
