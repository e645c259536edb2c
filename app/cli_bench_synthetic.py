"""`eyas bench --synthetic`: a model of a published shape with random weights, as a table, JSON and a plot.

The measuring is left to `bench_synthetic`. It needs torch and nothing else.
"""

import argparse
from pathlib import Path
from typing import TextIO

from app.bench import PLAIN
from app.bench_cells import Cell
from app.bench_plot import speedup_plot
from app.bench_report import LABEL, cell_lines, header_lines, json_report
from app.bench_synthetic import CellResult, SyntheticBench, SyntheticPlan
from app.drafts import SHIPPED_DRAFTS
from app.machine import describe_machine
from engine import ConfigError, EngineConfig, MeasuredProfile, chain, scale_profile, shape_of

SHIPPED_PROFILE = SHIPPED_DRAFTS / "smollm2" / "manifest.json"
SCALED_CHAIN = 3  # the chain whose acceptance length is stated
DEFAULT_CONTEXTS, DEFAULT_BLOCK_SIZE = (1024,), 64
RESULTS, PLOT = "cells.json", "speedup.svg"


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure plain decoding and every tree in each batch size, context and temperature."""
    trees = ("chain-3", "tree-8") if options.tree == ("auto",) else options.tree
    arms = (PLAIN, *(tree for tree in trees if tree != PLAIN))
    cells = [
        make_cell(context, batch, temperature, arms)
        for context in options.context or DEFAULT_CONTEXTS
        for batch in options.batch
        for temperature in options.temperature
    ]
    plan, source = plan_of(options, tuple(cells))
    run_plan(plan, source, out, options.out)
    return 0


def plan_of(options: argparse.Namespace, cells: tuple[Cell, ...]) -> tuple[SyntheticPlan, str]:
    """Return what the flags ask for, and where the acceptance profile comes from."""
    measured = MeasuredProfile.load(options.profile or SHIPPED_PROFILE)
    topology = chain(SCALED_CHAIN)
    plan = SyntheticPlan(
        name=options.synthetic,
        model=shape_of(options.synthetic),
        sizes=EngineConfig(
            model=Path(options.synthetic),
            device=options.device,
            dtype=options.dtype,
            block_size=options.block_size or DEFAULT_BLOCK_SIZE,
            attention_backend=options.attention_backend,
        ),
        profile=scale_profile(measured.probabilities, topology, options.tokens_per_call),
        tree_sizes=options.trees,
        cells=cells,
        rounds=options.rounds,
        seconds=options.seconds,
        is_traced=options.trace,
    )
    source = (
        f"{measured.source}; first ranks scaled in odds to {options.tokens_per_call} tokens per call with "
        f"{topology.name}"
    )
    return plan, source


def run_plan(plan: SyntheticPlan, source: str, out: TextIO, folder: Path | None) -> None:
    """Print a line per arm as it is measured; with a folder, write JSON and a plot there after every cell."""
    bench = SyntheticBench(plan)
    results: list[CellResult] = []
    environment: dict[str, str | int | None] = {}
    has_header = False
    for result in bench.run():
        results.append(result)
        if bench.facts is not None:
            environment = describe_machine(bench.facts)
            if not has_header:
                out.write("\n".join(header_lines(plan, bench.facts, environment, bench.rates)) + "\n")
            has_header = True
        out.write("\n".join(cell_lines(result)) + "\n")
        out.flush()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            report = json_report(plan, environment, bench.rates, source, results)
            (folder / RESULTS).write_text(report, encoding="utf-8")
            (folder / PLOT).write_text(speedup_plot(f"{plan.name}, {LABEL}", results), encoding="utf-8")
    checksums = [result.checksum for result in results if result.hole is None]
    out.write(f"profile: {source}\nchecksum of the real verifications: {sum(checksums)}\n")


def parse_cells(text: str, arms: tuple[str, ...], temperatures: tuple[float, ...]) -> tuple[Cell, ...]:
    """Read CONTEXT:BATCH pairs such as 1k:64,8k:16; each is a cell at every temperature."""
    cells = []
    for item in text.split(","):
        context, _, batch = item.partition(":")
        try:
            num_tokens = int(context[:-1]) * 1024 if context.endswith("k") else int(context)
            num_rows = int(batch)
        except ValueError:
            raise ConfigError(f"cells are CONTEXT:BATCH, such as 1k:64,8k:16, found {item!r}") from None
        cells += [make_cell(num_tokens, num_rows, temperature, arms) for temperature in temperatures]
    return tuple(cells)


def make_cell(context: int, batch: int, temperature: float, arms: tuple[str, ...]) -> Cell:
    """Return a cell; sampling also cuts to 0.9 of the probability, as chat does."""
    return Cell(context, batch, temperature, 0.9 if temperature else 1.0, arms)
