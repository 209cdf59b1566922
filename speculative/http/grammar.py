"""Grammars of answers: by `response_format` and its like, and by a tool that is to be called.

To compile a client's grammar is the one thing here that can take any time and memory, or end the process: llguidance is
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
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from heavypath.speculative.http.bodies.formats import StructuredOutputs
from heavypath.speculative.http.errors import Refusal
from heavypath.speculative.http.requests import ChatRequest, Sampling
from heavypath.speculative.http.tool_calls import Calls
from heavypath.speculative.http.trial import Trial
from heavypath.speculative.processors.grammar import Grammar, choice_source, regex_source, schema_source

AT_ONCE = 2  # grammars that are compiled side by side
SECONDS = 2.0  # that one may take
MEMORY = 128 << 20  # that one may take
WHITESPACE = 32  # characters in a place of JSON: a small model could go on with them to the end of its room
KEPT = 16  # grammars, which usually take 1 MiB


class GrammarSource(NamedTuple):
    """A grammar as text. what: as messages call it; field: of the request, that asked for it"""

    text: str
    what: str
    field: str


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

    async def of(self, source: GrammarSource) -> Grammar:
        """The grammar of a source. Raises Refusal for one that cannot be compiled within the limits.

        Cancelled while it waits for a thread, it takes none.
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
    """The grammar that holds the texts of a request to their form; None where any text will do.

    calls: how the model writes calls of tools, where the request has tools

    Raises Refusal for a schema that is beyond the limits, for two grammars, and where the server has no grammars.
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


def _close(trials: Sequence[Trial]) -> None:
    for trial in trials:
        trial.close()
