"""Small line charts as SVG text: panels side by side, shares over a logarithmic axis, one legend on top."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasewise._words import number, percent
from phasewise.topology.svg import FAINT_INK, FONT, INK, SERIES, document, escaped, text

PLOT_WIDTH, PLOT_HEIGHT = 300.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 14.0, 30.0, 44.0
"""Room around a plot for its title, its numbers and the names of its axes."""

MARGIN, LEGEND_ROW, SWATCH = 16.0, 22.0, 26.0
TEXT_CHAR = 6.8
"""Width of an average character of the legend, pixels."""

MAX_COLUMNS = 2  # wider, and a page would shrink the letters too much
GRID = "#dcdfe3"
LIMIT_INK = "#6b7280"
MARKS = ("circle", "square", "diamond", "triangle", "cross", "plus", "ring")


@dataclass(frozen=True)
class Panel:
    """One plot: lines of points (x, y) by name, in ascending x; positive, but a share may be 0."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    limit: Sequence[tuple[float, float]]
    """Points of a dashed limit line; may be empty."""
    x_name: str | None = None
    """Label of the x axis where the chart's does not apply."""


@dataclass(frozen=True)
class Chart:
    """Panels that share their axes' names and their legend."""

    title: str
    caption: str
    x_name: str
    y_name: str
    limit_name: str
    """Name of the dashed line."""
    emphasised: str | None
    """Name of the line that is drawn boldly."""
    panels: Sequence[Panel]


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis: values from `low` to `high` on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class _Share:
    """An even axis from 0 to 1 on pixels from `start` to `end`."""

    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + value * (self.end - self.start)


SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def draw_chart(chart: Chart) -> str:
    names = list(dict.fromkeys(name for panel in chart.panels for name in panel.lines))
    columns = min(MAX_COLUMNS, len(chart.panels))
    width = 2 * MARGIN + columns * (LEFT + PLOT_WIDTH + RIGHT)
    legend = _legend_rows([*names, chart.limit_name], width - 2 * MARGIN)
    above = MARGIN + 44
    head = above + LEGEND_ROW * len(legend)
    rows = -(-len(chart.panels) // columns)
    height = head + rows * (TOP + PLOT_HEIGHT + BOTTOM) + MARGIN
    elements = [text(MARGIN, MARGIN + 12, chart.title, "t"), text(MARGIN, MARGIN + 30, chart.caption, "c")]
    for index, entries in enumerate(legend):
        elements += _legend(MARGIN, above + LEGEND_ROW * (index + 0.5), entries, names)
    for index, panel in enumerate(chart.panels):
        x = MARGIN + index % columns * (LEFT + PLOT_WIDTH + RIGHT) + LEFT
        y = head + index // columns * (TOP + PLOT_HEIGHT + BOTTOM) + TOP
        elements += _panel(x, y, panel, chart, names)
    return document(width, height, _STYLE, elements)


def _panel(x: float, y: float, panel: Panel, chart: Chart, names: Sequence[str]) -> list[str]:
    points = [point for line in (*panel.lines.values(), panel.limit) for point in line]
    across = _Scale(*_span([px for px, _ in points]), x, x + PLOT_WIDTH)
    up = _Share(y + PLOT_HEIGHT, y)
    elements = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" fill="#ffffff" '
        f'stroke="{FAINT_INK}"/>',
        text(x, y - 10, panel.title, "t"),
        text(x + PLOT_WIDTH / 2, y + PLOT_HEIGHT + 34, panel.x_name or chart.x_name, "m"),
        f'<text class="m" transform="translate({x - 44:.1f} {y + PLOT_HEIGHT / 2:.1f}) rotate(-90)">'
        f"{escaped(chart.y_name)}</text>",
    ]
    for value in _ticks(across):
        elements.append(_rule(across.at(value), y, across.at(value), y + PLOT_HEIGHT))
        elements.append(text(across.at(value), y + PLOT_HEIGHT + 15, _number(value), "m"))
    for value in SHARES:
        elements.append(_rule(x, up.at(value), x + PLOT_WIDTH, up.at(value)))
        elements.append(text(x - 6, up.at(value) + 4, percent(value), "e"))
    if panel.limit:
        path = " ".join(f"{across.at(px):.1f},{up.at(py):.1f}" for px, py in panel.limit)
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{LIMIT_INK}" stroke-width="1.5" '
            'stroke-dasharray="6 4"/>'
        )
    for name in reversed(names):  # the first system is drawn last, above the others
        if name in panel.lines:
            places = [(across.at(px), up.at(py)) for px, py in panel.lines[name]]
            elements += _line(places, names.index(name), name == chart.emphasised)
    return elements


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The whole powers of two around all values, at least one step apart."""
    low = 2.0 ** math.floor(math.log2(min(values)) + 1e-9)
    return low, max(2.0 ** math.ceil(math.log2(max(values)) - 1e-9), low * 2)


def _ticks(scale: _Scale) -> list[float]:
    """Powers of two on a scale, few enough to be read."""
    steps = round(math.log2(scale.high / scale.low))
    powers = [scale.low * 2**step for step in range(steps + 1)]
    return powers[:: -(-len(powers) // 12)]


def _number(value: float) -> str:
    return number(value) if value < 10_000 else f"{number(value / 1000)}k"


def _line(places: Sequence[tuple[float, float]], index: int, is_bold: bool) -> list[str]:
    stroke = SERIES[index % len(SERIES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width = 2.4 if is_bold else 1.5
    return [
        f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>',
        *(_mark(x, y, index) for x, y in places),
    ]


def _mark(x: float, y: float, index: int) -> str:
    stroke, mark = SERIES[index % len(SERIES)], MARKS[index % len(MARKS)]
    if mark in {"circle", "ring"}:
        fill = stroke if mark == "circle" else "#ffffff"
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{stroke}"/>'
    shapes = {
        "square": "M-3-3H3V3H-3Z",
        "diamond": "M0-4L4 0L0 4L-4 0Z",
        "triangle": "M0-4L3.6 3H-3.6Z",
        "cross": "M-3-3L3 3M-3 3L3-3",
        "plus": "M0-4V4M-4 0H4",
    }
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{shapes[mark]}" fill="{stroke}" '
        f'stroke="{stroke}" stroke-width="1.5"/>'
    )


def _legend_rows(names: Sequence[str], width: float) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    left = 0.0
    for name in names:
        if rows[-1] and left + _entry_width(name) > width:
            rows.append([])
            left = 0.0
        rows[-1].append(name)
        left += _entry_width(name)
    return rows


def _entry_width(name: str) -> float:
    return SWATCH + 6 + len(name) * TEXT_CHAR + 18


def _legend(x: float, y: float, entries: Sequence[str], names: Sequence[str]) -> list[str]:
    elements = []
    for entry in entries:
        if entry in names:
            elements += _line([(x, y), (x + SWATCH, y)], names.index(entry), False)
        else:
            elements.append(
                f'<path d="M{x:.1f} {y:.1f}h{SWATCH}" stroke="{LIMIT_INK}" stroke-width="1.5" '
                'stroke-dasharray="6 4"/>'
            )
        elements.append(text(x + SWATCH + 6, y + 4, entry, "s"))
        x += _entry_width(entry)
    return elements


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID}"/>'


_STYLE = (
    f"text{{font-family:{FONT};font-size:12px}}"
    f".t{{font-weight:600;fill:{INK};font-size:13px}}.s{{fill:{INK}}}"
    f".c{{fill:{FAINT_INK};font-size:11px}}.m{{text-anchor:middle;fill:{FAINT_INK}}}.e{{text-anchor:end;fill:{FAINT_INK}}}"
)
