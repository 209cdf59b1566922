"""Grammars that restrict the output: a JSON schema, a regular expression, or a Lark grammar.

A grammar describes the new tokens alone. After an output w, token t is allowed iff some text of the language begins
with w t; an end-of-sequence token is allowed iff w is in the language. If w cannot be continued, only the
end-of-sequence tokens are left. llguidance (Microsoft 2025) computes the allowed tokens: an Earley parser over a lexer
of derivatives, along the prefix tree of the vocabulary. `matching` follows a sequence and the paths of its trees.
"""

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.processors.grammar_limits import check_lark, check_schema, check_source

_tokenizers: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # each takes about a second


class Grammar:
    """A language that the output must be in. Passed to `generate(logits_processor=[...])`, it masks all tokens after
    which no text of the language is possible.

        Grammar.json_schema({"type": "array", "items": {"type": "integer"}}, tokenizer)
        Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}", tokenizer)
        Grammar.lark('start: "yes" | "no"', tokenizer)

    One object serves any number of sequences. A complete output is followed by an end-of-sequence token. If
    max_new_tokens is reached before, the output is the beginning of a text of the language. Needs llguidance, the extra
    `grammar`.
    """

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        what: str = "grammar",
    ):
        """Make a grammar from an llguidance source; class methods accept a schema, a pattern, or a Lark grammar.

        tokenizer:    a fast tokenizer of transformers
        eos_token_id: the tokens that end a text (default: the tokenizer's)
        what:         the name of the source in error messages

        Raises ValueError for a source that is no grammar (the message contains the reason), for a source of more than
        64 KiB, and for a tokenizer without an end-of-sequence token. Raises TypeError for a tokenizer that is not fast,
        and ImportError without llguidance.
        """
        library = _library()
        check_source(source, what)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TypeError(f"a grammar needs a fast tokenizer of transformers, got {type(tokenizer).__name__}")
        self.eos_token_ids = _eos_tokens(eos_token_id, tokenizer)
        vocabulary = _vocabulary(tokenizer, self.eos_token_ids)
        limits = library.LLParserLimits(verbose_errors=False)
        self._beginning = library.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if self._beginning.is_error():
            raise ValueError(f"the {what} cannot be followed: {self._beginning.get_error()}")

    @classmethod
    def json_schema(
        cls,
        schema: str | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        whitespace: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> "Grammar":
        """A grammar of all JSON texts that satisfy a schema; {} allows any JSON value.

        schema:     a dictionary, or a JSON string
        whitespace: whether whitespace may stand between JSON's tokens. False keeps a small model from writing
                    whitespace without end

        Raises ValueError for a schema that is not JSON, for one beyond the limits of grammar_limits.py, and for one
        that llguidance cannot compile; the message names the part that is unknown, impossible or not implemented.
        """
        source = schema_source(schema, whitespace=whitespace)
        return cls(source, tokenizer, eos_token_id=eos_token_id, what="JSON schema")

    @classmethod
    def regex(
        cls, pattern: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_id: int | Sequence[int] | None = None
    ) -> "Grammar":
        """A grammar of all texts that a regular expression matches as a whole. Look-around and back-references are not
        supported.
        """
        return cls(regex_source(pattern), tokenizer, eos_token_id=eos_token_id, what=f"regular expression {pattern!r}")

    @classmethod
    def lark(
        cls, grammar: str, tokenizer: PreTrainedTokenizerBase, *, eos_token_id: int | Sequence[int] | None = None
    ) -> "Grammar":
        """A context-free grammar in Lark's syntax, with `start` as its first rule."""
        return cls(lark_source(grammar), tokenizer, eos_token_id=eos_token_id, what="Lark grammar")

    def matcher(self) -> Any:
        """Make an LLMatcher of llguidance for one sequence, which has read no token yet."""
        return self._beginning.deep_copy()

    def as_processor(self, prompt_length: int) -> "GrammarProcessor":
        """A logits processor for transformers' own `generate`. prompt_length: tokens of the prompts, with padding."""
        return GrammarProcessor(self, prompt_length)


class GrammarProcessor:
    """A grammar as a logits processor for transformers' own `generate`; also the reference for `matching`.

    Each call reads the whole output again. So it keeps no state and works with beams, but the time for an output grows
    with the square of its length.
    """

    def __init__(self, grammar: Grammar, prompt_length: int):
        self._grammar = grammar
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] with -inf for all tokens that may not follow the sequences LongTensor[R, T'].

        Raises ValueError for a sequence whose new tokens are not in the language.
        """
        words = []
        for new in input_ids[:, self._prompt_length :].tolist():
            ends = self._grammar.eos_token_ids
            matcher = self._grammar.matcher()
            read, ended = before_end(new, ends)
            if not matcher.consume_tokens(read):
                raise ValueError(f"the tokens {new} are not of the grammar: {matcher.get_error()}")
            may_follow = words_of(matcher, ends)
            words.append(words_with(ends, len(may_follow)) if ended else may_follow)
        return masked(scores, torch.stack(words))


def schema_source(schema: str | Mapping[str, Any], *, whitespace: bool = True, most: int | None = None) -> str:
    """The llguidance source of a JSON schema. It is not compiled yet: `Grammar(source, ...)` does that.

    schema: a dictionary, a bool, or a JSON string
    whitespace: whether whitespace may stand between JSON's tokens
    most: the most characters of whitespace between two tokens; None for any number

    Raises ValueError or TypeError for a schema that is not JSON, not an object, or beyond the limits of
    grammar_limits.py.
    """
    if isinstance(schema, str):
        check_source(schema, "JSON schema")
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"the JSON schema is no JSON: {error}") from None
        except RecursionError:
            raise ValueError("the JSON schema is nested too deep") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise TypeError(f"a JSON schema must be an object, got {type(schema).__name__}")
    library = _library()
    check_schema(schema)
    text = json.dumps(dict(schema))
    check_source(text, "JSON schema")
    bound = {} if most is None else {"whitespace_pattern": rf"[ \t\r\n]{{0,{most}}}"}
    overrides = {"whitespace_flexible": whitespace, **bound}
    try:
        return library.LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    except ValueError as error:
        raise ValueError(f"the JSON schema cannot be followed: {error}") from None


def regex_source(pattern: str) -> str:
    """The source, for `Grammar`, of a grammar of all texts that a regular expression matches as a whole.

    Raises ValueError for a pattern that ends within an escape, which llguidance would complete by leaving it out.
    """
    backslashes = len(pattern) - len(pattern.rstrip("\\"))
    if backslashes % 2 == 1:
        raise ValueError(
            f"the regular expression {pattern!r} cannot be followed: a backslash at its end escapes nothing; two of "
            "them match one"
        )
    return _library().LLMatcher.grammar_from_regex(pattern)


def lark_source(grammar: str) -> str:
    """The source, for `Grammar`, of a Lark grammar. Raises ValueError for one with too many rules."""
    check_lark(grammar)
    return _library().LLMatcher.grammar_from_lark(grammar)


def choice_source(texts: Sequence[str]) -> str:
    """The source, for `Grammar`, of a grammar that allows exactly these texts."""
    literals = " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
    escaped = literals.replace("\x7f", r"\u007f")  # which JSON allows within a text, and a grammar does not
    return _library().LLMatcher.grammar_from_lark(f"start: {escaped}\n")


def json_between(before: str, schema: Mapping[str, Any], after: str) -> str:
    """The llguidance source of JSON that satisfies a schema, without whitespace, between two parts of a Lark rule.

    before, after: the parts, in Lark's syntax

    Raises ValueError for a schema beyond the limits of grammar_limits.py.
    """
    library = _library()
    check_schema(schema)
    content = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    return library.LLMatcher.grammar_from_lark(f"start: {before} content {after}\ncontent: %json {content}\n")


def before_end(text: Sequence[int], ends: Sequence[int]) -> tuple[Sequence[int], bool]:
    """The tokens before the first end-of-sequence token (one of `ends`), and whether there is such a token."""
    index = next((index for index, token in enumerate(text) if token in ends), None)
    return (text, False) if index is None else (text[:index], True)


def words_of(matcher: Any, ends: Sequence[int]) -> Tensor:
    """The tokens that may follow what a matcher has read, as a bit mask, IntTensor[V / 32].

    Token t is bit t mod 32 of word t // 32. Within a text none of `ends`, the end-of-sequence tokens, may follow: for
    one that is not special, llguidance sets the bit if its characters may follow. Raises ValueError if the parser has
    failed.
    """
    words = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"the grammar could not be followed any further: {matcher.get_error()}")
    found = torch.frombuffer(bytearray(words), dtype=torch.int32)
    if not matcher.is_accepting():
        found &= ~words_with(ends, len(found))
    return found


def words_with(tokens: Iterable[int], words: int) -> Tensor:
    """A bit mask, IntTensor[words], in which only the bits of these tokens are set."""
    bits = np.zeros(words, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(bits.view(np.int32))


def masked(scores: Tensor, words: Tensor) -> Tensor:
    """The scores [R, V] with -inf for all tokens whose bit in `words`, IntTensor[R, any], is 0 or missing."""
    bit = torch.arange(32, device=scores.device, dtype=torch.int32)
    allowed = ((words.to(scores.device)[..., None] >> bit) & 1).bool().flatten(1)
    vocab_size = scores.shape[1]
    allowed = torch.nn.functional.pad(allowed, (0, max(0, vocab_size - allowed.shape[1])))[:, :vocab_size]
    return scores.masked_fill(~allowed, -torch.inf)


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise ImportError("grammars need llguidance: `pip install '.[grammar]'` in a checkout") from None
    return llguidance


def _eos_tokens(given: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    own: Any = tokenizer.eos_token_id if given is None else given
    tokens = tuple(own) if isinstance(own, Sequence) else () if own is None else (own,)
    if not tokens:
        raise ValueError("a grammar needs an end-of-sequence token, and the tokenizer has none: give eos_token_id")
    return tokens


def _vocabulary(tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> Any:
    """llguidance's form of a vocabulary. It is cached, and made again if tokens have been added to the tokenizer."""
    made = _tokenizers.setdefault(tokenizer, {})
    key = len(tokenizer), eos_token_ids
    if key not in made:
        made[key] = _library().hf.from_tokenizer(tokenizer, eos_token=list(eos_token_ids))
    return made[key]
