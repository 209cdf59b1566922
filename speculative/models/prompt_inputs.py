"""Prompts that are more than tokens: with images, audio, or embeddings in place of tokens.

    model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs))

is how transformers' own generate processes a prompt. This module does the same, in one pass over the whole prompt. So
bidirectional attention among the tokens of an image, three-dimensional positions and left padding are left to the
model's own code. The keys and values become rows of the decoder's cache. Everything later is tokens only:

    position of a token = its index + (position of the prompt's last token - index of that token)

That is all that drafted nodes need to know about an image, and it is checked for each prompt: the prompt's last token
also goes through the decoder's own pass, which must give the same logits. So an input that affects later tokens is
refused, and so is an image at the very end of a prompt.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, Taps, chain_mask
from heavypath.speculative.models.forward_of import check_alone, tolerance_of
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.text_cache import CACHE_NAME, TextCache, cache_argument

# Arguments of a model's call that are no part of the prompt, or that the decoder makes.
_NOT_INPUTS = {
    "input_ids",
    "attention_mask",
    "past_key_values",
    CACHE_NAME,
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "kwargs",
}


def given_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's model_inputs that are in use: not None, False or an empty dictionary."""
    return {
        name: value
        for name, value in inputs.items()
        if value is not None and value is not False and not (isinstance(value, Mapping) and not value)
    }


def inputs_of(
    given: Mapping[str, Any] | None,
    input_ids: Tensor,
    lengths: Tensor,
    target: Forward,
    new: int,
    past: TextCache | None,
) -> "PromptInputs | Seen | None":
    """Check the inputs of prompts besides tokens, and return them; None if there are none.

    given: the option model_inputs of a call
    input_ids: LongTensor[B, T] with left padding; lengths: LongTensor[B], without padding
    new: max_new_tokens
    past: cached sequences that the prompts continue; if these had such inputs, what is kept of them is returned

    Raises TypeError or ValueError for inputs that cannot be used with this target, these prompts or `past`.
    """
    if given is not None and not isinstance(given, Mapping):
        what = type(given).__name__
        raise TypeError(f"model_inputs must be a dictionary, as a processor returns it, got {what}")
    inputs = given_inputs(given or {})
    if past is not None:
        if inputs:
            raise ValueError(
                f"model_inputs {', '.join(inputs)} cannot be given with past, which already has the prompts' images "
                "and other inputs: give the tokens alone, or leave past out"
            )
        if past.seen is not None and len(past) != len(input_ids):
            raise ValueError(
                f"past has {len(past)} texts with model_inputs: prompt b must continue text b, got "
                f"{len(input_ids)} prompts"
            )
        return past.seen and _fitting(past.seen, lengths, target, new)
    if not inputs:
        return None
    check_alone("a prompt with model_inputs", target)
    if target.state_bytes:
        raise ValueError(f"{target.name} has recurrent layers, and is given tokens alone; leave model_inputs out")
    _check_names(inputs, target)
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.shape[:2] != input_ids.shape:
        expected = ", ".join(map(str, input_ids.shape))
        raise ValueError(f"inputs_embeds must be [{expected}, hidden size] like input_ids, got {[*embeds.shape]}")
    if lengths.max() < 2:
        raise ValueError("a prompt with model_inputs must have two tokens or more, got one")
    made = PromptInputs(target, input_ids, lengths, inputs)
    _fitting(made.seen, lengths, target, new)
    return made


def _fitting(seen: "Seen", lengths: Tensor, target: Forward, new: int) -> "Seen":
    """Return `seen`; raise ValueError if its positions do not fit the target."""
    if seen.offsets.any() and target.rope_limit is not None:
        raise ValueError(f"{target.name} has rotary embeddings of type longrope, which need positions 0, 1, 2, ...")
    target.check_positions(int((lengths + seen.offsets[:, 0]).max()) + new - 1, "with their model_inputs")
    return seen


class Seen(NamedTuple):
    """What is kept of images and the like after prefill: which cache rows depend on them, and shifted positions.

    lengths: how many of each sequence's first rows depend on more than tokens
    offsets: LongTensor[B, 1], what is added to a later token's index to get its position
    """

    lengths: list[int]
    offsets: Tensor

    @property
    def seen(self) -> "Seen":
        """This object: sequences that continue these ones depend on the same images (`PromptInputs` has it, too)."""
        return self

    def begin(self, cache: KeyValueCache, taps: Taps | None, reused: list[int]) -> list[int]:
        """Set the cache's position offsets, for sequences whose first `reused` rows are already in it.

        taps: ignored. Returns `reused`. Raises ValueError if these rows do not include all of the images.
        """
        if any(have < need for have, need in zip(reused, self.lengths, strict=True)):
            raise ValueError(
                f"past has prompts with model_inputs: prompt b must begin with the first {self.lengths} tokens of text "
                f"b, got prompts of which {reused} tokens can be taken over; continue texts of unequal length one by "
                "one, or leave past out and give model_inputs again"
            )
        cache.offsets.copy_(self.offsets)
        return reused


class PromptInputs:
    """The prompts of a batch with inputs besides tokens, such as images.

    seen: what is kept of the inputs after prefill

    Raises ValueError if positions after a prompt do not continue as those of text do.
    """

    def __init__(self, target: Forward, input_ids: Tensor, lengths: Tensor, inputs: dict[str, Any]):
        """input_ids: LongTensor[B, T] with left padding; lengths: LongTensor[B], without padding."""
        width = input_ids.shape[1]
        self._target = target
        self._input_ids = input_ids
        self._lengths = lengths
        self._inputs = inputs
        self._names = ", ".join(inputs)
        self._mask = (torch.arange(width, device=lengths.device) >= (width - lengths)[:, None]).long()
        if "position_ids" not in inputs and "position_ids" in signature(target.model.forward).parameters:
            prepare: Any = target.model._prepare_position_ids_for_generation
            self._inputs = inputs | {"position_ids": prepare(input_ids, {"attention_mask": self._mask, **inputs})}
        offsets = self._offsets(self._inputs.get("position_ids"))
        self.seen = Seen((lengths - 1).tolist(), offsets[:, None])

    def _offsets(self, positions: Tensor | None) -> Tensor:
        """LongTensor[B], the position of a token after the prompt, minus its index in the sequence.

        positions: the prompts' position_ids, [B or 1, T], or [3 or 4, B, T] in three dimensions; None for usual ones

        Raises ValueError if a prompt's last token is not of text.
        """
        if positions is None:
            return torch.zeros_like(self._lengths)
        last = positions[..., -1]  # [B] or [1]; in three dimensions [3, B], or [4, B] with those of a mask before them
        if last.dim() == 2:
            last = last[-3:]
            if (last != last[0]).any():
                raise ValueError(f"a prompt's last token must be of text, got positions {last.T.tolist()}")
            last = last[0]
        return last - (self._lengths - 1)

    def begin(self, cache: KeyValueCache, taps: Taps | None, reused: list[int]) -> list[int]:
        """Run the target over the prompts with their inputs, and cache keys, values and position offsets.

        Returns the number of rows that each sequence then has in the cache: all tokens except the last.

        taps: see `Forward.prefill`; reused: ignored, since prompts with inputs reuse no rows

        Raises ValueError if the decoder's own pass gives other logits after the prompts' last tokens.
        """
        target = self._target
        model = self._target.model
        lengths = self._lengths
        batch, width = self._input_ids.shape
        columns = torch.arange(int(lengths.max()), device=lengths.device) + (width - lengths)[:, None]
        columns = columns.clamp(max=width - 1)  # columns of the sequences, padded on the right as in the cache
        rows = torch.arange(columns.shape[1], device=lengths.device).expand(batch, -1)
        cache.offsets.copy_(self.seen.offsets)
        prepare: Any = model.prepare_inputs_for_generation
        arguments: dict[str, Any] = prepare(
            self._input_ids,
            is_first_iteration=True,
            attention_mask=None if self._mask.all() else self._mask,
            use_cache=True,
            **{cache_argument(model): _PromptRows(cache, columns, rows)},
            **self._inputs,
        )
        if "logits_to_keep" in signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1
        if taps is not None:
            arguments["output_hidden_states"] = True
        with target.exclusive_pass:
            out = model(**arguments)
        if taps is not None:
            before_roots = columns[:, :-1]
            states = {number: _picked(out.hidden_states[number], before_roots) for number in taps.numbers}
            taps.take(states, self._input_ids.gather(1, before_roots), rows[:, :-1], rows[:, :-1])
        self._check_last(cache, out.logits[:, -1].float())
        return self.seen.lengths

    def _check_last(self, cache: KeyValueCache, expected: Tensor) -> None:
        """Raise ValueError if the decoder's pass over the last tokens does not give the logits `expected` [B, V]."""
        target = self._target
        places = (self._lengths - 1)[:, None]
        mask = chain_mask(places[:, 0], 1, visible_rows=int(self._lengths.max()))
        found = target(self._input_ids[:, -1:], places, places, cache, mask)[:, 0].float()
        gap = float(((found - expected).square().mean(-1).sqrt() / expected.std(-1)).max())
        most = 3 * tolerance_of(target)  # a long prompt has larger rounding errors than the trial of the model
        if not gap <= most:
            raise ValueError(
                f"{target.name} cannot be decoded with model_inputs {self._names}: read as text, the "
                f"prompt's last token has logits that differ by {gap:.2g} standard deviations, expected at most "
                f"{most:.2g}; images, audio and embeddings must end before that token, and act on the prompt alone"
            )


class _PromptRows(Cache):
    """The cache for the pass over a prompt: it writes rows of the decoder's cache, and returns the states it is given.

    columns, rows: LongTensor[B, N], the prompt's columns to keep, and the rows that they become
    """

    def __init__(self, cache: KeyValueCache, columns: Tensor, rows: Tensor):
        super().__init__(layers=[])
        self._written = cache
        self._columns = columns
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (_picked(states.transpose(1, 2), self._columns) for states in (key_states, value_states))
        self._written.write(layer_idx, keys, values, self._rows)
        return key_states, value_states


def _picked(states: Tensor, columns: Tensor) -> Tensor:
    """states[b, columns[b]] for each sequence b: states [B, T, ...], columns LongTensor[B, N]; returns [B, N, ...]."""
    return states[torch.arange(len(columns), device=columns.device)[:, None], columns]


def _check_names(inputs: dict[str, Any], target: Forward) -> None:
    """Raise ValueError for inputs that the target's forward pass does not take by name."""
    model = target.model
    kind = type(target.model).__name__
    takes = [name for name in signature(model.forward).parameters if name not in _NOT_INPUTS]
    for name in inputs:
        if name not in takes:
            raise ValueError(f"model_inputs has {name!r}, which {kind} does not take; it takes {', '.join(takes)}")
        if not (target.is_foreign and isinstance(target, TransformersForward)):
            raise ValueError(
                f"model_inputs has {name!r}, but {kind} runs by {type(target).__name__}, which reads tokens alone; "
                "leave it out, and give the tokens as input_ids"
            )
