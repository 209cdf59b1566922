"""What decoding asks of a model: a forward pass over tree nodes, in which each node sees its own ancestors alone.

`llama` does it for Llama and its nearest relatives, with their own modules; `generic` does it for other models, by
transformers' own forward pass; `forward_of` chooses between the two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.kernels.prepared_attention import prepared_attention
from heavypath.kernels.tree_masks import attention_bias, interval_mask
from heavypath.speculative.models.caches import KeyValueCache

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds the size of the attention mask

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of query, key, value and scale


@dataclass(frozen=True, eq=False)
class TreeMask:
    """What N nodes of each sequence see: the prefix, themselves, and their ancestors in the tree behind the prefix.

    prefix_length: LongTensor[B], or [] where all sequences have the same
    visible_rows:  how many cache rows to look at: enough to hold the longest prefix and its tree
    subtree_end or ancestor_mask: the tree, as `tree_attention` takes it; exactly one of the two
    """

    prefix_length: Tensor
    visible_rows: int
    subtree_end: Tensor | None = None
    ancestor_mask: Tensor | None = None

    def attention(self, dtype: torch.dtype) -> Attend:
        """Attention under this mask, as one function for all layers of a forward pass."""
        return prepared_attention(
            prefix_length=self.prefix_length,
            rows=self.visible_rows,
            dtype=dtype,
            subtree_end=self.subtree_end,
            ancestor_mask=self.ancestor_mask,
        )

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask in additive form, [B or 1, 1, N, visible_rows]: 0 where a node sees a row, -inf elsewhere."""
        ancestors = self.ancestor_mask
        if ancestors is None:
            assert self.subtree_end is not None
            ancestors = interval_mask(self.subtree_end)
        return attention_bias(ancestors, self.prefix_length.reshape(-1), self.visible_rows, dtype)


class Forward(ABC):
    """A causal language model of transformers, in eval mode, as decoding calls it.

    Raises TypeError for a model without a language-model head. Raises ValueError for a model in training mode, without
    weights or on several devices, and for rotary embeddings that depend on more than a token's position.
    """

    layers: int  # layers that a forward pass goes through

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
        self.model = model
        self.embedding: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
        if not is_plain(self.embedding.weight):
            raise ValueError(f"{name} has a quantised token embedding; quantise its linear layers alone")

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, the activations and the cache."""
        return self.embedding.weight.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters with their names."""
        return self.model.named_parameters()

    def check_weights(self) -> None:
        """Raise ValueError if a weight is NaN or infinite. Quantised weights are not looked at."""
        for name, weight in self.weights():
            if is_plain(weight) and not weight.sum(dtype=torch.float32).isfinite():
                raise ValueError(f"{self.name} has NaN or infinite weights in {name}")

    @abstractmethod
    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for each of `batch` sequences; tokens may have positions below `rows`."""

    @abstractmethod
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
        """Run the model on N tokens of each sequence, and return its fp32 logits [B, N, V] after each token.

        tokens, positions: LongTensor[B, N]
        cache_rows:   LongTensor[B, N], where the keys and values of each token are stored in `cache`
        mask:         what the tokens see
        needs_logits: False, as for a prompt, leaves the language-model head out and returns [B, 0, V]
        """

    def prefill(self, tokens: Tensor, cache: KeyValueCache, starts: Sequence[int] | None = None) -> None:
        """Cache the keys and values of right-padded texts, LongTensor[B, T].

        starts: the position of each sequence's first token here, if the cache holds the rows before it (default: 0)

        Padding is cached too. It lies behind the sequence's length, where each row is overwritten before it is read.
        """
        batch, width = tokens.shape
        starts = [0] * batch if starts is None else starts
        one_mask = min(starts) == max(starts)
        first = torch.tensor(starts[0] if one_mask else starts, device=tokens.device)  # [] or [B]
        for begin in range(0, width, PREFILL_CHUNK):
            end = min(begin + PREFILL_CHUNK, width)
            positions = (first[..., None] + torch.arange(begin, end, device=tokens.device)).expand(batch, -1)
            mask = TreeMask(
                prefix_length=first + begin,
                visible_rows=max(starts) + end,
                subtree_end=torch.full((end - begin,), end - begin, device=tokens.device),
            )
            self(tokens[:, begin:end], positions, positions, cache, mask, needs_logits=False)


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary floating-point tensor; a quantised weight has a class or a dtype of its own."""
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.dtype.itemsize > 1


def _rope_types(parameters: Mapping[str, Any] | None) -> Iterator[str]:
    """The rope types of all layers: some models have parameters for each type of layer."""
    for name, value in (parameters or {}).items():
        if name == "rope_type":
            yield value
        elif isinstance(value, Mapping):
            yield from _rope_types(value)
