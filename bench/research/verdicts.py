"""Whether results show what a paper claims: each rule a function, whose docstring ends the sentence "shown if ...".

docs/papers.md names the rules of its tables, and its cog blocks print their docstrings and verdicts. A rule returns
effects: differences with standard errors that are above 0 if the paper is right. A difference that is computed exactly
of what was counted once has no error of its own, and 0 stands for it.
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
    """the best tree gains more from 64 to 1,024 nodes than each other shape"""
    rows = {row["nodes"]: row for row in found["rows"]}
    gained = {name: rows[1024][name] - rows[64][name] for name in ("best", "sequences", "binary", "4-ary", "chain")}
    return exact(gained["best"] - gained[name] for name in gained if name != "best")


def power_laws(found: Found) -> list[Effect]:
    """log rate is linear in log k with r² above 0.98, at each T"""
    laws = [each["methods"]["without replacement"]["power_law"] for each in found["temperature"].values()]
    return exact(law["r_squared"] - 0.98 for law in laws)


def lowest_rejection(found: Found) -> list[Effect]:
    """it is below SpecInfer, K-SEQ and top-k for each k = 2 .. 32 and T"""
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
    """the planned tree is ahead in each row"""
    return measured(found["rows"], "first over it")


def ahead_at_each_temperature(found: Found) -> list[Effect]:
    """it is ahead of SpecInfer and top-k at each T"""
    rows = [row for row in found["rows"] if row["top_p"] is None]
    return measured(rows, "over specinfer") + measured(rows, "over top-k")


def ahead_at_each_top_p(found: Found) -> list[Effect]:
    """it is ahead of both at each top-p"""
    rows = [row for row in found["rows"] if row["top_p"] is not None]
    return measured(rows, "over specinfer") + measured(rows, "over top-k")


def bounded_is_faster(found: Found) -> list[Effect]:
    """it is at least 5% faster from 64 nodes on, by both costs"""
    return exact(row["speedup"] / row["speedup unbounded"] - 1.05 for row in found["rows"] if row["nodes"] >= 64)


def flat_then_rising(found: Found) -> list[Effect]:
    """t(16) is below 1.1 and t(512) above 2 in each row"""
    return exact(effect for row in found["rows"] for effect in (1.1 - row["16"], row["512"] - 2))


def chosen_by_table_1(found: Found) -> list[Effect]:
    """table 1's constants choose 128 nodes and 6 to 10 levels at T = 0.6, faster than 5 x 8"""
    row = found["rows"][0]
    return holds([row["nodes"] == 128, 6 <= row["levels"] <= 10, row["speedup"] > row["5 x 8"]])


def chosen_by_roofline(found: Found) -> list[Effect]:
    """rooflines choose 64 nodes and 5 to 10 levels for each pair"""
    rows = [row for row in found["rows"] if "table 1" not in row["costs"]]
    return holds(row["nodes"] == 64 and 5 <= row["levels"] <= 10 for row in rows)


def roofline_is_close(found: Found) -> list[Effect]:
    """each ratio is within 15% of 1"""
    return within_15(each for row in found["rows"] for each in row["ratios"])


def chosen_by_sweeps(found: Found) -> list[Effect]:
    """the vector of each sweep chooses the paper's tree, and it is faster than each published cell"""
    rows = found["rows"]
    return holds(row["chosen"] == row["published"] for row in rows) + exact(
        row["speedup"] - row["best cell"] for row in rows
    )


def within_15(ratios: Iterable[float]) -> list[Effect]:
    return exact(0.15 - abs(ratio - 1) for ratio in ratios)


def simulation_is_close(found: Found) -> list[Effect]:
    """simulated seconds are within 15% of each published row's"""
    rows = [row for row in found["rows"] if not row["source"].startswith("this repository")]
    return within_15(row["ratio"] for row in rows if row["ratio"])


def beats_every_cell(found: Found) -> list[Effect]:
    """the chosen tree is ahead of each cell, the best inside the grid"""
    best = max(found["rows"], key=lambda row: row["speedup"][0])
    inner = 1 < best["width"] < 128 and 1 < best["depth"] < 128
    return measured(found["rows"], "behind the tree") + holds([inner])


def bound_is_kept(found: Found) -> list[Effect]:
    """the best k-ary tree is above the bound, and gains more from size to size"""
    gained = [
        (after["k* tree"] - before["k* tree"]) - (after["lower"] - before["lower"])
        for before, after in pairwise(found["rows"])
    ]
    return exact([row["k* tree"] - row["lower"] for row in found["rows"]] + gained)


def accepted_rises(found: Found) -> list[Effect]:
    """the mean acceptance rises from each tenth to the next"""
    return rising(row["accepted"] for row in found["rows"])


def target_rises(found: Found) -> list[Effect]:
    """the target's probability does"""
    return rising(row["target"] for row in found["rows"])


def fewer_blocks(found: Found) -> list[Effect]:
    """with the prefix depth first has fewer blocks, and by the paper's share"""
    effects = []
    for row in found["rows"]:
        before, after = (row[order] + row["prefix of 256"] for order in ("breadth_first", "depth_first"))
        if row["nodes"] in BLOCKS_9:
            published_before, published_after = BLOCKS_9[row["nodes"]]
            effects += [before - after, published_after / published_before - after / before]
    return exact(effects)


def dyspec_ahead(found: Found) -> list[Effect]:
    """DySpec is ahead of both at both T"""
    return measured(found["rows"], "behind")


def dyspec_by_temperature(found: Found) -> list[Effect]:
    """DySpec is ahead of Sequoia at T = 0, and behind it at 0.6"""
    rows = [row for row in found["rows"] if row["method"] == "sequoia"]
    signs = [1 if row["temperature"] == 0 else -1 for row in rows]
    return [(sign * value, error) for sign, (value, error) in zip(signs, measured(rows, "behind"), strict=True)]


def blocks_of_random_trees(found: Found) -> list[Effect]:
    """blocks in depth-first order are within 10% of the paper's at each size"""
    return exact(0.1 - abs(row["depth_first"][0] / BLOCKS_5[row["nodes"]][1] - 1) for row in found["rows"])


def trees_ahead(found: Found) -> list[Effect]:
    """with 64 nodes the best tree decodes more than batch and sequence, by both rules"""
    rows = [row for row in found["rows"] if row["nodes"] == 64 and row["tree"] in ("batch", "sequence")]
    return measured(rows, "first over it")


def falls_as_one_over_n(found: Found) -> list[Effect]:
    """log marginal on log n has a slope within 0.2 of -1, by both rules"""
    return exact(0.2 - abs(slope + 1) for slope in found["slopes"].values())


def within_bounds(found: Found) -> list[Effect]:
    """no best tree is above a bound"""
    names = ("v = 1", "least v", "theorem 4.1")
    return exact(row[name] - row["best tree"] for row in found["rows"] for name in names)


def entropy_of_rejection(found: Found) -> list[Effect]:
    """H is at least D on average, and nowhere two bits above (7) without its constant"""
    effects = [(row["H greedy"] - row["D of these"], 2 - row["constant of (7)"]) for row in found["rows"]]
    return exact(each for pair in effects for each in pair)


def coupling(found: Found) -> list[Effect]:
    """on average a race accepts more than lemma 3.1 says, and has H between D and (8)"""
    pairs = (("race", "lemma 3.1"), ("H race", "D"), ("upper", "H race"))
    return exact(row[more] - row[less] for row in found["rows"] for more, less in pairs)


def batches_prefer_races(found: Found) -> list[Effect]:
    """GSD rejects less with one child, and the race with eight, at each T"""
    facts = []
    for each in found["temperature"].values():
        lowest = each["lowest"]
        facts += ["race" not in lowest["1"], "without replacement" not in lowest["8"] and "race" in lowest["8"]]
    return holds(facts)


def above_the_prediction(found: Found) -> list[Effect]:
    """chains of 16 tokens or more are above the prediction"""
    return measured([row for row in found["rows"] if row["length"] >= 16], "over predicted")


def always_accepts(found: Found) -> list[Effect]:
    """recursive rejection accepts in all cases, and the optimum of independent draws does not"""
    facts = [abs(row["recursive"] - 1) < 1e-9 for row in found["rows"]]
    return holds([*facts, any(row["optimal"] < 1 for row in found["rows"])])


def family_ahead(found: Found) -> list[Effect]:
    """RSD's best is ahead of the others' best in each group"""
    return [(value, error) for value, error in found["ahead"].values()]


def likeliest(found: Found) -> list[Effect]:
    """the target's token is more often among the draft's 2, 4 and 8 likeliest"""
    rates = found["temperature"]["0.6"]["methods"]["top-k"]["rejection"]
    return rising(1 - rates[k - 1] for k in (1, 2, 4, 8))
