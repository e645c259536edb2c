"""Prints how long the first step of some prompts takes, its prefill launched by the host and replayed.

It needs a GPU and torch alone. Run: python benchmarks/first_step.py smollm2-135m llama-3.1-8b
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from engine import EngineConfig, Request, SamplingParams
from engine.engine import Engine, assemble_engine
from engine.runner.prefill_graphs import PrefillGraphs
from engine.runner.synthetic import shape_of
from engine.runner.worker import Origin, wire_worker
from engine.synthetic import SyntheticWeights
from engine.tree.library import TreeLibrary

CASES = ((1, 100), (1, 510), (1, 1000), (8, 100), (64, 10), (64, 100))  # prompts, tokens of each
ARMS = ("off", "chain-3")


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one step: until the host had launched it, and until the device had run it."""

    host: float
    device: float
    num_replays: int


def build(name: str) -> tuple[Engine, PrefillGraphs]:
    """Return an engine over random weights and what runs its prefills; nothing is captured yet."""
    num_prompts, size = max(count for count, _ in CASES), max(size for _, size in CASES)
    config = EngineConfig(
        Path(name),
        block_size=64,
        num_blocks=num_prompts * 4 + 64,
        max_model_len=size + 128,
        max_num_seqs=num_prompts,
        max_num_waiting=num_prompts,
        max_batched_tokens=8192,
        enable_prefix_cache=False,
    )
    config = replace(config, speculation=replace(config.speculation, mode="off"))
    weights = SyntheticWeights.create(name, shape_of(name), config)
    library = TreeLibrary.search(max_depth=config.speculation.feature_window - 1)
    origin = Origin(name, "", "synthetic weights", "synthetic weights")
    worker = wire_worker(config, weights.target, weights.head, library, origin)
    return assemble_engine(config, worker), worker.runner.prefill


def time_step(engine: Engine, prefill: PrefillGraphs, num_prompts: int, size: int, arm: str) -> Timing:
    """Add prompts to an idle engine and time the step that runs them."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, speculation=arm)
    prompts: list[list[int]] = torch.randint(10, 30000, (num_prompts, size)).tolist()
    for idx, prompt in enumerate(prompts):
        engine.add(Request(f"r{idx}", tuple(prompt), params))
    before = prefill.num_replays
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.step()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    num_replays = prefill.num_replays - before
    while engine.has_work:
        engine.step()
    return Timing(1e3 * (launched - started), 1e3 * (ended - started), num_replays)


def measure(engine: Engine, prefill: PrefillGraphs, repeats: int) -> dict[tuple[int, int, str], Timing]:
    """Return the median of every case."""
    found = {}
    for num_prompts, size in CASES:
        for arm in ARMS:
            timings = [time_step(engine, prefill, num_prompts, size, arm) for _ in range(3 + repeats)][3:]
            found[num_prompts, size, arm] = Timing(
                statistics.median(timing.host for timing in timings),
                statistics.median(timing.device for timing in timings),
                timings[-1].num_replays,
            )
    return found


def main() -> None:
    """Measure the models named, uncaptured and captured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    for name in options.models:
        engine, prefill = build(name)
        # Decode steps are replayed either way.
        for arm in ARMS:
            engine.capture(arm, engine.facts.max_num_seqs)
        before = measure(engine, prefill, options.repeats)
        used, started = torch.cuda.memory_reserved(), time.perf_counter()
        prefill.capture(engine.facts.max_batched_tokens)
        seconds, gigabytes = time.perf_counter() - started, (torch.cuda.memory_reserved() - used) / 1e9
        print(f"{name}: prefills captured in {seconds:.1f} s, {gigabytes:.2f} GB", flush=True)
        after = measure(engine, prefill, options.repeats)
        print("prompts x tokens, arm      host ms before  after    step ms before  after  replays")
        for (num_prompts, size, arm), timing in before.items():
            other = after[num_prompts, size, arm]
            print(
                f"{num_prompts:3d} x {size:4d} {arm:10s} {timing.host:18.2f} {other.host:6.2f} "
                f"{timing.device:17.2f} {other.device:6.2f} {other.num_replays:8d}",
                flush=True,
            )
        del engine, prefill
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
