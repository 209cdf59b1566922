"""The book of the papers: each verdict's rule says yes to one set of results and no to another."""

import json
import re
from itertools import pairwise

import pytest
from bench_scripts import BENCH, script

papers, rules = script("papers"), script("verdicts")


def vector_rows(difference):
    rows = [{"top_p": None}, {"top_p": 0.9}]
    return {"rows": [row | {"over specinfer": [difference, 0.1], "over top-k": [difference, 0.1]} for row in rows]}


def grown(best):
    others = dict.fromkeys(("sequences", "binary", "4-ary", "chain"), 2.0)
    return {"rows": [{"nodes": 64, "best": 2.5, **others}, {"nodes": 1024, "best": best, **others}]}


def fits(r_squared, own=0.1, race=("race",), alone=("without replacement",)):
    rates = {"without replacement": own, "with replacement": 0.3, "k-seq": 0.3, "top-k": 0.3}
    methods = {
        name: {
            "rejection": [rate, rate], "standard_error": [0.01, 0.01], "power_law": {"r_squared": r_squared},
        }
        for name, rate in rates.items()
    }  # fmt: skip
    lowest = {"1": [*alone], "8": [*race]}
    return {"temperature": {"0.6": {"methods": methods, "lowest": lowest}}}


def ranks(rates):
    return {"temperature": {"0.6": {"methods": {"top-k": {"rejection": rates}}}}}


def cells(tree, width=8):
    grid = [(width, 8, 3.0), (128, 1, 1.5), (1, 128, 1.0)]
    return {
        "rows": [
            {"width": wide, "depth": deep, "speedup": [each, 0.1], "behind the tree": [tree - each, 0.1]}
            for wide, deep, each in grid
        ]
    }


def theorem(gains):
    return {"rows": [{"lower": 0.2, "k* tree": 2.0}, {"lower": 0.3, "k* tree": 2.0 + gains}]}


def simulated(ratio):
    return {"rows": [{"ratio": ratio, "source": "Sequoia, table 2"}, {"ratio": 9.0, "source": "this repository: x"}]}


def swept(chosen, speedup):
    return {"rows": [{"chosen": chosen, "published": "128, 10", "speedup": speedup, "best cell": 3.7}]}


def dyspec(at_zero, sampled):
    return {
        "rows": [
            {"method": "sequoia", "temperature": temperature, "behind": [value, 0.1]}
            for temperature, value in ((0.0, at_zero), (0.6, sampled))
        ]
    }


def decoded(best):
    return {
        "rows": [
            {"rule": rule, "nodes": 64, "tree": tree, "first over it": more}
            for rule in ("GSD", "ERSD")
            for tree, more in (("best tree", None), ("batch", [best - 2.0, 0.1]), ("sequence", [best - 2.0, 0.1]))
        ]
    }


def roofline(nodes):
    return {"rows": [{"costs": "table 1's constants", "nodes": 1}, {"costs": "33B", "nodes": nodes, "levels": 6}]}


def table_1(nodes):
    return {"rows": [{"nodes": nodes, "levels": 7, "speedup": 3.0, "5 x 8": 2.0}]}


def tenths(field, values):
    return {"rows": [{field: value} for value in values]}


def entropies(entropy, constant):
    return {"rows": [{"H greedy": entropy, "D of these": 1.0, "constant of (7)": constant}]}


def races(accepted, entropy):
    return {"rows": [{"race": accepted, "lemma 3.1": 0.4, "H race": entropy, "D": 1.0, "upper": 4.0}]}


def blocks(after):
    return {"rows": [{"nodes": 768, "breadth_first": 300, "depth_first": after, "prefix of 256": 0}]}


def longer(more):
    return {"rows": [{"length": 4, "over predicted": [-1, 0.1]}, {"length": 16, "over predicted": [more, 0.1]}]}


CASES = {  # results for which a rule must say yes, and for which it must not
    "grows": (grown(3.5), grown(2.4)),
    "power_laws": (fits(0.99), fits(0.9)),
    "lowest_rejection": (fits(0.99), fits(0.99, own=0.4)),
    "planned_ahead": ({"rows": [{"first over it": [0.3, 0.1]}]}, {"rows": [{"first over it": [-0.3, 0.1]}]}),
    "ahead_at_each_temperature": (vector_rows(0.3), vector_rows(-0.3)),
    "ahead_at_each_top_p": (vector_rows(0.3), vector_rows(0.1)),
    "bounded_is_faster": (
        {"rows": [{"nodes": 64, "speedup": 3.0, "speedup unbounded": 2.5}]},
        {"rows": [{"nodes": 64, "speedup": 3.0, "speedup unbounded": 3.0}]},
    ),
    "flat_then_rising": ({"rows": [{"16": 1.05, "512": 4.0}]}, {"rows": [{"16": 2.0, "512": 1.9}]}),
    "chosen_by_table_1": (table_1(128), table_1(64)),
    "chosen_by_roofline": (roofline(64), roofline(32)),
    "roofline_is_close": ({"rows": [{"ratios": [1.1, 0.9]}]}, {"rows": [{"ratios": [1.1, 0.8]}]}),
    "chosen_by_sweeps": (swept("128, 10", 3.8), swept("64, 10", 3.8)),
    "simulation_is_close": (simulated(1.1), simulated(1.3)),
    "beats_every_cell": (cells(3.5), cells(2.0, width=1)),
    "bound_is_kept": (theorem(1.0), theorem(0.05)),
    "accepted_rises": (tenths("accepted", (0.1, 0.2)), tenths("accepted", (0.2, 0.1))),
    "target_rises": (tenths("target", (0.1, 0.2)), tenths("target", (0.2, 0.1))),
    "fewer_blocks": (blocks(150), blocks(301)),
    "dyspec_ahead": (dyspec(1, 1), dyspec(-1, -1)),
    "dyspec_by_temperature": (dyspec(1, -1), dyspec(-1, 1)),
    "blocks_of_random_trees": (
        {"rows": [{"nodes": 256, "depth_first": [22.0, 0.5]}]},
        {"rows": [{"nodes": 256, "depth_first": [30.0, 0.5]}]},
    ),
    "trees_ahead": (decoded(3.0), decoded(1.5)),
    "falls_as_one_over_n": ({"slopes": {"GSD": -1.1}}, {"slopes": {"GSD": -0.5}}),
    "within_bounds": (
        {"rows": [{"best tree": 3, "v = 1": 4, "least v": 4, "theorem 4.1": 5}]},
        {"rows": [{"best tree": 6, "v = 1": 4, "least v": 4, "theorem 4.1": 5}]},
    ),
    "entropy_of_rejection": (entropies(2.0, 1.0), entropies(0.5, 3.0)),
    "coupling": (races(0.6, 2.0), races(0.3, 0.5)),
    "batches_prefer_races": (fits(0.99), fits(0.99, race=("without replacement",), alone=("race",))),
    "above_the_prediction": (longer(0.5), longer(-0.5)),
    "always_accepts": (
        {"rows": [{"recursive": 1.0, "optimal": 0.8}]},
        {"rows": [{"recursive": 0.9, "optimal": 0.8}]},
    ),
    "family_ahead": ({"ahead": {"2 levels": [0.3, 0.1]}}, {"ahead": {"2 levels": [-0.3, 0.1]}}),
    "likeliest": (ranks([0.5, 0.4, 0.3, 0.3, 0.2, 0.2, 0.2, 0.1]), ranks([0.1] * 8)),
}


PAGE = (BENCH.parent / "docs/papers.md").read_text(encoding="utf-8")
CALLS = [
    re.findall(r'"([^"]+)"', names) for names in re.findall(r"tables\.(?:part|verdicts|ahead)\((.*?)\) ?[\n\]]", PAGE)
]


@pytest.mark.parametrize("rule", CASES)
def test_a_verdict_is_shown_by_some_results_and_not_by_others(rule):
    right, wrong = CASES[rule]
    judge = getattr(rules, rule)
    assert rules.verdict(judge(right)) == "shown"
    assert rules.verdict(judge(wrong)) != "shown"
    assert len(judge.__doc__.split()) > 3, "the rule in words"


def test_the_page_has_every_part_and_every_rule_and_no_others():
    named = {name for call in CALLS for name in call}
    assert {*papers.PARTS, *CASES} == named | {"family_ahead"}


@pytest.mark.parametrize(("effects", "verdict"), [
    ([(1, 0.4), (2, 0)], "shown"),
    ([(1, 0.6), (-1, 0.6)], "not shown"),
    ([(-1, 0.4), (1, 0.6)], "contradicted, in 1 of 2"),
    ([(1, 0.4), (1, 0.6)], "in 1 of 2"),
    ([(1, 0.4), (-1, 0.4), (0, 0)], "in 1 of 3, against it in 1"),
])  # fmt: skip
def test_an_effect_is_shown_by_what_is_above_two_errors(effects, verdict):
    assert rules.verdict(effects) == verdict


def test_results_without_effects_are_no_verdict():
    with pytest.raises(ValueError, match="nothing to judge"):
        rules.verdict(rules.planned_ahead({"rows": [{"first over it": None}]}))


RESULTS = json.loads((BENCH / "results/papers-cpu.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", papers.PARTS)
def test_results_have_the_command_that_makes_them(part):
    assert RESULTS[part]["command"].startswith(f"python bench/research/papers.py {part}")


def test_the_larger_pair_has_its_commands_and_contexts_and_a_name_for_each_difference():
    results, table = json.loads((BENCH / "results/papers-gemma-cpu.json").read_text("utf-8")), script("papers_table")
    parts = results.keys() - {"environment", "contexts"}
    assert parts <= table.LARGER.keys()
    for part in parts:
        found, (_, rule, named) = results[part], table.LARGER[part]
        assert found["command"].startswith(f"python bench/research/papers.py {part} --pair gemma")
        if part != "sequoia-greedy-shapes":  # whose cells are too many to show
            assert sorted(tuple(each) for _, each in named(found)) == sorted(getattr(rules, rule)(found))
        assert len(results["contexts"]["prompts"]) == found["prompts"]


def test_speed_ups_by_table_1_by_hand():
    """40 tokens in 8 levels: t(41) is on the line to t(128) = 1.07, and a level takes 0.5 / 24.2."""
    published = script("published")
    assert published.time_of(1) == 1
    assert published.time_of(128) == pytest.approx(1.0707, abs=0.0001)
    row = RESULTS["sequoia-shapes"]["rows"][-1]
    assert (row["width"], row["depth"]) == (5, 8)
    cost = 1 + (published.time_of(128) - 1) * 40 / 127 + 8 * 0.5 / 24.2
    assert row["speedup"] == pytest.approx([row["tokens"] / cost, row["error"] / cost], abs=1e-4)


def test_appendix_e_is_as_the_list_of_errors_says():
    vector = script("published").APPENDIX_E
    risen = [child + 2 for child, (before, after) in enumerate(pairwise(vector)) if after > before]
    assert risen == [21, 25, 26, 30]
