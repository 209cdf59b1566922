"""Any causal language model of transformers, called on tree nodes by its own forward pass.

    model(tokens, position_ids=prefix + depths, past_key_values=KeyValueCache.at(rows, ...), attention_mask=4-D)

With attn_implementation "sdpa" or "eager" a 4-D mask says what each node sees; with "heavypath" our attention function
is an argument of the call. A model's type does not tell whether it really follows the mask, the positions and the
cache; `probe` does.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from heavypath.speculative.models.attn_implementation import NAME
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, TreeMask

_ATTENTION = ("sdpa", "eager", NAME)


class TransformersForward(Forward):
    """A transformers causal language model, by its own forward pass.

    Raises TypeError for a model without a language-model head, or with an encoder; ValueError for one that keeps a
    state besides keys and values, and for attention that takes no mask of nodes.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model"):
        if model.config.is_encoder_decoder:
            raise TypeError(f"{name} must be a decoder alone, got an encoder and decoder: {type(model).__name__}")
        super().__init__(model, name)
        self._text_config: Any = model.config.get_text_config(decoder=True)
        kinds = {*(getattr(self._text_config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
        if kinds or getattr(model, "_is_stateful", False):
            what = f"layers of type {', '.join(sorted(kinds))}" if kinds else "a recurrent state"
            raise ValueError(f"{name} must have full or sliding attention alone, got {self._kind} with {what}")
        self._attention: str = self._text_config._attn_implementation
        if self._attention not in _ATTENTION:
            raise ValueError(
                f"{name} has attn_implementation={self._attention!r}, which takes no tree; "
                f'call {name}.set_attn_implementation("sdpa"), or "eager", or "{NAME}"'
            )
        self._read_layers()

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
        arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": positions, "use_cache": True}
        arguments["past_key_values"] = cache.at(cache_rows, mask.visible_rows)
        if self._attention == NAME:
            arguments["tree_attend"] = mask.attention(self.dtype)
            arguments["attention_mask"] = tokens[:, None, None, :1]  # any 4-D mask keeps transformers from making one
        else:
            arguments["attention_mask"] = mask.bias(self.dtype).expand(len(tokens), -1, -1, -1)
        if needs_logits:
            return self.model(**arguments).logits.float()
        self.model.base_model(**arguments)
        return torch.empty(len(tokens), 0, self.vocab_size, device=tokens.device)

    def refusal(self, why: str) -> ValueError:
        """The error for a model that cannot be decoded by trees."""
        how = f"cannot be decoded by trees with attn_implementation={self._attention!r}"
        return ValueError(f"{self.name} of type {self._kind} {how}: {why}")

    @torch.no_grad()
    def _read_layers(self) -> None:
        """Find out how many layers keep keys and values, and of how many heads and columns."""
        forgetful = _ForgetfulCache()
        try:
            self.model(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=self.device),
                past_key_values=forgetful,
                use_cache=True,
            )
        except Exception as error:
            raise self.refusal(f"{error or type(error).__name__}") from error
        shapes = forgetful.shapes
        if [*shapes] != [*range(len(shapes))] or not shapes:
            raise self.refusal(f"its layers with keys and values are {[*shapes]}, expected all")
        heads, columns = ([shape[i] for pair in shapes.values() for shape in pair] for i in range(2))
        if len({*heads}) > 1:
            raise self.refusal(f"its layers have keys and values of several numbers of heads: {sorted({*heads})}")
        self.layers, self._heads_and_columns = len(shapes), (heads[0], max(columns))


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
