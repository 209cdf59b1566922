"""What decoding asks of a model: a forward pass over tree nodes, of which each sees its own ancestors alone.

`llama` has it for Llama and its nearest kin, on their own modules; `transformers_forward` for others, by transformers'
own forward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.kernels.dense_attention import attention_bias
from heavypath.kernels.prepared_attention import prepared_attention
from heavypath.kernels.tree_masks import interval_mask
from heavypath.speculative.models.caches import KeyValueCache

PREFILL_CHUNK = 512  # tokens at once: bounds the attention mask of a long prompt

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of query, key, value and scale


@dataclass(frozen=True, eq=False)
class TreeMask:
    """What N tokens of each sequence see: its prefix, themselves, and their ancestors in a tree behind the prefix.

    prefix_length: LongTensor[B], or [] for all; rows: as many hold the longest prefix and its tree, or more
    subtree_end, ancestor_mask: one of them, as `tree_attention` has them
    """

    prefix_length: Tensor
    rows: int
    subtree_end: Tensor | None = None
    ancestor_mask: Tensor | None = None

    def attention(self, dtype: torch.dtype) -> Attend:
        """Attention under it, for all layers of a forward pass."""
        return prepared_attention(
            prefix_length=self.prefix_length,
            rows=self.rows,
            dtype=dtype,
            subtree_end=self.subtree_end,
            ancestor_mask=self.ancestor_mask,
        )

    def bias(self, dtype: torch.dtype) -> Tensor:
        """It as an additive mask [B or 1, 1, N, rows], 0 or -inf."""
        ancestors = self.ancestor_mask
        if ancestors is None:
            assert self.subtree_end is not None
            ancestors = interval_mask(self.subtree_end)
        return attention_bias(ancestors, self.prefix_length.reshape(-1), self.rows, dtype)


class Forward(ABC):
    """A transformers causal language model in eval mode, as decoding calls it.

    Raises TypeError for a model without a language-model head, ValueError for one with a rotary embedding that depends
    on more than token positions, in training mode, without weights or on several devices.
    """

    layers: int  # that it goes through

    def __init__(self, model: PreTrainedModel, name: str):
        if model.get_output_embeddings() is None:
            raise TypeError(f"{name} must have a language-model head (…ForCausalLM), got {type(model).__name__}")
        config: Any = model.config.get_text_config(decoder=True)
        for rope in _rope_types(getattr(config, "rope_parameters", None)):
            if "dynamic" in rope or rope == "longrope":
                raise ValueError(
                    f"{name} has rope type {rope!r}, by which a token's keys depend on the length of the text; "
                    "those of default, linear, llama3 or yarn do not"
                )
        if model.training:
            raise ValueError(f"{name} is in training mode; call {name}.eval() first")
        devices = sorted({str(weight.device) for weight in model.parameters()})
        if "meta" in devices:
            raise ValueError(f"{name} is on the meta device, it has no weights or offloads them; load it first")
        if len(devices) > 1:
            spread = f"{name} must be on one device, got one spread over {', '.join(devices)}"
            raise ValueError(spread + "; load it with device_map={'': device}")

        self.name = name
        self.config: Any = model.config
        self.vocab_size: int = config.vocab_size
        if getattr(config, "max_position_embeddings", None) is None:
            raise ValueError(f"{name}'s config has no max_position_embeddings; set it to those of its longest text")
        self.max_positions: int = config.max_position_embeddings
        kinds = getattr(config, "layer_types", None)
        windowed = kinds is None or "sliding_attention" in kinds
        self.window: int | None = getattr(config, "sliding_window", None) if windowed else None
        self._model = model
        self._embed: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
        if not is_plain(self._embed.weight):
            raise ValueError(f"{name} has a quantised token embedding; quantise its linear layers alone")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and cache."""
        return self._embed.weight.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters of the model."""
        return self._model.named_parameters()

    def check_weights(self) -> None:
        """ValueError for NaN or infinite weights; quantised ones are taken as they are."""
        for name, weight in self.weights():
            if is_plain(weight) and not weight.sum(dtype=torch.float32).isfinite():
                raise ValueError(f"{self.name} has NaN or infinite weights in {name}")

    @abstractmethod
    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for `batch` sequences; positions below `rows` can be used with it."""

    @abstractmethod
    def __call__(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: KeyValueCache, mask: TreeMask) -> Tensor:
        """fp32 logits [B, N, V] after each token.

        tokens, positions, rows: LongTensor[B, N]; token n's key and value go to cache row rows[:, n].
        mask: what the tokens see.
        """

    @abstractmethod
    def hidden(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: KeyValueCache, mask: TreeMask) -> Tensor:
        """The same without the head: what the last layer makes of each token, in any shape."""

    def prefill(self, tokens: Tensor, cache: KeyValueCache) -> None:
        """Cache right-padded texts LongTensor[B, T].

        Padding is cached too, behind the sequence's length, where nothing looks before it is overwritten.
        """
        batch, longest = tokens.shape
        for start in range(0, longest, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, longest)
            rows = torch.arange(start, stop, device=tokens.device).expand(batch, -1)
            mask = TreeMask(
                prefix_length=torch.full((), start, device=tokens.device),
                rows=stop,
                subtree_end=torch.full((stop - start,), stop - start, device=tokens.device),
            )
            self.hidden(tokens[:, start:stop], rows, rows, cache, mask)


def is_plain(weight: Tensor) -> bool:
    """Whether it is an ordinary tensor of floating-point numbers; a quantised one has a class or dtype of its own."""
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.dtype.itemsize > 1


def _rope_types(parameters: Mapping[str, Any] | None) -> Iterator[str]:
    """Those of all layers: some models have parameters for each type of layer."""
    for name, value in (parameters or {}).items():
        if name == "rope_type":
            yield value
        elif isinstance(value, Mapping):
            yield from _rope_types(value)
