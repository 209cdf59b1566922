"""The sequences that are decoded side by side: how one joins, moves on by a step, and leaves.

Those that run are in the first slots, so that a step does no work for empty ones. Where one leaves, the last one takes
its slot: its rows are copied, and nothing else moves.

A prompt goes through the models in an anteroom (`entrance`). Then its rows are copied into a slot.

Two rules keep one client's texts from holding up another's. The last free slot is for a client that has none, so that
nobody waits for the end of a stranger's text. On a CPU a step takes the longer the more texts are in it. There no
client has more than `BESIDE` of them in a step while others have any. Its further ones pause in the last slots, and go
on when a text ends. A client that is alone has all the time and all slots but one.

By transformers' own forward pass, rotary embeddings of type longrope have one set of factors for all rows of a step. So
short and long texts never run side by side there: the next text waits until those of the other kind have ended.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.kernels.native.sampling import seed_tensor
from heavypath.kernels.numbers import whole
from heavypath.speculative.decoding.drafted import no_lap
from heavypath.speculative.decoding.run import Engine, SlotNumbers, StepRunner
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Size
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.processors.draft import ProcessedSteps
from heavypath.speculative.processors.texts import BatchProcessors
from heavypath.speculative.serving.arrivals import Arrival
from heavypath.speculative.serving.entrance import Entrance
from heavypath.speculative.serving.logprobs import ReadLogits
from heavypath.speculative.serving.own_settings import OwnSettings
from heavypath.speculative.serving.prefixes import Prefixes, tokens_of
from heavypath.speculative.serving.progress import Reason
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

NO_TEXT = tokens_of([])
BESIDE = 2  # texts of a client in a step on a CPU, beside another client's


@dataclass(eq=False)
class Member:
    """A request that is decoded.

    row:  of `Sequences.output`, in which its new tokens are
    seen, nodes: how many of them, and of nodes that the target scored, the host knows
    """

    arrival: Arrival
    row: int
    seen: int = 0
    nodes: int = 0

    def passed_on(
        self, numbers: SlotNumbers, output: Tensor, logits: Callable[[int], Tensor] | None
    ) -> Reason | Exception | None:
        """Pass on what is new by the numbers of its slot; why it ends, None if it goes on.

        logits: see `Arrival.take`
        """
        if numbers.left < 0:
            return numbers.error("")
        new = output[self.row, self.seen : numbers.produced].tolist()
        nodes, self.nodes = numbers.nodes - self.nodes, numbers.nodes
        self.seen, self.arrival.steps = numbers.produced, numbers.steps
        return self.arrival.take(new, nodes, logits)


def serving_plan(plan: StepPlan) -> StepPlan:
    """The plan for sequences that are sampled each in its own way, of one for temperature 1 without filters.

    The filters are then those of the scores that `kernels.sequence_scores` makes of the logits: temperature 1, and
    none.

    Children are not drawn uniformly where a draft's support is used up. A request's processors may leave tokens out on
    purpose, all of them after the end of a text, and there a node must stay absent.
    """
    rules, plain = plan.rules, Filters()
    changes = (*rules.changes, OwnSettings())
    rules = replace(rules, target_filters=plain, draft_filters=plain, fill=False, changes=changes)
    return replace(plan, rules=rules)


class ServiceLimits(NamedTuple):
    """The limits of a service.

    slots:          sequences in a step
    max_tokens:     of a sequence, its prompt with its new tokens
    queue:          requests that may wait
    prefill_tokens: of prompts that go through a model between two steps
    prefix_bytes:   memory for rows of texts that have ended, for prompts that begin alike. Default: half of that of
                    the slots. 0 keeps none, and no prompt takes rows of another request's text that runs
    """

    slots: int
    max_tokens: int
    queue: int
    prefill_tokens: int
    prefix_bytes: int | None = None

    def check(self) -> "ServiceLimits":
        """The same as Python has it; TypeError for what is no integer, ValueError for a number below 1."""
        numbers = {name: whole(name, value) for name, value in self._asdict().items() if value is not None}
        for name, value in numbers.items():
            least = 0 if name == "prefix_bytes" else 1
            if value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        return self._replace(**numbers)


class ServiceSlots:
    """The memory and the state of the sequences that are decoded."""

    def __init__(
        self,
        plan: StepPlan,
        tree_of: Callable[[int], TokenTree | Growth],
        limits: ServiceLimits,
        seed: int,
        *,
        cuda_graphs: bool,
    ):
        """tree_of: one of the plan's trees, for so many members; seed: of the noise."""
        self.plan, self.limits, self._tree_of = plan, limits, tree_of
        count, max_tokens = limits.slots, limits.max_tokens
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
        self._engine = Engine[Member](self._runner, self._workspace, [self._state.output], waits=False)
        self._processors = BatchProcessors()
        self._readers = deque[ReadLogits | None]()  # of the steps whose outcome is not known yet
        self.running: list[Member] = []  # in the first slots, in their order
        self._rows = list(range(count))  # of `output` that nobody has
        models = (plan.target, *(plan.draft or NO_DRAFT).models)
        self._limits = [model.rope_limit for model in models if model.is_foreign and model.rope_limit is not None]
        if cuda_graphs:
            from heavypath.speculative.decoding.graphs import warm_up_steps

            warm_up_steps(self._runner, plan, self._workspace, count, max_tokens, tree_of)

    def may_join(self, client: Hashable, waiting: Collection[Hashable], entering: Sequence[Arrival] = ()) -> bool:
        """True if a client may have one more slot; waiting: the clients who wait for any; entering: who join soon."""
        clients = [*(member.arrival.client for member in self.running), *(arrival.client for arrival in entering)]
        if len(clients) >= self.limits.slots:
            return False
        if client is None:
            return True
        has = clients.count(client)
        if self._on_host and has >= BESIDE and len({*clients, *waiting}) > 1:
            return False  # it would pause
        return has == 0 or len(clients) + 1 < self.limits.slots

    def check_device(self, error: Exception) -> None:
        """Raise an error that came from a fault of the GPU, after which nothing can be computed in this process."""
        if self._on_host:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None

    def may_follow(self, group: Sequence[Arrival], arrival: Arrival) -> bool:
        """True if a prompt can be read together with others; with none, if its text can run beside those that run."""
        if not group:
            return not self.running or self._is_long(arrival) == self._is_long(self.running[0].arrival)
        sharing = [each for each in group if self._may_share(arrival, each)]
        return self._entrance.may_follow(group, arrival, sharing)

    def entering(self, group: Sequence[Arrival]) -> Iterator[int]:
        """Read prompts, a piece at a time; the tokens of each piece. After the last one they may `join`."""
        running = [
            [each.arrival.text if self._may_share(arrival, each.arrival) else NO_TEXT for each in self.running]
            for arrival in group
        ]
        yield from self._entrance.bring(group, self._prefixes.found([each.prompt for each in group], running))

    def join(self, group: Sequence[Arrival], place: int) -> None:
        """Move a request that has been read into a slot. Raises ValueError where its processors do not fit."""
        arrival, slot, row = group[place], len(self.running), self._rows[-1]
        self._processors.begin(row, arrival.request.input_ids[0], arrival.processors, arrival.stops, 0)
        member = Member(arrival, self._rows.pop())
        self._workspace.receive(slot, self._entrance.room(group), place, arrival.prompt_length)
        self._state.numbers[StateField.MEMBER, slot] = member.row
        self._state.numbers[StateField.LEFT, slot] = arrival.request.max_new_tokens
        self._state.settings[slot] = arrival.settings()
        self.running.append(member)

    def leave(self, member: Member, *, kept: bool = True) -> None:
        """Give a member's slot to the last one that runs; kept: whether its rows are, for prompts that begin alike."""
        slot, last = self.running.index(member), self.running[-1]
        if kept:
            self._prefixes.keep(slot, member.arrival.text)
        if last is not member:
            self._workspace.receive(slot, self._workspace, len(self.running) - 1, self._cache_rows(last))
            self.running[slot] = last
        self.running.pop()
        for field in (StateField.LEFT, StateField.LENGTHS):  # one by one: a GPU would wait for a list of them
            self._state.numbers[field, len(self.running)] = 0
        self._rows.append(member.row)
        self._processors.end(member.row)

    def step(self) -> list[tuple[Member, Reason | Exception]]:
        """Run a step and pass its new tokens on; those who ended by it, and why. They have to leave.

        An error ends those alone without whom the step runs. Raises one after which no step can run.
        """
        count = self._arrange()
        try:
            return self._step(count)
        except Exception as error:
            self.check_device(error)
            if count == 1 or not self._on_host:
                return [(member, error) for member in self.running[:count]]
            return self._one_by_one(count)

    def forget(self) -> None:
        """Keep nothing that was computed of texts that have ended."""
        self._prefixes.clear()

    def free(self) -> None:
        """Give the memory back, if that has not been done."""
        if hasattr(self, "_workspace"):
            self._entrance.free()
            del self._workspace, self._entrance, self._prefixes, self._state, self._engine

    def _is_long(self, arrival: Arrival) -> list[bool]:
        """On which side of each limit of its models a text lies, from its first token to its last."""
        return [arrival.prompt_length > limit for limit in self._limits]

    def _may_share(self, one: Arrival, other: Arrival) -> bool:
        """True if one's prompt may take the other's rows."""
        own = one.group is not None and (one.client, one.group) == (other.client, other.group)
        return own or self._prefixes.across_requests

    def _arrange(self) -> int:
        """Bring those that take part in a step into the first slots; how many they are."""
        clients = [member.arrival.client for member in self.running]
        if not self._on_host or len({*clients}) < 2:
            return len(clients)
        had, pause, part = Counter[Hashable](), [], []
        for slot, client in enumerate(clients):
            had[client] += 1
            (pause if client is not None and had[client] > BESIDE else part).append(slot)
        for early, late in zip(pause, reversed(part), strict=False):
            if early > late:
                break
            self._exchange(early, late)
        return len(part)

    def _cache_rows(self, member: Member) -> int:
        """At most so many rows of a member are in use: where the host is a step late, more than it knows."""
        return member.arrival.prompt_length + len(member.arrival.tokens) + 2 * (self.plan.depth + 1)

    def _one_by_one(self, count: int) -> list[tuple[Member, Reason | Exception]]:
        """The work of `step`, for one member after the other: a step that fails has committed nothing."""
        ended = []
        for slot, member in enumerate(self.running[:count]):
            self._exchange(0, slot)
            try:
                ended += self._step(1)
            except Exception as error:
                ended.append((member, error))
            self._exchange(0, slot)
        return ended

    def _exchange(self, one: int, other: int) -> None:
        rows = max(self._cache_rows(self.running[slot]) for slot in (one, other))
        self._workspace.swap(one, other, rows)
        self.running[one], self.running[other] = self.running[other], self.running[one]

    def _step(self, count: int) -> list[tuple[Member, Reason | Exception]]:
        members = self.running[:count]
        arrivals = [member.arrival for member in members]
        asked = any(arrival.processors for arrival in arrivals)
        reader = ReadLogits() if any(arrival.logprobs is not None for arrival in arrivals) else None
        self._workspace.changes = (() if reader is None else (reader,)) + (
            (ProcessedSteps(self._processors),) if asked else ()
        )
        # On a GPU, where each number of slots is a graph, there are few numbers.
        slots = count if self._on_host else min(self.limits.slots, 1 << (count - 1).bit_length())
        shortest = min(arrival.prompt_length + len(arrival.tokens) for arrival in arrivals) - 1
        outcome = self._engine.step(
            replace(self.plan, tree=self._tree_of(slots)).after(shortest),
            members,
            slots=slots,
            levels=max(arrival.left for arrival in arrivals) - 1,
            longest=max(arrival.prompt_length + len(arrival.tokens) for arrival in arrivals),
            lap=no_lap,
        )
        self._readers.append(reader)
        if outcome is None:
            return []
        (output,), ended, reader = outcome.looked, [], self._readers.popleft()
        for slot, (member, numbers) in enumerate(zip(outcome.who, outcome.rows, strict=True)):
            if member.arrival.has_ended:
                continue
            try:
                reason = member.passed_on(numbers, output, reader and partial(reader.of_slot, slot))
            except Exception as error:  # of a stopping criterion; the others' tokens are committed like these
                reason = error
            if reason is not None:
                ended.append((member, reason))
        return ended
