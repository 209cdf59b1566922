"""`Service`: a thread that decodes requests as they arrive (continuous batching)."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from secrets import randbits
from typing import Any, Unpack

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.sequences import MAX_SEQUENCES
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.models.forward import host_can_read
from heavypath.speculative.options import RequestOptions, checked_options
from heavypath.speculative.serving.arrivals import Arrival, Arrivals, ModelChanged, QueueFull
from heavypath.speculative.serving.completion import Completion, Process, Reason
from heavypath.speculative.serving.pauses import Pauses
from heavypath.speculative.serving.served_models import ServedModels
from heavypath.speculative.serving.slots import ServiceLimits, ServiceSlots, serving_plan
from heavypath.speculative.serving.statistics import ServiceStatistics
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

logger = logging.getLogger(__name__)
LOOK_EVERY = 16  # models are checked for changes after this many steps, and whenever a request begins or ends


class Service:
    """Decodes requests side by side: each joins when a slot is free, and leaves when it ends.

        with decoder.serve(slots=8) as service:
            completion = service.submit(tokenizer("def read").input_ids, max_new_tokens=64, temperature=0.6, seed=1)
            for tokens in completion:
                ...

    Requests have their own prompts, sampling, processors, lengths, stops and random numbers. Up to `slots` are decoded
    in each step. Up to `queue` more wait, first come, first served. If `submit` names the client of a request, clients
    take turns, and none can take everything (see `Arrivals` and `ServiceSlots`). A prompt goes through the models in
    chunks of `prefill_tokens`, between steps, so that no running request waits for more than one chunk. Short prompts
    go together. Rows that another sequence has computed for the same prefix are reused, see `prefixes`. All other
    memory is allocated when the service is opened.

    A request gets the tokens that it would get alone, whatever else runs (in float32; in 16 bits up to ties of
    rounding). With method "ersd", and for greedy decoding with any method, these are the tokens of
    `decoder.generate(prompt, ..., seed=SERVICE_SEED, sequence_ids=torch.tensor([REQUEST_SEED]))`.

    A request without a seed gets random numbers of its own; `Completion.seed` is the seed that was chosen.

    Trees depend on the number of running requests where the tokens do not depend on trees (ersd); elsewhere they are
    fixed. An error while decoding ends only the requests that it concerns. `SpeculativeDecoder.serve` makes a service.

    Models may change while a service is open: within `paused`, or at any time. Then everything computed by them is
    dropped, and later requests are decoded by the changed models. A change of the target outside of `paused` ends
    running requests with `ModelChanged`. After a change of the draft running requests finish first, and no prompt
    begins before.
    """

    def __init__(
        self,
        new_plan: Callable[[], StepPlan],
        tree_of: Callable[[int], TokenTree | Growth],
        checked: Callable[..., Request],
        draft_filters: Callable[[Filters], Filters],
        *,
        limits: ServiceLimits,
        seed: int,
        unseeded: int | None,
        cuda_graphs: bool,
    ):
        """Open the service and start its thread.

        new_plan: makes the plan for temperature 1 without filters, for the models in their current state
        tree_of: given a number of running requests, the tree of the plan for their next step
        checked: makes a checked request from the arguments of a call, as `Request.of` does for the decoder's models
        draft_filters: how the draft is sampled, given how the target is sampled
        seed: seed of the random numbers that all requests share
        unseeded: seed of the seeds chosen for requests without one; None for a random one
        cuda_graphs: whether steps on a GPU are captured as CUDA graphs
        """
        self._checked = checked
        self._draft_filters = draft_filters
        self._seed = seed
        self._tree_of = tree_of
        self._cuda_graphs = cuda_graphs
        self._models = ServedModels(new_plan)
        plan = self._models.plan
        self.limits = limits
        self._device = plan.target.device
        on_host = host_can_read(self._device)
        self._in_device = nullcontext if on_host else lambda: torch.cuda.device(self._device)
        self._beside = None if on_host else torch.cuda.Stream(self._device, priority=-1)  # has priority over steps
        with torch.inference_mode(), self._in_device():
            self._slots = self._new_slots(plan)
            if not on_host:
                torch.cuda.current_stream().synchronize()  # the service's thread may use another stream
        self._process = Process()
        self._arrivals = Arrivals(limits.queue)
        self._lock = threading.Lock()  # protects the counts
        self._counts = ServiceStatistics(limits.slots, self._slots.cache_bytes)
        self._entering: tuple[list[Arrival], Iterator[int] | None] | None = None  # with None before reading begins
        self._pauses = Pauses(self._arrivals.wake)
        self._steps = 0
        self.unseeded = randbits(32) if unseeded is None else unseeded
        self._names = Random(self.unseeded)  # chooses seeds for requests without one
        self._is_graceful = True
        self._thread = threading.Thread(target=self._run, name="heavypath-serve", daemon=True)
        self._thread.start()
        logger.debug("serving: %s, %d bytes of caches", limits, self._slots.cache_bytes)

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        *,
        seed: int | None = None,
        deadline: float | None = None,
        client: Hashable = None,
        group: Hashable = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Submit a request, from any thread, without waiting.

        input_ids: the prompt's tokens, a list or a LongTensor [T]
        seed: 0 .. 2**27 - 1, selects the request's random numbers; None chooses a seed, see `unseeded` of `serve`
        deadline: seconds from now, after which the request ends with the tokens that it has
        client: who submits the request. Clients take turns, one may fill half of the queue, and the last free slot is
            reserved for a client that has none. None, for a program that is alone, is only limited by the queue
        group: requests of a client that belong together; a client's groups take turns
        logprobs: report the log-probability of each new token under the target, and those of this many of the likeliest
            tokens at its position, in `Completion.logprobs`; None for none. prompt_logprobs: the same for the prompt
        options: `RequestOptions`, with the same meanings and defaults as in `SpeculativeDecoder.generate`

        Raises TypeError or ValueError for unsuitable arguments. Raises QueueFull if the queue, or this client's share
        of it, is full, and Closed after `close` or after an error ended the service. Like `stats`, `close` and `paused`
        it raises RuntimeError in a process that was forked from the service's.
        """
        self._process.check()
        self._arrivals.check_open()
        given = checked_options("submit", options, RequestOptions, "max_new_tokens", "temperature")
        seed = None if seed is None else whole("seed", seed)
        deadline = None if deadline is None else real("deadline", deadline)
        logprobs = _likeliest("logprobs", logprobs)
        prompt_logprobs = _likeliest("prompt_logprobs", prompt_logprobs)
        if prompt_logprobs is not None and self._slots.plan.target.state_bytes:
            raise ValueError("prompt_logprobs read a prompt twice, which a target with recurrent layers cannot do")
        prompt = _tokens_of(input_ids)
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be None or a number of seconds > 0, got {deadline!r}")
        with self._lock:
            name = self._names.randrange(MAX_SEQUENCES) if seed is None else seed
        if not 0 <= name < MAX_SEQUENCES:
            raise ValueError(f"seed must be None or in 0 .. {MAX_SEQUENCES - 1}, got {seed!r}")
        with self._apart(prompt):
            request = self._checked(
                prompt[None].to(self._device),
                max_new_tokens,
                temperature,
                {**given, "sequence_ids": torch.tensor([name], device=self._device)},
                seed=self._seed,
                penalties_as_processors=True,
            )
            if len(prompt) + request.max_new_tokens > self.limits.max_tokens:
                raise ValueError(
                    f"prompt and new tokens must be at most {self.limits.max_tokens} tokens, which a slot has room "
                    f"for, got {len(prompt)} and {max_new_tokens}"
                )
            now = time.monotonic()
            arrival = Arrival(
                request,
                self._draft_filters(request.filters),
                clock=time.monotonic,
                deadline=None if deadline is None else now + deadline,
                client=client,
                group=group,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                completion=Completion(self._arrivals.wake, name),
            )
        self._lend(request)
        try:
            self._arrivals.put(arrival)
        except QueueFull:
            self._count(refused=1)
            raise
        self._count(submitted=1, prompt_tokens=arrival.prompt_length)
        return arrival.completion

    @contextmanager
    def _apart(self, prompt: Tensor) -> Iterator[None]:
        """A context for reading a request's tensors, which are ready when it ends. prompt: the caller's LongTensor[T].

        Reading a tensor on a GPU waits for everything in its stream. Most streams contain steps, so requests are read
        in a separate stream.
        """
        if self._beside is None:
            yield
            return
        if prompt.is_cuda:
            self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            yield
        self._beside.synchronize()

    def _lend(self, request: Request) -> None:
        """Keep the memory of a request's tensors alive until the stream of the steps has used them (record_stream)."""
        if self._beside is not None:
            for tensor in (request.prompt, request.input_ids, request.lengths, request.sequence_ids, request.stops):
                tensor.record_stream(torch.cuda.default_stream(self._device))

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return self._slots.plan.target.vocab_size

    @property
    def is_open(self) -> bool:
        """Whether the service accepts requests: until it is closed or an error ends it; never in a forked process."""
        return self._process.is_this_one and self._arrivals.is_open

    def stats(self) -> ServiceStatistics:
        """A record of the requests that run and wait now, and of the counts since the service was opened."""
        self._process.check()
        entering = self._entering
        running = len(self._slots.running) + (0 if entering is None else len(entering[0]))
        with self._lock:
            return replace(self._counts, running=running, waiting=len(self._arrivals))

    def close(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests and wait until all have ended, at most `timeout` seconds; then release the memory.

        graceful: running and waiting requests are finished; otherwise they end as cancelled
        timeout: seconds, after which the requests that are left are cancelled, too; None for no limit

        Raises RuntimeError within a pause of the same thread, and in a forked process.
        """
        self._process.check()
        if self._pauses.is_of_this_thread:
            raise RuntimeError("a service cannot be closed within a pause of the same thread: leave that block first")
        self._is_graceful = self._is_graceful and graceful
        self._arrivals.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_graceful = False
            self._thread.join()

    def paused(self, graceful: bool = True, timeout: float | None = None) -> AbstractContextManager[None]:
        """A context during which nothing is decoded, in which the models may be changed: weights, adapters, modules.

            with service.paused():
                target.load_state_dict(weights)

        Running requests end first, with the models as they are. Waiting and new requests are decoded after the context,
        with the models as they are then. Rows of ended sequences are dropped.

        graceful: running requests are finished; otherwise they end as cancelled, with the tokens that they have
        timeout: seconds in which running requests may finish before they are cancelled; None for no limit

        If several threads pause, they take turns. Raises Closed if the service is closed. Raises RuntimeError in the
        decoding thread, and in a forked process.
        """
        self._process.check()
        self._arrivals.check_open()
        if threading.current_thread() is self._thread:
            raise RuntimeError("the thread that decodes cannot pause itself: pause in another one")
        return self._pauses.pause(graceful, timeout)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process.is_this_one:  # a forked process that leaves the block has nothing to close
            self.close(graceful=kind is None)

    def _run(self) -> None:
        with torch.inference_mode(), self._in_device():  # also for emptying slots after an error
            try:
                while self._is_busy() or self._arrivals.is_open:
                    if not self._is_busy():
                        self._arrivals.wait(lambda: self._pauses.is_asked)
                    begin = time.monotonic()
                    self._end_interrupted()
                    if self._pauses.is_asked and not self._slots.running and self._entering is None:
                        self._models.let_go()
                        self._pauses.stand()
                        continue
                    self._admit()
                    self._advance()
                    self._count(seconds_busy=time.monotonic() - begin)
            except BaseException as error:  # not an error of a single request: end all, so that nobody waits forever
                self._arrivals.close(error)
                self._end_all(error if isinstance(error, Exception) else RuntimeError("the service was stopped"))
                logger.exception("serving has ended by an error")  # last, since it may fail without memory
                raise
            finally:
                self._pauses.end()
                self._slots.free()

    def _is_busy(self) -> bool:
        return bool(self._slots.running) or self._entering is not None or len(self._arrivals) > 0

    def _end_interrupted(self) -> None:
        """End requests that were cancelled or are past their deadline; after a close that is not graceful, end all."""
        if not self._is_graceful:
            self._end_all("cancelled")
            return
        if self._pauses.is_impatient:
            self._end_under_way("cancelled")
        for arrival, reason in self._arrivals.interrupted():
            self._end(arrival, reason)
        for arrival in [*self._slots.running]:
            reason = arrival.interrupted()
            if reason is not None:
                self._slots.leave(arrival)
                self._end(arrival, reason)
        for arrival in [] if self._entering is None else self._entering[0]:
            if not arrival.has_ended and (reason := arrival.interrupted()) is not None:
                self._end(arrival, reason)
        if self._entering is not None and all(arrival.has_ended for arrival in self._entering[0]):
            self._entering = None

    def _admit(self) -> None:
        """Bring waiting requests into free slots, reading up to `prefill_tokens` of their prompts."""
        budget = self._slots.limits.prefill_tokens
        while budget > 0:
            if self._entering is None:
                if self._pauses.is_asked or not (group := self._next_group()):
                    return
                self._entering = group, None
            group, pieces = self._entering
            try:
                if pieces is None:
                    if not self._are_ready():
                        return
                    pieces = self._slots.entering(group)
                    self._entering = group, pieces
                if (tokens := next(pieces, None)) is not None:
                    budget -= tokens
                    continue
                self._entering = None
            except Exception as error:
                self._slots.check_device(error)
                self._notice_changes()  # a change may have caused the error
                self._entering = None
                self._end_each(group, error)
                continue
            for place, arrival in enumerate(group):
                if not arrival.has_ended:
                    self._join(group, place)

    def _are_ready(self) -> bool:
        """Whether a prompt may be read. If the models have changed, first makes a new plan for them.

        False while requests run that began before the change. Raises ModelChanged if the models cannot be decoded.
        """
        self._notice_changes(thorough=not self._slots.running)
        if self._models.is_stale and not self._slots.running:
            plan = self._models.renewed(self._device, self.limits.max_tokens)
            if (plan.target, plan.draft) == (self._slots.plan.target, self._slots.plan.draft):
                self._slots.forget()  # the same forward passes, which read the weights' new values
            else:
                self._slots.free()
                self._slots = self._new_slots(plan)
                self._count(cache_bytes=self._slots.cache_bytes - self._counts.cache_bytes)
            self._models.is_stale = False
        return not self._models.is_stale

    def _new_slots(self, plan: StepPlan) -> ServiceSlots:
        return ServiceSlots(serving_plan(plan), self._tree_of, self.limits, self._seed, cuda_graphs=self._cuda_graphs)

    def _notice_changes(self, *, thorough: bool = False) -> bool:
        """Check whether the models have changed. If the target has, end the running requests and return False.

        thorough: also make the checks that take milliseconds
        """
        if self._models.target_is_current(thorough=thorough):
            return True
        self._end_under_way(
            ModelChanged(
                "the target changed while this request was decoded, so that its text would be of two models: submit it "
                "again, and change models within `with service.paused():`"
            )
        )
        return False

    def _next_group(self) -> list[Arrival]:
        """Take the next requests from the queue that can be read together; an empty list if none can join now."""
        group: list[Arrival] = []

        def may(client: Hashable, waiting: Collection[Hashable]) -> bool:
            return self._slots.may_join(client, waiting, group)

        while (arrival := self._arrivals.pop(may, partial(self._slots.may_follow, group))) is not None:
            arrival.began = time.monotonic()
            group.append(arrival)
        return group

    def _join(self, group: list[Arrival], place: int) -> None:
        arrival = group[place]
        try:
            self._slots.join(group, place)
            self._count(reused_tokens=arrival.completion.reused_tokens)
        except Exception as error:
            self._slots.check_device(error)
            self._end(arrival, error)

    def _advance(self) -> None:
        """Run a step of all running requests, and end those whose sequences ended with it."""
        if not self._slots.running:
            return
        before = [(arrival, arrival.steps, len(arrival.tokens)) for arrival in self._slots.running]
        ended = self._slots.step()
        self._steps += 1
        steps = sum(arrival.steps - had for arrival, had, _ in before)  # counted before clients have their answers
        self._count(steps=steps, new_tokens=sum(len(each.tokens) - had for each, _, had in before), batch_steps=1)
        if (ended or self._steps % LOOK_EVERY == 0) and not self._notice_changes():
            return
        for arrival, outcome in ended:
            self._slots.leave(arrival, kept=not (self._models.is_stale or isinstance(outcome, Exception)))
            self._end(arrival, outcome)

    def _end_under_way(self, outcome: Reason | Exception) -> None:
        """End the requests that run, and those whose prompts are partly read; waiting requests stay in the queue."""
        if self._entering is not None and self._entering[1] is not None:
            group = self._entering[0]
            self._entering = None
            self._end_each(group, outcome)
        for arrival in [*self._slots.running]:
            self._slots.leave(arrival, kept=False)
            self._end(arrival, outcome)

    def _end_all(self, outcome: Reason | Exception) -> None:
        while (arrival := self._arrivals.pop()) is not None:
            self._end(arrival, outcome)
        if self._entering is not None:
            group = self._entering[0]
            self._entering = None
            self._end_each(group, outcome)
        for arrival in [*self._slots.running]:
            if not isinstance(outcome, Exception):  # after an error the device may be unusable
                self._slots.leave(arrival)
            self._end(arrival, outcome)

    def _end_each(self, group: list[Arrival], outcome: Reason | Exception) -> None:
        for arrival in group:
            if not arrival.has_ended:
                self._end(arrival, outcome)

    def _end(self, arrival: Arrival, outcome: Reason | Exception) -> None:
        if isinstance(outcome, Exception):
            self._count(failed=1)
        else:
            self._count(**{{"cancelled": "cancelled", "deadline": "expired"}.get(outcome, "completed"): 1})
        arrival.end(outcome)
        if isinstance(outcome, Exception):
            logger.warning("a request has failed: %s", outcome)
        elif (draft := self._slots.plan.draft) is not None and arrival.tokens:
            request = arrival.request
            new = torch.tensor([arrival.tokens], device="cpu")
            draft.learn(request.prompt, request.lengths, new, torch.tensor([len(arrival.tokens)], device="cpu"))

    def _count(self, **more: float) -> None:
        with self._lock:
            sums = {name: getattr(self._counts, name) + value for name, value in more.items()}
            self._counts = replace(self._counts, **sums)


def _tokens_of(input_ids: Any) -> Tensor:
    """A prompt's tokens as LongTensor[T]; raises TypeError or ValueError for anything else."""
    try:
        prompt = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"input_ids must be the tokens of one prompt, integers [T], got {input_ids!r}") from None
    prompt = prompt if prompt.numel() else prompt.long()  # an empty list has no integer type
    if prompt.dim() != 1 or prompt.dtype != torch.long:
        given = f"{prompt.dtype} {[*prompt.shape]}"
        raise ValueError(f"input_ids must be the tokens of one prompt, integers [T], got {given}")
    return prompt


def _likeliest(name: str, number: int | None) -> int | None:
    number = None if number is None else whole(name, number)
    if number is not None and number < 0:
        raise ValueError(f"{name} must be None or a number of tokens >= 0, got {number!r}")
    return number
