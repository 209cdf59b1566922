"""`TextCache`: keys and values of finished sequences, reused by later prompts that begin with the same tokens.

Row r of a cache belongs to token r of its sequence and depends on tokens 0 .. r alone. So the rows of the longest
common prefix serve a later sequence, whatever follows the prefix in either of the two.
"""

import weakref
from inspect import signature
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.forward import Forward

#: What transformers calls a cache: "cache", and before its version 5.24 "past_key_values".
CACHE_NAME: str = ALL_CACHE_NAMES[0]


def cache_argument(model: PreTrainedModel) -> str:
    """The argument by which a model's forward takes a cache; a model's own code may still use an older name."""
    names = signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in names:
            return name
    return CACHE_NAME


class Caching(Protocol):
    """A model whose cache rows may be kept: a `Forward`, or a draft head while it decodes.

    model:  the transformers model or the head's module
    layers: how many layers have rows
    rope_limit, max_positions: as in `Forward`
    """

    model: Any
    layers: int
    rope_limit: int | None
    max_positions: int

    def state(self) -> int:
        """A number that differs after the model has changed."""
        ...


class ModelRows:
    """A cache of rows that one model computed, and the identity of that model, which is not kept alive.

    unsure: how many of a sequence's last rows may be missing, because the model did not read their tokens
    """

    def __init__(self, forward: Caching, cache: RowCache, unsure: int = 0):
        self.cache = cache
        self.unsure = unsure
        self._model = weakref.ref(forward.model)
        self._layers = forward.layers
        self._state = forward.state()

    def are_of(self, forward: Caching) -> bool:
        """Whether the model of `forward`, as it is now, would compute the same rows."""
        if self._model() is not forward.model or self._layers != forward.layers:
            return False
        return self._state == forward.state()


class TextCache(Cache):
    """The cached sequences of one generation: `out.cache`, for `decoder.generate(..., past=out.cache)`.

    A later prompt reuses the rows of its longest common prefix with any of the sequences. They are copied, so one cache
    serves any number of continuations. `len()` is the number of sequences, `nbytes` the memory that it takes.

    It is a `Cache` of transformers, so transformers' `generate` accepts it as cache= together with a decoder. No model
    can be called with it.
    """

    def __init__(self, texts: Tensor, slots: list[int], models: list[ModelRows], seen: Any = None):
        """texts:  LongTensor[B, L] on the CPU, the tokens whose rows the target computed, -1 after each sequence
        slots:  the slot of sequence b in the models' caches
        models: the rows of the target and, if it is a model, of the draft
        seen:   `prompt_inputs.Seen`, where prompts were more than tokens: then prompt b can only continue sequence b
        """
        super().__init__(layers=[])
        self._texts = texts
        self._slots = slots
        self._models = models
        self.seen = seen

    @property
    def tokens(self) -> list[Tensor]:
        """The tokens whose rows are cached, a LongTensor[any] on the CPU for each sequence.

        These are the prompt and the new tokens except the last, and tokens that were accepted after the end of a
        sequence.
        """
        return [text[text >= 0] for text in self._texts]

    @property
    def nbytes(self) -> int:
        """Bytes of the models' caches; on a CPU this includes rows that were allocated and not used."""
        return sum(model.cache.nbytes for model in self._models)

    def check(self, target: Forward) -> None:
        """Raise ValueError if the rows were computed by another model than `target`, or before it changed."""
        if self._rows_of(target) is None:
            raise ValueError(
                f"past must come from a decoder with the same {target.name} model, and that model must be as it was; "
                "got one of another model, or from before its weights, adapters, type or device changed: leave past "
                "out to compute the text from its beginning"
            )

    def shared(self, prompts: Tensor, most: list[int]) -> "SharedPrefixes":
        """Find the longest common prefix of each right-padded prompt, LongTensor[B, T], with a cached sequence.

        most: for each prompt, the largest number of tokens to reuse
        """
        width = min(prompts.shape[1], self._texts.shape[1])
        on_host = prompts[:, :width].cpu()
        own = self._texts[:, :width]
        texts = []
        lengths = []
        for number, limit in enumerate(most):
            is_same = own == on_host[number]  # [texts, width]
            same = is_same.long().cumprod(1).sum(1)  # [texts], how many first tokens
            text = number if self.seen is not None else int(same.argmax())
            length = int(same[text])
            texts.append(text)
            lengths.append(min(length, limit))
        return SharedPrefixes(self, texts, lengths, most)

    def _rows_of(self, forward: Caching) -> ModelRows | None:
        for model in self._models:
            if model.are_of(forward):
                return model
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens of the longest sequence."""
        return self._texts.shape[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raise TypeError: a model cannot be called with this cache."""
        raise TypeError(
            "a model cannot be called with a TextCache; give it to SpeculativeDecoder.generate as past=, or to "
            f"transformers' generate as {CACHE_NAME}= together with custom_generate=decoder"
        )

    def __len__(self) -> int:
        return len(self._texts)

    def __repr__(self) -> str:
        lengths = [str(len(text)) for text in self.tokens[:8]]
        if len(self) > 8:
            lengths.append("...")
        tokens = ", ".join(lengths)
        return f"TextCache(texts={len(self)}, tokens=[{tokens}], MiB={self.nbytes / 2**20:.1f})"


class SharedPrefixes(NamedTuple):
    """What prompts share with the cached sequences of a `TextCache`.

    texts:   for each prompt, the number of the cached sequence that begins with the same tokens
    lengths: how many first tokens both have in common and may be reused
    ends:    how many tokens of each prompt will be in the cache after prefill
    """

    cache: TextCache
    texts: list[int]
    lengths: list[int]
    ends: list[int]

    def limited(self, lengths: list[int]) -> "SharedPrefixes":
        """The same prefixes, cut to these lengths."""
        return self._replace(lengths=lengths)

    def copy_rows(self, forward: Caching, cache: RowCache, first: int = 0) -> list[int]:
        """Copy the first lengths[b] rows of sequence texts[b] to sequence first + b of `cache`, for each prompt b.

        Returns the number of rows copied for each. It is less than lengths[b] if the last rows are unsure, and 0 if
        `forward` is not a model that computed such rows, or its rotary embeddings have other factors for a sequence of
        the new length.
        """
        model = self.cache._rows_of(forward)
        if model is None:
            return [0] * len(self.lengths)
        have = [len(tokens) for tokens in self.cache.tokens]
        copied = []
        for number, text in enumerate(self.texts):
            # A draft may lack the row of its last position, and it lacks all later rows.
            sure = have[text] - model.unsure
            rows = min(self.lengths[number], sure, forward.max_positions - 1)
            rows = max(0, rows)
            if not _same_factors(forward.rope_limit, have[text], self.ends[number]):
                rows = 0
            slot = self.cache._slots[text]
            copied.append(cache.take(first + number, model.cache, slot, rows))
        return copied


def _same_factors(limit: int | None, cached: int, end: int) -> bool:
    """Whether a cached sequence has the rotary factors of a sequence of `end` tokens. limit: `rope_limit`."""
    if limit is None:
        return True
    if cached == limit:  # it may have been computed with short or with long factors
        return False
    return (cached > limit) == (end >= limit)
