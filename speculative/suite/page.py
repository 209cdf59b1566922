"""One self-contained HTML page of a suite's results: plots of each temperature, and a table of all figures."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from heavypath.speculative.suite.plots import COLOURS, bars, lines
from heavypath.speculative.suite.results import SuiteResults, SuiteRow
from heavypath.speculative.suite.table import notes_on

TEMPLATE = Path(__file__).with_name("page.html")
HEADS = (
    "kind",
    "way",
    "tokens/pass",
    "tokens/s",
    "to plain",
    "to transformers",
    "to assisted",
    "accepted by depth",
    "text",
)


def suite_page(results: SuiteResults, environment: Mapping[str, Any]) -> str:
    """The text of one HTML page with plots and a table of the results.

    environment: facts about the machine, each shown with its name
    """
    facts = {name: value for name, value in environment.items() if not isinstance(value, Mapping)}
    temperatures = dict.fromkeys(row.temperature for row in results.rows)
    contents = {
        "FACTS": "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(str(fact))}</dd></div>" for name, fact in facts.items()
        ),
        "PLOTS": "".join(_section(results.rows, temperature) for temperature in temperatures),
        "NOTES": "".join(f"<p>{escape(note)}</p>" for note in notes_on(results)),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda name: contents[name[1]], template)


def _section(every: Sequence[SuiteRow], temperature: float) -> str:
    rows = [row for row in every if row.temperature == temperature]
    ways = [*dict.fromkeys(row.way for row in rows)]
    kinds = [*dict.fromkeys(row.kind for row in rows)]
    cells = {(row.kind, row.way): row for row in rows}
    drafting = [way for way in ways if any(cells[kind, way].acceptance for kind in kinds)]
    per_pass = [(way, [cells[kind, way].tokens_per_pass for kind in kinds]) for way in ways]
    gains = [(way, [cells[kind, way].over_plain for kind in kinds]) for way in ways]
    accepted = "".join(
        f"<figure><figcaption>{escape(kind)}</figcaption>"
        f"{lines([(way, cells[kind, way].acceptance if way in drafting else []) for way in ways])}</figure>"
        for kind in kinds
    )
    return (
        f"<section><h2>Temperature {temperature:g}</h2>{_legend(ways)}"
        f"<h3>Tokens for each forward pass of the target</h3>{bars(kinds, per_pass, line=1)}"
        f"<h3>Tokens a second, over our plain decoding</h3>{bars(kinds, gains, line=1)}"
        f'<h3>Share of accepted nodes with an accepted child, by depth</h3><div class="small">{accepted}</div>'
        f"{_table(rows)}</section>"
    )


def _legend(ways: Sequence[str]) -> str:
    keys = (f'<span><i class="s{number % COLOURS}"></i>{escape(way)}</span>' for number, way in enumerate(ways))
    return f'<p class="legend">{"".join(keys)}</p>'


def _table(rows: Sequence[SuiteRow]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: SuiteRow) -> list[str]:
    return [
        row.kind,
        row.way,
        str(row.tokens_per_pass),
        str(row.tokens_per_second),
        str(row.over_plain),
        str(row.over_transformers),
        "" if row.over_assisted is None else str(row.over_assisted),
        " ".join(f"{share.mean:.2f}" for share in row.acceptance),
        row.text,
    ]
