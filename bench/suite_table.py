"""The table by kind of work in docs/results.md, from what `heavypath compare --suite --save FILE` wrote."""

from collections.abc import Sequence
from typing import Any

import cog
from tables import results, source, table


def suite() -> None:
    """By kind of work, of `heavypath compare --suite`: means with standard errors over the prompts."""
    every = results("suite-demo")
    cells = {(row["kind"], row["way"]): row for row in every["rows"]}
    ways = ("chain", "sequoia")

    rows = []
    for kind in dict.fromkeys(kind for kind, _ in cells):
        line = [_estimate(cells[kind, way][field]) for field in ("tokens_per_pass", "over_plain") for way in ways]
        tree = cells[kind, "sequoia"]
        depths = " ".join(f"{share[0]:.2f}" for share in tree["acceptance"][:3])
        rows.append([kind, *line, _estimate(tree["over_transformers"]), _estimate(tree["over_assisted"]), depths])
    heads = [f"{name}, `{way}`" for name in ("tokens/pass", "to plain") for way in ways]
    table(["", *heads, "to transformers", "to assisted", "accepted by depth"], rows)
    source("suite-demo", also=_settings(every["settings"]))


def real(name: str = "suite-smollm2") -> None:
    """A published model by kind of work, a table for each temperature: tokens a pass and speed over plain decoding."""
    every = results(name)
    for temperature in every["settings"]["temperatures"]:
        cells = {(row["kind"], row["way"]): row for row in every["rows"] if row["temperature"] == temperature}
        ways = [way for way in dict.fromkeys(way for _, way in cells) if "," in way]
        rows = []
        for kind in dict.fromkeys(kind for kind, _ in cells):
            line = [
                f"{cells[kind, way]['tokens_per_pass'][0]:.2f} / {_estimate(cells[kind, way]['over_plain'])}"
                for way in ways
            ]
            plain = cells[kind, "autoregressive"]
            rows.append([kind, *line, _estimate(plain["over_transformers"])])
        heads = [f"`{way.partition(', ')[2]}`: tokens/pass / to plain" for way in ways]
        if temperature != every["settings"]["temperatures"][0]:
            cog.outl()
        table([f"T = {temperature:g}", *heads, "plain to transformers"], rows)
    source(name, also=_settings(every["settings"]))


def _settings(settings: dict[str, Any]) -> str:
    counts, temperatures = settings["prompts"].values(), settings["temperatures"]
    fewest, most = min(counts), max(counts)
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    prompts = f"{number} prompt{'s' * (most > 1)} of each kind"
    return f"; {prompts}, {settings['max_new_tokens']} new tokens, T = {' and '.join(map('{:g}'.format, temperatures))}"


def _estimate(estimate: Sequence[float]) -> str:
    mean, error = estimate
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"
