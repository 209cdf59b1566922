"""The program of the process that compiles grammars (`trial`), which ends if one exceeds its limits.

It reads a line and writes a line for each grammar: a source of llguidance as JSON, then the error message as JSON,
empty if there is none. The file is run by its path and imports nothing of the package, so that it starts quickly. Time
and recursion depth of compiling do not depend on the tokenizer, so a tokenizer of bytes is sufficient. The time is that
of a processor, so that no grammar is refused because the machine is busy.
"""

import json
import resource
import signal
import sys
import threading
from pathlib import Path

STACK = 4 << 20  # bytes; half of the stack of the server's thread, which compiles the same grammar later


def main() -> None:
    """Compile each grammar that arrives on standard input.

    The arguments are the limits: seconds of a processor for each grammar, and bytes of added memory.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    seconds = float(sys.argv[1])
    memory = int(sys.argv[2])
    tokenizer = LLTokenizer("byte")
    limits = LLParserLimits(verbose_errors=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(""), flush=True)  # ready
    for line in sys.stdin:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(matcher.get_error()), flush=True)


def _limit(what: int, most: int) -> None:
    """Set the soft limit of a resource to `most`, or to its hard limit if that is lower."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    threading.stack_size(STACK)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
