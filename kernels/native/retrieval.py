"""Lookup and retrieval drafts on a CPU: calls of the compiled kernels in retrieval.cpp."""

from ctypes import byref
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from heavypath.kernels.native.library import compiled
from heavypath.kernels.native.recording import Arguments, do, fields
from heavypath.kernels.retrieval.corpus import SortedCorpus

_PLACES = 32  # most occurrences of the longest suffix that are read: R of `retrieval.latest`
_MOST = 256  # most occurrences of a suffix that are read from a corpus: R of `retrieval.followers`
_ASKED = (
    "batch nodes first longest vocab rows step head *tokens *cache_rows *parent_rows *lengths *keys *values *known "
    "*latest *earlier *out *places *weights"
)


class _Lookup(Arguments):
    _fields_ = fields(f"{_ASKED} shortest")


class _Retrieval(Arguments):
    _fields_ = fields(f"{_ASKED} renews size *followers *steps")


class Index(NamedTuple):
    """Index of the rows at which B sequences have each token. Every lookup updates it first.

    known:   LongTensor[B], tokens of each sequence that are in the index; 0 for a new sequence
    latest:  IntTensor[B, V], the last row of each token, -1 for none
    earlier: IntTensor[B, 1, rows, 1], for each row the previous row with the same token, -1 for none
    """

    known: Tensor
    latest: Tensor
    earlier: Tensor


class Sought(NamedTuple):
    """The query of a lookup: n nodes of each of B sequences, and the cache that holds the sequences. LongTensors.

    tokens, cache_rows, parent_rows: [B, n]; parents come before their children
    lengths:      [B], tokens before the roots
    keys, values: [B, heads, rows, M], of equal strides, with contiguous rows
    """

    tokens: Tensor
    cache_rows: Tensor
    parent_rows: Tensor
    lengths: Tensor
    keys: Tensor
    values: Tensor
    known_rows: Index


def look_up(sought: Sought, shortest: int, *, vocab_size: int, after_last: bool) -> Tensor:
    """Return logits of `LookupDraft`, fp32 [B, n, V], and write the nodes' rows; after_last: only the last node's."""
    written, asked = _asked(sought, _PLACES, vocab_size, after_last)
    call = _Lookup(**asked, shortest=shortest)
    places = written.places.numpy()
    logits = written.out.view(-1).numpy()

    def run() -> None:
        count = compiled().look_up(byref(call))
        logits[places[:count]] = written.weights[:count].log().numpy()

    do(run, call)
    return written.out


class HasCorpus(Protocol):
    """An object with a sorted corpus, which may be replaced between steps."""

    @property
    def corpus(self) -> SortedCorpus: ...  # noqa: D102


def retrieve(sought: Sought, known: HasCorpus, *, renews: bool, vocab_size: int, after_last: bool) -> Tensor:
    """Return the logits of `RetrievalDraft`, fp32 [B, n, V], and write the nodes' rows.

    known: has the corpus, which is read again in each replay; renews: whether it may be replaced between steps
    after_last: only the logits after the last node are needed
    """
    rows, longest = sought.keys.shape[2:]
    written, asked = _asked(sought, rows + longest * _MOST, vocab_size, after_last)
    call = _Retrieval(**asked, renews=renews)
    places = written.places.numpy()
    logits = written.out.view(-1).numpy()
    weights = written.weights.numpy()

    def run() -> None:
        corpus = known.corpus  # read in each replay, since it may have been replaced
        call.size = len(corpus.steps)
        call.followers = corpus.followers.data_ptr()
        call.steps = corpus.steps.data_ptr()
        count = compiled().retrieve(byref(call))
        logits[places[:count]] = np.log(weights[:count])

    do(run, call)
    return written.out


class _Proposed(NamedTuple):
    """Output buffers: logits [B, n, V], and room for the flat indices and weights of all proposed tokens."""

    out: Tensor
    places: Tensor
    weights: Tensor


def _asked(sought: Sought, most: int, vocab_size: int, after_last: bool) -> tuple[_Proposed, dict[str, Any]]:
    """Allocate outputs and fill the fields that both structures share; most: tokens proposed after a node, at most."""
    batch, nodes = sought.tokens.shape
    longest = sought.keys.shape[3]
    first = nodes - 1 if after_last else 0
    out = torch.empty(batch, nodes - first, vocab_size, dtype=torch.float32, device="cpu")
    room = batch * (nodes - first) * min(most, vocab_size)
    places = torch.empty(room, dtype=torch.long, device="cpu")
    weights = torch.empty(room, dtype=torch.float32, device="cpu")
    step, per_head, *_ = sought.keys.stride()
    head = (sought.keys.shape[1] - 1) * per_head  # the last head holds the tokens
    tokens, cache_rows, parent_rows, lengths = (each.contiguous() for each in sought[:4])
    known, latest, earlier = sought.known_rows
    return _Proposed(out, places, weights), {
        "batch": batch,
        "nodes": nodes,
        "first": first,
        "longest": longest,
        "vocab": vocab_size,
        "rows": sought.keys.shape[2],
        "step": step,
        "head": head,
        "tokens": tokens,
        "cache_rows": cache_rows,
        "parent_rows": parent_rows,
        "lengths": lengths,
        "keys": sought.keys,
        "values": sought.values,
        "known": known,
        "latest": latest,
        "earlier": earlier,
        "out": out,
        "places": places,
        "weights": weights,
    }
