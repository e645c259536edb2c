"""A validated speed-up on paper: JSON that a later run compares with, and one HTML page with its plot.

Measuring is left to `speedup`, judging to `speedup_verdict`.
"""

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.options_validate import MIN_BLOCKS
from app.plot import Panel, Point, draw
from app.speedup import SpeedupCell, SpeedupPlan, prompts_digest
from app.speedup_verdict import Estimate, Floor, Judgement, Verdict, overall
from engine import ConfigError

METHOD = (
    "Per block, four runs over the same prompts in the order ABBA, then BAAB: plain decoding (A) and "
    "speculation (B), chosen by the speculation field of each request. A run sends as many streams at "
    "once as the batch size says, and lasts from the first request to the last token. The prompts are in "
    "the prefix cache before. The speed-up is the plain seconds over the speculative ones; its interval "
    "of 95% is bootstrapped over blocks. Against a stored run that asked the same prompts, the share of the "
    "floor is bootstrapped over blocks of both runs together."
)
JSON_NAME, HTML_NAME = "speedup.json", "speedup.html"

_STYLE = (
    "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;text-align:right;"
    "border-bottom:1px solid #ddd}.pass{color:#2ca02c}.regression{color:#d62728}.inconclusive{color:#b8860b}"
    "dt{font-weight:bold}dd{margin:0 0 .4rem 0;word-break:break-all}"
)
_COLUMNS = (
    *("batch", "plain tokens/s", "speculative tokens/s", "tokens per call", "speed-up", "95% interval"),
    *("floor", "of floor", "equal answers", "verdict"),
)


@dataclass(frozen=True, slots=True)
class SpeedupReport:
    """All of one validation. `floor_source` says where the floors come from; rows go by batch size."""

    plan: SpeedupPlan
    environment: Mapping[str, str]
    floor_source: str
    cells: Sequence[SpeedupCell]
    floors: Sequence[Estimate]
    judgements: Sequence[Judgement]

    @property
    def verdict(self) -> Verdict:
        return overall(judgement.verdict for judgement in self.judgements)

    def write(self, folder: Path) -> None:
        """Write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(self.to_json(), encoding="utf-8")
        (folder / HTML_NAME).write_text(self.to_html(), encoding="utf-8")

    def to_json(self) -> str:
        rows = zip(self.cells, self.floors, self.judgements, strict=True)
        report = {
            "verdict": self.verdict,
            "method": METHOD,
            "environment": dict(self.environment),
            "plan": dataclasses.asdict(self.plan),
            "prompts": prompts_digest(),
            "floor_source": self.floor_source,
            "cells": [
                {
                    **dataclasses.asdict(cell),
                    "floor": dataclasses.asdict(floor),
                    "judgement": dataclasses.asdict(judgement),
                }
                for cell, floor, judgement in rows
            ],
        }
        return json.dumps(report, indent=1) + "\n"

    def to_html(self) -> str:
        """Return a page that needs no other file."""
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(text)}</td>" for text in row[:-1])
            + _verdict_cell(row[-1])
            + "</tr>"
            for row in self.rows()
        )
        facts = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in self.environment.items()
        )
        plan = self.plan
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Speed-up</title>'
            f"<style>{_STYLE}</style><h1>Speed-up of speculation: "
            f'<span class="{self.verdict}">{self.verdict}</span></h1>'
            f"<p>{plan.num_blocks} blocks per batch size, {plan.max_tokens} tokens per answer, "
            f"speculation {html.escape(plan.arm)}. Floors: {html.escape(self.floor_source)}.</p>"
            f"<table><tr>{head}</tr>{rows}</table>{self._plot()}<p>{METHOD}</p><dl>{facts}</dl></html>\n"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, the verdict last."""
        found: list[tuple[str, ...]] = []
        for cell, floor, judgement in zip(self.cells, self.floors, self.judgements, strict=True):
            relative = judgement.relative
            found.append(
                (
                    str(cell.batch),
                    f"{cell.plain_tokens_per_second:.1f}",
                    f"{cell.speculative_tokens_per_second:.1f}",
                    "" if cell.tokens_per_call is None else f"{cell.tokens_per_call:.2f}",
                    f"{cell.speedup:.2f}",
                    f"{cell.low:.2f} to {cell.high:.2f}",
                    f"{floor.value:.2f}",
                    f"{relative.low:.2f} to {relative.high:.2f}, at least {judgement.threshold:.2f}",
                    f"{cell.num_equal} of {cell.num_pairs}",
                    judgement.verdict,
                )
            )
        return found

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        facts = [f"{name}: {value}" for name, value in self.environment.items()]
        table = [_COLUMNS, *self.rows()]
        widths = [max(len(row[idx]) for row in table) for idx in range(len(_COLUMNS))]
        body = [
            "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table
        ]
        return [*facts, f"floors: {self.floor_source}", "", *body, "", f"verdict: {self.verdict}"]

    def _plot(self) -> str:
        points = [Point(cell.batch, cell.speedup, cell.low, cell.high) for cell in self.cells]
        floors = [
            Point(cell.batch, floor.value, floor.low, floor.high)
            for cell, floor in zip(self.cells, self.floors, strict=True)
        ]
        return draw(
            "speed-up over plain decoding by batch size", [Panel("", {"measured": points, "floor": floors})]
        )


def _verdict_cell(verdict: str) -> str:
    return f'<td class="{verdict}">{verdict}</td>'


def stored_floors(path: Path, plan: SpeedupPlan, environment: Mapping[str, str]) -> list[Floor]:
    """Return the speed-ups of a stored run, one per batch size of `plan`.

    Raises `ConfigError` where the file is no stored run, or one of another model or another plan.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        is_same = stored.get("prompts") == prompts_digest()
        found = {cell["batch"]: _stored_floor(cell, is_same) for cell in stored["cells"]}
        then = (stored["environment"]["model_digest"], stored["plan"]["arm"], stored["plan"]["max_tokens"])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no stored run of eyas validate speedup: {error!r}") from error
    now = (environment["model_digest"], plan.arm, plan.max_tokens)
    for name, old, new in zip(("model digest", "--tree", "--max-tokens"), then, now, strict=True):
        if old != new:
            raise ConfigError(
                f"{path} was measured with {name} {old}, this run has {new}: they do not compare"
            )
    if missing := [batch for batch in plan.batches if batch not in found]:
        raise ConfigError(f"{path} has no batch size {missing[0]}: it has {sorted(found)}")
    return [found[batch] for batch in plan.batches]


def _stored_floor(cell: Mapping[str, Any], is_same: bool) -> Floor:
    """Read a batch size of a stored run; its blocks only where they asked what is asked now."""
    estimate = Estimate(float(cell["speedup"]), float(cell["low"]), float(cell["high"]))
    times = (
        [(float(block["plain"]), float(block["speculative"])) for block in cell["blocks"]] if is_same else []
    )
    numbers = [
        estimate.low,
        estimate.value,
        estimate.high,
        *(seconds for block in times for seconds in block),
    ]
    if not all(0 < number < math.inf for number in numbers) or not numbers[0] <= numbers[1] <= numbers[2]:
        raise ValueError(f"batch {cell['batch']}: {estimate}")
    if is_same and len(times) < MIN_BLOCKS:
        raise ValueError(f"batch {cell['batch']} has {len(times)} blocks")
    return Floor(estimate, tuple(times))
