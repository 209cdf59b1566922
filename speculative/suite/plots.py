"""Plots as SVG: bars in groups, and lines, with standard errors. Texts and colours are the page's, by its styles.

Both return an `<svg>` element whose classes a page gives colours: `s0`, `s1`, ... for the series, `axis`, `grid`,
`error`.
"""

import math
from collections.abc import Sequence
from html import escape

from heavypath.speculative.suite.estimates import Estimate

LEFT = 44  # room for the axes' labels, as the next two
TOP = 10
BOTTOM = 26
HEIGHT = 220
BAR = 14  # pixels of a bar
GAP = 18  # pixels between groups of bars
COLOURS = 8  # of a page's styles; further series begin again with the first

Series = tuple[str, Sequence[Estimate | None]]  # a name, and a value for each group or place; None for no value


def bars(groups: Sequence[str], series: Sequence[Series], line: float | None = None) -> str:
    """An `<svg>` of bars in groups: in each group a bar for each series, with its error.

    groups: names below the groups; series: a name and a value for each group (None: no bar)
    line: a value at which a line is drawn over the whole width
    """
    each = max(BAR * len(series) + GAP, 9 * max(map(len, groups)))
    width = LEFT + each * len(groups)
    scale = _Scale(series, HEIGHT)
    parts = [scale.grid(width)]
    for place, group in enumerate(groups):
        begin = LEFT + place * each + (each - BAR * len(series)) / 2
        for number, (name, values) in enumerate(series):
            if (value := values[place]) is not None:
                parts.append(_bar(scale, begin + number * BAR, value, number, f"{group}, {name}"))
        parts.append(_text(LEFT + (place + 0.5) * each, HEIGHT - 8, group, "middle"))
    if line is not None:
        parts.append(_line(LEFT, scale.of(line), width, scale.of(line), "axis"))
    return _svg(width, HEIGHT, parts)


def lines(series: Sequence[Series], width: int = 230, height: int = 150) -> str:
    """An `<svg>` with a line for each series over the places 1, 2, ..., with errors.

    series: a name and a value for each place, from 0 to 1 (None: no point); width, height: in pixels
    """
    scale = _Scale([("", [Estimate(1.0, None)])], height)
    most = max((len(values) for _, values in series), default=1)
    step = (width - LEFT - 12) / max(most, 1)
    parts = [scale.grid(width)]
    for number, (name, values) in enumerate(series):
        points = [(LEFT + (place + 0.5) * step, value) for place, value in enumerate(values) if value is not None]
        path = " ".join(f"{x:.1f},{scale.of(value.mean):.1f}" for x, value in points)
        parts.append(f'<polyline class="line s{number % COLOURS}" points="{path}"/>')
        for place, (x, value) in enumerate(points, start=1):
            parts.append(_error(scale, x, value))
            title = f"<title>{escape(f'{name}, depth {place}: {value}')}</title>"
            place_of_dot = f'cx="{x:.1f}" cy="{scale.of(value.mean):.1f}" r="3"'
            parts.append(f'<circle class="dot s{number % COLOURS}" {place_of_dot}>{title}</circle>')
    parts += [_text(LEFT + (place + 0.5) * step, height - 8, str(place + 1), "middle") for place in range(most)]
    return _svg(width, height, parts)


class _Scale:
    """The vertical axis of a plot `height` pixels high, from 0 to the largest value with its error."""

    def __init__(self, series: Sequence[Series], height: int):
        tops = [value.mean + (value.error or 0) for _, values in series for value in values if value is not None]
        self.bottom = height - BOTTOM
        self.step = _round_step(max(tops, default=1.0) / 4)
        self.most = self.step * math.ceil(max(tops, default=1.0) / self.step - 1e-9)

    def of(self, value: float) -> float:
        """The vertical position of a value in pixels; a value below 0 or above the axis is at the axis's end."""
        share = min(max(value / self.most, 0.0), 1.0)
        return self.bottom - share * (self.bottom - TOP)

    def grid(self, width: float) -> str:
        """The horizontal lines of the plot, each with its value, as SVG elements."""
        values = [self.step * number for number in range(round(self.most / self.step) + 1)]
        return "".join(
            _line(LEFT, self.of(value), width, self.of(value), "grid")
            + _text(LEFT - 6, self.of(value) + 4, f"{value:g}", "end")
            for value in values
        )


def _round_step(least: float) -> float:
    """The smallest number, `least` or more, that is 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(round(power * times, 10) for times in (1, 2, 2.5, 5, 10) if power * times >= least * (1 - 1e-9))


def _bar(scale: _Scale, x: float, value: Estimate, number: int, name: str) -> str:
    top = scale.of(value.mean)
    title = f"<title>{escape(f'{name}: {value}')}</title>"
    shape = f'x="{x:.1f}" y="{top:.1f}" width="{BAR - 2}" height="{scale.bottom - top:.1f}"'
    return f'<rect class="bar s{number % COLOURS}" {shape}>{title}</rect>' + _error(scale, x + BAR / 2 - 1, value)


def _error(scale: _Scale, x: float, value: Estimate) -> str:
    if not value.error:
        return ""
    return _line(x, scale.of(value.mean - value.error), x, scale.of(value.mean + value.error), "error")


def _line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    return f'<line class="{style}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {size} role="img">{"".join(parts)}</svg>'
