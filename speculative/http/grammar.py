"""Compile the grammars of requests: for `response_format` and similar fields, and for forced tool calls.

Compiling a client's grammar may take any time and memory, or crash the process, since llguidance is compiled code with
recursion. So each grammar is first compiled in a separate process (`trial`), by threads of their own. A grammar that
passes is compiled in this process, too, and kept for later requests.
"""

import asyncio
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.formats import StructuredOutputs
from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import ChatRequest, Sampling
from heavypath.speculative.http.tool_calls import Calls
from heavypath.speculative.http.trial import Trial
from heavypath.speculative.processors.grammar import Grammar, choice_source, regex_source, schema_source

AT_ONCE = 2  # how many grammars are compiled at a time
SECONDS = 2.0  # of a processor, the time limit for compiling one
MEMORY = 128 << 20  # memory limit in bytes for compiling one
WHITESPACE = 32  # longest run of spaces in JSON: a small model might otherwise write spaces until there is no more room
KEPT = 16  # how many grammars are kept; one usually takes 1 MiB


class GrammarSource(NamedTuple):
    """A grammar before it is compiled.

    text:  the grammar as llguidance reads it
    what:  its name in error messages, such as "JSON schema"
    field: the request's field that has it
    """

    text: str
    what: str
    field: str


class Grammars:
    """Compiles the grammars of requests in threads, and keeps the 16 that were used last, by their source texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._eos_token_ids = [*eos_token_ids] or None
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammar")
        self._trials: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        for _ in range(AT_ONCE):
            trial = Trial(SECONDS, MEMORY)
            self._trials.put(trial)
            weakref.finalize(self, trial.close)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # protects `_kept`

    async def of(self, source: GrammarSource) -> Grammar:
        """The compiled grammar of a source. Raises Refusal if it cannot be compiled within the limits.

        Cancelled while it waits for a thread, it does not take one later.
        """
        with self._lock:
            if source.text in self._kept:
                self._kept.move_to_end(source.text)
                return self._kept[source.text]
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, source)

    def _compiled(self, source: GrammarSource) -> Grammar:
        trial = self._trials.get()
        try:
            trial.check(source.text, source.what)
            grammar = Grammar(source.text, self._tokenizer, eos_token_id=self._eos_token_ids, what=source.what)
        except (ValueError, TypeError) as error:
            raise _refusal(source.field, error) from error
        finally:
            self._trials.put(trial)
        with self._lock:
            self._kept[source.text] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar


def source_of(request: Sampling, calls: Calls | None) -> GrammarSource | None:
    """The source of the grammar that a request's texts must follow; None if they are free.

    calls: how the model writes tool calls; None without tools

    Raises Refusal for a schema beyond the limits, for two grammars, and if the server cannot use grammars.
    """
    field = "response_format"
    try:
        wanted = request.wanted()
        field = wanted[0] if wanted else "tool_choice"
        must_call = isinstance(request, ChatRequest) and request.must_call
        if wanted and must_call:
            raise ValueError(f"a text has one form, and tool_choice asks for a call; leave {field} out")
        if not wanted and not must_call:
            return None
        if request.ignore_eos:
            raise ValueError("such a text ends by an end-of-sequence token; leave ignore_eos out")
        if request.shared().get("min_new_tokens"):
            raise ValueError("such a text ends when it is complete, which may be earlier; leave min_tokens out")
        if calls is not None and must_call:
            return GrammarSource(calls.source(), "call of a tool", field)
        assert wanted is not None
        return _source(wanted[1], field)
    except (ValueError, TypeError, ImportError) as error:
        raise _refusal(field, error) from error


def _source(wanted: StructuredOutputs, field: str) -> GrammarSource:
    if wanted.regex is not None:
        return GrammarSource(regex_source(wanted.regex), "regular expression", field)
    if wanted.choice is not None:
        return GrammarSource(choice_source(wanted.choice), "choice", field)
    schema = {"type": "object"} if wanted.json_ is None else wanted.json_
    return GrammarSource(schema_source(schema, most=WHITESPACE), "JSON schema", field)


def _refusal(field: str, error: Exception) -> Refusal:
    return Refusal(400, f"{field}: {' '.join(str(error).split())}", param=field)
