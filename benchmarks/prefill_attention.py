"""Times prefill attention over paged K/V on a GPU, beside torch's flash attention over contiguous K/V.

Times are medians of CUDA graph replays. The arithmetic is checked by `tests/gpu/test_prefill_attention.py`.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.prefill_attention import PrefillConfig, attend_prefill, choose_prefill_config

MODELS = {"llama-3.1-8b": (8, 4, 128), "smollm2": (3, 3, 64)}
DEVICE = torch.device("cuda")
# Chunks of a step: (tokens, cached tokens before them) each.
CASES: dict[str, list[tuple[int, int]]] = {
    "512 at 0": [(512, 0)],
    "512 at 8k": [(512, 8192)],
    "512 at 128k": [(512, 131072 - 512)],
    "2048 at 0": [(2048, 0)],
    "2048 at 32k": [(2048, 32768)],
    "8192 at 0": [(8192, 0)],
    "8192 at 32k": [(8192, 32768)],
    "16 x 128 at 1k": [(128, 1024)] * 16,
    "32 x 64 at 0": [(64, 0)] * 32,
}
CONFIGS = [
    PrefillConfig(*values)
    for values in ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3))
]
CONFIGS += [PrefillConfig(*values) for values in ((64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 4, 3))]


def measure(call: Callable[[], object], repeats: int) -> float:
    """Return microseconds per call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 4)
    return statistics.median(times)


class Problem:
    """Random chunks of one case."""

    def __init__(self, chunks: list[tuple[int, int]], heads: int, group: int, dim: int, page: int) -> None:
        self.lens = tuple(size for size, _ in chunks)
        total = [size + start for size, start in chunks]
        width = -(-max(total) // page)
        blocks = width * len(chunks)
        pages = torch.randn(2, blocks, page, heads, dim, dtype=torch.bfloat16, device=DEVICE)
        self.k_pages, self.v_pages = pages
        self.tables = torch.randperm(blocks, device=DEVICE).view(len(chunks), width)
        self.starts = torch.tensor([start for _, start in chunks], device=DEVICE)
        self.window_starts = torch.zeros_like(self.starts)
        self.offsets = torch.tensor([0, *itertools.accumulate(self.lens)], device=DEVICE)
        self.q = torch.randn(sum(self.lens), heads * group, dim, dtype=torch.bfloat16, device=DEVICE)
        pairs = sum(size * start + size * (size + 1) // 2 for size, start in chunks)
        self.flops = 4 * pairs * heads * group * dim

    def call(self, config: PrefillConfig) -> Tensor:
        """Run our kernel."""
        where = (self.tables, self.offsets, self.starts, self.window_starts)
        return attend_prefill(self.q, self.k_pages, self.v_pages, *where, config=config)

    def flash(self, size: int, start: int, group: int) -> Callable[[], object] | None:
        """Return torch's flash attention over one contiguous chunk, where its causal bound is ours."""
        if len(self.lens) > 1 or start > 0:
            return None
        q = self.q.transpose(0, 1)[None]
        k, v = (
            x[self.tables[0]].flatten(0, 1)[:size].repeat_interleave(group, 1).transpose(0, 1)[None]
            for x in (self.k_pages, self.v_pages)
        )
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run_case(name: str, model: str, options: argparse.Namespace) -> dict[str, object]:
    """Measure one case and print its line."""
    heads, group, dim = MODELS[model]
    problem = Problem(CASES[name], heads, group, dim, options.page)
    own = choose_prefill_config(sum(problem.lens), len(problem.lens), group, 2)
    configs = list(dict.fromkeys([own, *(CONFIGS if options.sweep else [])]))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(problem.call, configs))
    timed = [
        (measure(lambda config=config: problem.call(config), options.repeats), config) for config in configs
    ]
    duration = timed[0][0]
    flash = problem.flash(*CASES[name][0], group)
    other = measure(flash, options.repeats) if flash else None
    text = f"  torch flash {other:9.1f} us" if other else ""
    print(f"{name:16s} {duration:9.1f} us {problem.flops / duration / 1e6:6.0f} TFLOP/s{text}", flush=True)
    for found, config in sorted(timed, key=lambda pair: pair[0])[: options.top if options.sweep else 0]:
        print(f"    {found:9.1f} us {problem.flops / found / 1e6:6.0f} TFLOP/s  {asdict(config)}")
    result = {"model": model, "case": name, "us": duration, "flash_us": other, "flops": problem.flops}
    return {**result, "configs": [[found, asdict(config)] for found, config in timed]}


def main() -> None:
    """Measure every case and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b,smollm2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for model in options.models.split(","):
        print(f"{model}, bfloat16, page {options.page}")
        results += [run_case(name, model, options) for name in options.cases.split(",")]
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(
            json.dumps({"machine": machine, "page": options.page, "cases": results}, indent=1)
        )


if __name__ == "__main__":
    main()
