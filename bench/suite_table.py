"""The table by kind of work in docs/results.md, from what `heavypath compare --suite --save FILE` wrote."""

from collections.abc import Sequence

from tables import results, source, table


def suite() -> None:
    """By kind of work, of `heavypath compare --suite`: means with standard errors over the prompts."""
    every = results("suite-demo")
    cells = {(row["kind"], row["way"]): row for row in every["rows"]}
    ways = ("chain", "sequoia")

    def shown(estimate: Sequence[float]) -> str:
        return f"{estimate[0]:.2f} ± {estimate[1]:.2f}"

    rows = []
    for kind in dict.fromkeys(kind for kind, _ in cells):
        line = [shown(cells[kind, way][field]) for field in ("tokens_per_pass", "over_plain") for way in ways]
        tree = cells[kind, "sequoia"]
        depths = " ".join(f"{share[0]:.2f}" for share in tree["acceptance"][:3])
        rows.append([kind, *line, shown(tree["over_transformers"]), shown(tree["over_assisted"]), depths])
    heads = [f"{name}, `{way}`" for name in ("tokens/pass", "to plain") for way in ways]
    table(["", *heads, "to transformers", "to assisted", "accepted by depth"], rows)
    settings = every["settings"]
    count = max(settings["prompts"].values())
    temperature = settings["temperatures"][0]
    source(
        "suite-demo",
        also=f"; {count} prompts of each kind, {settings['max_new_tokens']} new tokens, T = {temperature:g}",
    )
