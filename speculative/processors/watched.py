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
"""

import weakref
from typing import Any

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

    @property
    def unseen(self) -> str:
        """The reason why a part of the callable's state cannot be read; "" if all of it can."""
        return self.shared.now.unseen

    def ask(self, ids: Tensor, scores: Tensor | None, *, keeps: bool = False) -> tuple[Any, bool]:
        """Call the callable, and undo a change of its state, or keep it for this sequence if `keeps`.

        Returns the result, and whether the state had changed. A state that cannot be read counts as unchanged.
        """
        if self.unseen:
            answer = self.processor(ids, scores)
            return answer, False
        state = self.shared.enter(self)
        answer = self.processor(ids, scores)
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
