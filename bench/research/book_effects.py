"""What the papers say is larger, by a part's results: differences with errors, above 0 where the papers are right.

A difference that is computed exactly of what was counted once has no error of its own, and 0 stands for it.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import hypot
from typing import Any

from book_words import Found, where

Effect = tuple[float, float]  # a difference, and its standard error
Effects = Callable[[Found], list[Effect]]
CLOSE = 0.15  # that what is simulated may be off


def verdict(effects: Sequence[Effect]) -> str:
    """What the results say of an effect: it counts where it is above two standard errors, and against it below."""
    right, wrong = (sum(sign * value > 2 * error for value, error in effects) for sign in (1, -1))
    if right == len(effects):
        return "shown"
    if right and wrong:
        return f"in {right} of {len(effects)}, against it in {wrong}"
    if right:
        return f"in {right} of {len(effects)}"
    return "contradicted" if wrong else "not shown"


def exact(values: Iterable[float]) -> list[Effect]:
    return [(value, 0.0) for value in values]


def rising(values: Iterable[float]) -> list[Effect]:
    return exact(after - before for before, after in pairwise(values))


def ahead(row: Found, other: Found) -> Effect:
    """One row's tokens over another's; its error is too large where both have the same prompts."""
    return row["tokens"] - other["tokens"], hypot(row["error"], other["error"])


def over(*fields: str, **which: Any) -> Effects:
    """The differences of the rows that have them, as they were measured in pairs."""

    def effects(found: Found) -> list[Effect]:
        rows = [row for row in found["rows"] if all(row.get(name) == value for name, value in which.items())]
        return [(row[field][0], row[field][1]) for row in rows for field in fields if row.get(field)]

    return effects


def above(*pairs: tuple[str, str]) -> Effects:
    """How far a field of each row is above another one."""
    return lambda found: exact(row[more] - row[less] for row in found["rows"] for more, less in pairs)


bounded = above(("speedup", "speedup unbounded"))
theorem = above(("k* tree", "lower"))
fewer_blocks = above(("breadth first", "heavy path"))
bounds = above(("v = 1", "best tree"), ("least v", "best tree"), ("theorem 4.1", "best tree"))
coupling = above(("race", "lemma 3.1"), ("H race", "D"), ("upper", "H race"))


def pays(draft: str) -> Effects:
    """What a draft brings: tokens per forward above the one of decoding without it."""
    return lambda found: [(row["tokens"] - 1, row["error"]) for row in found["rows"] if row["draft"] == draft]


def growth(found: Found) -> list[Effect]:
    """From 64 nodes to 1,024 the best tree gains more than any other shape."""
    small, large = where(found, nodes=64), where(found, nodes=1024)
    gained = {name: large[name] - small[name] for name in ("best", "sequences", "binary", "4-ary", "chain")}
    return exact(gained["best"] - gained[name] for name in gained if name != "best")


def trees(found: Found) -> list[Effect]:
    rows = [row for row in found["trees"] if row["nodes"] >= 8]
    return rising(row["levels"] for row in rows) + rising(row["root's children"] for row in rows)


def exponents(found: Found) -> list[Effect]:
    laws = [each["methods"]["without replacement"]["power_law"] for each in found["temperature"].values()]
    (high, of_high), (low, of_low) = ((law["exponent"], law["exponent_standard_error"]) for law in (laws[0], laws[-1]))
    return [(high - low, hypot(of_high, of_low))]


def sampled(*others: str, cut: bool) -> Effects:
    def effects(found: Found) -> list[Effect]:
        rows = [row for row in found["rows"] if (row["top_p"] is not None) == cut]
        return [tuple(row[f"over {other}"]) for row in rows for other in others]

    return effects


def flat_then_rising(found: Found) -> list[Effect]:
    """Of GPUs: 16 nodes cost less than a tenth more than one, and 512 more than twice as much."""
    rows = [row for row in found["rows"] if row["device"] != "this processor"]
    return exact([1.1 - row["16"] for row in rows] + [row["512"] - 2 for row in rows])


def chosen(*, paper: bool) -> Effects:
    """The chosen tree is faster than 5 x 8, by the paper's constants or by a roofline."""

    def effects(found: Found) -> list[Effect]:
        return exact(row["speedup"] - row["5 x 8"] for row in (found["rows"][:1] if paper else found["rows"][1:]))

    return effects


def wider_and_deeper(found: Found) -> list[Effect]:
    rows = {(row["width"], row["depth"]): row for row in found["rows"]}
    return [ahead(rows[16, 8], rows[1, 8]), ahead(rows[16, 8], rows[16, 1])]


def close(paper: str, table: str) -> Effects:
    """Simulated seconds are within `CLOSE` of the published ones."""

    def effects(found: Found) -> list[Effect]:
        rows = [row for row in found["rows"] if row["ratio"] and paper in row["source"] and table in row["source"]]
        return exact(CLOSE - abs(row["ratio"] - 1) for row in rows)

    return effects


def by_probability(field: str) -> Effects:
    def effects(found: Found) -> list[Effect]:
        return rising(found["rows"][place][field] for place in (0, 4, 9))

    return effects


def construction(found: Found) -> list[Effect]:
    return exact(0.02 - row["construction"] for row in found["rows"])


def thresholds(found: Found) -> list[Effect]:
    rows = found["rows"]
    return [(rows[-1]["nodes"] - rows[0]["nodes"], 0.0), ahead(rows[-2], rows[0])]


def fewer_of_random(found: Found) -> list[Effect]:
    return [(row["insertion"][0] - row["heavy_path"][0], hypot(row["insertion"][1], row["heavy_path"][1]))
            for row in found["rows"]]  # fmt: skip


def dyspec(*signs: int) -> Effects:
    """DySpec as published over Sequoia, at T = 0 and T = 0.6; -1 where the paper has Sequoia ahead."""

    def effects(found: Found) -> list[Effect]:
        rows = [where(found, method="dyspec, as published", temperature=each) for each in (0.0, 0.6)]
        return [(sign * row["over sequoia"][0], row["over sequoia"][1]) for sign, row in zip(signs, rows, strict=True)]

    return effects


def trees_ahead(found: Found) -> list[Effect]:
    rows = {(row["rule"], row["tree"]): row for row in found["rows"][-8:]}
    return [ahead(rows[rule, "best tree"], rows[rule, name]) for rule in ("GSD", "ERSD")
            for name in ("batch", "sequence")]  # fmt: skip


def doublings(found: Found) -> list[Effect]:
    """Where a node brings as 1 / n, twice the nodes bring as much at each size: here within a fifth, as expected."""
    rows = [row for row in found["rows"] if row.get("twice the nodes") and row["tree"] == "best tree"]
    brought = {rule: [row["twice the nodes"][0] for row in rows if row["rule"] == rule] for rule in ("GSD", "ERSD")}
    return exact(0.2 - abs(each[-1] / each[0] - 1) for each in brought.values())


def entropies(found: Found) -> list[Effect]:
    """The index of greedy rejection has at least D bits, and at most two more than (7) without its constant."""
    rows = found["rows"]
    return exact([row["H greedy"] - row["D"] for row in rows] + [2 - row["constant of (7)"] for row in rows])


def best_of(group: str, ours: Sequence[str]) -> Effects:
    """The best of these families over the best of the others."""

    def effects(found: Found) -> list[Effect]:
        if "ahead" in found:
            return [tuple(found["ahead"][group])]
        rows = [row for row in found["rows"] if row["group"] == group]
        best = [max((row for row in rows if (row["label"].split()[0] in ours) == own), key=lambda row: row["tokens"])
                for own in (True, False)]  # fmt: skip
        return [ahead(*best)]

    return effects


def always(found: Found) -> list[Effect]:
    return exact(row["recursive"] - row["optimal"] for row in found["rows"] if row["optimal"] < 1)


def likeliest(found: Found) -> list[Effect]:
    rates = found["temperature"]["0.6"]["methods"]["top-k"]["rejection"]
    return rising(1 - rates[k - 1] for k in (1, 2, 4, 8))
