"""The batch of a service: how a request joins, takes a step, and leaves.

Running requests are in the first slots, so that a step does no work for empty ones. When one leaves, the last one moves
to its slot: its rows are copied, and nothing else moves.

A prompt first goes through the models in a separate workspace (`entrance`). Then its rows are copied into a slot.

Two rules keep one client from holding up others. The last free slot is reserved for a client that has none, so that
nobody has to wait for the end of another client's request. And on a CPU, where a step takes longer the more requests
are in it, a client has at most `BESIDE` requests in a step while other clients have any. Its further requests pause in
the last slots, and continue when one ends. A client that is alone gets all the time, and all slots but one.

With transformers' own forward pass, rotary embeddings of type longrope have one set of factors for all rows of a step.
So short and long sequences never run together there: the next request waits until those of the other kind have ended.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.kernels.native.sampling import seed_tensor
from heavypath.kernels.numbers import whole
from heavypath.speculative.decoding.drafted import no_lap
from heavypath.speculative.decoding.run import Engine, StepRunner
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Size
from heavypath.speculative.drafts.changes import LogitChange
from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.processors.steps import ProcessedSteps, criteria_of
from heavypath.speculative.serving.arrivals import Arrival
from heavypath.speculative.serving.completion import Reason
from heavypath.speculative.serving.entrance import Entrance
from heavypath.speculative.serving.logprobs import ReadLogits
from heavypath.speculative.serving.own_settings import OwnSettings
from heavypath.speculative.serving.prefixes import Prefixes, tokens_of
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

NO_TEXT = tokens_of([])
BESIDE = 2  # requests of a client in a step on a CPU, while other clients have any


def serving_plan(plan: StepPlan) -> StepPlan:
    """The plan of steps whose requests have different sampling settings, made from a plan for one request.

    Temperature and filters become part of the scores that `kernels.sequence_scores` makes from logits. So the plan
    itself has temperature 1 and no filters.

    Children are not drawn uniformly when a draft's support is used up. A request's processors may exclude tokens on
    purpose, and after the end of a sequence they exclude all; a node must stay absent there.
    """
    rules = plan.rules
    plain = Filters()
    changes = (*rules.changes, OwnSettings())
    rules = replace(rules, target_filters=plain, draft_filters=plain, fill=False, changes=changes)
    return replace(plan, rules=rules)


class ServiceLimits(NamedTuple):
    """The limits of a service.

    slots:          how many sequences are decoded in a step
    max_tokens:     length of a sequence: its prompt and its new tokens
    queue:          how many requests may wait
    prefill_tokens: how many tokens of prompts go through a model between two steps
    prefix_bytes:   memory for rows of ended sequences, reused by prompts with the same beginning. Default: half of the
                    memory of the slots. With 0 none is kept, and different requests share no rows, not even while they
                    run
    """

    slots: int
    max_tokens: int
    queue: int
    prefill_tokens: int
    prefix_bytes: int | None = None

    def check(self) -> "ServiceLimits":
        """The same limits as Python integers.

        Raises TypeError for a limit that is no whole number, and ValueError below 1, for prefix_bytes below 0.
        """
        numbers = {name: whole(name, value) for name, value in self._asdict().items() if value is not None}
        for name, value in numbers.items():
            least = 0 if name == "prefix_bytes" else 1
            if value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        return self._replace(**numbers)


class ServiceSlots:
    """The batch of a service: the running requests, their caches, and the steps that decode them.

    plan:        the plan of a step, from `serving_plan`
    limits:      the limits of the service
    cache_bytes: size of all caches, also of those in which prompts are read
    running:     the requests in slots 0, 1, ...
    """

    def __init__(
        self,
        plan: StepPlan,
        tree_of: Callable[[int], TokenTree | Growth],
        limits: ServiceLimits,
        seed: int,
        *,
        cuda_graphs: bool,
    ):
        """Allocate all memory, and capture CUDA graphs.

        tree_of: given a number of requests in a step, the tree of the plan for it
        seed: seed of the random numbers that all requests share
        """
        self.plan = plan
        self.limits = limits
        self._tree_of = tree_of
        count = limits.slots
        max_tokens = limits.max_tokens
        device = plan.target.device
        self._on_host = host_can_read(device)
        self._runner = StepRunner(cuda_graphs)
        size = Size(
            sequences=count,
            cache_rows=max_tokens + plan.rows,
            new_tokens=max_tokens,
            stops=1,
            count_slots=max(1, plan.depth * plan.branching),
            penalised=0,
        )
        self._workspace = self._runner.new_workspace(plan, size)
        self._entrance = Entrance(plan, size, limits.prefill_tokens)
        self._state = self._workspace.state
        self._state.seed.copy_(seed_tensor(seed))
        kept = self._workspace.cache_bytes // 2 if limits.prefix_bytes is None else limits.prefix_bytes
        self._prefixes = Prefixes(plan, self._workspace, kept)
        self.cache_bytes = self._workspace.cache_bytes + self._entrance.cache_bytes
        self._engine = Engine[Arrival](self._runner, self._workspace, [self._state.output], waits=False)
        self._processors = ProcessedSteps()
        self._readers = deque[ReadLogits | None]()  # for steps whose results have not arrived yet
        self.running: list[Arrival] = []  # by slot, from the first one on
        self._rows = list(range(count))  # free rows of `output`
        models = (plan.target, *plan.draft.models)
        self._limits = [model.rope_limit for model in models if model.is_foreign and model.rope_limit is not None]
        if cuda_graphs:
            from heavypath.speculative.decoding.graphs import warm_up_steps

            warm_up_steps(self._runner, plan, self._workspace, count, max_tokens, tree_of)

    def may_join(self, client: Hashable, waiting: Collection[Hashable], entering: Sequence[Arrival] = ()) -> bool:
        """Whether a client may have one more slot, by the rules at the top of this file.

        waiting: the clients with waiting requests; entering: requests that will join first
        """
        clients = [arrival.client for arrival in (*self.running, *entering)]
        if len(clients) >= self.limits.slots:
            return False
        if client is None:
            return True
        has = clients.count(client)
        if self._on_host and has >= BESIDE and len({*clients, *waiting}) > 1:
            return False  # the request would only pause
        return has == 0 or len(clients) + 1 < self.limits.slots

    def check_device(self, error: Exception) -> None:
        """Raise `error` again if it left the GPU unusable for this process; otherwise return."""
        if self._on_host:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None

    def may_follow(self, group: Sequence[Arrival], arrival: Arrival) -> bool:
        """Whether a prompt can be read in one batch with those of `group`.

        With an empty group, whether it may run with the running ones: with longrope, long and short ones may not.
        """
        if not group:
            return not self.running or self._is_long(arrival) == self._is_long(self.running[0])
        sharing = [each for each in group if self._may_share(arrival, each)]
        return self._entrance.may_follow(group, arrival, sharing)

    def entering(self, group: Sequence[Arrival]) -> Iterator[int]:
        """Read the prompts of a group, one chunk at each `next`; yields the number of tokens of each chunk.

        After the last chunk the requests may `join`.
        """
        running = [
            [each.text if self._may_share(arrival, each) else NO_TEXT for each in self.running] for arrival in group
        ]
        prompts = [arrival.prompt for arrival in group]
        yield from self._entrance.bring(group, self._prefixes.found(prompts, running))

    def join(self, group: Sequence[Arrival], place: int) -> None:
        """Move request group[place], whose prompt has been read, into the first free slot.

        Raises ValueError if its logits processors do not fit.
        """
        arrival = group[place]
        slot = len(self.running)
        row = self._rows[-1]
        request = arrival.request
        criteria = criteria_of(request)
        self._processors.begin(row, request.input_ids[0], arrival.processors, arrival.stops, 0, criteria)
        arrival.row = self._rows.pop()
        self._workspace.receive(slot, self._entrance.room(group), place, arrival.prompt_length)
        self._state.numbers[StateField.MEMBER, slot] = arrival.row
        self._state.numbers[StateField.LEFT, slot] = arrival.request.max_new_tokens
        self._state.settings[slot] = arrival.settings()
        self.running.append(arrival)

    def leave(self, arrival: Arrival, *, kept: bool = True) -> None:
        """Remove a request; the request in the last slot moves to its slot. kept: keep its rows for later prompts."""
        slot = self.running.index(arrival)
        last = self.running[-1]
        if kept:
            self._prefixes.keep(slot, arrival.text)
        if last is not arrival:
            self._workspace.receive(slot, self._workspace, len(self.running) - 1, self._cache_rows(last))
            self.running[slot] = last
        self.running.pop()
        for field in (StateField.LEFT, StateField.LENGTHS):  # indexing with a list would make the host wait for the GPU
            self._state.numbers[field, len(self.running)] = 0
        self._rows.append(arrival.row)
        self._processors.end(arrival.row)

    def step(self) -> list[tuple[Arrival, Reason | Exception]]:
        """Run a step and pass its tokens on. Returns the requests that end, each with the reason or the error.

        The caller must remove them by `leave`. On a GPU tokens come one step late: the next step is launched first.

        If a step of several requests fails on a CPU, each runs alone, so that only those that fail again end; on a GPU
        all end. An error after which no step can run is raised.
        """
        count = self._arrange()
        try:
            return self._step(count)
        except Exception as error:
            self.check_device(error)
            self._drop_not_finite()
            if count == 1 or not self._on_host:
                return [(arrival, error) for arrival in self.running[:count]]
            return self._one_by_one(count)

    def forget(self) -> None:
        """Drop the rows of all ended sequences."""
        self._prefixes.clear()

    def free(self) -> None:
        """Release the memory. A second call has no effect."""
        if hasattr(self, "_workspace"):
            self._entrance.free()
            del self._workspace, self._entrance, self._prefixes, self._state, self._engine

    def _is_long(self, arrival: Arrival) -> list[bool]:
        """For each longrope limit of the models, whether the sequence is above it from its prompt on."""
        return [arrival.prompt_length > limit for limit in self._limits]

    def _may_share(self, one: Arrival, other: Arrival) -> bool:
        """Whether one request's prompt may reuse the other's rows: in a client's group, or if prefixes are kept."""
        own = one.group is not None and (one.client, one.group) == (other.client, other.group)
        return own or self._prefixes.across_requests

    def _arrange(self) -> int:
        """Move the requests that take part in the next step into the first slots; returns their number."""
        clients = [arrival.client for arrival in self.running]
        if not self._on_host or len({*clients}) < 2:
            return len(clients)
        had = Counter[Hashable]()
        pause = []
        part = []
        for slot, client in enumerate(clients):
            had[client] += 1
            (pause if client is not None and had[client] > BESIDE else part).append(slot)
        for early, late in zip(pause, reversed(part), strict=False):
            if early > late:
                break
            self._exchange(early, late)
        return len(part)

    def _cache_rows(self, arrival: Arrival) -> int:
        """An upper bound of a request's used cache rows: the device may be one step ahead of the tokens known here."""
        return arrival.prompt_length + len(arrival.tokens) + 2 * (self.plan.depth + 1)

    def _one_by_one(self, count: int) -> list[tuple[Arrival, Reason | Exception]]:
        """Run the step for one request at a time. The step of all together failed, so it has committed nothing."""
        ended = []
        for slot, arrival in enumerate(self.running[:count]):
            self._exchange(0, slot)
            try:
                ended += self._step(1)
            except Exception as error:
                self._drop_not_finite()
                ended.append((arrival, error))
            self._exchange(0, slot)
        return ended

    def _drop_not_finite(self) -> None:
        """Replace NaN and infinities that a failed step has left by zeros: a weight of 0 would not hide them."""
        for cache in (self._workspace.target_cache, self._workspace.draft_cache):
            for field in cache.remembered():
                if field.is_floating_point():
                    field.nan_to_num_(0.0, 0.0, 0.0)

    def _exchange(self, one: int, other: int) -> None:
        rows = max(self._cache_rows(self.running[slot]) for slot in (one, other))
        self._workspace.swap(one, other, rows)
        self.running[one], self.running[other] = self.running[other], self.running[one]

    def _step(self, count: int) -> list[tuple[Arrival, Reason | Exception]]:
        arrivals = self.running[:count]
        asked = any(arrival.processors for arrival in arrivals)
        reader = ReadLogits() if any(arrival.logprobs is not None for arrival in arrivals) else None
        changes: list[LogitChange] = []
        if reader is not None:
            changes.append(reader)
        if asked:
            changes.append(self._processors)
        self._workspace.changes = tuple(changes)
        # On a GPU each number of slots needs a CUDA graph, so numbers are rounded up to powers of two.
        slots = count if self._on_host else min(self.limits.slots, 1 << (count - 1).bit_length())
        shortest = min(arrival.prompt_length + len(arrival.tokens) for arrival in arrivals) - 1
        outcome = self._engine.step(
            replace(self.plan, tree=self._tree_of(slots)).after(shortest),
            arrivals,
            slots=slots,
            levels=max(arrival.left for arrival in arrivals) - 1,
            longest=max(arrival.prompt_length + len(arrival.tokens) for arrival in arrivals),
            lap=no_lap,
        )
        self._readers.append(reader)
        if outcome is None:
            return []
        (output,) = outcome.looked
        ended = []
        reader = self._readers.popleft()
        for slot, (arrival, numbers) in enumerate(zip(outcome.who, outcome.rows, strict=True)):
            if arrival.has_ended:
                continue
            try:
                reason = arrival.take(numbers, output, reader and partial(reader.of_slot, slot))
            except Exception as error:  # raised by a stopping criterion; it must not affect other requests
                reason = error
            if reason is not None:
                ended.append((arrival, reason))
        return ended
