"""The `Draft` of an EAGLE head: drafts a tree level by level from the target's features, see `entries`.

This is the implementation with PyTorch operations. On a CPU, compiled code replaces it (`native`); then it is the
reference.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heavypath.kernels.layers.entries import EntryNodes, EntryNorms, Inputs, end_entries, entry_inputs, node_entries
from heavypath.kernels.layers.rms_norm import add_rms_norm
from heavypath.kernels.layers.rotary import Turns
from heavypath.kernels.layers.spread import spread_logits
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.entries import EntriesDraft
from heavypath.speculative.drafts.heads.layer import LayerFunctions, norm_if_any
from heavypath.speculative.drafts.heads.layered import LayeredDraft
from heavypath.speculative.drafts.heads.native import NativeHead
from heavypath.speculative.models.forward import (
    Forward,
    TreeMask,
    as_logits,
)
from heavypath.speculative.models.joined import Joining
from heavypath.speculative.models.linear import are_plain, as_it_lies, each_alone
from heavypath.speculative.models.llama import is_plain_embedding, norm_of
from heavypath.speculative.models.native import Ends, native_pass
from heavypath.speculative.models.structure import has_hooks

Cached = TypeVar("Cached", bound=HeadCache)


class _HeadFunctions(LayerFunctions):
    """The modules and functions of a `HeadLayer`."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.side_by_side = layer.side_by_side
        self.norm_before_residual = layer.norm_before_residual
        self.hidden_norm = norm_if_any(layer, "hidden_norm")


class HeadDraft(LayeredDraft, EntriesDraft):
    """An `EagleHead` as a draft, level by level. Raises ValueError as `LayeredDraft` does."""

    head: EagleHead

    def __init__(self, head: EagleHead, target: Forward):
        super().__init__(head, target)
        linears = self.linears
        self._tap_norms = None if head.fc_norm is None else [norm_of(each) for each in head.fc_norm]
        self._fc_norm = None if head.input_norm is None else norm_of(head.input_norm)
        self._layers = [_HeadFunctions(layer) for layer in head.layers]
        first = self._layers[0]
        self._norms = EntryNorms(None, None)
        if first.side_by_side:
            self._norms = EntryNorms(first.norm, first.hidden_norm, first.norm_before_residual)
        self._norm = None if head.norm is None else norm_of(head.norm)
        self.native = self._compiled()
        one, together = (linears.one, linears.together) if self.native is None else (as_it_lies, each_alone)
        joining = Joining(head)
        for layer in self._layers:
            layer.look_up(one, lambda modules: joining.products(modules) or together(modules))
        self._fc = one(head.fc)
        self._lm_head = target.parts.joined(self.lm_head, one(target.parts.of(self.lm_head)))

    def _compiled(self) -> NativeHead | None:
        """The compiled form of this draft, for a CPU; None if the head has a part that compiled code lacks."""
        head = self.head
        config = self.config
        embedding = self.embedding
        usual = self.target.ranks is None and type(embedding) is nn.Embedding and not has_hooks(embedding)
        if not (usual and are_plain([head.fc])):
            return None
        first = config.generation == 1
        ends = Ends(
            embedding.weight,
            self._norm,
            self.lm_head,
            self.vocab_size,
            given=config.target_hidden_size if first else config.hidden_size,
            join=head.fc if first else None,
            proposed=None if self.own_tokens is None else self.own_tokens.of_target,
            feeds_back_normed=config.feeds_back_normed,
        )
        weights = [*head.parameters(), embedding.weight, self.lm_head.weight]
        over = native_pass(self._layers, weights, ends, self.linears)
        fc = None if first or over is None else self.linears.copy_of([head.fc]).blocks
        norms = self._tap_norms or [None] * len(config.taps)
        return None if over is None else NativeHead(over, fc, (norms, self._fc_norm))

    def new_cache(self, batch: int, rows: int) -> HeadCache:
        """An empty cache of `rows` rows for each of `batch` sequences."""
        return self.cache_of(HeadCache, batch, rows)

    def cache_of(self, kind: type[Cached], batch: int, rows: int) -> Cached:
        """An empty cache of this class for `batch` sequences of `rows` rows."""
        config = self.config
        width = config.hidden_size
        return kind(
            batch,
            rows,
            (config.target_hidden_size if config.generation == 1 else width, width),
            layers=config.layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            like=self._layers[0].mlp_norm.weight,
            rotary=self.rotary(rows),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, n, V] of ends of entries [B, n, H]."""
        logits = as_logits(self._lm_head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:2], -1))
        return logits if self.own_tokens is None else spread_logits(logits, self.own_tokens)

    def run(
        self,
        features: Tensor,
        tokens: Tensor,
        rows: Tensor,
        cache: HeadCache,
        mask: TreeMask,
        positions: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """The ends [B, last, H] of entries, see `EntriesDraft.run`: by `EagleHead.forward`, and the norm after it."""
        table, looked_up = self._embedded(tokens)
        inputs = entry_inputs(features, tokens if looked_up else None, table, self._norms)
        return self._through(inputs, rows, cache, mask, rows if positions is None else positions, last)

    def after_nodes(self, feed: Feed, cache: HeadCache) -> Tensor:
        """See `EntriesDraft.after_nodes`."""
        nodes = EntryNodes(
            feed.tokens, feed.cache_rows, feed.positions, feed.parent_rows, feed.prefix_lengths, feed.ancestor_mask
        )
        table, looked_up = self._embedded(feed.tokens)
        entries = node_entries(cache.outputs, nodes, table, self._norms, looked_up=looked_up)
        mask = TreeMask(entries.before, feed.visible_rows, ancestor_mask=entries.ancestors)
        return self._through(entries.inputs, entries.rows, cache, mask, entries.positions)

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, bool]:
        """The table of embeddings, and that tokens are to be looked up in it; or else the embeddings of all tokens."""
        if is_plain_embedding(self.embedding) and not has_hooks(self.embedding):
            return self.embedding.weight, True
        return self.embedding(tokens.flatten()), False

    def _through(
        self,
        inputs: Inputs,
        rows: Tensor,
        cache: HeadCache,
        mask: TreeMask,
        positions: Tensor,
        last: int | None = None,
    ) -> Tensor:
        """The ends [B, last, H] of entries with these inputs."""
        attend = mask.attention(self.dtype, {None})[None]
        assert cache.rotary is not None
        turns = Turns.at(cache.rotary, positions)
        hidden = inputs.states
        attended = inputs.joined
        if self.config.generation == 1:
            hidden = attended = self._fc(inputs.joined)
        added = None
        for index, layer in enumerate(self._layers):
            if added is not None:
                assert layer.norm is not None
                hidden, attended = add_rms_norm(hidden, added, layer.norm)
            mixed = layer.attention(attended, turns, rows, cache.read(index), attend)
            hidden, normed = add_rms_norm(hidden, mixed, layer.mlp_norm)
            added = layer.mlp(normed)
        assert added is not None
        read = slice(0 if last is None else rows.shape[1] - last, None)
        hidden, added = (each.view(*rows.shape, -1)[:, read].flatten(0, 1) for each in (hidden, added))
        rows = rows[:, read]
        keeps_normed = self.config.feeds_back_normed
        ends = end_entries(hidden, added, self._norm, cache.outputs, rows, keeps_normed=keeps_normed)
        return ends.view(*rows.shape, ends.shape[-1])

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept of the target's hidden states, a list of [B, N, Ht]: [B, N, H], for EAGLE-1 [B, N, Ht]."""
        if self.config.generation == 1:
            return taps[0]
        flat = [tap.flatten(0, 1) for tap in taps]
        if self._tap_norms is not None:
            flat = [add_rms_norm(tap, None, norm)[1] for norm, tap in zip(self._tap_norms, flat, strict=True)]
        joined = torch.cat(flat, -1)
        if self._fc_norm is not None:
            _, joined = add_rms_norm(joined, None, self._fc_norm)
        return self._fc(joined).view(*taps[0].shape[:2], -1)

    def mask_features(self) -> Tensor:
        """The features of a mask entry, [1, 1, H], made from mask_hidden in place of hidden states."""
        assert self.head.mask_hidden is not None
        return self.features(self.head.mask_hidden.view(len(self.config.taps), 1, 1, -1).unbind())

    def level_weights(self) -> list[Tensor]:
        """All weights except the embedding, of which only a few rows are read."""
        own = [weight for name, weight in self.weights() if not name.startswith(("embed_tokens", "lm_head"))]
        return [*own, self.lm_head.weight]
