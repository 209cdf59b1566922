"""`Forward`: the interface of a model's forward pass over tree nodes, which see the prefix and their ancestors.

`llama` implements it for Llama and its nearest relatives, from their own modules. `generic` implements it for other
models, by transformers' own forward pass. `forward_of` chooses between them.
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

from heavypath.kernels.attention.masks import PackedAncestors, attention_bias, interval_mask
from heavypath.kernels.attention.prepared import first_row_seen, prepared_attention
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.layer_weights import stream_of, streamed
from heavypath.speculative.models.structure import WeightValues, structure_of
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import WHOLE, Parts, is_split, local_of

PREFILL_CHUNK = 512  # tokens of each prompt in one pass: bounds the size of the attention mask
PREFILL_ROWS = 8192  # tokens of all prompts in one pass on a GPU: attention needs no mask there, more rows are faster
STREAMED_CHUNK = {"cpu": 2048, "cuda": 1984}  # where each pass reads all weights; GPU attention takes less than 2,048

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # of query, key, value and scale
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TreeMask:
    """The attention mask of N nodes of each sequence: a node sees the prefix, itself, and its ancestors in the tree.

    prefix_length: LongTensor[B], or [] where all sequences have the same
    visible_rows:  how many cache rows to read: enough for the longest prefix and its tree
    subtree_end or ancestor_mask: the tree; exactly one of the two. subtree_end: LongTensor[N] or [B, N], the number
                   after each node's last descendant in depth-first order; ancestor_mask: bool [N, M] or [B, N, M], true
                   where node j of the tree is an ancestor of the i-th of the N nodes, or the node itself
    level:         the level of the nodes, where a tree is run level by level
    """

    prefix_length: Tensor
    visible_rows: int
    subtree_end: Tensor | None = None
    ancestor_mask: Tensor | PackedAncestors | None = None
    level: int = 0

    def attention(self, dtype: torch.dtype, windows: Iterable[int | None]) -> dict[int | None, Attend]:
        """For each sliding window in `windows`, a function that does attention under this mask.

        Its arguments are query [B, Hq, N, D], key and value [B, Hkv, rows, D], and the scale of the scores.
        """

        def prepare(window: int | None) -> Attend:
            return prepared_attention(
                prefix_length=self.prefix_length,
                rows=self.visible_rows,
                dtype=dtype,
                window=window,
                subtree_end=self.subtree_end,
                ancestor_mask=self.ancestor_mask,
            )

        return self._by_window(prepare, windows)

    def biases(self, dtype: torch.dtype, windows: Iterable[int | None]) -> dict[int | None, Tensor]:
        """The additive mask for each window: 0 where a node sees a row, -inf elsewhere.

        [B or 1, 1, N, rows], for the visible rows from `first_row(window)` on
        """
        ancestors = self.ancestor_mask
        if ancestors is None:
            assert self.subtree_end is not None
            ancestors = interval_mask(self.subtree_end)
        assert isinstance(ancestors, Tensor)

        def bias(window: int | None) -> Tensor:
            first = self.first_row(window)
            prefix_length = self.prefix_length.reshape(-1) - first
            return attention_bias(ancestors, prefix_length, self.visible_rows - first, dtype, window)

        return self._by_window(bias, windows)

    def first_row(self, window: int | None) -> int:
        """The first row that `biases` cover for a window: no node sees an earlier row. 0 on a GPU."""
        return first_row_seen(self.prefix_length, window)

    def _by_window(self, make: Callable[[int | None], T], windows: Iterable[int | None]) -> dict[int | None, T]:
        """The results of `make` for each window. A window that covers all visible rows is treated as None."""
        made: dict[int | None, T] = {}
        for window in windows:
            effective = None if window is None or window >= self.visible_rows else window
            if effective not in made:
                made[effective] = make(effective)
            made[window] = made[effective]
        return made


def chain_mask(prefix_length: Tensor, nodes: int, visible_rows: int) -> TreeMask:
    """The mask of a chain of `nodes` tokens after each prefix: a token sees all tokens before it.

    prefix_length, visible_rows: as in `TreeMask`
    """
    end = torch.full((nodes,), nodes, device=prefix_length.device)
    return TreeMask(prefix_length=prefix_length, visible_rows=visible_rows, subtree_end=end)


class Taps(NamedTuple):
    """A request for hidden states of a forward pass.

    numbers: which hidden states, as transformers numbers them: 0 is the embedding, i the input of layer i, and the last
             one (the number of layers) is the output of the final norm
    read:    called with these states [B, N, H], the tokens, their positions and cache rows, LongTensor[B, N] each
    """

    numbers: tuple[int, ...]
    read: Callable[[list[Tensor], Tensor, Tensor, Tensor], None]

    def take(self, states: Mapping[int, Tensor], tokens: Tensor, positions: Tensor, cache_rows: Tensor) -> None:
        """Call `read` with the requested hidden states.

        states: [B * N, H] or [B, N, H] by number, the requested ones at least; the others: as `read` gets them
        """
        requested = []
        for number in self.numbers:
            state = states[number].reshape(*tokens.shape, -1)  # [B, N, H]
            requested.append(state)
        self.read(requested, tokens, positions, cache_rows)


class Forward(ABC):
    """The forward pass of a transformers causal language model in eval mode.

    rope_limit: number of positions above which rotary embeddings of type longrope use their other (long) factors for
                all tokens of the sequence; None for other types. A sequence must stay on one side of it: see `settled`.
                (Type dynamic changes its factors above max_positions, which no sequence reaches.)
    parts:      which part of the weights this process has
    ranks:      the processes that the weights are split over, which must all make the same calls; None for one process
    stream:     loads the weights of layers when they are needed; None if all weights are in memory

    Raises TypeError for a model without a language-model head. Raises ValueError for a model in training mode, without
    weights or on several devices.
    """

    is_foreign: bool = False  # whether it calls the model's own forward, which is not this package's code
    is_head: bool = False  # whether it reads hidden states of the target, like `TappedDraft`
    drafts_at_once: bool = False  # whether one pass drafts all levels
    state_bytes: int = 0  # size of recurrent states, which each sequence keeps besides its cache rows
    layers: int  # how many layers a forward pass runs
    windows: Collection[int | None]  # the sliding windows of these layers; None for layers that see everything

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
        self.has_dynamic_rope = False
        limits: set[int] = set()
        for rope in _ropes(getattr(config, "rope_parameters", None)):
            if "dynamic" in rope["rope_type"]:
                self.has_dynamic_rope = True
            if rope["rope_type"] == "longrope":
                limits.add(rope["original_max_position_embeddings"])
        if len(limits) > 1:
            raise ValueError(f"{name}'s rotary embeddings must change at one length of the text, got {sorted(limits)}")
        self.rope_limit: int | None = min(limits, default=None)
        self.model = model
        self.watch(model)
        self.embedding: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
        if not is_plain(self.like):
            raise ValueError(f"{name} has a quantised token embedding; quantise its linear layers alone")

    def watch(self, model: nn.Module) -> None:
        """Record the current structure of `model`, for `is_current`; it is, or contains, the model that is called."""
        self._watched = model
        self._structure = structure_of(model)
        self._values = WeightValues(model)

    def is_current(self) -> bool:
        """Whether the model's structure is the recorded one. The values of its weights may have changed."""
        return structure_of(self._watched) == self._structure

    def state(self) -> int:
        """A number that differs after the model's function, or a value of its weights, has changed."""
        values = self._values.state()
        return hash((*self._structure.function, values))

    @property
    def exclusive_pass(self) -> AbstractContextManager[object]:
        """A context for a pass over streamed layers, in which passes of other threads wait; else it does nothing."""
        if self.stream is None:
            return nullcontext()
        return self.stream.one_pass()

    @property
    def reading_ahead(self) -> AbstractContextManager[object]:
        """A context for a step, entered before drafting: a GPU copies the first streamed layers meanwhile."""
        if self.stream is None:
            return nullcontext()
        return self.stream.ahead()

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of weights, activations and caches."""
        return local_of(self.embedding.weight)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, the activations and the cache."""
        return self.like.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters with their names."""
        return self.model.named_parameters()

    def check_weights(self) -> None:
        """Raise ValueError if a weight is NaN or infinite. Quantised weights are not checked.

        Streamed weights are checked when they have been read.
        """
        brought: set[int] = set()
        for layer in self.model.modules():
            if streamed(layer):
                brought.update(map(id, layer.parameters()))
        resident = []
        for name, weight in self.weights():
            if id(weight) not in brought:
                resident.append((name, weight))
        check_finite(self.name, resident)

    def check_positions(self, needed: int, how: str) -> None:
        """Raise ValueError if prompts and new tokens need more positions than the model has.

        needed: number of positions; how: for the message, what they include
        """
        if needed <= self.max_positions:
            return
        message = (
            f"prompt and new tokens need {needed} positions {how}, but {self.name} has {self.max_positions} positions"
        )
        if self.has_dynamic_rope:
            message += "; beyond them, its rotary embeddings depend on the text's length"
        raise ValueError(message)

    @abstractmethod
    def new_cache(self, batch: int, rows: int, lag: int = 0) -> KeyValueCache:
        """An empty cache of `rows` rows and positions for each of `batch` sequences.

        lag: only for models with recurrent layers, see `HybridCache`
        """

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
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the model on N tokens of each sequence, and return its logits [B, N, V] after each token.

        The logits have the model's own dtype, since 16 bits take half of the memory and of the time to read; kernels
        compute in fp32. A dtype wider than fp32 is converted to fp32.

        tokens, positions: LongTensor[B, N]
        cache_rows:   LongTensor[B, N], where the keys and values of each token are stored in `cache`
        mask:         what the tokens see
        needs_logits: False, as for a prompt, leaves the language-model head out and returns [B, 0, V]
        taps:         a request for hidden states of this pass
        """

    def prefill(
        self, tokens: Tensor, cache: KeyValueCache, starts: Sequence[int] | None = None, taps: Taps | None = None
    ) -> None:
        """Cache the keys and values of right-padded sequences, LongTensor[B, T]; the cache has more than T rows.

        starts: the position of each sequence's first token here, if the cache holds the rows before it (default: 0)
        taps:   a request for hidden states of each chunk

        Padding is cached too. It lies after the sequence's length. A row there is overwritten before a query sees it.
        """
        batch, width = tokens.shape
        device = tokens.device
        if starts is None:
            starts = [0] * batch
        least = min(starts)
        largest = max(starts)
        first = torch.tensor(starts if least < largest else least, device=device)  # [B], or [] if all are equal
        limit = self.rope_limit
        is_long = limit is not None and least + width >= limit
        most = chunk_of(batch, device) if self.stream is None else STREAMED_CHUNK[device.type]
        for begin in range(0, width, most):
            end = min(begin + most, width)
            column = torch.arange(begin, end, device=device)
            rows = first[..., None] + column
            rows = rows.expand(batch, -1)  # [B, N]
            positions = rows
            chunk = tokens[:, begin:end]
            if limit is not None and is_long and least + end <= limit:
                chunk, positions, rows = as_long(chunk, rows, limit)
            count = rows.shape[1]
            visible_rows = largest + begin + count
            mask = chain_mask(first + begin, count, visible_rows)
            self(chunk, positions, rows, cache, mask, needs_logits=False, taps=taps)

    def positions_within_limit(self, positions: Tensor, prefix_length: Tensor) -> Tensor:
        """The positions LongTensor[B, N] with those of absent nodes clamped to short ones, for a model with longrope.

        The last nodes of a tree may lie beyond the end of a short sequence, and then beyond `rope_limit`. Without this
        they would make longrope use its long factors for the whole sequence. Other models get the same positions back.

        prefix_length: LongTensor[B], the positions of the roots; those of a long sequence are at the limit or above
        """
        if self.rope_limit is None:
            return positions
        is_long = prefix_length[:, None] >= self.rope_limit
        short = positions.clamp(max=self.rope_limit - 1)
        return positions.where(is_long, short)


def chunk_of(batch: int, device: torch.device) -> int:
    """The number of tokens of each of `batch` prompts that go through a model in one pass of prefill."""
    least = PREFILL_CHUNK
    most = PREFILL_CHUNK if device.type == "cpu" else STREAMED_CHUNK["cuda"]
    return max(least, min(PREFILL_ROWS // batch, most))


def as_long(tokens: Tensor, rows: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add one token to a chunk so that longrope uses its long factors; returns tokens, positions and cache rows.

    The chunk is the beginning of a long sequence, but its own positions all lie below the limit. The added token has
    the position `limit`. It lies after the chunk, as padding does, and no other token sees it.

    tokens, rows: LongTensor[B, N], the rows below limit; returned are LongTensors [B, N + 1]
    limit:        see `Forward.rope_limit`
    """
    positions = pad(rows, (0, 1), value=limit)
    next_row = rows[:, -1:] + 1
    rows = torch.cat([rows, next_row], 1)
    return pad(tokens, (0, 1)), positions, rows


def parts_of(model: nn.Module, name: str) -> Parts:
    """Which part of a model's weights this process has: `WHOLE`, or one of several ranks' parts.

    name: of the model in messages. Raises ValueError for weights that are split in more than one way.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # FSDP may have gathered split weights, so look for its class
    for module in model.modules():
        is_sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
        if is_sharded or is_split(module):
            return load("shards_of")(model, name)
    return WHOLE


def check_window(window: Any, name: str) -> None:
    """Raise ValueError for a sliding window that is neither None nor an integer of at least 2.

    A window of 1 is ambiguous: by transformers' masks a token then sees itself alone, by its cache it sees everything.
    """
    if window is None or (isinstance(window, int) and window >= 2):
        return
    raise ValueError(
        f"{name} has sliding_window={window!r} in its config, expected a whole number of at least 2, or None for "
        "layers that see the whole text; correct the config"
    )


def as_logits(logits: Tensor) -> Tensor:
    """Logits in a dtype that kernels take: fp64 becomes fp32, others stay."""
    if logits.dtype.itemsize < 8:
        return logits
    return logits.float()


def host_can_read(device: torch.device) -> bool:
    """Whether the host can read a device's tensors without waiting: true for a CPU, false for a GPU."""
    return device.type == "cpu"


def check_no_autocast(device: torch.device) -> None:
    """Raise ValueError under torch.autocast, where keys and values would have another dtype than the cache."""
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"decoding does not run under torch.autocast({device.type!r}, ...); leave that, or convert the models: "
            "model.to(torch.bfloat16)"
        )


def check_finite(whose: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if one of the named weights is NaN or infinite; quantised weights are skipped."""
    for name, weight in weights:
        own = local_of(weight)
        if is_plain(own) and not own.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{whose} has NaN or infinite weights in {name}")


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary floating-point tensor; a quantised weight has a class or a dtype of its own."""
    if type(weight) not in (nn.Parameter, Tensor):
        return False
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _ropes(parameters: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parameters of all rotary embeddings in a config, each with a "rope_type"; some models have several."""
    if parameters and "rope_type" in parameters:
        yield parameters
    for value in (parameters or {}).values():
        if isinstance(value, Mapping):
            yield from _ropes(value)
