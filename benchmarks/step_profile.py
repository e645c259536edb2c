"""Prints where the device time of one decode step goes, kernel by kernel, on a synthetic model.

It needs torch alone. Run: python benchmarks/step_profile.py llama-3.1-8b 1k:1:off 1k:64:chain-3
"""

import argparse
import sys
from pathlib import Path

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.bench_cells import trace_arm
from app.bench_synthetic import SyntheticBench
from app.bench_trace import Trace
from app.cli_bench_synthetic import parse_cells, plan_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("synthetic")
    parser.add_argument("cells", nargs="+", help="CONTEXT:BATCH:TREE")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--top", type=int, default=24)
    options = parser.parse_args()
    cells = [
        parse_cells(item.rpartition(":")[0], (item.rpartition(":")[2],), (options.temperature,))[0]
        for item in options.cells
    ]
    fixed = argparse.Namespace(
        synthetic=options.synthetic,
        profile=None,
        device="cuda",
        dtype="bfloat16",
        block_size=options.block_size,
        attention_backend="auto",
        tokens_per_call=2.78,
        trees=((8, 4), (16, 5)),
        rounds=3,
        seconds=1e9,
        trace=True,
    )
    plan, _ = plan_of(fixed, tuple(cells))
    bench = SyntheticBench(plan)
    for cell in cells:
        engine, arm = bench.open(cell, cells), cell.arms[0]
        engine.engine.capture(arm, cell.batch)
        trace = trace_arm(engine, cell, engine.random_prompts(cell.batch, cell.context), arm)
        assert trace is not None, "nothing ran on the device"
        print_trace(f"{cell.context} x {cell.batch} {arm}", trace, options.top)


def print_trace(title: str, trace: Trace, top: int) -> None:
    print(
        f"== {title}: {trace.ms_per_step:.3f} ms a step, nothing runs in {trace.idle_share:.1%} of it, "
        f"{trace.num_launches:.0f} launches"
    )
    for kernel in trace.kernels[:top]:
        each = kernel.microseconds / kernel.num_launches
        print(
            f"{kernel.microseconds:9.1f} us {kernel.num_launches:7.1f} x {each:7.2f}  {kernel.name[:90]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
