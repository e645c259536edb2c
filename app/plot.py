"""Draws ratios by batch size as SVG: lines with intervals, in panels side by side, with nothing but text.

What is drawn is left to `bench_plot` and `speedup_report`.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _MARGIN, _TITLE = 420, 300, 48, 24
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class Point:
    """A ratio at one batch size, with its interval."""

    batch: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines by name over the same batch sizes."""

    title: str
    lines: Mapping[str, Sequence[Point]]


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a panel puts its numbers: batches in even steps, values from 0 to `top`."""

    batches: Sequence[int]
    top: float

    def x(self, batch: int) -> float:
        step = (_WIDTH - 2 * _MARGIN) / len(self.batches)
        return round(_MARGIN + (self.batches.index(batch) + 0.5) * step, 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _MARGIN - value / self.top * (_HEIGHT - 2 * _MARGIN), 1)


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the SVG document."""
    body = [f'<text x="{_MARGIN}" y="18" font-size="13">{html.escape(title)}</text>']
    for idx, panel in enumerate(panels):
        body.append(f'<g transform="translate({idx * _WIDTH} {_TITLE})">')
        body.append(f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{html.escape(panel.title)}</text>')
        body += [*_panel(panel.lines), "</g>"]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(1, len(panels)) * _WIDTH}" '
        f'height="{_HEIGHT + _TITLE}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, *body, "</svg>", ""])


def _panel(lines: Mapping[str, Sequence[Point]]) -> list[str]:
    points = [point for line in lines.values() for point in line]
    axes = _Axes(sorted({point.batch for point in points}), max([1.0, *(point.high for point in points)]))
    parts = [
        f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{axes.y(value)}" y2="{axes.y(value)}" '
        f'stroke="#ccc"/><text x="{_MARGIN - 16}" y="{axes.y(value) + 4}">{value}</text>'
        for value in range(int(axes.top) + 1)
    ]
    parts += [
        f'<text x="{axes.x(batch)}" y="{_HEIGHT - _MARGIN + 16}">{batch}</text>' for batch in axes.batches
    ]
    for number, (name, line) in enumerate(lines.items()):
        parts += _line(axes, line, _COLORS[number % len(_COLORS)])
        parts.append(
            f'<text x="{_WIDTH - 2}" y="{_MARGIN + 12 * number}" text-anchor="end" '
            f'fill="{_COLORS[number % len(_COLORS)]}">{html.escape(name)}</text>'
        )
    return parts


def _line(axes: _Axes, points: Sequence[Point], color: str) -> list[str]:
    """Return one line through its values, and a bar for every interval."""
    path = " ".join(f"{axes.x(point.batch)},{axes.y(point.value)}" for point in points)
    bars = [
        f'<line x1="{axes.x(point.batch)}" x2="{axes.x(point.batch)}" y1="{axes.y(point.low)}" '
        f'y2="{axes.y(point.high)}" stroke="{color}"/>'
        for point in points
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{color}"/>', *bars]
