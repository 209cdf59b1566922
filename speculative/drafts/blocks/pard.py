"""A draft model that drafts all levels of a tree in one pass (PARD): masks replace the tokens not drafted yet.

    input    the tokens that are new since the last step, the root, and masks, at consecutive positions
    output   the root's row gives the distribution of its children, the j-th mask's row that at depth j + 1

The model is an ordinary causal model with the target's vocabulary, trained on such inputs. Distributions depend on the
depth alone. Keys and values of tokens stay in the cache, those of masks are overwritten. Source: An et al. 2025, "PARD:
Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation", arXiv 2504.18583.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.layers.rotary import store_rows
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.drafts.blocks.draft import place_of
from heavypath.speculative.drafts.draft import Draft, Draftable, Feed
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.caches import KeyValueCache, RowCache
from heavypath.speculative.models.forward import Forward, Taps, as_logits, host_can_read


@dataclass(frozen=True, eq=False)
class Pard(Draftable):
    """A model trained with PARD, as a draft; `load_draft` makes one if a folder's config.json has a `pard_token`.

    model:         the model, as transformers loads it
    mask_token_id: the token for masks, `pard_token` in its config
    depths:        the most levels that it drafts; PARD's authors trained their models with 8

    Raises ValueError for a mask_token_id that is no token of the model, and for depths below 1.
    """

    model: PreTrainedModel
    mask_token_id: int
    depths: int = 8

    def __post_init__(self) -> None:
        vocab = self.model.config.get_text_config().vocab_size
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < vocab:
            raise ValueError(f"mask_token_id must be a token of the draft's {vocab}, got {self.mask_token_id!r}")
        if self.depths < 1:
            raise ValueError(f"depths must be at least 1, got {self.depths}")


class PardCache(RowCache):
    """The model's cache, and the tokens that the target has read, in the same rows as in the target's cache.

    tokens: LongTensor[B, 1, rows, 1], written during the target's passes
    known:  LongTensor[B], number of tokens of each sequence whose keys and values have been computed
    base:   [B, D + 1, V], the logits of the D depths in this step; the last row is -inf, for deeper nodes
    """

    _OWN = ("tokens", "known", "base")

    def __init__(self, model: KeyValueCache, base: Tensor):
        super().__init__(model.keys, model.values)
        batch = len(base)
        rows = model.keys.shape[2]
        self.model = model
        self.base = base
        self.tokens = torch.zeros(batch, 1, rows, 1, dtype=torch.long, device=base.device)
        self.known = torch.zeros(batch, dtype=torch.long, device=base.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return super().nbytes + sum(getattr(self, name).nbytes for name in self._OWN)

    def begin(self, lengths: Tensor) -> None:
        """Set how many tokens the prefill reads in each sequence, LongTensor[B]: all tokens before the root."""
        self.known.copy_(lengths)

    def first(self, slots: int) -> Self:
        """A view of the first `slots` sequences."""
        view = super().first(slots)
        view.model = self.model.first(slots)
        for name in self._OWN:
            setattr(view, name, getattr(self, name)[:slots])
        return view

    def remembered(self) -> list[Tensor]:
        """All tensors with the state of sequences, which `RowCache.swap` and `receive` move with a sequence."""
        return [self.keys, self.values, self.tokens, self.known]

    def accept(self, path: Tensor, length: Tensor, prefix_length: Tensor, node_rows: Tensor | None = None) -> None:
        """Move the tokens of an accepted path. Their keys and values are computed in the next step."""
        step_kernels(path.device).compact([self.tokens], path, length, prefix_length)


class PardDraft(ModelDraft):
    """The `Draft` of `Pard`: drafts all levels in one pass of its model. ValueError for one with recurrent layers."""

    can_rest = False  # its cache lacks the keys and values of the tokens that were accepted last

    def __init__(self, forward: Forward, vocab_size: int, given: Pard):
        super().__init__(forward, vocab_size)
        if forward.state_bytes:
            raise ValueError("the model of a Pard must have attention layers alone, got one with recurrent layers")
        self.levels = self._depths = given.depths
        self.forward.drafts_at_once = True  # for estimates of costs
        self._mask = given.mask_token_id
        self._columns = vocab_size

    def new_cache(self, batch: int, rows: int) -> PardCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and nodes, with further rows for masks."""
        base = as_logits(self.forward.like.new_full((batch, self._depths + 1, self._columns), -torch.inf))
        return PardCache(self.forward.new_cache(batch, rows + self._depths), base)

    def taps(self, cache: PardCache) -> Taps:
        """A request for no hidden states: it only stores the tokens that the target's passes read."""

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            store_rows(cache.tokens, tokens[:, :, None, None], cache_rows)

        return Taps((), read)

    def prefill(self, tokens: Tensor, cache: PardCache, starts: Any = None) -> None:
        """Read right-padded sequences LongTensor[B, T]; starts: as in `Forward.prefill`."""
        super().prefill(tokens, cache.model, starts)

    def __call__(self, feed: Feed, cache: PardCache) -> Tensor:
        """The logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
        if feed.news:
            self._draft_all(feed, cache)
        nodes = 1 if feed.news else feed.tokens.shape[1]
        return cache.base[place_of(feed, self._depths)][:, None].expand(-1, nodes, -1)

    def unsure_rows(self, levels: int) -> int:
        """levels + 2: all nodes that the last step accepted, the last root, and the token before it."""
        return levels + 2

    def _draft_all(self, feed: Feed, cache: PardCache) -> None:
        """Run the model over the tokens that it has not read yet and over masks; store the logits of each depth."""
        lengths = feed.prefix_lengths
        root = feed.tokens[:, -1:]
        levels = min(feed.levels, self._depths)
        committed = cache.tokens[:, 0, :, 0]
        if feed.drafted is not None:  # tokens that count as drafted are read in a later step, as new ones
            lengths = lengths - feed.drafted
            root = root.where(feed.drafted[:, None] == 0, committed.gather(1, lengths[:, None]))
        new = lengths + 1 - cache.known
        cache.known.copy_(lengths + 1)
        count = max(1, int(new.max())) if host_can_read(lengths.device) else feed.news
        # The last `count` tokens. In a sequence with fewer tokens, the first one is repeated.
        rows = (lengths[:, None] + torch.arange(1 - count, levels, device=lengths.device)).clamp(min=0)
        unread = committed.gather(1, rows[:, : count - 1]).where(rows[:, : count - 1] < lengths[:, None], root)
        masks = torch.full_like(rows[:, count:], self._mask)
        every = torch.arange(count + levels - 1, device=lengths.device)
        given = replace(
            feed,
            tokens=torch.cat([unread, root, masks], 1),
            positions=rows,
            cache_rows=rows,
            parent_rows=rows - 1,
            prefix_lengths=rows[:, 0],
            visible_rows=min(max(feed.visible_rows, count) + levels, cache.keys.shape[2]),
            ancestor_mask=every <= (rows - rows[:, :1])[..., None],
        )
        cache.base[:, :levels] = super().__call__(given, cache.model)[:, count - 1 :]


@as_draft.register
def _(given: Pard, target: Forward, model: PreTrainedModel) -> Draft:
    return PardDraft(as_draft(given.model, target, model).forward, target.vocab_size, given)


@describe.register
def _(given: Pard) -> str:
    return f"pard of {given.depths} levels, {describe(given.model)}"


@draft_parameter_count.register
def _(given: Pard, target: PreTrainedModel) -> int:
    return parameter_count(given.model)
