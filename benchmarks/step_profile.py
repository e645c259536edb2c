"""Prints where the device time of one decode step goes, kernel by kernel, on a synthetic model.

It needs torch alone. Run: python benchmarks/step_profile.py llama-3.1-8b 1k:1:off 1k:64:chain-3
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.bench_cells import make_requests
from app.bench_synthetic import SyntheticBench
from app.cli_bench_synthetic import parse_cells, plan_of

NUM_WARM, NUM_STEPS, MAX_TOKENS = 8, 6, 120


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
    )
    plan, _ = plan_of(fixed, tuple(cells))
    bench = SyntheticBench(plan)
    for cell in cells:
        engine = bench.open(cell, cells)
        engine.engine.capture(cell.arms[0], cell.batch)
        prompts = engine.random_prompts(cell.batch, cell.context)
        engine.cache(prompts)
        for request in make_requests(cell, prompts, cell.arms[0], MAX_TOKENS, 0):
            engine.engine.add(request)
        for _ in range(NUM_WARM):
            engine.engine.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(NUM_STEPS):
                engine.engine.step()
            torch.cuda.synchronize()
        _print(f"{cell.context} x {cell.batch} {cell.arms[0]}", profiler, options.top)
        while engine.engine.has_work:
            engine.engine.step()


def _print(title: str, profiler: profile, top: int) -> None:
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, count = defaultdict(float), defaultdict(int)
    for start, end, name in spans:
        busy[name] += end - start
        count[name] += 1
    total = spans[-1][1] - spans[0][0]
    print(
        f"== {title}: {total / NUM_STEPS / 1000:.3f} ms a step, kernels {sum(busy.values()) / NUM_STEPS / 1000:.3f} ms, "
        f"{len(spans) / NUM_STEPS:.0f} launches"
    )
    for name in sorted(busy, key=busy.__getitem__, reverse=True)[:top]:
        print(
            f"{busy[name] / NUM_STEPS:9.1f} us {count[name] / NUM_STEPS:7.1f} x {busy[name] / count[name]:7.2f}  {name[:90]}"
        )


if __name__ == "__main__":
    main()
