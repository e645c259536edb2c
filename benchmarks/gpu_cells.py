"""Measures cells of a synthetic model on this machine within a time budget, printing and writing as it goes.

It needs torch alone. Run: python benchmarks/gpu_cells.py --synthetic llama-3.1-8b --cells 1k:1,1k:64,8k:16
--arms off,chain-3,tree-8 --temperatures 0,0.8 --seconds 300 --out FOLDER. A cell may name arms of its own, as
in 1k:64/off+chain-3+tree-6.
"""

import argparse
import sys
from pathlib import Path

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.bench_cells import Cell
from app.cli_bench_synthetic import parse_cells, plan_of, run_plan


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Read NODES:LEVELS pairs."""
    return tuple(
        (int(nodes), int(levels)) for nodes, _, levels in (i.partition(":") for i in text.split(","))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--synthetic", default="llama-3.1-8b")
    parser.add_argument(
        "--cells", default="1k:1,1k:8,1k:32,1k:64,8k:1,8k:16,8k:64", help="CONTEXT:BATCH[/ARM+ARM],..."
    )
    parser.add_argument("--arms", default="off,chain-3,tree-8,tree-16")
    parser.add_argument("--trees", type=pairs, default="6:3,8:4,12:4,16:5,24:5,32:6", help="NODES:LEVELS,...")
    parser.add_argument("--temperatures", default="0", help="above 0 with top-p 0.9")
    parser.add_argument("--tokens-per-call", type=float, default=2.78, help="of a chain of 3")
    parser.add_argument("--profile", type=Path, help="acceptance by depth and rank, JSON")
    parser.add_argument("--rounds", type=int, default=8, help="at most, per cell; at least 3")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all cells together")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--trace", action="store_true", help="list the kernels of a step in the JSON")
    parser.add_argument("--out", type=Path, help="folder for JSON and plot")
    options = parser.parse_args()
    temperatures = tuple(float(item) for item in options.temperatures.split(","))
    cells: list[Cell] = []
    for item in options.cells.split(","):
        place, _, arms = item.partition("/")
        cells += parse_cells(place, tuple(arms.split("+") if arms else options.arms.split(",")), temperatures)
    plan, source = plan_of(options, tuple(cells))
    run_plan(plan, source, sys.stdout, options.out)


if __name__ == "__main__":
    main()
