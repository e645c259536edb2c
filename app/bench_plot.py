"""The speed-ups of a synthetic benchmark as a plot: a panel per context and temperature.

Which cells there are is left to `bench_synthetic`, drawing to `plot`.
"""

from collections.abc import Sequence

from app.bench_synthetic import CellResult
from app.plot import Panel, Point, draw


def speedup_plot(title: str, results: Sequence[CellResult]) -> str:
    """Return an SVG with the speed-up of each arm by batch size."""
    panels: dict[tuple[int, float], list[CellResult]] = {}
    for result in results:
        panels.setdefault((result.cell.context, result.cell.temperature), []).append(result)
    return draw(
        f"speed-up over plain decoding: {title}",
        [
            Panel(f"context {context}, temperature {temperature}", _lines(cells))
            for (context, temperature), cells in sorted(panels.items())
        ],
    )


def _lines(cells: Sequence[CellResult]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for result in sorted(cells, key=lambda result: result.cell.batch):
        for arm in result.arms:
            if arm.speedup is not None:
                lines.setdefault(arm.arm, []).append(Point(result.cell.batch, *arm.speedup))
    return lines
