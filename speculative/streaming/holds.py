"""Which thread holds a streamed layer, and whether the call for which it took the layer is over.

Hooks of a layer's module take it before a call and release it after. PyTorch calls none after a call that Ctrl-C has
ended, so that the layer would be held until its thread takes another. Other threads find that out here.
"""

import sys
import threading
from typing import NamedTuple

LOOK_AGAIN = 0.5  # seconds after which a waiting thread looks for holds that are over: such a hold notifies nobody


class Hold(NamedTuple):
    """A thread that holds layer number `layer`.

    call: the id of the frame in which a module is called for it; None if no module is called
    """

    layer: int
    thread: threading.Thread
    call: int | None

    @classmethod
    def of_this_call(cls, layer: int) -> "Hold":
        """The hold of the current thread, for the innermost call of a module that it is in."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_call_impl":
            frame = frame.f_back
        return cls(layer, threading.current_thread(), None if frame is None else id(frame))

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, or has left the call."""
        if not self.thread.is_alive():
            return True
        if self.call is None:
            return False
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None:
            if id(frame) == self.call:  # or a later frame at the same address, which is left in its turn
                return False
            frame = frame.f_back
        return True
