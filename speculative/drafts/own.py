"""Checks of a user's own `Draft`: its methods when the decoder is built, and their results at every call."""

import inspect
from dataclasses import fields, replace
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from heavypath.kernels.native.recording import refuse
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.models.caches import RowCache

_OF_THE_CACHE = ("new_cache", "prefill")  # a draft has both of them, or neither and then no cache
_METHODS = {name: [*inspect.signature(getattr(Draft, name)).parameters][1:] for name in (*_OF_THE_CACHE, "__call__")}
_EXPECTED = (
    "a causal language model of transformers, PromptLookup(), Retrieval(texts), Recall(), EarlyExit(layers), "
    "or a Draft of your own"
)


class OwnDraft(Draft):
    """Wraps a user's own draft for a target with this vocabulary size on this device.

    A draft without `new_cache` and `prefill` remembers nothing: its cache has rows without columns.

    Raises TypeError for an object that lacks a method of `Draft`, or has it with other parameters. Its methods raise
    ValueError or TypeError if the draft returns a cache or logits of another type, shape, dtype or device.
    """

    def __init__(self, draft: Draft, vocab_size: int, device: torch.device):
        self.name = type(draft).__name__
        self.foreign = (self.name,)
        self._draft = draft
        self._vocab_size = vocab_size
        self._device = device
        if isinstance(draft, type):
            raise TypeError(f"draft must be an object, got the class {draft.__name__}; give {draft.__name__}(...)")
        if isinstance(draft, str):
            loading = "heavypath.speculative.loading.load_draft(name, target) loads it"
            raise TypeError(f"draft must be an object, got the name {draft!r}; {loading}")
        absent = [name for name in _METHODS if not _has(draft, name)]
        self._has_cache = not {*_OF_THE_CACHE} <= {*absent} or any(_similar(draft, name) for name in _OF_THE_CACHE)
        lacking = [_lacking(draft, name) for name in absent if self._has_cache or name not in _OF_THE_CACHE]
        if lacking:
            order = "; write nn.Module before Draft" if isinstance(draft, nn.Module) else ""
            raise TypeError(
                f"draft must be {_EXPECTED}, got {self.name!r}, which lacks {' and '.join(lacking)}; a Draft has "
                f"{_call('__call__')}, and {' and '.join(map(_call, _OF_THE_CACHE))} if it remembers sequences{order}"
            )
        for name, parameters in _METHODS.items():
            if name in absent:
                continue
            try:
                inspect.signature(draft if name == "__call__" else getattr(draft, name)).bind(
                    *[None for _ in parameters]
                )
            except TypeError as error:
                raise TypeError(f"draft {self.name!r} must be callable as {_call(name)}: {error}") from None

    def new_cache(self, batch: int, rows: int) -> RowCache:
        """The draft's empty cache, checked: two tensors [batch, heads, rows, D] of one dtype on the target's device."""
        if not self._has_cache:
            nothing = torch.empty(batch, 1, rows, 0, device=self._device)
            return RowCache(nothing, nothing)
        cache = self._draft.new_cache(batch, rows)
        if not isinstance(cache, RowCache):
            raise TypeError(f"{self.name}.new_cache must return a RowCache, got {type(cache).__name__}")
        for name, field in (("keys", cache.keys), ("values", cache.values)):
            like = cache.keys.shape, cache.keys.dtype
            fits = field.dim() == 4 and (field.shape[0], field.shape[2]) == (batch, rows)
            if not fits or (field.shape, field.dtype) != like or field.device != self._device:
                raise ValueError(
                    f"{self.name}.new_cache({batch}, {rows}) must return keys and values of one shape "
                    f"[{batch}, heads, {rows}, D] and one dtype on {self._device}, got {name} {_described(field)}"
                )
        return cache

    def prefill(self, tokens: Tensor, cache: RowCache) -> None:
        """Let the user's draft read right-padded sequences LongTensor[B, T]; does nothing if it has no `prefill`."""
        if self._has_cache:
            self._draft.prefill(tokens, cache)

    def __call__(self, feed: Feed, cache: RowCache) -> Tensor:
        """The draft's logits after each node, fp32 [B, n, V].

        The draft gets copies of the feed's tensors, because it may write to them, and its logits are copied, because it
        may reuse their memory.
        """
        refuse(self.name)  # a recording would not run its Python again
        logits = self._draft(_copied(feed), cache)
        if not isinstance(logits, Tensor):
            raise TypeError(f"{self.name} must return logits, a tensor, got {type(logits).__name__}")
        shape = (*feed.tokens.shape, self._vocab_size)
        if logits.shape != shape or logits.dtype != torch.float32 or logits.device != self._device:
            raise ValueError(
                f"{self.name} must return logits after each node of feed.tokens {[*feed.tokens.shape]} for each of the "
                f"target's {self._vocab_size} tokens: torch.float32 {[*shape]} on {self._device}, "
                f"got {_described(logits)}"
            )
        return logits.clone(memory_format=torch.contiguous_format)


def _copied(feed: Feed) -> Feed:
    """The feed with copies of its tensors."""
    values = {field.name: getattr(feed, field.name) for field in fields(feed)}
    return replace(feed, **{name: value.clone() for name, value in values.items() if isinstance(value, Tensor)})


def _has(draft: object, name: str) -> bool:
    """Whether an object implements a method itself, and does not just inherit the one of `Draft`, which raises."""
    method = getattr(draft, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(Draft, name)


def _call(name: str) -> str:
    """A method of `Draft` by name, with its parameters, for messages: "prefill(tokens, cache)"."""
    return f"{name}({', '.join(_METHODS[name])})"


def _lacking(draft: object, name: str) -> str:
    """The name of a missing method in words, with similar names that the object has, for messages."""
    similar = _similar(draft, name)
    return _call(name) + (f" (it has {', '.join(similar)})" if similar else "")


def _similar(draft: object, name: str) -> list[str]:
    """Public attributes with names similar to a method's: probably that method, misspelt."""
    return [one for one in get_close_matches(name, dir(draft)) if one != name and not one.startswith("_")]


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {[*tensor.shape]} on {tensor.device}"
