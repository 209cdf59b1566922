"""Small drawings as SVG files that are legible on light and on dark pages: they bring their own background.

Colours are names of THEME, which become classes of a style sheet: light ones, and dark ones where the reader's system
asks for them. A file needs nothing else, and no script.
"""

from html import escape
from pathlib import Path
from typing import Any

THEME = {  # light, dark; those that the page of a trace has, too, are the same there
    "page": ("#f7f6f3", "#131517"),
    "panel": ("#ffffff", "#1b1e22"),
    "ink": ("#23272d", "#e7e5e0"),
    "dim": ("#5f6672", "#a3aab4"),
    "faint": ("#a9aeb7", "#626973"),
    "line": ("#e3e1dc", "#2b2f35"),
    "edge": ("#c0c4ca", "#4a515a"),
    "accepted": ("#0f7a57", "#55c99f"),
    "accepted-tint": ("#dcf1e8", "#17372c"),
    "bonus": ("#5947c2", "#ada1ff"),
    "bonus-tint": ("#e8e4fb", "#2c284c"),
    "recovered": ("#a84e06", "#f2a561"),
    "recovered-tint": ("#fbe7d3", "#402b17"),
    "rejected": ("#b0364a", "#f08a96"),
    "rejected-tint": ("#fbe6e8", "#3d2127"),
    "target": ("#2b6cb8", "#6caef2"),
    "target-tint": ("#cfe0f3", "#22364c"),
}
SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


class Drawing:
    """Shapes and text, in the order in which they are drawn. Lengths are in pixels, y goes down."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, fill="page", stroke="line", radius=12)

    def rect(self, x: float, y: float, width: float, height: float, *, radius: float = 0.0, **look: Any) -> None:
        """A rectangle. look: fill, stroke, thickness, dashes and opacity, see `_look`."""
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        shape += f' rx="{radius:g}"' if radius else ""
        self.parts.append(shape + _look(**look) + "/>")

    def path(self, points: str, **look: Any) -> None:
        """A path by SVG's own commands. look: as for `rect`."""
        self.parts.append(f'<path d="{points}"' + _look(**look) + "/>")

    def dots(self, places: list[tuple[float, float]], radius: float, colour: str) -> None:
        """A dot at each place."""
        points = "".join(f"M{x:g} {y:.1f}h0" for x, y in places)
        self.parts.append(
            f'<path d="{points}" class="s-{colour}" stroke-width="{2 * radius:g}" stroke-linecap="round"/>'
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str = "none", stroke: str = "none") -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}"' + _look(fill=fill, stroke=stroke) + "/>")

    def text(
        self, x: float, y: float, content: str, *, colour: str = "ink", size: float = 13, anchor: str = "start",
        style: str = "",
    ) -> None:  # fmt: skip
        """A line of text on the baseline y. Spaces in it are kept. style: "bold", "mono" or neither."""
        classes = f"{colour} t {style}".rstrip()
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{classes}" font-size="{size:g}"{place} xml:space="preserve">'
            f"{escape(content)}</text>"
        )

    def arrow(self, points: str, *, stroke: str = "faint", thickness: float = 1.6) -> None:
        """A path with an arrow's head at its end."""
        look = _look(stroke=stroke, thickness=thickness)
        self.parts.append(f'<path d="{points}"{look} marker-end="url(#head-{stroke})"/>')

    def save(self, path: Path) -> None:
        heads = {name for name in THEME if any(f"url(#head-{name})" in part for part in self.parts)}
        markers = "".join(
            f'<marker id="head-{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" '
            f'orient="auto-start-reverse"><path d="M0 0.8L7 4L0 7.2z" class="f-{name}"/></marker>'
            for name in sorted(heads)
        )
        light, dark = (
            "".join(
                f".{name}.t,.f-{name}{{fill:{both[theme]}}}.s-{name}{{stroke:{both[theme]}}}"
                for name, both in THEME.items()
                if any(name in part for part in self.parts)
            )
            for theme in (0, 1)
        )
        style = f"text{{font-family:{SANS}}}.mono{{font-family:{MONO}}}.bold{{font-weight:650}}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{style}{light}@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
            + (f"<defs>{markers}</defs>\n" if markers else "")
            + "\n".join(self.parts)
            + "\n</svg>\n",
            encoding="utf-8",
        )


def _look(
    *, fill: str = "none", stroke: str = "none", thickness: float = 1.0, dashes: str = "", opacity: float = 1.0
) -> str:
    """Attributes of a shape. fill, stroke: colours of THEME; dashes: lengths of line and gap of its outline."""
    classes = " ".join(f"{kind}-{name}" for kind, name in (("f", fill), ("s", stroke)) if name != "none")
    look = f' class="{classes}"' if classes else ""
    look += ' fill="none"' if fill == "none" else ""
    look += f' stroke-width="{thickness:g}"' if stroke != "none" and thickness != 1 else ""
    look += f' stroke-dasharray="{dashes}"' if dashes else ""
    return look + (f' opacity="{opacity:g}"' if opacity != 1 else "")
