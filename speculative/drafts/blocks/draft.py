"""The `Draft` of a block draft: one pass per step, over the root and masks, computes the logits of all depths.

The target has read all tokens of the sequence x_0 .. x_L except the root x_L. Let f_t be the concatenated taps (hidden
states) of token t, and E the embedding. A layer uses the same W_k and W_v for the context and for the block's rows:

    context   c_t = norm_hidden(fc f_t)                       for t < L, the same for all layers
    rows      h_0 = E[x_L], h_r = E[mask]                     at positions L + r
    layer     y = norm_in(h);  q = W_q y;  keys W_k [c; y], values W_v [c; y];  RMSNorm and RoPE of each head of q, keys
              h = h + W_o attention(q, keys, values);  h = h + mlp(norm_post(h))
    logits    lm_head(norm(h)), scaled and capped

A row attends to all tokens before L. In a causal layer it also attends to the block's rows up to itself, in other
layers to the whole block. If a causal layer has a window W, the row at position p attends to positions above p - W. In
other layers with a window, all rows attend to the same tokens as the root's row. Source: Chen et al. 2026, "DFlash:
Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; JetSpec is the case in which all layers are causal.

The distribution after a node needs no other pass: it is the distribution of its depth. Some drafts add a term that
depends on the node's token or path (`terms`). The logits may be divided by a temperature for each depth.

A pass of the target also computes the context's keys and values of all its nodes, for all layers. So nothing is
computed twice, and no shape depends on the number of accepted nodes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding as looked_up

from heavypath.kernels.layers.entries import EntryNorms, Inputs, entry_inputs
from heavypath.kernels.layers.few_logits import few_logits
from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm
from heavypath.kernels.layers.rotary import Projected, Turns, rotate_and_store, store_rows
from heavypath.kernels.layers.side_by_side import FieldRows
from heavypath.kernels.layers.spread import spread_logits
from heavypath.speculative.drafts.blocks.cache import BlockCache
from heavypath.speculative.drafts.blocks.convolution import around
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, Pass, TokenLayers
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads.layer import LayerFunctions
from heavypath.speculative.drafts.heads.layered import LayeredDraft
from heavypath.speculative.models.forward import Attend, Forward, Taps, TreeMask, as_logits
from heavypath.speculative.models.joined import Joining
from heavypath.speculative.models.llama import is_plain_embedding, norm_of
from heavypath.speculative.models.structure import has_hooks


class BlockHeadDraft(LayeredDraft):
    """A `BlockHead` as a draft. Its block limits the depth of trees. Raises ValueError as `LayeredDraft` does."""

    drafts_at_once = True
    head: BlockHead

    def __init__(self, head: BlockHead, target: Forward):
        super().__init__(head, target)
        config = self.config
        self.levels = config.depths
        if head.embed_tokens is None and hasattr(target.embedding, "embed_norm"):
            # The draft skips this norm, as in transformers.
            self.embedding = partial(looked_up, weight=target.embedding.weight)
        linears = self.linears
        modules: Any = head.layers
        self._attentions = [layer.self_attn for layer in modules]
        self._fc = linears.one(head.fc)
        self._context_norm = norm_of(head.hidden_norm)
        projections = [[getattr(each, name) for each in self._attentions] for name in ("k_proj", "v_proj")]
        self._context = linears.together([*projections[0], *projections[1]])
        if type(head.term).contexts is not BlockTerm.contexts:
            self._contexts = [linears.together([*both]) for both in zip(*projections, strict=True)]
        self._key_norm = Norm(torch.ones_like(self._attentions[0].k_norm.weight), config.rms_norm_eps)
        self._layers = [LayerFunctions(layer) for layer in head.layers]
        joining = Joining(head)
        for layer in self._layers:
            layer.look_up(linears.one, lambda modules: joining.products(modules) or linears.together(modules))
        self._convolutions = [(layer.attention_conv, layer.mlp_conv) for layer in modules]
        self._norm = norm_of(head.norm)
        self._lm_head = target.parts.joined(self.lm_head, linears.one(target.parts.of(self.lm_head)))
        # The context itself lies in the cache as further heads of keys and values.
        by_layer = 2 * config.num_key_value_heads * config.head_dim
        self._context_layers = -(-config.hidden_size // by_layer) if head.term.reads_before else 0
        self._ends = self._ends_of(target)
        self._below_all = torch.zeros(config.depths + 1, dtype=torch.float32, device=self.device)
        self._below_all[-1] = -torch.inf
        sharper = [1 / each for each in head.temperatures]
        self._sharper = None  # [D + 1]
        if sharper:
            self._sharper = torch.tensor([*sharper, 1.0], dtype=torch.float32, device=self.device)

    def new_cache(self, batch: int, rows: int) -> BlockCache:
        """An empty cache for `batch` sequences of at most `rows` tokens and nodes, and a block after them."""
        config = self.config
        like = self._norm.weight
        term = self.head.term
        rows += config.block_size
        return BlockCache(
            as_logits(like.new_full((batch, config.depths + 1, config.draft_vocab_size), -torch.inf)),
            rows,
            (term.columns, term.state_size),
            fp32=term.keeps_fp32,
            layers=config.layers + self._context_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            like=like,
            rotary=self.rotary(rows),
        )

    def taps(self, cache: BlockCache) -> Taps:
        """A request for the target's hidden states, from which keys and values are computed and stored in the cache."""

        def read(states: list[Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
            stacked = torch.stack([state.flatten(0, 1) for state in states], 1)  # [B * N, T, Ht]
            context = self._fc(stacked.flatten(1))
            inputs = self.head.term.contexts(stacked, context) or [context]
            normed = [add_rms_norm(each, None, self._context_norm)[1] for each in inputs]
            self._keep(normed, positions, cache_rows, cache)
            cache.tokens.scatter_(1, cache_rows, tokens)

        return Taps(self.config.taps, read)

    def prefill(self, tokens: Tensor, cache: BlockCache, starts: Sequence[int] | None = None) -> None:
        """Does nothing: the target's passes have already written the cache."""

    def __call__(self, feed: Feed, cache: BlockCache) -> Tensor:
        """The logits after each node [B, n, V]; for a step's first feed only those after the root, [B, 1, V]."""
        depths = self.config.depths
        term = self.head.term
        tokens = feed.tokens[:, -1:] if feed.news else feed.tokens
        if feed.news:
            self._draft_block(feed, cache)
        at = place_of(feed, depths)
        above = self._above(feed, cache)
        kept = None if above is None else FieldRows(cache.state, feed.cache_rows[:, -tokens.shape[1] :])
        logits, states = term(cache.base[at], cache.hidden[at], Parents(tokens, at[1], above, kept), self._ends)
        if kept is not None and kept.at is not None and not term.stores_states:
            store_rows(kept.field[:, None], states[:, :, None], kept.at)
        if not isinstance(at[1], int) or at[1] == depths:  # nothing is below the last depth, whatever the term says
            logits = logits + self._below_all[at[1]].view(-1, 1, 1)
        if self._sharper is not None:
            logits = logits * self._sharper[at[1]].view(-1, 1, 1)
        if self.own_tokens is not None:
            logits = spread_logits(logits, self.own_tokens)
        return logits.expand(-1, tokens.shape[1], -1)

    def pass_weights(self) -> list[Tensor]:
        """All weights except the term's and the embedding, of which only a few rows are read."""
        others = {id(weight) for weight in self.level_weights()}
        own = [(name, weight) for name, weight in self.weights() if id(weight) not in others]
        own = [weight for name, weight in own if not name.startswith(("embed_tokens", "lm_head"))]
        return [*own, self.lm_head.weight]

    def level_weights(self) -> list[Tensor]:
        """The weights of the term, and lm_head if the term reads it."""
        return [*self.head.term.level_weights(), *([self.lm_head.weight] if self.head.term.uses_lm_head else [])]

    def unsure_rows(self, levels: int) -> int:
        """0, because none of the last rows may be missing: each pass of the target writes the draft's rows, too."""
        return 0

    def _keep(self, contexts: list[Tensor], positions: Tensor, cache_rows: Tensor, cache: BlockCache) -> None:
        """Compute and store the keys and values of all layers, for contexts [B * N, H] at positions [B, N].

        contexts: one for each layer, or one for all
        """
        config = self.config
        by_head = (*cache_rows.shape, -1, self.config.head_dim)
        if len(contexts) == 1:
            projected = self._context(contexts[0])
        else:
            pairs = [both(context) for both, context in zip(self._contexts, contexts, strict=True)]
            projected = [part for parts in zip(*pairs, strict=True) for part in parts]
        keys = torch.cat([*projected[: config.layers]], -1)
        values = torch.cat([*projected[config.layers :]], -1)
        # The norms of the layers differ by their weights alone, which come after the division.
        _, normed = add_rms_norm(keys.view(-1, config.head_dim), None, self._key_norm)
        weights = torch.stack([each.k_norm.weight for each in self._attentions])
        weights = weights.repeat_interleave(config.num_key_value_heads, 0)
        normed = normed.view(by_head) * weights
        turns = Turns.at(_table(cache), positions)
        heads = normed.shape[2]
        if self._context_layers:
            kept = contexts[0].new_zeros(
                *cache_rows.shape, 2, self._context_layers * config.num_key_value_heads * config.head_dim
            )
            kept.view(*cache_rows.shape, -1)[..., : config.hidden_size] = contexts[0].view(*cache_rows.shape, -1)
            for own, part in zip((cache.keys, cache.values), kept.unbind(2), strict=True):
                store_rows(own[:, heads:], part.view(by_head), cache_rows)
        # The kernel also rotates queries. There are none here, so the first key head is passed instead of them.
        rotate_and_store(
            Projected(normed[:, :, :1], normed, values.view(by_head)),
            turns,
            cache.keys[:, :heads],
            cache.values[:, :heads],
            cache_rows,
        )

    def _draft_block(self, feed: Feed, cache: BlockCache) -> None:
        """Run the layers over each sequence's block, and store the logits of the depths that the step drafts."""
        config = self.config
        term = self.head.term
        lengths = feed.prefix_lengths
        root = feed.tokens[:, -1:]
        if feed.drafted is not None:
            lengths = lengths - feed.drafted
            root = root.where(feed.drafted[:, None] == 0, cache.tokens.gather(1, lengths[:, None]))
        levels = min(feed.levels, config.depths)
        count = levels + (not config.from_root) if all(config.causal) else config.block_size
        rows = lengths[:, None] + torch.arange(count, device=root.device)
        # The block overwrites rows of tokens that count as drafted; later steps need these rows, so they are restored.
        kept = None if feed.drafted is None else [_heads_of(each, rows) for each in (cache.keys, cache.values)]
        masks = torch.full_like(rows[:, 1:], config.mask_token_id)
        hidden = self.embedding(torch.cat([root, masks], 1).flatten())
        if self.head.mask_embedding is not None:
            hidden.view(*rows.shape, -1)[:, 1:] = self.head.mask_embedding
        turns = Turns.at(_table(cache), rows)
        visible = min(feed.visible_rows + count, cache.keys.shape[2])
        attends = self._attends(lengths, count, visible)
        for index, layer in enumerate(self._layers):
            assert layer.norm is not None
            of_attention, of_mlp = self._convolutions[index]
            _, normed = add_rms_norm(hidden, None, layer.norm)
            before, after = around(of_attention, normed, count)
            mixed = after(layer.attention(before(normed), turns, rows, cache.read(index), attends[index]))
            hidden, normed = add_rms_norm(hidden, mixed, layer.mlp_norm)
            before, after = around(of_mlp, normed, count)
            hidden = hidden + after(layer.mlp(before(normed)))
            hidden = term.after_layer(index, hidden.view(*rows.shape, -1), root[:, 0]).flatten(0, 1)
        if kept is not None:
            for own, before in zip((cache.keys, cache.values), kept, strict=True):
                store_rows(own, before, rows)
        before = self._before(lengths, cache) if term.reads_before else None
        given = Pass(root[:, 0], levels, before, lengths > 0)
        base, read = term.finish(hidden.view(*rows.shape, -1), given, self._ends)
        cache.base[:, :levels] = base
        cache.hidden[:, :levels] = read

    def _before(self, lengths: Tensor, cache: BlockCache) -> Tensor:
        """The context [B, H] of the last token before each root; arbitrary in a sequence without such a token.

        lengths: LongTensor[B], the number of tokens before each root
        """
        heads = self.config.layers * self.config.num_key_value_heads
        rows = (lengths - 1).clamp(min=0)[:, None]
        parts = [_heads_of(each[:, heads:], rows).flatten(1) for each in (cache.keys, cache.values)]
        return torch.cat(parts, -1)[:, : self.config.hidden_size]

    def _ends_of(self, target: Forward) -> TokenLayers:
        """The functions before and after the layers: embedding, norm, and lm_head with scale and cap.

        They do not hold the draft, which so ends with its last user.
        """
        config = self.config
        width = self.config.hidden_size
        own = self.lm_head
        embedding = self.embedding
        last_norm = self._norm
        multiply = self._lm_head
        lm_head = target.parts.of(own)
        whole = lm_head is own and lm_head.weight.shape == (config.draft_vocab_size, width)

        def embed(tokens: Tensor) -> Tensor:
            return embedding(tokens.flatten()).view(*tokens.shape, -1)

        def norm(rows: Tensor) -> Tensor:
            return add_rms_norm(rows.reshape(-1, width), None, last_norm)[1].view(rows.shape)

        def logits(normed: Tensor) -> Tensor:
            return scaled(as_logits(multiply(normed.reshape(-1, width))).view(*normed.shape[:-1], -1))

        def logits_of(row: Tensor, added: Tensor, tokens: Tensor) -> Tensor:
            if whole:
                return scaled(few_logits(row, added, last_norm, own.weight, tokens))
            every = logits(norm(row[:, None].to(added.dtype) + added))  # lm_head is on several ranks, or quantised
            return every.gather(2, tokens.long()[:, None].expand(-1, added.shape[1], -1))

        def scaled(logits: Tensor) -> Tensor:
            if config.multiplier != 1:
                logits = logits * config.multiplier
            return logits if config.softcap is None else config.softcap * torch.tanh(logits / config.softcap)

        is_table = is_plain_embedding(embedding) and not has_hooks(embedding)

        def words(tokens: Tensor) -> FieldRows:
            if is_table:
                return FieldRows.of_table(embedding.weight, tokens)
            return FieldRows(embed(tokens), torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape))

        def beside(rows: Tensor, tokens: Tensor, norms: EntryNorms, rows_first: bool) -> Inputs:
            features = rows[:, None].expand(-1, tokens.shape[1], -1)
            if is_table:
                return entry_inputs(features, tokens, embedding.weight, norms, features_first=rows_first)
            return entry_inputs(features, None, embedding(tokens.flatten()), norms, features_first=rows_first)

        return TokenLayers(embed, words, norm, logits, logits_of, beside, last_norm)

    def _above(self, feed: Feed, cache: BlockCache) -> FieldRows | None:
        """The term's states of the nodes' parents; None for a term without states."""
        term = self.head.term
        if not term.state_size:
            return None
        if not feed.news:
            return FieldRows(cache.state, feed.parent_rows)
        state = cache.state.new_zeros(len(feed.tokens), 1, term.state_size)
        if feed.drafted is not None:  # the path to the node consists of tokens of the sequence
            root = feed.prefix_lengths - feed.drafted
            for depth in range(self.config.depths):
                token = cache.tokens.gather(1, (root + depth).clamp(max=cache.tokens.shape[1] - 1)[:, None])
                nodes = Parents(token, depth, FieldRows(state, None))
                _, below = term(cache.base[:, depth], cache.hidden[:, depth], nodes, self._ends)
                assert below is not None
                state = below.where((depth < feed.drafted)[:, None, None], state)
        return FieldRows(state, None)

    def _attends(self, lengths: Tensor, count: int, visible: int) -> list[Attend]:
        """For each layer, a function that does the attention of a block's rows to the prefix and to the block.

        lengths: LongTensor[B], tokens of the prefixes; count: rows of a block; visible: cache rows that are read
        """
        config = self.config
        every = torch.ones(count, count, dtype=torch.bool, device=lengths.device)
        windows = [
            window if causal or window is None else window + count - 1
            for causal, window in zip(config.causal, config.windows, strict=True)
        ]
        attends = {
            causal: TreeMask(prefix_length=lengths, visible_rows=visible, ancestor_mask=seen).attention(
                self.dtype, {window for own, window in zip(config.causal, windows, strict=True) if own == causal}
            )
            for causal, seen in ((True, every.tril()), (False, every))
        }
        return [attends[causal][window] for causal, window in zip(config.causal, windows, strict=True)]


def place_of(feed: Feed, depths: int) -> tuple[Any, Any]:
    """An index into a tensor [B, depths + 1, any] that has a row for each depth: the row of a feed's level.

    That is `feed.level` or, for each sequence, `feed.drafted`; deeper levels get the last row.
    """
    if feed.drafted is None:
        return slice(None), min(feed.level, depths)
    return torch.arange(len(feed.tokens), device=feed.tokens.device), feed.drafted.clamp(max=depths)


def _table(cache: BlockCache) -> Tensor:
    assert cache.rotary is not None
    return cache.rotary


def _rows_of(field: Tensor, rows: Tensor) -> Tensor:
    """The rows with these numbers, LongTensor[B, N], of a tensor [B, S, ...]: [B, N, ...]."""
    return field[torch.arange(len(field), device=rows.device)[:, None], rows]


def _heads_of(field: Tensor, rows: Tensor) -> Tensor:
    """The rows with these numbers, LongTensor[B, N], of keys or values [B, heads, S, D]: [B, N, heads, D]."""
    return _rows_of(field.transpose(1, 2), rows)
