"""Run a model with recurrent layers on tree nodes, by transformers' own forward pass.

Its attention layers take a 4-D mask, like those of other models (`generic`). Its recurrent layers run in a copy of the
model over the same weights (`mixers`), where states support trees (`nodes`).
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.recurrent.cache import HybridCache, StateLayout
from heavypath.speculative.models.recurrent.mixers import StatesCache, check_mixers, over_trees

ATTENTION = ("full_attention", "hybrid")  # kinds of layers with attention
OTHERS = ("linear_attention", "conv", "moe", "mlp")  # kinds of the other layers


class RecurrentForward(TransformersForward):
    """A transformers causal language model that keeps a state besides keys and values, or instead of them.

    Raises ValueError for layers that keep a state in an unknown way, for sliding windows besides recurrent layers, for
    rotary embeddings of type longrope, and for weights that are split over processes.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model"):
        check_mixers(model, name)
        super().__init__(model, name)
        if self.has_own_attention:
            raise ValueError(
                f"{name} has recurrent layers and attn_implementation={self.attention!r}, which is not transformers' "
                f'own; call {name}.set_attn_implementation("sdpa")'
            )
        if self.ranks is not None:
            raise ValueError(f"{name} has recurrent layers and is split over processes; load it in one")
        if self.rope_limit is not None:
            raise ValueError(f"{name} has recurrent layers and rotary embeddings of type longrope, which cannot be")

    def _kinds_of(self, model: PreTrainedModel, name: str) -> list[str | None]:
        """["full_attention"], the kind of all attention layers. Raises ValueError for layers of unknown kinds."""
        unknown = {*(getattr(self.text_config, "layer_types", None) or ())} - {*ATTENTION, *OTHERS}
        if unknown:
            raise ValueError(
                f"{name} of type {model.config.model_type!r} has recurrent layers, and beside them layers of type "
                f"{', '.join(sorted(unknown))}; known are {', '.join((*ATTENTION, *OTHERS))}"
            )
        return ["full_attention"]

    def new_cache(self, batch: int, rows: int, lag: int = 0) -> KeyValueCache:
        """An empty cache with `rows` rows and initial states for each of `batch` sequences; lag: see `HybridCache`."""
        return HybridCache(self._layout, batch, rows, self.like, lag)

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
        assert isinstance(cache, HybridCache)
        rows = cache.give(mask, positions, cache_rows)
        logits = super().__call__(tokens, positions, rows, cache, mask, needs_logits=needs_logits, taps=taps)
        cache.end_of_pass()
        return logits

    def prefill(
        self, tokens: Tensor, cache: KeyValueCache, starts: Sequence[int] | None = None, taps: Taps | None = None
    ) -> None:
        """Read prompts, with arguments as in `Forward.prefill`, and move the states over tokens not read before."""
        assert isinstance(cache, HybridCache)
        with cache.reading():
            super().prefill(tokens, cache, starts, taps)

    def gap(self, model: torch.nn.Module, prefix: int = 3, chain: int = 6) -> float:
        """How far logits over small trees differ from the model's own, in standard deviations of the latter.

        prefix, chain: ignored, because the trial has trees of its own
        """
        from heavypath.speculative.models.recurrent.probe import gap

        return gap(self, model, HybridCache(self._layout, 2, 32, self.like))

    def _as_masks(self, each: Mapping[str | None, Tensor]) -> Any:
        """The attention_mask argument: the mask for each kind of attention layer, and None for other kinds."""
        return dict.fromkeys(ATTENTION, each["full_attention"]) | dict.fromkeys(OTHERS)

    def taken(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call that the model accepts: a model without attention takes no positions or masks."""
        takes_positions = "position_ids" in signature(self.model.forward).parameters
        left_out = () if takes_positions else ("position_ids", "attention_mask")
        return {name: given for name, given in arguments.items() if name not in left_out}

    @torch.no_grad()
    def _read_layers(self) -> None:
        """Call the model once, to find which layers keep keys, values and states, and their shapes."""
        self._called = over_trees(self.model)
        noted = _NotedLayers()
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        arguments = {"input_ids": tokens, "use_cache": True, "position_ids": torch.arange(2, device=self.device)[None]}
        arguments |= {self.cache_argument: noted, "attention_mask": dict.fromkeys((*ATTENTION, *OTHERS))}
        try:
            self._called(**self.taken(arguments))
        except Exception as error:
            raise self.refusal(f"{error or type(error).__name__}") from error
        unused = sorted({layer for layer, _ in noted.asked} - {layer for layer, _ in noted.used})
        if unused or not noted.convolved:
            raise self.refusal(f"its layers {unused} ask for a recurrent state, and what they do with it is not known")
        rows = {layer: place for place, layer in enumerate(noted.rows)}
        shapes = [shape for pair in noted.rows.values() for shape in pair] or [(1, 1)]
        if len({heads for heads, _ in shapes}) > 1:
            raise self.refusal(f"its layers have keys and values of several numbers of heads: {sorted({*shapes})}")
        head_dim = max(columns for _, columns in shapes)
        self._layout = StateLayout(rows, shapes[0][0], head_dim, noted.used, noted.convolved, noted.limits)
        self.layers = self.text_config.num_hidden_layers
        self.state_bytes = self._layout.states(1, self.like).nbytes


class _NotedLayers(StatesCache):
    """A cache that keeps nothing, and records what layers would keep.

    rows:      {layer: heads and columns of its keys, and of its values}
    asked:     the states that mixers requested
    used:      the states that a known rule used, with their shapes
    convolved: shapes of convolutions' states
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.asked: set[tuple[int, int]] = set()
        self.used: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.convolved: dict[tuple[int, int], tuple[int, int]] = {}
        self.limits: dict[tuple[int, int], tuple[float, float]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.rows[layer_idx] = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        return key_states, value_states

    def state(self, layer: int, which: int) -> Any:
        return _NotedLayer(self, (layer, which))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self.asked.add((layer_idx, state_idx))
        return self.state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _NotedLayer:
    """Stands for one layer's state in `_NotedLayers`: records the shapes that its mixer uses, and computes nothing."""

    def __init__(self, noted: _NotedLayers, key: tuple[int, int]):
        self._noted = noted
        self._key = key
        self.state = torch.zeros((), device="cpu")

    def convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        self._noted.convolved[self._key] = weight.shape[1] - 1, weight.shape[0]
        return torch.zeros_like(inputs)

    def clamped(self, steps: Tensor, limits: tuple[float, float] | None) -> Tensor:
        low, high = (float(limit) for limit in limits or (0, float("inf")))
        if low > 0 or high < float("inf"):  # steps are positive, so a limit of 0 has no effect
            self._noted.limits[self._key] = low, high
        return steps

    def recur(self, rule: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        query, key, value, *_ = inputs
        self._noted.used[self._key] = value.shape[2], key.shape[3], value.shape[3]
        return torch.zeros_like(value, dtype=query.dtype)
