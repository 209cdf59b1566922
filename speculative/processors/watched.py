"""Use a user's stateful callables in trees: each sequence has its own state, which changes once for each token.

In a tree a callable is called for nodes that are never accepted, and more than once for accepted ones. So changes of
its state are undone after each call. A node at which a call changes the state gets no children, because they would need
the changed state. If the node is accepted, the call is repeated, and the change stays. The final state is the one after
one call for each token, in order, with transformers' arguments. A callable that changes in each call, like a counter,
has trees of the root alone.

This is lossless for any draft. Whether a node has children is decided before they are drawn (in the draft's call), or
by the target's logits, the path to the node and the state. It does not depend on the tokens of the children.

If a part of the state cannot be read, nothing is drafted: the callable is called once for each token, with the target's
logits.

A step of a service that fails for one sequence is repeated for the others. So a call that raises changes no state, the
changes of a step are kept all or not at all, and a call that cannot be undone is not repeated: its result is kept.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from heavypath.speculative.processors.kinds import name_of
from heavypath.speculative.processors.state import KeptState

logger = logging.get_logger(__name__)

TOLD_AFTER = 3  # changes after which a warning is logged: a callable may set itself up in its first calls


class Shared:
    """The state of a callable that one or several sequences use, each with its own state of it.

    kept: the user's object whose state is watched: the callable, or a function in it
    now:  a copy of the state that the object has now
    """

    def __init__(self, kept: object):
        self.kept = kept
        self.now = KeptState(kept)
        self._before: KeptState | None = None  # the state before the first change
        self._owner: WatchedCallable | None = None  # the sequence whose state is `now`
        self._changes = 0

    def enter(self, sequence: "WatchedCallable") -> KeptState:
        """Give the object the state that the last call for this sequence has left. Returns a copy of this state."""
        if self.now.has_changed():  # by code outside of these calls
            self.now = KeptState(self.kept)
        if self._before is not None and self._owner is not sequence:
            if self._owner is not None:
                self._owner.own = self.now
            self.now = sequence.own or self._before
            self._owner = sequence
            self.now.put_back()
        return self.now

    def moved_on(self, sequence: "WatchedCallable") -> None:
        """Keep the state that the object has now, after a call for this sequence, as the state of the sequence.

        After three changes a warning is logged.
        """
        self._before = self._before or self.now
        self._owner = sequence
        self.now = KeptState(self.kept)
        self._changes += 1
        if self._changes == TOLD_AFTER:
            tell(self.kept, "it changes when it is called")

    def moment(self) -> "Moment":
        """The state that the object has now, for `go_back`."""
        return Moment(self.now, self._before, self._owner)

    def go_back(self, moment: "Moment") -> None:
        """Give the object the state of an earlier moment."""
        self.now, self._before, self._owner = moment
        self.now.put_back()


class Moment(NamedTuple):
    """What a `Shared` holds at one moment: the copies of states, and the sequence whose state is `now`."""

    now: KeptState
    before: KeptState | None
    owner: "WatchedCallable | None"


class WatchedCallable:
    """A user's callable, as one sequence uses it: each call finds the state that this sequence's calls have left.

    processor: the callable
    shared:    its state, which all sequences that use it share
    own:       this sequence's state, while the callable has another sequence's state
    """

    def __init__(self, processor: Any, shared: Shared):
        self.processor = processor
        self.shared = shared
        self.own: KeptState | None = None
        self._last: tuple[Tensor, Any] | None = None  # input_ids and result of the last call, if state cannot be read
        self._error: Exception | None = None  # which a call has raised, if state cannot be read

    @property
    def unseen(self) -> str:
        """The reason why a part of the callable's state cannot be read; "" if all of it can."""
        return self.shared.now.unseen

    def ask(self, ids: Tensor, scores: Tensor | None, *, keeps: bool = False) -> tuple[Any, bool]:
        """Call the callable, and undo a change of its state, or keep it for this sequence if `keeps`.

        Returns the result, and whether the state had changed. A state that cannot be read counts as unchanged; a second
        call for the same tokens gives the first one's result or error, because it belongs to a repeated step.
        """
        if self.unseen:
            if self._error is None and (self._last is None or not torch.equal(self._last[0], ids)):
                try:
                    self._last = ids.clone(), self.processor(ids, scores)
                except Exception as error:
                    self._error = error
            if self._error is not None:
                raise self._error
            assert self._last is not None
            return self._last[1], False
        state = self.shared.enter(self)
        try:
            answer = self.processor(ids, scores)
        except BaseException:
            state.put_back()
            raise
        changed = state.has_changed()
        if changed:
            if keeps:
                self.shared.moved_on(self)
            else:
                state.put_back()
        return answer, changed

    def keep(self, ids: Tensor, scores: Tensor | None) -> Any:
        """Call the callable, and keep a change of its state for this sequence. Returns the result."""
        answer, _ = self.ask(ids, scores, keeps=True)
        return answer


class Change(NamedTuple):
    """A call that changed a callable's state, to be repeated if its node is accepted.

    ids: LongTensor[1, T'], scores: fp32 [1, V], the arguments
    """

    watched: WatchedCallable
    ids: Tensor
    scores: Tensor


def keep_all(changes: Sequence[Change]) -> None:
    """Repeat calls, in order, and keep their changes of state. If one raises, no change is kept: all are undone."""
    before = [(each.watched, each.watched.own, each.watched.shared.moment()) for each in changes]
    try:
        for watched, ids, scores in changes:
            watched.keep(ids, scores)
    except BaseException:
        for watched, own, moment in before:
            watched.own = own
            watched.shared.go_back(moment)
        raise


class WatchedOnes:
    """Makes the `WatchedCallable`s of a batch. Sequences that use the same object share a `Shared`."""

    def __init__(self) -> None:
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()

    def of(self, processor: Any, kept: object = None) -> WatchedCallable:
        """Make the callable for one sequence.

        processor: what is called; kept: the object whose state is watched, None for the processor itself

        Raises ValueError if its state cannot be read, may depend on the sequence, and another sequence uses it, too.
        """
        kept = processor if kept is None else kept
        shared = self._shared.get(id(kept))
        if shared is None:
            shared = Shared(kept)
            self._shared[id(kept)] = shared
            if shared.now.unseen:
                tell(kept, shared.now.unseen)
        elif shared.now.unseen and shared.now.may_differ:
            raise ValueError(
                f"{name_of(kept)} is given for several sequences at a time, and the state that it keeps between calls "
                f"cannot be read: {shared.now.unseen}. Give each sequence an object of its own (a list for each), or "
                "set its attribute keeps_no_state = True if its results depend on its arguments alone"
            )
        return WatchedCallable(processor, shared)


def tell(kept: object, why: str) -> None:
    """Log a warning, once, that a callable makes trees smaller. why: the reason."""
    logger.warning_once(
        f"{name_of(kept)} is called once for each token, and no tree is drafted if its results may depend on earlier "
        f"calls: {why}. If they depend on its arguments alone, set its attribute keeps_no_state = True"
    )


def is_promised(processor: object) -> bool:
    """Whether a processor's attribute `keeps_no_state` promises that its results depend on its arguments alone."""
    return getattr(processor, "keeps_no_state", False) is True
