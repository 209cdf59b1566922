"""The alternatives that a JSON schema leaves to a value."""

from collections.abc import Mapping
from typing import Any

from heavypath.speculative.http.tool_calls.arguments import listed, referred

MOST = 256  # alternatives of a schema, and schemas looked at to find them
JOINED = {"$ref", "allOf", "anyOf", "oneOf"}  # keywords of other schemas that the same value follows

Alternative = list[Mapping[str, Any]]  # schemas that a value must follow at once, without the keywords above


def alternatives_of(schema: Any, root: Mapping[str, Any]) -> list[Alternative]:
    """The alternatives of a schema by anyOf and oneOf, each with what allOf and references add to it.

    A schema that leads back to itself adds no alternative there. Empty if no value follows the schema.

    root: the schema of all arguments, to which references are relative

    Raises ValueError for a schema with more than `MOST` of them.
    """
    return _Search(root).of(schema, frozenset())


class _Search:
    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._seen = 0

    def of(self, schema: Any, around: frozenset[int]) -> list[Alternative]:
        """The alternatives of a schema. around: the ids of the schemas that have led to it."""
        self._seen += 1
        self._check(self._seen)
        if schema is False or id(schema) in around:
            return []
        if not isinstance(schema, Mapping):
            return [[]]
        around |= {id(schema)}
        found: list[Alternative] = [[{key: value for key, value in schema.items() if key not in JOINED}]]
        every = [*listed(schema.get("allOf"))]
        if isinstance(reference := schema.get("$ref"), str):
            every.append(referred(reference, self._root))
        for each in every:
            found = self._both(found, self.of(each, around))
        for name in ("anyOf", "oneOf"):
            if choices := listed(schema.get(name)):
                found = self._both(found, [one for each in choices for one in self.of(each, around)])
        return found

    def _both(self, one: list[Alternative], other: list[Alternative]) -> list[Alternative]:
        self._check(len(one) * len(other))
        return [first + second for first in one for second in other]

    def _check(self, count: int) -> None:
        if count > MOST:
            raise ValueError(f"the JSON schema cannot be followed: it has more than {MOST} alternatives for a value")
