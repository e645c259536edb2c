"""`eyas bench`: speculation against plain decoding on this machine, as a table or as JSON.

The measuring is left to `bench`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TextIO

from app.bench import PLAIN, BenchPlan, Cell, measure
from app.bench_prompts import bench_prompts
from app.config import EngineSection
from app.local_model import LocalModel, check_length
from app.machine import describe_machine
from engine import ConfigError, EngineFacts, StepError

BASELINE = "plain decoding by the same engine in the same run, arms alternating ABBA"
_COLUMNS = (
    f"{'batch':>5} {'context':>7} {'arm':<10} {'tokens/s':>9} {'per call':>8} {'speed-up':>8}  95% interval"
)


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure every batch size and write the report; in float32 answers that differ are an error."""
    if options.tree == PLAIN:
        raise ConfigError("--tree off is the baseline: name a tree, or auto")
    model = LocalModel.open(
        options.model,
        options.draft,
        EngineSection(
            dtype=options.dtype,
            max_num_seqs=max(options.batch),
            enable_prefix_cache=False,  # the second arm of a round would find the first one's prompts
        ),
    )
    prompts = bench_prompts(model.tokenizer, model.template, options.context)
    engine = model.engine()
    facts = engine.facts
    check_length(max(map(len, prompts)), options.max_tokens, facts.max_model_len)
    if facts.draft_digest is None:
        raise ConfigError("no draft is loaded: name its folder with --draft, or use a model that ships one")
    plan = BenchPlan(prompts, options.batch, options.max_tokens, options.rounds, options.tree)
    cells = measure(engine, plan, time.perf_counter)
    out.write(_json_report(plan, facts, cells) if options.json else table(plan, facts, cells))
    check_identity(cells, facts.dtype)
    return 0


def table(plan: BenchPlan, facts: EngineFacts, cells: Sequence[Cell]) -> str:
    """Return the report for a reader."""
    lines = [f"{name}: {value}" for name, value in describe_machine(facts).items()]
    lines += [f"baseline: {BASELINE}", f"rounds: {plan.rounds}, tokens per answer: {plan.max_tokens}", ""]
    lines.append(_COLUMNS)
    for cell in cells:
        interval = "" if cell.arm == PLAIN else f"[{cell.ci_low:.2f}, {cell.ci_high:.2f}]"
        lines.append(
            f"{cell.batch:>5} {cell.context:>7} {cell.arm:<10} {cell.tokens_per_second:>9.1f} "
            f"{cell.tokens_per_call:>8.2f} {cell.speedup:>8.2f}  {interval}".rstrip()
        )
    identical, rows = count_identical(cells)
    lines += ["", f"answers identical to plain decoding: {identical} of {rows}", ""]
    return "\n".join(lines)


def count_identical(cells: Sequence[Cell]) -> tuple[int, int]:
    """Return how many speculative answers equal plain decoding's, and of how many."""
    speculative = [cell for cell in cells if cell.arm != PLAIN]
    return sum(cell.identical_rows for cell in speculative), sum(cell.rows for cell in speculative)


def check_identity(cells: Sequence[Cell], dtype: str) -> None:
    """Raise `StepError` where float32 answers differ; in lower precision a near-tie may flip."""
    identical, rows = count_identical(cells)
    if dtype == "float32" and identical != rows:
        raise StepError(
            f"in float32 every answer must equal plain decoding's: {rows - identical} of {rows} differ"
        )


def _json_report(plan: BenchPlan, facts: EngineFacts, cells: Sequence[Cell]) -> str:
    identical, rows = count_identical(cells)
    report = {
        "environment": describe_machine(facts),
        "baseline": BASELINE,
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "identity": {"rows": rows, "identical_rows": identical, "share": identical / rows},
    }
    return json.dumps(report, indent=2) + "\n"
