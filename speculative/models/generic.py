"""Any causal language model of transformers, called on tree nodes by its own forward pass.

    model(tokens, position_ids=prefix + depths, past_key_values=KeyValueCache.at(rows, ...), attention_mask=4-D)

With attn_implementation "sdpa" or "eager" a 4-D mask says what each node sees, one for each kind of layer where some
have a sliding window; with "heavypath" our attention function is an argument of the call. A model's type does not tell
whether it really follows the mask, the positions and the cache. So every model is tried once, on a small tree: it must
give the logits that it gives for each of the tree's paths as a text of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from heavypath.speculative.models.attn_implementation import NAME
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.window_probe import check_windows

_ATTENTION = ("sdpa", "eager", NAME)
# How far logits may be apart, in standard deviations of the logits; 0.003 for wider types.
_TOLERANCE = {torch.float16: 0.03, torch.bfloat16: 0.1}


class TransformersForward(Forward):
    """A transformers causal language model, by its own forward pass.

    Raises TypeError for a model without a language-model head, or with an encoder; ValueError for one that keeps a
    state besides keys and values, for attention that takes no mask of nodes, and for whatever else makes a small tree's
    logits differ from those of its paths.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model"):
        if model.config.is_encoder_decoder:
            raise TypeError(f"{name} must be a decoder alone, got an encoder and decoder: {type(model).__name__}")
        if _has_alibi(model.config):
            raise ValueError(
                f"{name} of type {model.config.model_type!r} has ALiBi position biases, which follow from a cache's "
                "rows, where a tree's nodes lie out of order; take a model with rotary or learned positions"
            )
        super().__init__(model, name)
        if self.has_dynamic_rope and self.device.type == "cuda":
            raise ValueError(
                f"{name} of type {self._kind} has rope type 'dynamic', which waits for the GPU in every forward pass, "
                "so that it cannot be part of a CUDA graph; types llama, mistral, qwen2 and qwen3 do not need to"
            )
        self._text_config: Any = model.config.get_text_config(decoder=True)
        kinds = {*(getattr(self._text_config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
        if kinds or getattr(model, "_is_stateful", False):
            what = f"layers of type {', '.join(sorted(kinds))}" if kinds else "a recurrent state"
            raise ValueError(f"{name} must have full or sliding attention alone, got {self._kind} with {what}")
        self._kinds: list[str | None] = getattr(self._text_config, "layer_types", None) or [None]
        window: int | None = getattr(self._text_config, "sliding_window", None) or None
        self._window_of = {kind: None if kind == "full_attention" else window for kind in self._kinds}
        self.windows = {*self._window_of.values()}
        self._attention: str = self._text_config._attn_implementation
        if self._attention not in _ATTENTION:
            raise ValueError(
                f"{name} has attn_implementation={self._attention!r}, which takes no tree; "
                f'call {name}.set_attn_implementation("sdpa"), or "eager", or "{NAME}"'
            )
        self._probe()

    @property
    def _kind(self) -> str:
        return repr(self.model.config.model_type)

    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for each of `batch` sequences."""
        heads, columns = self._heads_and_columns
        return KeyValueCache(
            batch=batch, layers=self.layers, kv_heads=heads, rows=rows, head_dim=columns, like=self.embedding.weight
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache_rows: Tensor,
        cache: KeyValueCache,
        mask: TreeMask,
        *,
        needs_logits: bool = True,
    ) -> Tensor:
        """fp32 logits [B, N, V] after each token, see `Forward`."""
        if self._text_config._attn_implementation != self._attention:
            given = f"from {self._attention!r} to {self._text_config._attn_implementation!r}"
            raise ValueError(f"{self.name}'s attn_implementation went {given}; make a new decoder for that")
        within = positions.clamp(max=self.max_positions - 1)  # absent nodes may lie beyond
        arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": within, "use_cache": True}
        first_rows: list[int] = []
        if self._attention == NAME:
            arguments["tree_attend"] = self._attend(mask)
            arguments["attention_mask"] = tokens[:, None, None, :1]  # any 4-D mask keeps transformers from making one
        else:
            biases = mask.biases(self.dtype, self.windows)
            each = {kind: biases[window].expand(len(tokens), -1, -1, -1) for kind, window in self._window_of.items()}
            arguments["attention_mask"] = each if len(self.windows) > 1 else each[self._kinds[0]]
            first_row = {kind: mask.first_row(window) for kind, window in self._window_of.items()}
            first_rows = [first_row[kind] for kind in self._kinds]
        arguments["past_key_values"] = cache.at(cache_rows, mask.visible_rows, first_rows)
        if needs_logits:
            return self.model(**arguments).logits.float()
        self.model.base_model(**arguments)
        return torch.empty(len(tokens), 0, self.vocab_size, device=tokens.device)

    def _attend(self, mask: TreeMask) -> Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]:
        """Attention under the mask, as a function of query, key, value, scale and the layer's sliding window."""
        attends = mask.attention(self.dtype, self.windows)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
            if window not in attends:
                expected = ", ".join(map(str, attends))
                raise ValueError(f"{self.name} has a layer with a sliding window of {window}, expected {expected}")
            return attends[window](query, key, value, scale)

        return attend

    @torch.no_grad()
    def _probe(self) -> None:
        """Try a small tree behind two prefixes, and the edges of windows; raise ValueError if its logits are wrong."""
        try:
            gap = self._gap()
        except Exception as error:
            raise ValueError(
                f"{self.name} of type {self._kind} cannot be decoded by trees with attn_implementation="
                f"{self._attention!r}: {error or type(error).__name__}"
            ) from error
        limit = _TOLERANCE.get(self.dtype, 3e-3)
        if not gap <= limit:
            raise ValueError(
                f"{self.name} of type {self._kind} cannot be decoded by trees with attn_implementation="
                f"{self._attention!r}: a tree's logits differ from those of its paths by {gap:.2g} standard "
                f"deviations, expected at most {limit}; its attention must take a 4-D mask, position_ids and a cache"
            )
        check_windows(self, limit)

    def _gap(self) -> float:
        """The distance between the logits of the tree and those of its paths as texts, in standard deviations."""
        noise = torch.Generator().manual_seed(0)  # torch's own is the caller's
        prefix, nodes = torch.randint(self.vocab_size, (2, 11), generator=noise).to(self.device).split([3, 8], 1)
        lengths, depths, ends, paths = (  # a chain of six nodes, and below its root two more, in rows far behind it
            torch.tensor(numbers, device=self.device)
            for numbers in ([3, 2], [0, 1, 2, 3, 4, 5, 1, 2], [8, 6, 6, 6, 6, 6, 8, 8], [[0, 1, 2], [0, 6, 7]])
        )
        places = (lengths[:, None, None] + torch.arange(3, device=self.device)).expand(2, 2, 3)
        texts = torch.cat([prefix, nodes[:, :3]], 1)[:, None].repeat(1, 2, 1).scatter_(2, places, nodes[:, paths])
        forgetful = _ForgetfulCache()
        expected = self.model(input_ids=texts.flatten(0, 1), past_key_values=forgetful, use_cache=True).logits.float()
        expected = expected.view(2, 2, 6, -1).gather(2, places[..., None].expand(-1, -1, -1, expected.shape[-1]))

        shapes = forgetful.shapes
        if [*shapes] != [*range(len(shapes))] or not shapes:
            raise ValueError(f"its layers with keys and values are {[*shapes]}, expected all")
        heads, columns = ([shape[i] for pair in shapes.values() for shape in pair] for i in range(2))
        if len({*heads}) > 1:
            raise ValueError(f"its layers have keys and values of several numbers of heads: {sorted({*heads})}")
        self.layers, self._heads_and_columns = len(shapes), (heads[0], max(columns))
        cache = self.new_cache(2, 11)
        self.prefill(prefix, cache)
        cache_rows = lengths[:, None] + torch.arange(8, device=self.device)
        mask = TreeMask(prefix_length=lengths, visible_rows=11, subtree_end=ends)
        logits = self(nodes, lengths[:, None] + depths, cache_rows, cache, mask)
        if logits.shape != (2, 8, self.vocab_size):
            raise ValueError(f"expected logits {[2, 8, self.vocab_size]} from its vocabulary, got {[*logits.shape]}")
        distance = (logits[:, paths] - expected).square().mean(-1).sqrt()
        return float((distance / expected.std(-1)).max())


def _has_alibi(config: Any) -> bool:
    """Whether a model's attention has biases by distance in place of position embeddings."""
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


class _ForgetfulCache(Cache):
    """A cache that keeps nothing: it returns the new keys and values, and notes their heads and columns by layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, list[tuple[int, int]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        return key_states, value_states
