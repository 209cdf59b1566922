"""The way of prompts into slots: through the models in an anteroom, with what other texts have computed of them.

A prompt goes through the models piece by piece, between the steps of the running sequences, so that none of these waits
for more than one piece. Several short ones go together where all of them make up one piece, unless they begin alike:
then the first goes before, and the others take its rows.

Rotary embeddings of type longrope change with the text's length. Then each prompt goes alone. The first piece of a long
one reaches to the limit, so that it is known as one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Launcher, Size, Workspace
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.serving.arrivals import Arrival
from heavypath.speculative.serving.logprobs import prompt_logprobs
from heavypath.speculative.serving.prefixes import FoundPrefixes, common

GROUP = 8  # prompts that go together, at most
LOGITS = 64  # tokens of a prompt of which there are logits at a time, which take memory for the vocabulary


class Entrance:
    """The memory in which prompts are read: of one sequence of any length, and of a group of short ones.

    piece: tokens of prompts that go through a model at a time
    """

    def __init__(self, plan: StepPlan, size: Size, piece: int):
        self._plan, self._piece = plan, piece
        self._one = Workspace(plan, size._replace(sequences=1), Launcher())
        self._rooms = [self._one]
        models = (plan.target, *(plan.draft or NO_DRAFT).models)
        self._limits = [model.rope_limit for model in models if model.rope_limit is not None]
        self._most = 1 if self._limits else min(GROUP, size.sequences)
        self._short = piece // 2
        if self._most > 1 and self._short > 1:
            rows = min(size.cache_rows, self._short + plan.rows)
            small = size._replace(sequences=self._most, cache_rows=rows, new_tokens=1)
            self._rooms.append(Workspace(plan, small, Launcher()))

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches."""
        return sum(room.cache_bytes for room in self._rooms)

    def may_follow(self, group: Sequence[Arrival], arrival: Arrival, sharing: Sequence[Arrival]) -> bool:
        """True if a prompt can go together with others, of which there is at least one.

        sharing: those of them whose rows it may take
        """
        together = [*group, arrival]
        longest = max(each.prompt_length for each in together)
        if len(together) > self._most or len(self._rooms) < 2 or longest > self._short:
            return False
        if len(together) * longest > self._piece or any(each.prompt_logprobs is not None for each in together):
            return False
        return all(2 * common(each.prompt, arrival.prompt) < arrival.prompt_length for each in sharing)

    def room(self, group: Sequence[Arrival]) -> Workspace:
        """The memory that a group is in."""
        return self._rooms[len(group) > 1]

    def bring(self, group: Sequence[Arrival], found: FoundPrefixes) -> Iterator[int]:
        """Bring prompts into their room, a piece at a time; the number of tokens of each piece.

        found: texts that they begin like
        """
        first = group[0].request
        past: Any = found
        # The end of a text is found by `Arrival.take`: what ends one does not end the others.
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
                arrival.progress.reused = rows
            width = max(each.prompt_length - rows for each, rows in zip(group, reused, strict=True))
            yield min(piece, len(group) * width)
        if group[0].prompt_logprobs is not None:
            yield from self._scored(group[0], group[0].prompt_logprobs)

    def _scored(self, arrival: Arrival, likeliest: int) -> Iterator[int]:
        piece = min(LOGITS, self._piece)
        cache, prompt = self._one.target_cache, arrival.request.prompt
        for scored in prompt_logprobs(self._plan.target, cache, prompt, likeliest, piece):
            arrival.progress.prompt_logprobs += scored
            yield piece

    def free(self) -> None:
        """Give the memory back."""
        del self._one, self._rooms
