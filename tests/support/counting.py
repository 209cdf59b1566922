"""How much a call does, counted, so that no computer is too slow for it."""

import sys


def lines_run(call, folder="speculative"):
    """The number of lines of Python that a call runs in the package's `folder`: a count of steps that has no clock."""
    count = 0

    def in_function(frame, event, argument):
        nonlocal count
        count += event == "line"
        return in_function

    def entered(frame, event, argument):
        return in_function if f"/{folder}/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
