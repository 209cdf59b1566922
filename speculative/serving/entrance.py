"""Chunked prefill: run prompts through the models before they get a slot, reusing rows of other sequences.

A prompt goes through the models in chunks, between steps of the running sequences, so that none of them waits for more
than one chunk. Several short prompts go together if they all fit into one chunk, unless they begin alike: then the
first one goes ahead, and the others copy its rows.

Rotary embeddings of type longrope change with the length of the sequence. There each prompt goes alone, and the first
chunk of a long prompt reaches up to the limit, so that the model uses its long factors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Launcher, Size, Workspace
from heavypath.speculative.serving.arrivals import Arrival
from heavypath.speculative.serving.logprobs import prompt_logprobs
from heavypath.speculative.serving.prefixes import FoundPrefixes, common

GROUP = 8  # how many prompts go together at most
LOGITS = 64  # for how many tokens of a prompt logits are computed at a time, since each takes memory for the vocabulary


class Entrance:
    """Prefill of a service, with two workspaces: for one prompt of any length, and for a group of short prompts.

    plan:  the models, and the rules of a step
    size:  the size of the service's own workspace, which bounds the length of a prompt
    piece: how many tokens of prompts go through a model at a time
    """

    def __init__(self, plan: StepPlan, size: Size, piece: int):
        self._plan = plan
        self._piece = piece
        self._one = Workspace(plan, size._replace(sequences=1), Launcher())
        self._rooms = [self._one]
        models = (plan.target, *plan.draft.models)
        self._limits = [model.rope_limit for model in models if model.rope_limit is not None]
        self._most = 1 if self._limits else min(GROUP, size.sequences)
        self._short = piece // 2
        if self._most > 1 and self._short > 1:
            rows = min(size.cache_rows, self._short + plan.rows)
            small = size._replace(sequences=self._most, cache_rows=rows, new_tokens=1)
            self._rooms.append(Workspace(plan, small, Launcher()))

    @property
    def cache_bytes(self) -> int:
        """The size of the caches of both workspaces in bytes."""
        return sum(room.cache_bytes for room in self._rooms)

    def may_follow(self, group: Sequence[Arrival], arrival: Arrival, sharing: Sequence[Arrival]) -> bool:
        """Whether a prompt can be read in one batch with the prompts in `group`, which is not empty.

        The prompts must be short, fit into one chunk, and want no log-probabilities. A prompt that has half of its
        tokens or more in common with one in `sharing` must wait, to copy these rows later.

        sharing: the requests of the group whose rows `arrival` may reuse
        """
        together = [*group, arrival]
        longest = max(each.prompt_length for each in together)
        if len(together) > self._most or len(self._rooms) < 2 or longest > self._short:
            return False
        if len(together) * longest > self._piece or any(each.prompt_logprobs is not None for each in together):
            return False
        return all(2 * common(each.prompt, arrival.prompt) < arrival.prompt_length for each in sharing)

    def room(self, group: Sequence[Arrival]) -> Workspace:
        """The workspace in which the prompts of a group are read."""
        return self._rooms[len(group) > 1]

    def bring(self, group: Sequence[Arrival], found: FoundPrefixes) -> Iterator[int]:
        """Read the prompts of a group into its workspace, one chunk at each `next`; yields the chunk's token count.

        Also computes the log-probabilities of a prompt that wants them, and writes `Completion.reused_tokens`.

        group: requests that may be read together, by `may_follow`
        found: for each prompt, a cached sequence that begins alike; common rows are copied instead of computed
        """
        first = group[0].request
        past: Any = found
        # `Arrival.take` finds the end of each sequence, because what ends one must not end the others.
        request = replace(first, stops=first.stops[:0], processors=None, past=past)
        if len(group) > 1:
            requests = [each.request for each in group]
            prompts = pad_sequence([each.prompt[0] for each in requests], batch_first=True)
            request = replace(
                request,
                prompt=prompts,
                input_ids=prompts,
                lengths=torch.cat([each.lengths for each in requests]),
                sequence_ids=torch.cat([each.sequence_ids for each in requests]),
            )
        piece = max([self._piece, *(limit for limit in self._limits if limit < first.prompt.shape[1])])
        for reused in self.room(group).beginning(request, self._plan, piece):
            for arrival, rows in zip(group, reused, strict=True):
                arrival.completion.reused_tokens = rows
            width = max(each.prompt_length - rows for each, rows in zip(group, reused, strict=True))
            yield min(piece, len(group) * width)
        if group[0].prompt_logprobs is not None:
            yield from self._scored(group[0], group[0].prompt_logprobs)

    def _scored(self, arrival: Arrival, likeliest: int) -> Iterator[int]:
        piece = min(LOGITS, self._piece)
        cache = self._one.target_cache
        prompt = arrival.request.prompt
        for scored in prompt_logprobs(self._plan.target, cache, prompt, likeliest, piece):
            arrival.completion.prompt_logprobs += scored
            yield piece

    def free(self) -> None:
        """Release the memory. The object cannot be used afterwards."""
        del self._one, self._rooms
