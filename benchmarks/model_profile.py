"""Prints where the time of one decode step of a real model goes, on the device and on the host.

Run: python benchmarks/model_profile.py MODEL_FOLDER PROMPTS.jsonl --draft FOLDER 1:off 64:chain-3
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.bench_trace import Span, summarise
from app.local_model import LocalModel
from app.prompt_file import read_chats
from benchmarks.step_profile import print_trace
from engine import Engine, EngineConfig, Request, SamplingParams, SpeculationConfig

MAX_TOKENS, NUM_WARM_STEPS, NUM_STEPS, NUM_FIRST_STEPS = 128, 8, 8, 4


def start(engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, arm: str) -> None:
    """Add the requests and step until every row decodes."""
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=arm)
    for row in range(batch):
        engine.add(Request(f"row-{row}", prompts[row % len(prompts)], sampling))
    for _ in range(NUM_WARM_STEPS):
        engine.step()


def time_start(engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, arm: str) -> tuple[float, ...]:
    """Return the milliseconds of the first steps, which admit, prefill and decode, the device waited for."""
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=arm)
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for row in range(batch):
        engine.add(Request(f"row-{row}", prompts[row % len(prompts)], sampling))
    times.append(time.perf_counter())
    for _ in range(NUM_FIRST_STEPS):
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    finish(engine)
    return tuple(1e3 * (end - begin) for begin, end in itertools.pairwise(times))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def trace_device(engine: Engine, title: str, top: int) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    trace = summarise(spans, NUM_STEPS)
    assert trace is not None, "nothing ran on the device"
    print_trace(title, trace, top)


def time_steps(engine: Engine, *, is_host: bool) -> float:
    """Return the median milliseconds of the next steps; of the host alone where the device is waited for
    before each.
    """
    times = []
    for _ in range(NUM_STEPS):
        if is_host:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def profile_host(engine: Engine, top: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(top)


def open_model(
    folder: Path, draft: Path | None, prompts: Path, cells: Sequence[tuple[int, str]], mode: str
) -> tuple[LocalModel, list[tuple[int, ...]]]:
    """Return a model in bfloat16 with room for the largest of `cells`, (rows, tree), and its prompts."""
    sizes = EngineConfig(
        folder,
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=max(batch for batch, _ in cells),
        enable_prefix_cache=False,
        max_batched_tokens=8192,
        speculation=SpeculationConfig(mode=mode),
    )
    model = LocalModel.open(sizes, str(folder), str(draft))
    return model, [model.encode_chat(chat.first_turn) for chat in read_chats(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("cells", nargs="+", help="BATCH:TREE")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--top", type=int, default=16, help="kernels")
    parser.add_argument("--host-top", type=int, default=0, help="functions of the host")
    options = parser.parse_args()
    cells = [(int(batch), arm) for batch, _, arm in (cell.partition(":") for cell in options.cells)]
    # Requests name their trees.
    model, prompts = open_model(options.model, options.draft, options.prompts, cells, mode="off")
    engine = model.engine()
    for batch, arm in cells:
        engine.capture(arm, batch)
        start(engine, prompts, batch, arm)
        ms_step, ms_host = time_steps(engine, is_host=False), time_steps(engine, is_host=True)
        trace_device(engine, f"{batch} rows, {arm}", options.top)
        finish(engine)
        print(f"{batch} rows, {arm}: {ms_step:.3f} ms a step, {ms_host:.3f} ms of the host", flush=True)
        firsts = min(time_start(engine, prompts, batch, arm) for _ in range(3))
        print("first calls, ms: add, then steps: " + ", ".join(f"{ms:.2f}" for ms in firsts))
        if options.host_top:
            start(engine, prompts, batch, arm)
            profile_host(engine, options.host_top)
            finish(engine)


if __name__ == "__main__":
    main()
