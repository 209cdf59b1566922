"""`response_format`: which texts an answer may be.

To compile a client's schema is the one thing here that can take any time and memory, or end the process: llguidance is
compiled code that calls itself. So a process compiles it first (`trial`), in threads of their own; what has passed is
compiled here, too, and kept for requests to come.
"""

import asyncio
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import Sampling
from heavypath.speculative.http.trial import Trial
from heavypath.speculative.processors.grammar import Grammar, schema_source

AT_ONCE = 2  # schemas that are compiled side by side
SECONDS = 2.0  # that one may take
WHAT = "JSON schema"  # as messages call a source
MEMORY = 128 << 20  # that one may take
KEPT = 16  # grammars, which usually take 1 MiB


class Grammars:
    """The grammars of requests, by their sources."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]):
        self._tokenizer, self._eos_token_ids = tokenizer, [*eos_token_ids] or None
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammar")
        self._trials: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        trials = [Trial(SECONDS, MEMORY) for _ in range(AT_ONCE)]
        for trial in trials:
            self._trials.put(trial)
        weakref.finalize(self, _close, trials)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept

    async def of(self, source: str) -> Grammar:
        """The grammar of a source. Raises Refusal for one that cannot be compiled within the limits.

        Cancelled while it waits for a thread, it takes none.
        """
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, source)

    def _compiled(self, source: str) -> Grammar:
        trial = self._trials.get()
        try:
            trial.check(source, WHAT)
            grammar = Grammar(source, self._tokenizer, eos_token_id=self._eos_token_ids, what=WHAT)
        except (ValueError, TypeError) as error:
            raise _refusal(error) from error
        finally:
            self._trials.put(trial)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar


def source_of(request: Sampling) -> str | None:
    """The grammar that holds the texts of a request to their format, as a source; None where any text will do.

    Raises Refusal for a schema that is beyond the limits, and where the server has no grammars.
    """
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if request.ignore_eos:
        message = "response_format: such a text ends by an end-of-sequence token; leave ignore_eos out"
        raise Refusal(400, message, param="response_format")
    try:
        return schema_source({"type": "object"} if wanted.json_schema is None else wanted.json_schema.definition)
    except (ValueError, TypeError, ImportError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> Refusal:
    return Refusal(400, f"response_format: {' '.join(str(error).split())}", param="response_format")


def _close(trials: Sequence[Trial]) -> None:
    for trial in trials:
        trial.close()
