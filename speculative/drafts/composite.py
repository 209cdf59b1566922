"""Drafts made of drafts: a cascade, in which each drafts some levels of a tree, and a mixture, in which all draft each.

The output has the target's distribution for any logits, so these only combine logits. Each part remembers sequences in
its own cache. Parts without a model are called for all nodes, because that costs nothing. In a cascade, a model is not
called for the nodes of its last level and below; when the next tree begins, it reads those that were accepted. So its
first feed is a chain of the last tokens, instead of just the root.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.mixing import add_to_mixture
from heavypath.kernels.numbers import real
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward, Taps, host_can_read
from heavypath.speculative.trees.tails import Usual

FIRST = 0.9  # default weight of the first draft of a mixture, which should be the strongest


@dataclass(frozen=True)
class Cascade(Draftable):
    """A draft made of several: the first one drafts the first levels of each tree, the next one those below, and so on.

        Cascade([draft, PromptLookup()], levels=[2, 4])     # a model for two levels, prompt lookup for four more

    drafts: anything that SpeculativeDecoder takes as a draft, strongest first
    levels: number of levels of each, at least 1; the last draft drafts all remaining levels

    Source: the horizontal cascade of Chen et al. 2024, "Cascade Speculative Drafting for Even Faster LLM Inference".
    """

    drafts: Sequence[Any]
    levels: Sequence[int]

    def __post_init__(self) -> None:
        check_drafts("Cascade", self.drafts)
        if len(self.levels) != len(self.drafts) or not all(isinstance(each, int) and each >= 1 for each in self.levels):
            raise ValueError(
                f"Cascade needs a number of levels, at least 1, for each of its {len(self.drafts)} drafts, "
                f"got {[*self.levels]}"
            )


@dataclass(frozen=True)
class Mixture(Draftable):
    """A draft made of several: Q = sum_i w_i Q_i / sum_i w_i, over those that propose anything at a node.

        Mixture([draft, PromptLookup()], weights=[0.7, 0.3])

    So a tree has the likeliest tokens of all drafts together.

    drafts: anything that SpeculativeDecoder takes as a draft
    weights: one for each, above 0; default: 0.9 for the first one, the rest shared equally by the others
    """

    drafts: Sequence[Any]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_drafts("Mixture", self.drafts)
        if self.weights is None:
            return
        weights = [real("weights", each) for each in self.weights]
        if len(weights) != len(self.drafts) or not all(math.isfinite(each) and each > 0 for each in weights):
            raise ValueError(f"Mixture needs a weight above 0 for each of its {len(self.drafts)} drafts, got {weights}")


def check_drafts(name: str, drafts: Sequence[Any]) -> None:
    """Raise ValueError unless `drafts` is a list of at least two drafts. name: the composite's, for the message."""
    is_list = isinstance(drafts, Sequence) and not isinstance(drafts, str)
    if not is_list or len(drafts) < 2:
        got = f"[{', '.join(type(each).__name__ for each in drafts)}]" if is_list else type(drafts).__name__
        raise ValueError(f"{name} needs a list of at least two drafts, got {got}")


class CompositeCache(RowCache):
    """The cache of a composite draft: the caches of its parts, and the sequence's tokens.

    keys: LongTensor[B, 1, rows, 1], the token of each row; values is the same tensor
    known: LongTensor[B], number of rows whose tokens all parts have read: those up to the last tree's root
    """

    def __init__(self, parts: list[Any], tokens: Tensor):
        super().__init__(tokens, tokens)
        self.parts = parts
        self.known = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and of all parts."""
        return self.keys.nbytes + sum(part.nbytes for part in self.parts)

    def begin(self, lengths: Tensor) -> None:
        """Begin sequences in all parts. lengths: LongTensor[B], the number of tokens before each root."""
        self.known.copy_(lengths)
        for part in self.parts:
            part.begin(lengths)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = copy(self)
        view.keys = view.values = self.keys[:slots]
        view.known = self.known[:slots]
        view.parts = [part.first(slots) for part in self.parts]
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [self.keys, self.known, *(field for part in self.parts for field in part.remembered())]

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the rows of an accepted path in the tokens and in all parts; arguments as in `RowCache.accept`."""
        drafted = path if node_rows is None else node_rows.gather(1, path.clamp(min=0))
        step_kernels(path.device).compact([self.keys], drafted, length, prefix_length)
        for part in self.parts:
            part.accept(path, length, prefix_length, node_rows)

    def advance(self, path: Tensor, produced: Tensor, node_rows: Tensor | None = None) -> None:
        """Update state that is not in rows, in all parts; arguments as in `RowCache.advance`."""
        for part in self.parts:
            part.advance(path, produced, node_rows)


class CompositeDraft(Draft):
    """Base class of cascades, mixtures and merges: a draft that calls its parts and combines their logits.

    Raises ValueError for two trained heads, or two lookaheads: only one of each can take part in the target's pass.
    """

    def __init__(self, parts: list[Draft], device: torch.device):
        self.drafts = parts
        self._device = device
        counts = {
            "trained head": sum(leaf.reads_target for leaf in self.leaves),
            "lookahead": sum(leaf.extra_nodes > 0 for leaf in self.leaves),
        }
        for name, count in counts.items():
            if count > 1:
                raise ValueError(f"a draft made of drafts can have one {name} among them, got {count}")
        self.extra_nodes = sum(leaf.extra_nodes for leaf in self.leaves)
        self.foreign = tuple(name for leaf in self.leaves for name in leaf.foreign)

    def new_cache(self, batch: int, rows: int) -> CompositeCache:
        """An empty cache, with caches of all parts in it, of `rows` rows for each of `batch` sequences."""
        tokens = torch.zeros(batch, 1, rows, 1, dtype=torch.long, device=self._device)
        return CompositeCache([part.new_cache(batch, rows) for part in self.drafts], tokens)

    def prefill(self, tokens: Tensor, cache: CompositeCache) -> None:
        """Store the tokens of right-padded sequences LongTensor[B, T]; the decoder prefills each of `parts` besides."""
        cache.keys[:, 0, : tokens.shape[1], 0] = tokens

    def parts(self, cache: CompositeCache) -> list[tuple[Draft, Any]]:
        """The draft itself and all of its parts, recursively, each with its cache."""
        below = [part.parts(own) for part, own in zip(self.drafts, cache.parts, strict=True)]
        return [(self, cache), *(pair for pairs in below for pair in pairs)]

    @property
    def leaves(self) -> list[Draft]:
        """The drafts that are not made of others, in all parts, recursively."""
        return [leaf for part in self.drafts for leaf in part.leaves]

    def taps(self, cache: CompositeCache) -> Taps | None:
        """One request for the hidden states that all parts read; None if no part reads any."""
        found = [part.taps(own) for part, own in zip(self.drafts, cache.parts, strict=True)]
        parts = [taps for taps in found if taps is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        numbers = tuple(dict.fromkeys(number for taps in parts for number in taps.numbers))

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            by_number = dict(zip(numbers, states, strict=True))
            for taps in parts:
                taps.read([by_number[number] for number in taps.numbers], tokens, positions, cache_rows)

        return Taps(numbers, read)

    def changes(self, cache: CompositeCache) -> list[Any]:
        """The `LogitChange`s of all parts."""
        return [change for part, own in zip(self.drafts, cache.parts, strict=True) for change in part.changes(own)]

    def usual_acceptance(self, temperature: float) -> Usual:
        """How often tokens of its best part are usually accepted."""
        return max(part.usual_acceptance(temperature) for part in self.drafts)

    def learn(self, prompts: Tensor, lengths: Tensor, new: Tensor, counts: Tensor) -> None:
        """Let all parts learn from finished sequences; arguments as in `Draft.learn`."""
        for part in self.drafts:
            part.learn(prompts, lengths, new, counts)

    def unsure_rows(self, levels: int) -> int:
        """2 + levels, the number of last rows that may be missing: a model lacks what other drafts drafted below it."""
        return 2 + levels


class CascadeDraft(CompositeDraft):
    """The `Draft` of `Cascade`: for each level it calls the draft that drafts there."""

    def __init__(self, parts: list[Draft], levels: Sequence[int], device: torch.device):
        super().__init__(parts, device)
        for leaf in (leaf for part in parts[:-1] for leaf in part.leaves):
            if leaf.keeps_state:
                raise ValueError(
                    "a draft with recurrent layers must read each token in the step after it, got one in a Cascade "
                    "before its last draft; make it the last one, or take a Mixture"
                )
        self._ends = [*accumulate(levels)][:-1]  # the first level that each draft, except the last, does not draft
        # Whether each draft lacks what others drafted below it, and so begins a step by reading a chain of tokens.
        self._lacks_rows = [*(part.can_rest and part.overlap is not None for part in parts[:-1]), False]

    @property
    def positions(self) -> float:
        """The length up to which the first draft proposes tokens: after it, other drafts have no node to go on from."""
        return self.drafts[0].positions

    def __call__(self, feed: Feed, cache: CompositeCache) -> Tensor:
        """The logits [B, n, V] of the part that drafts below this level, in fp32 whatever the parts' dtypes are.

        For a step's first feed maybe only those after the root, [B, 1, V].
        """
        store_rows(cache.keys, feed.tokens[:, :, None, None], feed.cache_rows)
        stage = sum(feed.level >= end for end in self._ends)
        caught_up = _chain_feed(feed, cache) if feed.news and any(self._lacks_rows) else feed
        logits: dict[int, Tensor] = {}
        for index, (part, part_cache) in enumerate(zip(self.drafts, cache.parts, strict=True)):
            if index >= stage or part.overlap is None:  # below their levels, only drafts without a model are called
                logits[index] = part(caught_up if self._lacks_rows[index] else feed, part_cache)
        if feed.drafted is None:
            return logits[stage].float()
        chosen = logits[0][:, -1:].float()  # each sequence's node is at its own level
        for index, end in enumerate(self._ends, 1):
            chosen = chosen.where((feed.drafted < end)[:, None, None], logits[index][:, -1:].float())
        return chosen


class MixtureDraft(CompositeDraft):
    """The `Draft` of `Mixture`: it calls all drafts for each level, and averages their distributions by weights."""

    def __init__(self, parts: list[Draft], weights: Sequence[float] | None, device: torch.device):
        super().__init__(parts, device)
        if weights is None:
            weights = [FIRST, *[(1 - FIRST) / (len(parts) - 1)] * (len(parts) - 1)]
        self._logs = [math.log(weight) for weight in weights]

    def __call__(self, feed: Feed, cache: CompositeCache) -> Tensor:
        """The mixture's log-probabilities, fp32 [B, n, V]; for a step's first feed only those after the root."""
        after = -1 if feed.news else 0
        mixed = None
        for part, part_cache, log in zip(self.drafts, cache.parts, self._logs, strict=True):
            mixed = add_to_mixture(mixed, part(feed, part_cache)[:, after:], log)
        assert mixed is not None
        return mixed


def _chain_feed(feed: Feed, cache: CompositeCache) -> Feed:
    """A step's first feed for a part with a model: all tokens that may be new to it, as a chain that ends at the root.

    It has at most feed.news tokens of each sequence. In a shorter sequence, the first token is repeated.
    """
    lengths = feed.prefix_lengths
    new = lengths + 1 - cache.known
    cache.known.copy_(lengths + 1)
    count = max(1, int(new.max())) if host_can_read(lengths.device) else feed.news
    rows = (lengths[:, None] + torch.arange(1 - count, 1, device=lengths.device)).clamp(min=0)
    tokens = cache.keys[:, 0, :, 0].gather(1, rows)
    return replace(
        feed,
        tokens=tokens,
        positions=rows,
        cache_rows=rows,
        parent_rows=rows - 1,
        prefix_lengths=rows[:, 0],
        visible_rows=max(feed.visible_rows, count),
        ancestor_mask=torch.arange(count, device=lengths.device) <= (rows - rows[:, :1])[..., None],
    )


def parts_for(drafts: Sequence[Any], kind: str, target: Forward, model: PreTrainedModel) -> list[Draft]:
    """The `Draft`s for the drafts that a user gave to a composite.

    kind: the composite's name in messages; target, model: as in `as_draft`. Raises ValueError for a Merge among them.
    """
    parts = [as_draft(each, target, model) for each in drafts]
    if any(part.root_distributions > 1 for part in parts):
        raise ValueError(f"a Merge has paths of its own, and is no part of a {kind}")
    return parts


@as_draft.register
def _(given: Cascade, target: Forward, model: PreTrainedModel) -> Draft:
    return CascadeDraft(parts_for(given.drafts, "Cascade", target, model), given.levels, target.device)


@as_draft.register
def _(given: Mixture, target: Forward, model: PreTrainedModel) -> Draft:
    return MixtureDraft(parts_for(given.drafts, "Mixture", target, model), given.weights, target.device)


def describe_parts(given: Any, shares: Sequence[Any] | None) -> str:
    """A composite draft in words. shares: levels or weights of its parts; None if it has none"""
    parts = " and ".join(map(describe, given.drafts))
    return f"{type(given).__name__} of {parts}" + ("" if shares is None else f", {[*shares]}")


@describe.register
def _(given: Cascade) -> str:
    return describe_parts(given, given.levels)


@describe.register
def _(given: Mixture) -> str:
    return describe_parts(given, given.weights)


@draft_parameter_count.register
def _(given: Cascade | Mixture, target: PreTrainedModel) -> int:
    return sum(draft_parameter_count(part, target) for part in given.drafts)
