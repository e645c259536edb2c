"""Draws the speed-ups of a benchmark as SVG, with nothing but text.

Which cells there are is left to `bench_synthetic`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench_synthetic import CellResult

_WIDTH, _HEIGHT, _MARGIN, _TITLE = 420, 300, 48, 24
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class _Point:
    """A speed-up with its interval, at one of the batch sizes that stand side by side."""

    batch_idx: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a panel puts its numbers: batches in even steps, values from 0 to `top`."""

    num_batches: int
    top: float

    def x(self, batch_idx: int) -> float:
        return round(_MARGIN + (batch_idx + 0.5) * (_WIDTH - 2 * _MARGIN) / self.num_batches, 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _MARGIN - value / self.top * (_HEIGHT - 2 * _MARGIN), 1)


def speedup_plot(title: str, results: Sequence[CellResult]) -> str:
    """Return an SVG with a panel per context and temperature: speed-up of each arm by batch size."""
    panels: dict[tuple[int, float], list[CellResult]] = {}
    for result in results:
        panels.setdefault((result.cell.context, result.cell.temperature), []).append(result)
    body = [f'<text x="{_MARGIN}" y="18" font-size="13">speed-up over plain decoding: {title}</text>']
    for idx, ((context, temperature), cells) in enumerate(sorted(panels.items())):
        body.append(f'<g transform="translate({idx * _WIDTH} {_TITLE})">')
        body.append(
            f'<text x="{_MARGIN}" y="{_MARGIN - 8}">context {context}, temperature {temperature}</text>'
        )
        body += [*_panel(cells), "</g>"]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(1, len(panels)) * _WIDTH}" '
        f'height="{_HEIGHT + _TITLE}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, *body, "</svg>", ""])


def _panel(cells: Sequence[CellResult]) -> list[str]:
    batches = sorted({result.cell.batch for result in cells})
    lines: dict[str, list[_Point]] = {}
    for result in sorted(cells, key=lambda result: result.cell.batch):
        for arm in result.arms:
            if arm.speedup is not None:
                point = _Point(batches.index(result.cell.batch), *arm.speedup)
                lines.setdefault(arm.arm, []).append(point)
    axes = _Axes(len(batches), max([1.0, *(point.high for points in lines.values() for point in points)]))
    parts = [
        f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{axes.y(value)}" y2="{axes.y(value)}" '
        f'stroke="#ccc"/><text x="{_MARGIN - 16}" y="{axes.y(value) + 4}">{value}</text>'
        for value in range(int(axes.top) + 1)
    ]
    parts += [
        f'<text x="{axes.x(idx)}" y="{_HEIGHT - _MARGIN + 16}">{batch}</text>'
        for idx, batch in enumerate(batches)
    ]
    for number, (name, points) in enumerate(lines.items()):
        parts += _line(axes, points, _COLORS[number % len(_COLORS)])
        parts.append(
            f'<text x="{_WIDTH - _MARGIN + 2}" y="{_MARGIN + 12 * number}" '
            f'fill="{_COLORS[number % len(_COLORS)]}">{name}</text>'
        )
    return parts


def _line(axes: _Axes, points: Sequence[_Point], color: str) -> list[str]:
    """Return one arm: a line through its speed-ups, and a bar for every interval."""
    path = " ".join(f"{axes.x(point.batch_idx)},{axes.y(point.value)}" for point in points)
    bars = [
        f'<line x1="{axes.x(point.batch_idx)}" x2="{axes.x(point.batch_idx)}" y1="{axes.y(point.low)}" '
        f'y2="{axes.y(point.high)}" stroke="{color}"/>'
        for point in points
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{color}"/>', *bars]
