"""Writes the cells of a synthetic benchmark: a line per arm, and JSON.

Measuring is left to `bench_cells`, plotting to `bench_plot`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from app.bench_synthetic import CellResult, SyntheticPlan
from engine import EngineFacts, MachineRates

LABEL = "synthetic weights, replayed acceptance"
METHOD = (
    "(time of 193 tokens - time of 1 token) / 192, all requests given at once, to the last token of "
    "the last; medians of rounds"
)
BASELINE = "plain decoding by the same engine in the same rounds, arms alternating ABBA"

COLUMNS = (
    f"{'context':>7} {'batch':>5} {'temp':>4} {'arm':<9} {'ms/token':>8} {'best':>7} {'per call':>8} "
    f"{'ms/step':>8} {'limit':>7} {'of it':>5} {'idle':>6} {'traced':>6} {'host ms':>7} "
    f"{'speed-up':>8}  95% interval"
)


def cell_lines(result: CellResult) -> list[str]:
    """Return the table's lines of one cell; a hole is one line with its reason."""
    cell = result.cell
    head = f"{cell.context:>7} {cell.batch:>5} {cell.temperature:>4.1f}"
    if result.hole is not None:
        return [f"{head} hole: {result.hole}"]
    lines = []
    for arm in result.arms:
        traced = "" if arm.trace is None else f"{arm.trace.idle_share:.1%}"
        line = (
            f"{head} {arm.arm:<9} {arm.ms_per_token:>8.3f} {arm.best_ms_per_token:>7.3f} "
            f"{arm.tokens_per_call:>8.2f} {arm.ms_per_step:>8.3f} {arm.ms_limit:>7.3f} "
            f"{arm.roofline_share:>5.0%} {arm.idle_share:>6.1%} {traced:>6} {arm.ms_host:>7.3f}"
        )
        if arm.speedup is not None:
            value, low, high = arm.speedup
            line += f" {value:>8.2f}  [{low:.2f}, {high:.2f}]"
        lines.append(line)
    return lines


def json_report(
    plan: SyntheticPlan,
    environment: Mapping[str, str | int | None],
    rates: MachineRates,
    profile_source: str,
    results: Sequence[CellResult],
) -> str:
    """Return everything that was measured and what it was measured on."""
    report = {
        "label": LABEL,
        "environment": dict(environment),
        "method": METHOD,
        "baseline": BASELINE,
        "model": plan.name,
        "block_size": plan.sizes.block_size,
        "profile_source": profile_source,
        "profile": plan.profile,
        "rates": dataclasses.asdict(rates),
        "cells": [_cell_report(result) for result in results],
    }
    return json.dumps(report, indent=1) + "\n"


def _cell_report(result: CellResult) -> dict[str, object]:
    cell = dataclasses.asdict(result.cell)
    del cell["arms"]
    if result.hole is not None:
        return {**cell, "hole": result.hole}
    arms = [{**dataclasses.asdict(arm), "roofline_share": arm.roofline_share} for arm in result.arms]
    return {**cell, "checksum": result.checksum, "arms": arms}


def header_lines(
    plan: SyntheticPlan, facts: EngineFacts, environment: Mapping[str, str | int | None], rates: MachineRates
) -> list[str]:
    """Return what stands above the table."""
    lines = [f"{name}: {value}" for name, value in environment.items()]
    return [
        *lines,
        f"measured: copy {rates.bandwidth / 1e12:.2f} TB/s, products {rates.flops / 1e12:.0f} TFLOP/s",
        f"block size {facts.block_size}, at most {plan.rounds} rounds",
        METHOD,
        f"baseline: {BASELINE}",
        f"** {plan.name}: {LABEL} **",
        COLUMNS,
    ]
