"""Run any causal language model of transformers on tree nodes, by its own forward pass.

    model(tokens, position_ids=prefix + depths, cache=KeyValueCache.at(rows, ...), attention_mask=4-D)

With attn_implementation "sdpa" or "eager" a 4-D mask says which rows each node sees; layers with different windows get
different masks. With "heavypath" our attention function is an argument of the call. A user's own attention gets the
form of mask that it was registered for. A model's type does not show whether it really follows the mask, the positions
and the cache; `probe` tries it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heavypath.speculative.models.attn_implementation import NAME, attention_forward
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, Taps, TreeMask, as_logits, check_window
from heavypath.speculative.models.functions import is_of_library, strange_parts
from heavypath.speculative.models.structure import attentions_of
from heavypath.speculative.models.text_cache import cache_argument

_OWN = ("sdpa_attention_forward", "eager_attention_forward")  # transformers' functions that take a 4-D mask


class TransformersForward(Forward):
    """A transformers causal language model, run by its own forward pass.

    Raises TypeError for a model without a language-model head, or with an encoder. Raises ValueError for attention that
    cannot take a mask over nodes.
    """

    is_foreign = True

    def __init__(self, model: PreTrainedModel, name: str = "model"):
        if model.config.is_encoder_decoder:
            raise TypeError(f"{name} must be a decoder alone, got an encoder and decoder: {type(model).__name__}")
        if _has_alibi(model.config):
            raise ValueError(
                f"{name} of type {model.config.model_type!r} has ALiBi position biases, which follow from a cache's "
                "rows, where a tree's nodes lie out of order; take a model with rotary or learned positions"
            )
        self.text_config: Any = model.config.get_text_config(decoder=True)
        self._kinds = self._kinds_of(model, name)
        super().__init__(model, name)
        selected = getattr(self.text_config, "keep_window_size", None)  # of Doge
        if selected is not None and selected < self.max_positions:
            raise ValueError(
                f"{name} of type {model.config.model_type!r} has {self.max_positions} positions, and in texts of more "
                f"than keep_window_size={selected} tokens a token sees those that it selects, equal ones by chance; "
                f"set max_position_embeddings={selected} in its config to decode shorter texts"
            )
        if self.has_dynamic_rope and self.device.type == "cuda":
            raise ValueError(
                f"{name} of type {model.config.model_type!r} has rope type 'dynamic', which waits for the GPU in each "
                "pass, so that it cannot be part of a CUDA graph; types llama, mistral, qwen2 and qwen3 do not need to"
            )
        window: int | None = getattr(self.text_config, "sliding_window", None)
        if window == 0 and "sliding_attention" not in self._kinds:  # some configs write 0 for no window
            window = None
        if {*self._kinds} != {"full_attention"}:
            check_window(window, name)
        self._window_of = {kind: None if kind == "full_attention" else window for kind in self._kinds}
        self.windows = {*self._window_of.values()}
        attentions = attentions_of(model, type(self.text_config))
        self.attention = ", ".join(sorted(attentions))
        forms = {_form_of_masks(each, name) for each in attentions}
        if "arguments" in forms and len(forms) > 1:
            raise ValueError(f"{name} has layers with attn_implementation={NAME!r} and others; set one for all")
        self._by_arguments = "arguments" in forms
        self._by_bool = forms == {"bool"}
        self.has_own_attention = not all(is_of_library(ALL_ATTENTION_FUNCTIONS.get(each)) for each in attentions)
        self.strange = strange_parts(model, attentions)
        self.cache_argument = cache_argument(model)
        self._called = model
        self._read_layers()

    def new_cache(self, batch: int, rows: int, lag: int = 0) -> KeyValueCache:
        """An empty cache of `rows` rows for each of `batch` sequences. lag: ignored."""
        heads, columns = self._heads_and_columns
        return KeyValueCache(
            batch=batch, layers=self.layers, kv_heads=heads, rows=rows, head_dim=columns, like=self.like
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
        taps: Taps | None = None,
    ) -> Tensor:
        """Logits [B, N, V] after each token. Arguments and result are as in `Forward.__call__`."""
        within = (positions + cache.offsets).clamp(max=self.max_positions - 1)  # absent nodes may exceed the positions
        arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": within, "use_cache": True}
        first_rows: list[int] = []
        if self._by_arguments:
            arguments["tree_attend"] = self._attend(mask)
            any_mask = tokens[:, None, None, :1]  # given any 4-D mask, transformers does not make one
            arguments["attention_mask"] = self._as_masks(dict.fromkeys(self._kinds, any_mask))
        else:
            biases = mask.biases(self.dtype, self.windows)
            if self._by_bool:
                biases = {window: bias == 0 for window, bias in biases.items()}
            each = {kind: biases[window].expand(len(tokens), -1, -1, -1) for kind, window in self._window_of.items()}
            arguments["attention_mask"] = self._as_masks(each)
            first_row = {kind: mask.first_row(window) for kind, window in self._window_of.items()}
            first_rows = [first_row[kind] for kind in self._kinds]
        arguments[self.cache_argument] = cache.at(cache_rows, mask.visible_rows, first_rows)
        if taps is not None:
            arguments["output_hidden_states"] = True
        with self.exclusive_pass:
            out = (self._called if needs_logits else self._called.base_model)(**self.taken(arguments))
        if taps is not None:
            taps.take(dict(enumerate(out.hidden_states)), tokens, positions, cache_rows)
        if needs_logits:
            return as_logits(out.logits)
        return torch.empty(len(tokens), 0, self.vocab_size, dtype=self.dtype, device=tokens.device)

    def _attend(self, mask: TreeMask) -> Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]:
        """A function of query, key, value, scale and a layer's sliding window that does attention under the mask.

        The function raises ValueError for a window that the config does not have.
        """
        attends = mask.attention(self.dtype, self.windows)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
            if window not in attends:
                expected = ", ".join(map(str, attends))
                raise ValueError(f"{self.name} has a layer with a sliding window of {window}, expected {expected}")
            return attends[window](query, key, value, scale)

        return attend

    def _kinds_of(self, model: PreTrainedModel, name: str) -> list[str | None]:
        """Each layer's kind of attention, from the config; [None] if it has no list of kinds, so that all are alike.

        Raises ValueError for a kind that is neither full nor sliding attention.
        """
        kinds: list[str | None] = getattr(self.text_config, "layer_types", None) or [None]
        others = {str(kind) for kind in kinds} - {"None", "full_attention", "sliding_attention"}
        if others:
            raise ValueError(
                f"{name} must have full or sliding attention, or recurrent layers, got {model.config.model_type!r} "
                f"with layers of type {', '.join(sorted(others))}"
            )
        return kinds

    def _as_masks(self, each: Mapping[str | None, Tensor]) -> Any:
        """The attention_mask argument for masks by kind of layer: the one mask if all layers have the same window."""
        return each if len(self.windows) > 1 else each[self._kinds[0]]

    def taken(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call that the model accepts: here all; a subclass may leave some out."""
        return arguments

    def gap(self, model: nn.Module, prefix: int = 3, chain: int = 6) -> float:
        """How far logits over a small tree differ from the model's own, in standard deviations of the latter.

        model, prefix, chain: as in `probe.gap`
        """
        from heavypath.speculative.models.probe import gap

        return gap(self, model, prefix, chain)

    def refusal(self, why: str) -> ValueError:
        """An error which says that the model cannot be decoded by trees. why: the reason, the end of its message."""
        how = f"cannot be decoded by trees with attn_implementation={self.attention!r}"
        return ValueError(f"{self.name} of type {self.model.config.model_type!r} {how}: {why}")

    @torch.no_grad()
    def _read_layers(self) -> None:
        """Call the model once, to find how many layers have keys and values, and their numbers of heads and columns."""
        forgetful = _ForgetfulCache()
        try:
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            self.model(input_ids=tokens, use_cache=True, **{self.cache_argument: forgetful})
        except Exception as error:
            raise self.refusal(f"{error or type(error).__name__}") from error
        shapes = forgetful.shapes
        if [*shapes] != [*range(len(shapes))] or not shapes:
            raise self.refusal(f"its layers with keys and values are {[*shapes]}, expected all")
        heads, columns = ([shape[i] for pair in shapes.values() for shape in pair] for i in range(2))
        if len({*heads}) > 1:
            raise self.refusal(f"its layers have keys and values of several numbers of heads: {sorted({*heads})}")
        self.layers = len(shapes)
        self._heads_and_columns = (heads[0], max(columns))


def _form_of_masks(attention: str, name: str) -> str:
    """How an attention gets to know what nodes see: by an "additive" mask, a "bool" mask, or "arguments" of the call.

    Raises ValueError for an attention that takes no such mask.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    makes_masks = ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
    if function is attention_forward:
        return "arguments"
    is_own = function is None or is_of_library(function)
    if is_own and getattr(function, "__name__", "eager_attention_forward") not in _OWN:
        raise ValueError(
            f"{name} has attn_implementation={attention!r}, which takes no tree; "
            f'call {name}.set_attn_implementation("sdpa"), or "eager", or "{NAME}"'
        )
    if makes_masks not in (None, sdpa_mask, eager_mask):
        raise ValueError(
            f"{name} has attn_implementation={attention!r}, whose masks are made by "
            f"{getattr(makes_masks, '__qualname__', makes_masks)!r} in transformers' AttentionMaskInterface, and "
            "a tree's mask would take their place; register transformers.masking_utils.sdpa_mask or eager_mask for it, "
            f'or call {name}.set_attn_implementation("sdpa")'
        )
    return "bool" if makes_masks is sdpa_mask and not is_own else "additive"


def _has_alibi(config: Any) -> bool:
    """Whether a model has ALiBi: attention biases by distance instead of position embeddings."""
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


class _ForgetfulCache(Cache):
    """A cache that keeps nothing: it returns the new keys and values, and records their heads and columns by layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, list[tuple[int, int]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        return key_states, value_states
