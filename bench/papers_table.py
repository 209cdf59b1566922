"""The table of docs/papers.md for a larger pair, from bench/results/papers-PAIR-cpu.json, for cog."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Named = Iterator[tuple[str, list[float]]]  # differences with their standard errors, and what each one is called


def by_nodes(found: Row) -> Named:
    for row in found["rows"]:
        if row["first over it"]:
            yield f"{row['nodes']:.0f} nodes", row["first over it"]


def by_shape(found: Row) -> Named:
    for row in found["rows"]:
        if row["nodes"] == 64 and row["tree"] in ("batch", "sequence"):
            yield f"{row['rule']}, {row['tree']}", row["first over it"]


def by_temperature(found: Row) -> Named:
    for place, row in enumerate(row for row in found["rows"] if row["top_p"] is None):
        temperature = f"{row['temperature']:g}" if place else f"T = {row['temperature']:g}"
        yield f"{temperature}, SpecInfer", row["over specinfer"]
        yield "top-k", row["over top-k"]


def by_cell(found: Row) -> Named:
    """The speed-ups of the chosen tree and of the best cell, and the difference between the two."""
    best = max(found["rows"], key=lambda row: row["speedup"][0])
    yield f"the tree, {found['tree']['nodes']} nodes", found["tree"]["speedup"]
    yield f"best cell, {best['width']} x {best['depth']}", best["speedup"]
    yield "the tree over it", best["behind the tree"]


def by_group(found: Row) -> Named:
    """The unit of the groups' names, levels or nodes, is said once."""
    for place, (name, value) in enumerate(found["ahead"].items()):
        yield name.split()[0] if place else name, value


LARGER: dict[str, tuple[str, str, Callable[[Row], Named]]] = {  # by part: what it repeats, and its rule
    "sequoia-scaling": ("Sequoia, figure 4, left", "planned_ahead", by_nodes),
    "sequoia-robustness": ("Sequoia, figure 4, right", "ahead_at_each_temperature", by_temperature),
    "sequoia-greedy-shapes": ("Sequoia, table 5", "beats_every_cell", by_cell),
    "rsd-1-at-0.3": ("RSD, experiment 1, T = 0.3", "family_ahead", by_group),
    "rsd-1-at-1": ("RSD, experiment 1, T = 1", "family_ahead", by_group),
    "rsd-2-at-0.3": ("RSD, experiment 2, T = 0.3", "family_ahead", by_group),
    "rsd-2-at-1": ("RSD, experiment 2, T = 1", "family_ahead", by_group),
    "ersd-growth": ("ERSD, figure 3", "trees_ahead", by_shape),
}


def larger(pair: str) -> None:
    """Each part that was run on a larger pair, with its differences and the verdict on them."""
    import tables  # within cog alone

    own, every, rows = tables.book(), tables.results(f"papers-{pair}"), []
    for source, (repeated, rule, named) in LARGER.items():
        if source in every:
            found = every[source]
            rows.append([
                repeated, "; ".join(f"{name}: {own.printed(value)}" for name, value in named(found)),
                found["prompts"], own.judged(found, rule).rsplit(": ", 1)[1],
            ])  # fmt: skip
    tables.table(["repeated", "differences", "prompts", "verdict"], rows)
    tables.cog.outl()
    options = " ".join(every[next(name for name in LARGER if name in every)]["command"].split()[3:])
    tables.cog.outl(f"`python bench/research/papers.py PART {options}`.")
