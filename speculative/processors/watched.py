"""Use a user's stateful callables in trees: each sequence has its own state, which changes once for each token.

In a tree a callable is called for nodes that are never accepted, and more than once for accepted ones. So changes of
its state are undone after each call, or, if several callables may read them, after the node's calls. A node at which a
call changes the state gets no children, because they would need the changed state. If the node is accepted, the call is
repeated, and the change stays. The final state is the one after one call for each token, in order, with transformers'
arguments. A callable that changes in each call, like a counter, has trees of the root alone.

This is lossless for any draft. Whether a node has children is decided before they are drawn (in the draft's call), or
by the target's logits, the path to the node and the state. It does not depend on the tokens of the children.

If a part of the state cannot be read, nothing is drafted: the callable is called once for each token, with the target's
logits. The same holds for a processor that has an object in common with a stopping criterion, which is called after the
step.

A step of a service that fails for one sequence is repeated for the others. So a call that raises changes no state, the
changes of a step are kept all or not at all, and a call that cannot be undone is not repeated: its result is kept.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from heavypath.speculative.processors.kinds import name_of
from heavypath.speculative.processors.state import KeptState

logger = logging.get_logger(__name__)

TOLD_AFTER = 3  # changes after which a warning is logged: a callable may set itself up in its first calls


class OwnState:
    """One sequence's state of the callables of a `Shared`, while these have another sequence's state; else None."""

    def __init__(self) -> None:
        self.kept: KeptState | None = None


class Shared:
    """The state of callables that one or several sequences use, each with its own state of them.

    What one of them changes, another one may read, so their states are one.

    kept: the user's objects whose state is watched: the callables, or functions in them
    now:  a copy of the state that the objects have now
    """

    def __init__(self, kept: Sequence[object]):
        self.kept = kept
        self.now = KeptState(kept)
        self._before: KeptState | None = None  # the state before the first change
        self._owner: OwnState | None = None  # of the sequence whose state is `now`
        self._changes = 0
        self._elsewhere = ""
        self.is_used = False  # by a sequence

    @property
    def unseen(self) -> str:
        """The reason why a part of the state cannot be read, or be undone; "" if all of it can."""
        return self._elsewhere or self.now.unseen

    @property
    def may_differ(self) -> bool:
        """Whether this part may depend on the sequence."""
        return bool(self._elsewhere) or self.now.may_differ

    def look_at(self, criteria: Sequence[object]) -> None:
        """Find out whether stopping criteria, which are called after a step, may change this state."""
        if criteria and not self.unseen and self.now.has_some_of(KeptState(criteria)):
            self._elsewhere = "a stopping criterion has some of its objects"
            tell(self.kept[0], self._elsewhere)

    def enter(self, own: OwnState) -> KeptState:
        """Give the objects the state that the last call for a sequence has left. Returns a copy of this state."""
        if self.now.has_changed():  # by code outside of these calls
            self.now = KeptState(self.kept)
        if self._before is not None and self._owner is not own:
            if self._owner is not None:
                self._owner.kept = self.now
            self.now = own.kept or self._before
            self._owner = own
            self.now.put_back()
        return self.now

    def moved_on(self, own: OwnState, kept: object) -> None:
        """Keep the state that the objects have now, after a call of one of them, as the state of the sequence.

        After three changes a warning is logged. kept: the object that was called
        """
        self._before = self._before or self.now
        self._owner = own
        self.now = KeptState(self.kept)
        self._changes += 1
        if self._changes == TOLD_AFTER:
            tell(kept, "it changes when it is called")

    def go_on(self, state: KeptState) -> None:
        """Give the objects a later state, for calls of other callables, until `go_back`."""
        self.now = state
        state.put_back()

    def moment(self) -> "Moment":
        """The state that the objects have now, for `go_back`."""
        return Moment(self.now, self._before, self._owner)

    def go_back(self, moment: "Moment") -> None:
        """Give the objects the state of an earlier moment."""
        self.now, self._before, self._owner = moment
        self.now.put_back()


class Moment(NamedTuple):
    """What a `Shared` holds at one moment: the copies of states, and the sequence whose state is `now`."""

    now: KeptState
    before: KeptState | None
    owner: OwnState | None


class WatchedCallable:
    """A user's callable, as one sequence uses it: each call finds the state that this sequence's calls have left.

    processor: the callable
    kept:      the user's object in it whose state is watched
    shared:    its state, which all sequences that use it share
    own:       this sequence's state
    """

    def __init__(self, processor: Any, kept: object, shared: Shared, own: OwnState):
        self.processor = processor
        self.kept = kept
        self.shared = shared
        self.own = own
        self._last: tuple[Tensor, Any] | None = None  # input_ids and result of the last call, if state cannot be read
        self._error: Exception | None = None  # which a call has raised, if state cannot be read

    @property
    def unseen(self) -> str:
        """The reason why a part of the callable's state cannot be read; "" if all of it can."""
        return self.shared.unseen

    def ask(self, ids: Tensor, scores: Tensor | None, *, keeps: bool = False) -> tuple[Any, KeptState | None]:
        """Call the callable, and undo a change of its state, or keep it for this sequence if `keeps`.

        Returns the result, and the state after the call if it had changed, or None. A state that cannot be read counts
        as unchanged; a second call for the same tokens gives the first one's result or error, because it belongs to a
        repeated step.
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
            return self._last[1], None
        state = self.shared.enter(self.own)
        try:
            answer = self.processor(ids, scores)
        except BaseException:
            state.put_back()
            raise
        if not state.has_changed():
            return answer, None
        if keeps:
            self.shared.moved_on(self.own, self.kept)
            return answer, self.shared.now
        after = KeptState(self.shared.kept)
        state.put_back()
        return answer, after

    def keep(self, ids: Tensor, scores: Tensor | None) -> Any:
        """Call the callable, and keep a change of its state for this sequence. Returns the result."""
        answer, _ = self.ask(ids, scores, keeps=True)
        return answer


@contextmanager
def undone(watched: Sequence[WatchedCallable]) -> Iterator[None]:
    """A context after which callables of one sequence have the state that they had before it."""
    before: list[tuple[Shared, Moment]] = []
    for each in watched:
        if not each.unseen and all(each.shared is not shared for shared, _ in before):
            each.shared.enter(each.own)
            before.append((each.shared, each.shared.moment()))
    try:
        yield
    finally:
        for shared, moment in before:
            shared.go_back(moment)


class Change(NamedTuple):
    """A call that changed a callable's state, to be repeated if its node is accepted.

    ids: LongTensor[1, T'], scores: fp32 [1, V], the arguments
    """

    watched: WatchedCallable
    ids: Tensor
    scores: Tensor


def keep_all(changes: Sequence[Change]) -> None:
    """Repeat calls, in order, and keep their changes of state. If one raises, no change is kept: all are undone."""
    before = [(each.watched, each.watched.own.kept, each.watched.shared.moment()) for each in changes]
    try:
        for watched, ids, scores in changes:
            watched.keep(ids, scores)
    except BaseException:
        for watched, kept, moment in before:
            watched.own.kept = kept
            watched.shared.go_back(moment)
        raise


class WatchedOnes:
    """Makes the `WatchedCallable`s of a batch. Sequences that use the same objects share a `Shared`."""

    def __init__(self) -> None:
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()

    def together(self, lists: Sequence[Sequence[object]]) -> list[Shared]:
        """Make the states of objects; those of one list, and of lists with an object in common, have one state.

        An object has a state of its own if that cannot be read, and the one that it has already. Returns the states,
        which are forgotten if nobody refers to them.
        """
        groups: list[dict[int, object]] = []
        found = []
        for given in lists:
            own = dict[int, object]()
            for each in given:
                if id(each) not in self._shared and all(id(each) not in group for group in groups):
                    alone = Shared([each])
                    if alone.unseen:
                        tell(each, alone.unseen)
                        self._shared[id(each)] = alone
                        found.append(alone)
                if id(each) not in self._shared:
                    own[id(each)] = each
            for group in [each for each in groups if each.keys() & own.keys()]:
                groups.remove(group)
                own = group | own
            groups.append(own)
        for group in filter(None, groups):
            shared = Shared([*group.values()])
            self._shared.update(dict.fromkeys(group, shared))
            found.append(shared)
        return found

    def of(self, pairs: Sequence[tuple[Any, object]], criteria: Sequence[object] = ()) -> list[WatchedCallable]:
        """Make the callables for one sequence.

        pairs: for each of them, what is called, and the object whose state is watched
        criteria: a user's stopping criteria, if the callables are processors

        Raises ValueError if a state cannot be read, may depend on the sequence, and another sequence uses it, too.
        """
        used = {id(kept) for _, kept in pairs if id(kept) in self._shared and self._shared[id(kept)].is_used}
        states = self.together([[kept for _, kept in pairs]])
        own = dict[int, OwnState]()
        made = []
        for processor, kept in pairs:
            shared = self._shared[id(kept)]
            if id(kept) in used and shared.unseen and shared.may_differ:
                raise ValueError(
                    f"{name_of(kept)} is given for several sequences at a time, and the state that it keeps between "
                    f"calls cannot be read: {shared.unseen}. Give each sequence an object of its own (a list for "
                    "each), or set its attribute keeps_no_state = True if its results depend on its arguments alone"
                )
            made.append(WatchedCallable(processor, kept, shared, own.setdefault(id(shared), OwnState())))
        del states
        for each in made:
            each.shared.is_used = True
            each.shared.look_at(criteria)
        return made


def tell(kept: object, why: str) -> None:
    """Log a warning, once, that a callable makes trees smaller. why: the reason."""
    logger.warning_once(
        f"{name_of(kept)} is called once for each token, and no tree is drafted if its results may depend on earlier "
        f"calls: {why}. If they depend on its arguments alone, set its attribute keeps_no_state = True"
    )


def is_promised(processor: object) -> bool:
    """Whether a processor's attribute `keeps_no_state` promises that its results depend on its arguments alone."""
    return getattr(processor, "keeps_no_state", False) is True
