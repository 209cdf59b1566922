"""Callables of a user's own, whose state is watched: each text has its own, moved on once for each of its tokens.

A tree asks about nodes that are never accepted, and twice about the others. So what a call changes is put back, and a
node at which a call has changed anything has no children: below it the state would be another one. If the node is
accepted, the call is made once more, and what it changes stays. So a callable has been called, as far as it can tell,
once for each token, in order, with what transformers would have given it. One that changes in each call, as a counter
does, has a tree of the root alone.

That is lossless for any draft. Whether a node has children is known before these are drawn, by the draft's call, or
depends on the target's logits, the node's text and the state, and not on which tokens its children have.

Where a part of the state cannot be seen, nothing is drafted at all: each token's call is made once, by the target.
"""

import weakref
from typing import Any

from torch import Tensor
from transformers.utils import logging

from heavypath.speculative.processors.kinds import name_of
from heavypath.speculative.processors.state import KeptState

logger = logging.get_logger(__name__)

TOLD_AFTER = 3  # changes: what only prepares itself in its first calls is no news


class Shared:
    """A callable that one or several texts have; `KeptState` is taken of `kept`, which is the user's part of it."""

    def __init__(self, kept: object):
        self.kept, self.now = kept, KeptState(kept)
        self._before: KeptState | None = None  # any change
        self._owner: WatchedCallable | None = None
        self._changes = 0

    def enter(self, text: "WatchedCallable") -> KeptState:
        """Bring the callable to the state that a text has left it in; that state."""
        if self.now.has_changed():  # by others than the texts, since the last call
            self.now = KeptState(self.kept)
        if self._before is not None and self._owner is not text:
            if self._owner is not None:
                self._owner.own = self.now
            self.now, self._owner = text.own or self._before, text
            self.now.put_back()
        return self.now

    def moved_on(self, text: "WatchedCallable") -> None:
        """A text's call has changed the state, which is to stay so."""
        self._before, self._owner = self._before or self.now, text
        self.now = KeptState(self.kept)
        self._changes += 1
        if self._changes == TOLD_AFTER:
            tell(self.kept, "it changes when it is called")


class WatchedCallable:
    """A callable as one text has it. own: its state while another text's is in force."""

    def __init__(self, processor: Any, shared: Shared):
        self.processor, self.shared = processor, shared
        self.own: KeptState | None = None

    @property
    def unseen(self) -> str:
        """Why its state cannot be seen."""
        return self.shared.now.unseen

    def ask(self, ids: Tensor, scores: Tensor) -> tuple[Any, bool]:
        """The answer, and whether the call has changed the state, which is then put back."""
        if self.unseen:
            return self.processor(ids, scores), False
        state = self.shared.enter(self)
        answer = self.processor(ids, scores)
        changed = state.has_changed()
        if changed:
            state.put_back()
        return answer, changed

    def keep(self, ids: Tensor, scores: Tensor | None) -> Any:
        """The answer of a call whose changes stay."""
        if self.unseen:
            return self.processor(ids, scores)
        state = self.shared.enter(self)
        answer = self.processor(ids, scores)
        if state.has_changed():
            self.shared.moved_on(self)
        return answer


class WatchedOnes:
    """The watched callables of a batch of texts, which may share them."""

    def __init__(self) -> None:
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()

    def of(self, processor: Any, kept: object = None) -> WatchedCallable:
        """A callable, for one text; kept: the user's part of it, where that is not all.

        Raises ValueError for one whose state cannot be seen, and which another text has, too.
        """
        kept = processor if kept is None else kept
        shared = self._shared.get(id(kept))
        if shared is None:
            self._shared[id(kept)] = shared = Shared(kept)
            if shared.now.unseen:
                tell(kept, shared.now.unseen)
        elif shared.now.unseen and shared.now.may_differ:
            raise ValueError(
                f"{name_of(kept)} is given for several texts at a time, and what it keeps between its calls cannot be "
                f"seen: {shared.now.unseen}. Give each sequence an object of its own (a list for each), or set its "
                "attribute keeps_no_state = True if its answers depend on its arguments alone"
            )
        return WatchedCallable(processor, shared)


def tell(kept: object, why: str) -> None:
    """Say once that a callable is in the way of trees."""
    logger.warning_once(
        f"{name_of(kept)} is called once for each token, and no tree is drafted where its answers may depend on the "
        f"calls before: {why}. If they depend on its arguments alone, set its attribute keeps_no_state = True"
    )


def is_promised(processor: object) -> bool:
    """True if a user has said that a callable answers by its arguments alone."""
    return getattr(processor, "keeps_no_state", False) is True
