"""Whether results show what a paper claims: each rule a function, whose docstring is the rule as docs/papers.md has it.

A rule returns effects: differences with standard errors that are above 0 if the paper is right. A difference that is
computed exactly of what was counted once has no error of its own, and 0 stands for it.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import hypot
from typing import Any

from published import BLOCKS_5, BLOCKS_9

Found = dict[str, Any]  # a part's results
Effect = tuple[float, float]  # a difference, and its standard error
Rule = Callable[[Found], list[Effect]]


def verdict(effects: Sequence[Effect]) -> str:
    """A claim is shown if all effects are above two standard errors, and contradicted if some are below minus two."""
    if not effects:
        raise ValueError("a rule found nothing to judge in its results: run the part again")
    right, wrong = (sum(sign * value > 2 * error for value, error in effects) for sign in (1, -1))
    if right == len(effects):
        return "shown"
    if right:
        return f"in {right} of {len(effects)}" + (f", against it in {wrong}" if wrong else "")
    return f"contradicted, in {wrong} of {len(effects)}" if wrong else "not shown"


def exact(values: Iterable[float]) -> list[Effect]:
    return [(value, 0.0) for value in values]


def holds(facts: Iterable[bool]) -> list[Effect]:
    """Effects of facts that are true or not."""
    return exact(1.0 if fact else -1.0 for fact in facts)


def rising(values: Iterable[float]) -> list[Effect]:
    return exact(after - before for before, after in pairwise(values))


def measured(rows: Iterable[Found], field: str) -> list[Effect]:
    """The differences of the rows that have them, as they were measured in pairs."""
    return [(row[field][0], row[field][1]) for row in rows if row.get(field)]


def grows(found: Found) -> list[Effect]:
    """from 64 to 1,024 nodes the best tree gains more than each other shape"""
    rows = {row["nodes"]: row for row in found["rows"]}
    gained = {name: rows[1024][name] - rows[64][name] for name in ("best", "sequences", "binary", "4-ary", "chain")}
    return exact(gained["best"] - gained[name] for name in gained if name != "best")


def power_laws(found: Found) -> list[Effect]:
    """log rate is linear in log k with r² above 0.98, at each T"""
    laws = [each["methods"]["without replacement"]["power_law"] for each in found["temperature"].values()]
    return exact(law["r_squared"] - 0.98 for law in laws)


def lowest_rejection(found: Found) -> list[Effect]:
    """below SpecInfer, K-SEQ and top-k by two errors, for each k = 2 .. 32 and T"""
    effects = []
    for each in found["temperature"].values():
        own = each["methods"]["without replacement"]
        for name in ("with replacement", "k-seq", "top-k"):
            other = each["methods"][name]
            for place in range(1, len(own["rejection"])):
                error = hypot(own["standard_error"][place], other["standard_error"][place])
                effects.append((other["rejection"][place] - own["rejection"][place], error))
    return effects


def planned_ahead(found: Found) -> list[Effect]:
    """the planned tree ahead by two paired errors in each row"""
    return measured(found["rows"], "first over it")


def ahead_by_vectors(found: Found) -> list[Effect]:
    """above SpecInfer and top-k by two paired errors, in each row"""
    return [effect for name in ("over specinfer", "over top-k") for effect in measured(found["rows"], name)]


def whole(found: Found) -> Found:
    """The rows of all tokens, without top-p."""
    return {"rows": [row for row in found["rows"] if row["top_p"] is None]}


def cut(found: Found) -> Found:
    """The rows with top-p."""
    return {"rows": [row for row in found["rows"] if row["top_p"] is not None]}


def at_each_temperature(found: Found) -> list[Effect]:
    """above SpecInfer and top-k by two paired errors, at each T"""
    return ahead_by_vectors(whole(found))


def at_each_top_p(found: Found) -> list[Effect]:
    """the same at each top-p"""
    return ahead_by_vectors(cut(found))


def bounded_is_faster(found: Found) -> list[Effect]:
    """at least 5% faster from 64 nodes on, by both costs"""
    return exact(row["speedup"] / row["speedup unbounded"] - 1.05 for row in found["rows"] if row["nodes"] >= 64)


def flat_then_rising(found: Found) -> list[Effect]:
    """t(16) below 1.1 and t(512) above 2, for each target and device"""
    return exact(effect for row in found["rows"] for effect in (1.1 - row["16"], row["512"] - 2))


def chosen_by_table_1(found: Found) -> list[Effect]:
    """at T = 0.6: 128 nodes, 6 to 10 levels, faster than 5 x 8"""
    row = found["rows"][0]
    return holds([row["nodes"] == 128, 6 <= row["levels"] <= 10, row["speedup"] > row["5 x 8"]])


def chosen_by_roofline(found: Found) -> list[Effect]:
    """64 nodes and 5 to 10 levels each; 33B 2.13 to 2.27 times"""
    rows = [row for row in found["rows"] if "table 1" not in row["costs"]]
    facts = [row["nodes"] == 64 and 5 <= row["levels"] <= 10 for row in rows]
    return holds([*facts, *(2.13 <= row["speedup"] <= 2.27 for row in rows if "33B" in row["costs"])])


def close(paper: str, table: str) -> Rule:
    """The rule of seconds that are simulated, for a table of a paper."""

    def effects(found: Found) -> list[Effect]:
        """simulated seconds within 15% of each row's"""
        rows = [row for row in found["rows"] if row["ratio"] and paper in row["source"] and table in row["source"]]
        return exact(0.15 - abs(row["ratio"] - 1) for row in rows)

    return effects


def beats_every_cell(found: Found) -> list[Effect]:
    """the chosen tree above each cell by two errors, and the best cell neither the widest nor the deepest"""
    best = max(found["rows"], key=lambda row: row["speedup"])
    inner = 1 < best["width"] < 128 and 1 < best["depth"] < 128
    return [(found["tree"] - row["speedup"], row["error"]) for row in found["rows"]] + holds([inner])


def bound_is_kept(found: Found) -> list[Effect]:
    """the best k-ary tree is above the bound, and gains more than it from each size to the next"""
    gained = [
        (after["k* tree"] - before["k* tree"]) - (after["lower"] - before["lower"])
        for before, after in pairwise(found["rows"])
    ]
    return exact([row["k* tree"] - row["lower"] for row in found["rows"]] + gained)


def accepted_rises(found: Found) -> list[Effect]:
    """rises from each tenth to the next"""
    return rising(row["accepted"] for row in found["rows"])


def target_rises(found: Found) -> list[Effect]:
    """rises from each tenth to the next"""
    return rising(row["target"] for row in found["rows"])


def fewer_blocks(found: Found) -> list[Effect]:
    """depth first fewer blocks, and by the paper's share of them, both with the prefix"""
    effects = []
    for row in found["rows"]:
        before, after = (row[order] + row["prefix of 256"] for order in ("breadth_first", "depth_first"))
        if row["nodes"] in BLOCKS_9:
            published_before, published_after = BLOCKS_9[row["nodes"]]
            effects += [before - after, published_after / published_before - after / before]
    return exact(effects)


def dyspec_ahead(found: Found) -> list[Effect]:
    """DySpec above Sequoia and SpecInfer by two paired errors, at T = 0 and 0.6"""
    return measured(found["rows"], "behind")


def dyspec_by_temperature(found: Found) -> list[Effect]:
    """DySpec above Sequoia by two paired errors at T = 0, below it at 0.6"""
    rows = [row for row in found["rows"] if row["method"] == "sequoia"]
    signs = [1 if row["temperature"] == 0 else -1 for row in rows]
    return [(sign * value, error) for sign, (value, error) in zip(signs, measured(rows, "behind"), strict=True)]


def blocks_of_random_trees(found: Found) -> list[Effect]:
    """blocks in depth-first order within 10% of the paper's, at each size"""
    return exact(0.1 - abs(row["depth_first"][0] / BLOCKS_5[row["nodes"]][1] - 1) for row in found["rows"])


def trees_ahead(found: Found) -> list[Effect]:
    """with 64 nodes the best tree decodes above batch and sequence by two errors, by both rules"""
    rows = {(row["rule"], row["tree"]): row for row in found["rows"] if row["nodes"] == 64}
    return [
        (
            rows[rule, "best tree"]["tokens"] - rows[rule, other]["tokens"],
            hypot(rows[rule, "best tree"]["error"], rows[rule, other]["error"]),
        )
        for rule in ("GSD", "ERSD")
        for other in ("batch", "sequence")
    ]


def falls_as_one_over_n(found: Found) -> list[Effect]:
    """log marginal on log n has a slope within 0.2 of -1, by both rules"""
    return exact(0.2 - abs(slope + 1) for slope in found["slopes"].values())


def within_bounds(found: Found) -> list[Effect]:
    """no best tree above a bound"""
    names = ("v = 1", "least v", "theorem 4.1")
    return exact(row[name] - row["best tree"] for row in found["rows"] for name in names)


def entropy_of_rejection(found: Found) -> list[Effect]:
    """H at least D on average, and at no position two bits above (7) without its constant"""
    effects = [(row["H greedy"] - row["D of these"], 2 - row["constant of (7)"]) for row in found["rows"]]
    return exact(each for pair in effects for each in pair)


def coupling(found: Found) -> list[Effect]:
    """on average: a race accepts more than lemma 3.1's bound, H at least D and at most (8)"""
    pairs = (("race", "lemma 3.1"), ("H race", "D"), ("upper", "H race"))
    return exact(row[more] - row[less] for row in found["rows"] for more, less in pairs)


def batches_prefer_races(found: Found) -> list[Effect]:
    """one child: GSD rejects less; 8 children: the race; by two paired errors, at each T"""
    facts = []
    for each in found["temperature"].values():
        lowest = each["lowest"]
        facts += ["race" not in lowest["1"], "without replacement" not in lowest["8"] and "race" in lowest["8"]]
    return holds(facts)


def above_the_prediction(found: Found) -> list[Effect]:
    """from 16 tokens on above the prediction by two errors, at each T"""
    return measured([row for row in found["rows"] if row["length"] >= 16], "over predicted")


def always_accepts(found: Found) -> list[Effect]:
    """recursive rejection accepts in all cases, and the optimum of independent draws does not in one at least"""
    facts = [abs(row["recursive"] - 1) < 1e-9 for row in found["rows"]]
    return holds([*facts, any(row["optimal"] < 1 for row in found["rows"])])


def family_ahead(found: Found) -> list[Effect]:
    """the family's best above the best of the others by two paired errors, in each group"""
    return [(value, error) for value, error in found["ahead"].values()]


def likeliest(found: Found) -> list[Effect]:
    """the share rises from k = 1 to 2, 4 and 8"""
    rates = found["temperature"]["0.6"]["methods"]["top-k"]["rejection"]
    return rising(1 - rates[k - 1] for k in (1, 2, 4, 8))
