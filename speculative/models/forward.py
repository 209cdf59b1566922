"""The forward pass that decoding asks of a model: over tree nodes, where each node sees its own ancestors alone.

`llama` does it for Llama and its nearest relatives, with their own modules; `generic` does it for other models, by
transformers' own forward pass; `forward_of` chooses between the two.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from heavypath.kernels.attention.masks import attention_bias, interval_mask
from heavypath.kernels.attention.prepared import first_row_seen, prepared_attention
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.layer_weights import stream_of, streamed
from heavypath.speculative.models.structure import WeightValues, structure_of
from heavypath.speculative.names import load
from heavypath.speculative.ranks.parts import WHOLE, Parts, is_split, local_of

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once: bounds the size of the attention mask
PREFILL_ROWS = 8192  # of all prompts, on a GPU, whose attention needs no mask: few rows leave multiprocessors idle
STREAMED_CHUNK = {"cpu": 2048, "cuda": 1984}  # where all weights are read for each; a GPU's attention takes no 2,048

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of query, key, value and scale
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TreeMask:
    """The view of N nodes of each sequence: the prefix, themselves, and their ancestors in the tree after the prefix.

    prefix_length: LongTensor[B], or [] where all sequences have the same
    visible_rows:  how many cache rows to look at: enough to hold the longest prefix and its tree
    subtree_end or ancestor_mask: the tree, as `tree_attention` takes it; exactly one of the two
    level: of the nodes in a tree that is given level by level
    """

    prefix_length: Tensor
    visible_rows: int
    subtree_end: Tensor | None = None
    ancestor_mask: Tensor | None = None
    level: int = 0

    def attention(self, dtype: torch.dtype, windows: Iterable[int | None]) -> dict[int | None, Attend]:
        """Attention under this mask, as one function for all layers with the same sliding window."""

        def prepare(window: int | None) -> Attend:
            return prepared_attention(
                prefix_length=self.prefix_length, rows=self.visible_rows, dtype=dtype, window=window,
                subtree_end=self.subtree_end, ancestor_mask=self.ancestor_mask,
            )  # fmt: skip

        return self._by_window(prepare, windows)

    def biases(self, dtype: torch.dtype, windows: Iterable[int | None]) -> dict[int | None, Tensor]:
        """The mask in additive form for each window: 0 where a node sees a row, -inf elsewhere.

        [B or 1, 1, N, rows], of the visible rows from `first_row(window)` on
        """
        ancestors = self.ancestor_mask
        if ancestors is None:
            assert self.subtree_end is not None
            ancestors = interval_mask(self.subtree_end)

        def bias(window: int | None) -> Tensor:
            first = self.first_row(window)
            return attention_bias(
                ancestors, self.prefix_length.reshape(-1) - first, self.visible_rows - first, dtype, window
            )

        return self._by_window(bias, windows)

    def first_row(self, window: int | None) -> int:
        """The first of the rows that `biases` cover for a window: the host knows that nothing before it is seen."""
        return first_row_seen(self.prefix_length, window)

    def _by_window(self, make: Callable[[int | None], T], windows: Iterable[int | None]) -> dict[int | None, T]:
        """The results of `make` for each window; a window that holds all visible rows is none."""
        made: dict[int | None, T] = {}
        for window in windows:
            effective = None if window is None or window >= self.visible_rows else window
            if effective not in made:
                made[effective] = make(effective)
            made[window] = made[effective]
        return made


def chain_mask(prefix_length: Tensor, nodes: int, visible_rows: int) -> TreeMask:
    """The view of a chain's nodes after prefixes, LongTensor[B] or []; visible_rows as in `TreeMask`."""
    end = torch.full((nodes,), nodes, device=prefix_length.device)
    return TreeMask(prefix_length=prefix_length, visible_rows=visible_rows, subtree_end=end)


class Taps(NamedTuple):
    """Hidden states of a forward pass that somebody reads.

    numbers: which, by transformers' numbers: 0 is the embedding, i what layer i gets, and the last, with as many layers
             before it, is after the final norm
    read:    called with these states [B, N, H], the tokens, their positions and cache rows, LongTensor[B, N] each
    """

    numbers: tuple[int, ...]
    read: Callable[[list[Tensor], Tensor, Tensor, Tensor], None]

    def take(self, states: Mapping[int, Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
        """Hand on those asked for of hidden states by their numbers, [B * N, H] or [B, N, H] each."""
        self.read([states[number].reshape(*tokens.shape, -1) for number in self.numbers], tokens, positions, cache_rows)


class Forward(ABC):
    """A causal language model of transformers, in eval mode, as decoding calls it.

    rope_limit: where rotary embeddings of type longrope change their factors, for all tokens of a text, because the
                text has more positions than this; None for other types. A text must lie on one side of it: `settled`.
                (Those of type dynamic change them beyond max_positions, which no text reaches.)
    parts:      what this process has of the weights
    ranks:      the processes that the weights are split over, all of which call it alike; None for one process
    stream:     what reads the weights of its layers when they are needed; None if they are all in memory

    Raises TypeError for a model without a language-model head. Raises ValueError for a model in training mode, without
    weights or on several devices.
    """

    is_foreign: bool = False  # whether it calls code that is not the package's
    is_head: bool = False  # whether it reads the target's passes, as `TappedDraft`
    drafts_at_once: bool = False  # whether one pass of it drafts all levels
    state_bytes: int = 0  # of recurrent layers, that a sequence keeps beside its rows
    layers: int  # layers that a forward pass goes through
    windows: Collection[int | None]  # the sliding windows of these layers, None for those that see the whole text

    def __init__(self, model: PreTrainedModel, name: str):
        if model.get_output_embeddings() is None:
            raise TypeError(f"{name} must have a language-model head (…ForCausalLM), got {type(model).__name__}")
        config: Any = model.config.get_text_config(decoder=True)
        if model.training:
            raise ValueError(f"{name} is in training mode; call {name}.eval() first")
        devices = sorted({str(weight.device) for weight in model.parameters()})
        if "meta" in devices:
            raise ValueError(f"{name} is on the meta device, it has no weights; load it first")
        if len(devices) > 1:
            spread = f"{name} must be on one device, got one spread over {', '.join(devices)}"
            raise ValueError(spread + "; load it with device_map={'': device}")
        check_no_autocast(model.device)
        self.parts = parts_of(model, name)
        self.ranks = self.parts.ranks
        self.stream = stream_of(model)
        if self.ranks is not None and self.stream is not None:
            raise ValueError(f"{name} is split over {self.ranks.count} processes and streamed; it can be one of these")

        self.name = name
        self.config: Any = model.config
        self.vocab_size: int = config.vocab_size
        if getattr(config, "max_position_embeddings", None) is None:
            raise ValueError(f"{name}'s config has no max_position_embeddings; set it to those of its longest text")
        self.max_positions: int = config.max_position_embeddings
        ropes = [*_ropes(getattr(config, "rope_parameters", None))]
        self.has_dynamic_rope = any("dynamic" in rope["rope_type"] for rope in ropes)
        limits = {rope["original_max_position_embeddings"] for rope in ropes if rope["rope_type"] == "longrope"}
        if len(limits) > 1:
            raise ValueError(f"{name}'s rotary embeddings must change at one length of the text, got {sorted(limits)}")
        self.rope_limit: int | None = limits.pop() if limits else None
        self.model = model
        self.watch(model)
        self.embedding: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
        if not is_plain(self.like):
            raise ValueError(f"{name} has a quantised token embedding; quantise its linear layers alone")

    def watch(self, model: nn.Module) -> None:
        """Remember what `model`, which is or contains the model that is called, consists of now."""
        self._watched, self._structure, self._values = model, structure_of(model), WeightValues(model)

    def is_current(self) -> bool:
        """True if the model's parts are those that it had when it was tried; values of weights may have changed."""
        return structure_of(self._watched) == self._structure

    def state(self) -> int:
        """A number that is another one after a change of the model, or of its weights' values."""
        return hash((*self._structure.function, self._values.state()))

    @property
    def alone(self) -> AbstractContextManager[object]:
        """A block for a pass over streamed layers, in which passes of other threads wait instead of disturbing it."""
        return nullcontext() if self.stream is None else self.stream.one_pass()

    @property
    def reading_ahead(self) -> AbstractContextManager[object]:
        """A block for a step before it drafts: a GPU then copies the first of streamed layers meanwhile."""
        return nullcontext() if self.stream is None else self.stream.ahead()

    @property
    def like(self) -> Tensor:
        """A tensor of the type and on the device of weights, activations and caches."""
        return local_of(self.embedding.weight)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, the activations and the cache."""
        return self.like.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters with their names."""
        return self.model.named_parameters()

    def check_weights(self) -> None:
        """Raise ValueError if a weight is NaN or infinite. Quantised weights are not looked at.

        What a stream brings is looked at when it has been read.
        """
        brought = {id(one) for layer in self.model.modules() if streamed(layer) for one in layer.parameters()}
        check_finite(self.name, ((name, one) for name, one in self.weights() if id(one) not in brought))

    def check_positions(self, needed: int, how: str) -> None:
        """Raise ValueError where prompts with their new tokens need more positions than there are; how: in words."""
        if needed > self.max_positions:
            past = "; beyond them, its rotary embeddings depend on the text's length" if self.has_dynamic_rope else ""
            raise ValueError(
                f"prompt and new tokens need {needed} positions {how}, but {self.name} has {self.max_positions} "
                f"positions{past}"
            )

    @abstractmethod
    def new_cache(self, batch: int, rows: int, lag: int = 0) -> KeyValueCache:
        """An empty cache of `rows` rows, and positions, for each of `batch` sequences; lag: see `HybridCache`."""

    @abstractmethod
    def __call__(
        self, tokens: Tensor, positions: Tensor, cache_rows: Tensor, cache: KeyValueCache, mask: TreeMask, *,
        needs_logits: bool = True, taps: Taps | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the model on N tokens of each sequence, and return its logits [B, N, V] after each token.

        They are of the model's own dtype, in which they take half of the memory and of the time to read them if it has
        16 bits; kernels compute in fp32. A wider type than fp32 is narrowed to it.

        tokens, positions: LongTensor[B, N]
        cache_rows:   LongTensor[B, N], where the keys and values of each token are stored in `cache`
        mask:         what the tokens see
        needs_logits: False, as for a prompt, leaves the language-model head out and returns [B, 0, V]
        taps:         who reads hidden states of this pass
        """

    def prefill(
        self, tokens: Tensor, cache: KeyValueCache, starts: Sequence[int] | None = None, taps: Taps | None = None
    ) -> None:
        """Cache the keys and values of right-padded texts, LongTensor[B, T]; the cache has more than T rows.

        starts: the position of each sequence's first token here, if the cache holds the rows before it (default: 0)
        taps:   who reads hidden states of each chunk

        Padding is cached too. It lies after the sequence's length, where each row is overwritten before it is read.
        """
        batch, width = tokens.shape
        starts = [0] * batch if starts is None else starts
        first = torch.tensor(starts if min(starts) < max(starts) else starts[0], device=tokens.device)  # [] or [B]
        limit = self.rope_limit
        is_long = limit is not None and min(starts) + width >= limit
        most = chunk_of(batch, tokens.device) if self.stream is None else STREAMED_CHUNK[tokens.device.type]
        for begin in range(0, width, most):
            end = min(begin + most, width)
            rows = (first[..., None] + torch.arange(begin, end, device=tokens.device)).expand(batch, -1)
            positions, chunk = rows, tokens[:, begin:end]
            if limit is not None and is_long and min(starts) + end <= limit:
                chunk, positions, rows = as_long(chunk, rows, limit)
            mask = chain_mask(first + begin, rows.shape[1], visible_rows=max(starts) + begin + rows.shape[1])
            self(chunk, positions, rows, cache, mask, needs_logits=False, taps=taps)

    def settled(self, positions: Tensor, prefix_length: Tensor) -> Tensor:
        """A step's positions LongTensor[B, N], such that absent nodes do not make a text pass for a longer one.

        The last nodes of a tree may lie beyond the end of the text, and then beyond `rope_limit`.

        prefix_length: LongTensor[B], the positions of the roots; a long text's are all at the limit or above
        """
        if self.rope_limit is None:
            return positions
        return positions.where(prefix_length[:, None] >= self.rope_limit, positions.clamp(max=self.rope_limit - 1))


def chunk_of(batch: int, device: torch.device) -> int:
    """The tokens of each of so many prompts that go through a model at once."""
    least, most = PREFILL_CHUNK, PREFILL_CHUNK if device.type == "cpu" else STREAMED_CHUNK["cuda"]
    return max(least, min(PREFILL_ROWS // batch, most))


def as_long(tokens: Tensor, rows: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """A piece of a long text that is too short to be known as one: its tokens, positions and cache rows, LongTensor.

    One more token, which no other sees, has the position that tells. It lies after the piece, as padding does.

    tokens, rows: [B, N], the latter below limit; what is returned is [B, N + 1]
    limit:        see `Forward.rope_limit`
    """
    return pad(tokens, (0, 1)), pad(rows, (0, 1), value=limit), torch.cat([rows, rows[:, -1:] + 1], 1)


def parts_of(model: nn.Module, name: str) -> Parts:
    """The part of a model in this process. Raises ValueError for weights that are split in more than one way."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # which may have gathered what is split
    is_sharded = fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    if is_sharded or any(map(is_split, model.modules())):
        return load("shards_of")(model, name)
    return WHOLE


def check_window(window: Any, name: str) -> None:
    """Raise ValueError for a sliding window that is neither None nor a number from 2 on.

    With one of 1 a token sees itself alone, or all: transformers' masks say the former, its cache the latter.
    """
    if window is None or (isinstance(window, int) and window >= 2):
        return
    raise ValueError(
        f"{name} has sliding_window={window!r} in its config, expected a whole number of at least 2, or None for "
        "layers that see the whole text; correct the config"
    )


def as_logits(logits: Tensor) -> Tensor:
    """Logits of a type that kernels take: fp32, or 16 bits as they are."""
    return logits if logits.dtype.itemsize < 8 else logits.float()


def host_can_read(device: torch.device) -> bool:
    """True if the host may read a device's tensors at any time, as on a CPU; for a GPU's tensors it would wait."""
    return device.type == "cpu"


def check_no_autocast(device: torch.device) -> None:
    """Raise ValueError under torch.autocast, where keys and values are of another type than the cache's."""
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"decoding does not run under torch.autocast({device.type!r}, ...); leave that, or convert the models: "
            "model.to(torch.bfloat16)"
        )


def check_finite(whose: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if one of the weights, given with their names, is NaN or infinite; quantised ones may be."""
    for name, weight in weights:
        own = local_of(weight)
        if is_plain(own) and not own.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{whose} has NaN or infinite weights in {name}")


def is_plain(weight: Tensor) -> bool:
    """True if a weight is an ordinary floating-point tensor; a quantised weight has a class or a dtype of its own."""
    return type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1


def _ropes(parameters: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parameters of all rotary embeddings: some models have one for each kind of layer."""
    if parameters and "rope_type" in parameters:
        yield parameters
    for value in (parameters or {}).values():
        if isinstance(value, Mapping):
            yield from _ropes(value)
