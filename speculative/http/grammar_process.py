"""Compiles grammars in a process of its own, which ends where one is too much for it: one line in and one out for each.

Run by its path, not imported: it takes nothing of the package, so that it starts in the time of llguidance's import.
What comes in is a source of llguidance, as JSON; what goes out is what is wrong with it, as JSON, empty for nothing.
How long compiling takes, and how deep it calls itself, does not depend on the tokenizer, so one of bytes will do.
"""

import json
import resource
import sys
import threading
import time
from pathlib import Path

STACK = 4 << 20  # half of a thread's in the server, which compiles after it
SECONDS = 10  # of computing, where nobody is left who would end it


def main() -> None:
    """Compile what comes, each in as many more bytes of memory as the first argument says."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    memory = int(sys.argv[1])
    tokenizer, limits = LLTokenizer("byte"), LLParserLimits(verbose_errors=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(""), flush=True)  # ready
    for line in sys.stdin:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        print(json.dumps(matcher.get_error()), flush=True)


def _limit(what: int, most: int) -> None:
    """Set a soft limit, within the hard one."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    threading.stack_size(STACK)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
